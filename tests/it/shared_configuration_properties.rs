//! Two configurations that have gone different ways come to one, whatever they were.

use std::collections::BTreeSet;

use proptest::prelude::*;
use quota_share::core::{
    directory::{Change, Directory, Documents, Write},
    document::{Content, DocumentName},
    ids::{ConnectionId, PoolId},
    plan::{DimensionSpec, PlanSpec},
    pool::PoolSpec,
    settings::SettingsUpdate,
    units::Timestamp,
};

/// What an administrator does to one of a few things.
#[derive(Clone, Debug)]
enum Step {
    Create(u8, BTreeSet<u8>),
    Update(u8, BTreeSet<u8>),
    Delete(u8),
    PutPlan(u8, u8),
    DeletePlan(u8),
    Settings(u8),
}

fn any_step() -> impl Strategy<Value = Step> {
    let connections = || prop::collection::btree_set(0..5u8, 1..3);
    prop_oneof![
        3 => (0..4u8, connections()).prop_map(|(pool, of)| Step::Create(pool, of)),
        2 => (0..4u8, connections()).prop_map(|(pool, of)| Step::Update(pool, of)),
        2 => (0..4u8).prop_map(Step::Delete),
        1 => (0..5u8, 1..9u8).prop_map(|(connection, limit)| Step::PutPlan(connection, limit)),
        1 => (0..5u8).prop_map(Step::DeletePlan),
        1 => (0..9u8).prop_map(Step::Settings),
    ]
}

fn change(step: &Step, name: &str) -> Change {
    let pool = |id: u8, connections: &BTreeSet<u8>| PoolSpec {
        pool_id: format!("p{id}"),
        name: name.to_owned(),
        connection_ids: connections.iter().map(|id| format!("c{id}")).collect(),
        ..PoolSpec::default()
    };
    match step {
        Step::Create(id, connections) => Change::CreatePool(pool(*id, connections)),
        Step::Update(id, connections) => Change::UpdatePool { spec: pool(*id, connections), revision: 0 },
        Step::Delete(id) => {
            Change::DeletePool { pool: PoolId::parse("pool", &format!("p{id}")).expect("an id"), revision: 0 }
        }
        Step::PutPlan(connection, limit) => {
            let (unit, window) = ("tokens".to_owned(), "daily".to_owned());
            let dimensions =
                vec![DimensionSpec { unit, window, limit: Some(f64::from(*limit)), ..Default::default() }];
            let connection_id = format!("c{connection}");
            Change::PutPlan {
                spec: PlanSpec { connection_id, dimensions, ..PlanSpec::default() },
                revision: 0,
            }
        }
        Step::DeletePlan(connection) => {
            let connection = ConnectionId::parse("plan", &format!("c{connection}")).expect("an id");
            Change::DeletePlan { connection, revision: 0 }
        }
        Step::Settings(tenths) => Change::UpdateSettings(SettingsUpdate {
            saturation_threshold: Some(f64::from(*tenths) / 10.0),
            ..SettingsUpdate::default()
        }),
    }
}

/// The directory after `steps`, as far as they are allowed, on the branch of this name.
fn after(mut directory: Directory, steps: &[Step], branch: &str) -> Directory {
    for (index, step) in steps.iter().enumerate() {
        let name = format!("{branch}{index}");
        let applied = directory.apply(change(step, &name), Timestamp::from_unix_ms(index as u64 + 1));
        if let Ok(Some(applied)) = applied {
            directory = applied.next.written(name);
        }
    }
    directory
}

/// What a store has after `writes`, which led to `next`.
fn stored(before: &Directory, next: &Directory, writes: &[Write]) -> Documents {
    let mut documents = before.documents();
    for write in writes {
        if let Write::Deletion(name, None) = write {
            documents.remove(name);
        }
    }
    documents.extend(next.documents_of(writes));
    documents
}

fn lives_and_connections(documents: &Documents) -> (Vec<u64>, Vec<String>) {
    let (mut lives, mut connections) = (Vec::new(), Vec::new());
    for document in documents.values() {
        if let Some(Content::Pool { created_revision, spec, .. }) = &document.content {
            lives.push(*created_revision);
            connections.extend(spec.connection_ids.clone());
        }
    }
    (lives, connections)
}

