//! The one table of all methods: what each needs of its caller, and with which others it shares its room.

use std::sync::LazyLock;

use hashbrown::HashMap;

use crate::transport::auth::{
    Access::{self, AnyRole, Needs, Open},
    Role::{Admin, Router, Viewer},
};

/// Calls that are bounded together, so that no others keep them from being answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Share {
    /// Decisions and records.
    Decisions,
    /// What is read and changed by people and their programs.
    Administration,
    /// Streams of usage, which last.
    Watching,
    /// Probes.
    Health,
    /// Streams of health, one for each connection of some clients, and reflection, which are open for long and do
    /// nothing.
    HealthWatching,
}

/// What is decided of a method before its call is looked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Method {
    /// Without the slash before it.
    pub(super) name: &'static str,
    pub(super) access: Access,
    pub(super) share: Share,
}

/// A method that the table does not have: if the contract has it after all, it is not open by mistake.
const UNKNOWN: Method = method("a method that is not known", Needs(Admin), Share::Administration);

const METHODS: [Method; 29] = [
    method("quotashare.v1.QuotaShare/Enforce", Needs(Router), Share::Decisions),
    method("quotashare.v1.QuotaShare/RecordConsumption", Needs(Router), Share::Decisions),
    method("quotashare.v1.QuotaShare/ReleaseReservation", Needs(Router), Share::Decisions),
    method("quotashare.v1.QuotaShare/ReportSignals", Needs(Router), Share::Decisions),
    method("quotashare.v1.PoolAdmin/CreatePool", Needs(Admin), Share::Administration),
    method("quotashare.v1.PoolAdmin/GetPool", Needs(Viewer), Share::Administration),
    method("quotashare.v1.PoolAdmin/ListPools", Needs(Viewer), Share::Administration),
    method("quotashare.v1.PoolAdmin/UpdatePool", Needs(Admin), Share::Administration),
    method("quotashare.v1.PoolAdmin/DeletePool", Needs(Admin), Share::Administration),
    method("quotashare.v1.PoolAdmin/PutAllocation", Needs(Admin), Share::Administration),
    method("quotashare.v1.PoolAdmin/DeleteAllocation", Needs(Admin), Share::Administration),
    method("quotashare.v1.PoolAdmin/GetPoolUsage", Needs(Viewer), Share::Administration),
    method("quotashare.v1.PoolAdmin/WatchPoolUsage", Needs(Viewer), Share::Watching),
    method("quotashare.v1.PoolAdmin/ListReservations", Needs(Viewer), Share::Administration),
    method("quotashare.v1.PoolAdmin/PreviewDecision", Needs(Viewer), Share::Administration),
    method("quotashare.v1.PoolAdmin/ResetUsage", Needs(Admin), Share::Administration),
    method("quotashare.v1.PoolAdmin/ImportPools", Needs(Admin), Share::Administration),
    method("quotashare.v1.PlanAdmin/GetPlan", Needs(Viewer), Share::Administration),
    method("quotashare.v1.PlanAdmin/ListPlans", Needs(Viewer), Share::Administration),
    method("quotashare.v1.PlanAdmin/PutPlan", Needs(Admin), Share::Administration),
    method("quotashare.v1.PlanAdmin/DeletePlan", Needs(Admin), Share::Administration),
    method("quotashare.v1.PlanAdmin/ListCatalog", Needs(Viewer), Share::Administration),
    method("quotashare.v1.SettingsAdmin/GetSettings", Needs(Viewer), Share::Administration),
    method("quotashare.v1.SettingsAdmin/UpdateSettings", Needs(Admin), Share::Administration),
    method("quotashare.v1.SettingsAdmin/GetStatus", Needs(Viewer), Share::Administration),
    method("grpc.health.v1.Health/Check", Open, Share::Health),
    method("grpc.health.v1.Health/Watch", Open, Share::HealthWatching),
    method("grpc.reflection.v1.ServerReflection/ServerReflectionInfo", AnyRole, Share::HealthWatching),
    method("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", AnyRole, Share::HealthWatching),
];

const fn method(name: &'static str, access: Access, share: Share) -> Method {
    Method { name, access, share }
}

/// The method that is called by `path`.
pub(super) fn of_path(path: &str) -> &'static Method {
    static BY_NAME: LazyLock<HashMap<&str, &Method>> =
        LazyLock::new(|| METHODS.iter().map(|method| (method.name, method)).collect());
    path.strip_prefix('/').and_then(|name| BY_NAME.get(name).copied()).unwrap_or(&UNKNOWN)
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use prost_types::FileDescriptorSet;

    use super::*;
    use crate::transport::grpc::pb;

    /// The names of all methods of what is described by `descriptors`.
    fn names(descriptors: &[u8]) -> Vec<String> {
        let files = FileDescriptorSet::decode(descriptors).unwrap().file;
        let services = files.iter().flat_map(|file| file.service.iter().map(move |service| (file, service)));
        services
            .flat_map(|(file, service)| {
                let of = move |name: &str| format!("{}.{}/{name}", file.package(), service.name());
                service.method.iter().map(move |method| of(method.name()))
            })
            .collect()
    }

    #[test]
    fn every_method_that_is_served_is_in_the_table_and_no_other() {
        let mut served = names(pb::DESCRIPTORS);
        served.extend(names(tonic_health::pb::FILE_DESCRIPTOR_SET));
        served.extend(names(tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET));
        served.extend(names(tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET));
        let mut known: Vec<_> = METHODS.iter().map(|method| method.name.to_owned()).collect();
        served.sort();
        known.sort();
        assert_eq!(served, known);
    }

    /// A method whose name says that it reads or changes may do no less.
    #[test]
    fn what_reads_is_a_viewers_and_what_changes_is_an_admins() {
        for method in METHODS.iter().filter(|method| method.name.contains("Admin/")) {
            let (_, verb) = method.name.split_once('/').unwrap();
            let reads =
                ["Get", "List", "Watch", "Preview", "Export"].iter().any(|read| verb.starts_with(read));
            assert_eq!(method.access, Needs(if reads { Viewer } else { Admin }), "{}", method.name);
        }
    }

    #[test]
    fn what_is_not_known_is_not_open() {
        for path in ["", "/", "/quotashare.v1.PoolAdmin/Nothing", "quotashare.v1.QuotaShare/Enforce"] {
            assert_eq!(of_path(path).access, Needs(Admin), "{path:?}");
        }
        assert_eq!(of_path("/quotashare.v1.QuotaShare/Enforce").access, Needs(Router));
    }
}
