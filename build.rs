//! Compiles the contract in `proto/` without protoc: Rust types for `transport`, and the descriptor set that reflection serves.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message;

const SERVICES: [&str; 4] = [
    "quotashare/v1/quota_share.proto",
    "quotashare/v1/pool_admin.proto",
    "quotashare/v1/plan_admin.proto",
    "quotashare/v1/settings_admin.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    println!("cargo::rerun-if-changed=migrations");

    let descriptors = protox::compile(SERVICES, ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
