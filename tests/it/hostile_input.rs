//! Whatever bytes and numbers come: the server goes on, never blames itself, and a refused call changes nothing.

use std::time::Duration;

use proptest::{
    collection::vec,
    prelude::*,
    sample::select,
    test_runner::{Config, TestCaseResult},
};
use prost::{
    Message,
    bytes::BufMut,
    encoding::{WireType, encode_key, encode_varint},
};
use prost_types::{
    DescriptorProto, FieldDescriptorProto, FileDescriptorSet,
    field_descriptor_proto::{Label, Type},
};
use tonic::{Code, Status};

use crate::harness::{Client, TestServer, ask, call_raw, dimension, hard, pb, pool, tokens, told};

/// One message to one method.
#[derive(Clone)]
struct Call {
    path: String,
    message: Vec<u8>,
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown = &self.message[..self.message.len().min(2_000)];
        write!(f, "{} {} bytes {}", self.path, self.message.len(), shown.escape_ascii())
    }
}

proptest! {
    #![proptest_config(Config { cases: 10, max_shrink_iters: 200, failure_persistence: None, ..Config::default() })]

    /// A refused call leaves no trace; what an accepted one leaves can be read again by the next process.
    #[test]
    fn no_input_breaks_the_server_or_changes_it_by_a_refused_call(calls in vec(any_call(), 1..180)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(survives(&calls))?;
    }
}

async fn survives(calls: &[Call]) -> TestCaseResult {
    let mut server = server_with_something_in_it().await;
    let mut before = State::of(&server).await;
    for call in calls {
        let outcome = send(&server, call).await;
        let after = State::of(&server).await;
        match outcome {
            Ok(()) => before = after,
            Err(status) => {
                prop_assert!(is_a_refusal(&status), "{call:?}: {status:?}");
                prop_assert_eq!(&before, &after, "{:?} was refused: {:?}", call, status);
            }
        }
    }
    server.restart().await;
    prop_assert_eq!(before, State::of(&server).await, "after a restart");
    Ok(())
}

/// Blames the caller, or says what is not built; anything else would be a defect of the server.
fn is_a_refusal(status: &Status) -> bool {
    let blame = [
        Code::InvalidArgument,
        Code::NotFound,
        Code::AlreadyExists,
        Code::Aborted,
        Code::FailedPrecondition,
        Code::Unimplemented,
        // A message of more than 4 MB.
        Code::OutOfRange,
    ];
    blame.contains(&status.code()) && !status.message().is_empty()
}

async fn server_with_something_in_it() -> TestServer {
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension("tokens/hourly", 1e6), dimension("usd/daily", 50.0)]).await;
    let capped = hard("A", 50.0).capped_for("large", "tokens/5h", 500.0);
    server.create(pool("p", ["c1", "c2"], [capped, hard("B", 50.0)])).await;
    server.create(pool("q", ["c3"], [hard("A", 0.0)]).with_provider("kimi")).await;
    server.record("A", "c1", tokens(1_000)).await;
    let attempt = ask("A", "c1", tokens(10)).holding(Duration::from_secs(60)).named("x");
    told(server.quota().enforce(attempt).await);
    server
}

/// All that calls can change and clients can see.
#[derive(Debug, PartialEq)]
struct State {
    revision: i64,
    settings: pb::GetSettingsResponse,
    pools: Vec<pb::Pool>,
    plans: Vec<pb::Plan>,
    usage: Vec<(pb::PoolUsage, Vec<pb::Reservation>)>,
}

impl State {
    async fn of(server: &TestServer) -> Self {
        let pools = server.list_pools().await;
        let mut usage = Vec::new();
        for pool in &pools {
            usage.push((server.usage(&pool.pool_id).await, server.reservations(&pool.pool_id).await));
        }
        let revision = server.enforce("nobody", "nowhere", None).await.config_revision;
        let settings = told(server.settings().get_settings(pb::GetSettingsRequest {}).await);
        Self { revision, settings, plans: server.list_plans().await, pools, usage }
    }
}

/// Sends the bytes as they are. Of a stream the first answer is enough.
async fn send(client: &Client, call: &Call) -> Result<(), Status> {
    call_raw(client.channel(), &call.path, call.message.clone(), None).await.map(|_| ())
}

/// How far a message goes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mood {
    /// It may well be accepted, so that there is something to lose.
    Calm,
    /// A hostile value here and there, so that it gets past the door.
    Hostile,
}