fn distinct<T: Ord>(values: &[T]) -> bool {
    values.iter().collect::<BTreeSet<_>>().len() == values.len()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Whatever two histories from a common ancestor: reconciled, both sides have the same documents, of each the newer
    /// one; no two pools share a connection or a life; what is stored is what decides; and repeating it changes nothing.
    #[test]
    fn two_histories_of_one_ancestor_come_to_the_same_documents(
        common in prop::collection::vec(any_step(), 0..12),
        here in prop::collection::vec(any_step(), 0..12),
        there in prop::collection::vec(any_step(), 0..12),
    ) {
        let ancestor = after(Directory::default().of_lineage("l".to_owned()), &common, "common");
        let own = after(ancestor.clone(), &here, "here");
        let other = after(ancestor.clone(), &there, "there");
        let (head, documents) = (other.head().unwrap(), other.documents());
        let reconciled = own.reconcile(&head, &documents, "together".to_owned()).unwrap();
        let next = &reconciled.next;
        let next_head = next.head().unwrap();

        // The other side follows by what it was given.
        let (followed, writes) = other.follow(next_head.clone(), &reconciled.missing).unwrap();
        prop_assert_eq!(followed.documents(), next.documents());
        prop_assert_eq!(stored(&other, &followed, &writes), next.documents());
        prop_assert_eq!(stored(&own, next, &reconciled.writes), next.documents());
        prop_assert!(next_head.revision >= own.revision().max(other.revision()));

        let (lives, connections) = lives_and_connections(&next.documents());
        prop_assert!(distinct(&lives) && distinct(&connections), "{:?}", next.documents());

        let dropped: BTreeSet<&DocumentName> = reconciled.dropped.iter().map(|(name, _)| name).collect();
        let mine = own.documents();
        for (name, document) in &next.documents() {
            let (ours, theirs) = (mine.get(name), documents.get(name));
            let newer = match (ours, theirs) {
                (Some(ours), Some(theirs)) if ours.revision > theirs.revision => Some(ours),
                (_, Some(theirs)) => Some(theirs),
                (ours, None) => ours,
            };
            let newer = newer.expect("it comes from somewhere");
            let life_apart = |content: &Option<Content>| match content {
                Some(Content::Pool { spec, .. }) => format!("{spec:?}"),
                content => format!("{content:?}"),
            };
            if !dropped.contains(name) {
                prop_assert_eq!(life_apart(&document.content), life_apart(&newer.content), "{}", name);
            }
        }

        let again = next.reconcile(&next_head, &followed.documents(), "again".to_owned()).unwrap();
        prop_assert!(again.missing.is_empty() && again.writes.is_empty() && again.dropped.is_empty());
        prop_assert_eq!(again.next.head().unwrap(), next_head.clone());

        // Who has stayed with the ancestor comes to the same, and who has nothing too.
        let late = ancestor.reconcile(&next_head, &next.documents(), "late".to_owned()).unwrap();
        prop_assert!(late.missing.is_empty());
        prop_assert_eq!(late.next.documents(), next.documents());
        let (fresh, writes) = Directory::default().take_over(next_head, &next.documents()).unwrap();
        prop_assert_eq!(fresh.documents(), next.documents());
        prop_assert_eq!(stored(&Directory::default(), &fresh, &writes), next.documents());
    }

    /// Who follows an administrator's changes one by one, or all at once, has the same as he.
    #[test]
    fn whoever_follows_has_the_same(steps in prop::collection::vec(any_step(), 0..20), seen in 0..20usize) {
        let start = Directory::default().of_lineage("l".to_owned());
        let seen = seen.min(steps.len());
        let before = after(start, &steps[..seen], "a");
        let now = after(before.clone(), &steps[seen..], "b");
        let later = now.documents().into_iter().filter(|(_, of)| of.revision > before.revision()).collect();
        let (followed, writes) = before.follow(now.head().unwrap(), &later).unwrap();
        prop_assert_eq!(followed.documents(), now.documents());
        prop_assert_eq!(stored(&before, &followed, &writes), now.documents());
    }
}

#[test]
fn what_cannot_be_is_refused_and_names_the_document() {
    let start = Directory::default().of_lineage("l".to_owned());
    let two = [Step::Create(0, BTreeSet::from([0])), Step::Create(1, BTreeSet::from([1]))];
    let now = after(start.clone(), &two, "a");
    let (head, documents) = (now.head().unwrap(), now.documents());
    let name: DocumentName = "pool:p0".parse().unwrap();
    type Spoil<'a> = &'a dyn Fn(&mut Documents);
    // what is changed | what the refusal names
    let cases: [(Spoil<'_>, &str); 6] = [
        (&|all| all.get_mut(&name).unwrap().revision = 3, "pool:p0.revision"),
        (&|all| all.get_mut(&name).unwrap().revision = 0, "pool:p0.revision"),
        (
            &|all| all.get_mut(&name).unwrap().written_at = Timestamp::from_unix_ms(u64::MAX),
            "pool:p0.written_at",
        ),
        (&|all| with(all, "pool:p1", |created, _| *created = 1), "pool:p1.created_revision"),
        (&|all| with(all, "pool:p1", |_, spec| spec.pool_id = "p2".to_owned()), "pool:p1.pool_id"),
        (&|all| with(all, "pool:p1", |_, spec| spec.connection_ids = vec!["c0".to_owned()]), "connection c0"),
    ];
    for (spoil, named) in cases {
        let mut spoilt = documents.clone();
        spoil(&mut spoilt);
        let refused = start.follow(head.clone(), &spoilt).unwrap_err().to_string();
        assert!(refused.contains(named), "{refused}");
    }
}

fn with(all: &mut Documents, name: &str, spoil: impl Fn(&mut u64, &mut PoolSpec)) {
    let document = all.get_mut(&name.parse().expect("a document")).expect("a document");
    let Some(Content::Pool { created_revision, spec, .. }) = &mut document.content else { panic!("a pool") };
    spoil(created_revision, spec);
}