/// Mostly messages of the right shape, and now and then noise.
fn any_call() -> impl Strategy<Value = Call> {
    let schema = Schema::of_the_contract();
    let methods = schema.methods().into_iter().map(|(path, input)| {
        let noise = vec(any::<u8>(), 0..200);
        let nested = (1..2_000_usize).prop_map(|depth| vec![0x0b; depth]);
        let cut = (schema.message(&input, Mood::Hostile), any::<prop::sample::Index>())
            .prop_map(|(message, at)| message[..at.index(message.len() + 1)].to_vec());
        let (calm, hostile) = (schema.message(&input, Mood::Calm), schema.message(&input, Mood::Hostile));
        let message = prop_oneof![10 => calm, 10 => hostile, 1 => noise, 1 => nested, 1 => cut];
        message.prop_map(move |message| Call { path: path.clone(), message }).boxed()
    });
    prop::strategy::Union::new(methods)
}

/// The messages and methods that the service is built from.
struct Schema(FileDescriptorSet);

impl Schema {
    fn of_the_contract() -> Self {
        let descriptors = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
        Self(FileDescriptorSet::decode(&descriptors[..]).expect("the build wrote it"))
    }

    /// The path and the input of every method.
    fn methods(&self) -> Vec<(String, String)> {
        let services =
            self.0.file.iter().flat_map(|file| file.service.iter().map(move |service| (file, service)));
        let methods = services.flat_map(|(file, service)| {
            service.method.iter().map(move |method| {
                let path = format!("/{}.{}/{}", file.package(), service.name(), method.name());
                (path, method.input_type().to_owned())
            })
        });
        methods.collect()
    }

    /// The message of a name such as `.quotashare.v1.Pool`.
    fn descriptor(&self, name: &str) -> &DescriptorProto {
        let files = self.0.file.iter().flat_map(|file| {
            file.message_type.iter().flat_map(move |message| {
                let name = format!(".{}.{}", file.package(), message.name());
                let nested = message.nested_type.iter();
                let nested = nested.map({
                    let name = name.clone();
                    move |entry| (format!("{name}.{}", entry.name()), entry)
                });
                std::iter::once((name.clone(), message)).chain(nested)
            })
        });
        let mut named = files.filter(|(other, _)| other == name);
        named.next().unwrap_or_else(|| panic!("{name} is in the contract")).1
    }

    /// Encoded messages of this type.
    fn message(&self, name: &str, mood: Mood) -> BoxedStrategy<Vec<u8>> {
        let fields: Vec<_> =
            self.descriptor(name).field.iter().map(|field| self.field(field, mood)).collect();
        fields.prop_map(|fields| fields.concat()).boxed()
    }

    /// A field with its key, as often as it occurs.
    fn field(&self, field: &FieldDescriptorProto, mood: Mood) -> BoxedStrategy<Vec<u8>> {
        let one = self.value(field, mood);
        match (field.label(), mood) {
            (Label::Repeated, Mood::Calm) => vec(one, 1..3).prop_map(|few| few.concat()).boxed(),
            (Label::Repeated, Mood::Hostile) => {
                let many = (one.clone(), select(vec![50_usize, 20_000])).prop_map(|(one, n)| one.repeat(n));
                let few = vec(one, 0..4).prop_map(|few| few.concat());
                prop_oneof![60 => few, 1 => many.prop_filter("at most 1 MB", |bytes| bytes.len() < 1 << 20)]
                    .boxed()
            }
            (_, mood) => prop::option::weighted(if mood == Mood::Calm { 0.98 } else { 0.9 }, one)
                .prop_map(Option::unwrap_or_default)
                .boxed(),
        }
    }

    fn value(&self, field: &FieldDescriptorProto, mood: Mood) -> BoxedStrategy<Vec<u8>> {
        let (tag, name) = (field.number() as u32, field.name());
        match field.r#type() {
            Type::Double => any_double(name, mood).prop_map(move |v| fixed64(tag, v)).boxed(),
            Type::String => any_text(name, mood).prop_map(move |v| delimited(tag, v.as_bytes())).boxed(),
            Type::Message => {
                let message = self.message(field.type_name(), mood);
                message.prop_map(move |v| delimited(tag, &v)).boxed()
            }
            Type::Bool => any::<bool>().prop_map(move |v| varint(tag, v.into())).boxed(),
            Type::Enum => any_enum(name, mood).prop_map(move |v| varint(tag, i64::from(v) as u64)).boxed(),
            Type::Int32 | Type::Int64 => {
                any_integer(name, mood).prop_map(move |v| varint(tag, v as u64)).boxed()
            }
            other => panic!("the contract has a field of another type: {other:?}"),
        }
    }
}

/// A likely value; in a hostile mood, now and then one that is not.
fn likely_or<T: Clone + std::fmt::Debug + 'static>(
    likely: Vec<T>,
    mood: Mood,
    hostile: BoxedStrategy<T>,
) -> BoxedStrategy<T> {
    match mood {
        Mood::Calm => select(likely).boxed(),
        Mood::Hostile => prop_oneof![12 => select(likely), 1 => hostile].boxed(),
    }
}

fn any_double(field: &str, mood: Mood) -> BoxedStrategy<f64> {
    let likely = match field {
        "owner_reserve" | "saturation_threshold" => vec![0.0, 0.1, 0.5],
        "limit" | "value" => vec![1e-6, 33.3, 1e6],
        "weight" => vec![0.0, 1.1, 33.3],
        _ => vec![0.0, 1.0, 33.3, 50.0],
    };
    let hostile = vec![
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        -0.0,
        -1.0,
        1e308,
        f64::MIN_POSITIVE,
        5e-324,
        9e15,
        9.000_000_000_000_002e15,
        1e-10,
        100.0,
        100.000_000_1,
    ];
    likely_or(likely, mood, prop_oneof![select(hostile), any::<f64>()].boxed())
}

fn any_integer(field: &str, mood: Mood) -> BoxedStrategy<i64> {
    let likely = match field {
        "revision" | "nanos" => vec![0],
        _ => vec![0, 1, 2, 7, 100],
    };
    let hostile = vec![
        i64::MIN,
        i64::MAX,
        -1,
        9_000_000_000_000_000,
        9_000_000_000_000_001,
        i64::from(i32::MAX),
        999_999_999,
    ];
    likely_or(likely, mood, prop_oneof![select(hostile), any::<i64>()].boxed())
}

fn any_enum(field: &str, mood: Mood) -> BoxedStrategy<i32> {
    let likely = if field == "unit" { vec![2, 3, 3, 4] } else { vec![1, 2] };
    likely_or(likely, mood, select(vec![-1, 0, 3, 99, i32::MIN, i32::MAX]).boxed())
}

/// Names that mean something here, and some that should mean nothing anywhere.
fn any_text(field: &str, mood: Mood) -> BoxedStrategy<String> {
    let likely: &[&str] = match field {
        "api_key_id" | "api_key_ids" => &["A", "B", "C"],
        "connection_id" | "connection_ids" => &["c1", "c2", "c3", "c4"],
        "pool_id" => &["p", "q", "r"],
        "window" => &["hourly", "5h", "daily", "60m"],
        "provider" => &["", "kimi", "codex"],
        "model" => &["", "large"],
        "page_token" => &[""],
        "reservation_id" | "idempotency_key" | "request_id" => &["", "", "x"],
        "name" => &["Team"],
        _ => &["", "x"],
    };
    let hostile: Vec<String> = [
        "",
        "\0",
        "a\nb",
        "\u{7f}",
        "\u{202e}",
        "é\u{301}🦀",
        "'; drop table pools; --",
        "../../etc/passwd",
        "{\"a\":",
        "%s%n",
        "r1-000000000000000000000000",
        "r18446744073709551615-ffffffffffffffffffffffff",
        "-1s",
        "99999999999999999999d",
    ]
    .map(str::to_owned)
    .into();
    let long = select(vec![64_usize, 65, 128, 129, 256, 257, 4_096, 1 << 20]).prop_map(|n| "x".repeat(n));
    let hostile = prop_oneof![3 => select(hostile), 1 => long, 1 => ".{0,40}"].boxed();
    likely_or(likely.iter().map(|text| (*text).to_owned()).collect(), mood, hostile)
}

fn delimited(tag: u32, bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len() + 8);
    encode_key(tag, WireType::LengthDelimited, &mut out);
    encode_varint(bytes.len() as u64, &mut out);
    out.extend_from_slice(bytes);
    out
}

fn varint(tag: u32, value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    encode_key(tag, WireType::Varint, &mut out);
    encode_varint(value, &mut out);
    out
}

fn fixed64(tag: u32, value: f64) -> Vec<u8> {
    let mut out = Vec::new();
    encode_key(tag, WireType::SixtyFourBit, &mut out);
    out.put_f64_le(value);
    out
}
