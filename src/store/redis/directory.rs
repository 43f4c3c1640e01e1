//! The configuration that replicas share, in Redis: documents, their order, and a head that only the next write moves.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use fred::types::Value;

use super::{
    STORE,
    client::{Client, Command, Failure, bytes_of, entries_of},
    health::Health,
    reach::Reach,
};
use crate::{
    core::{
        directory::Documents,
        document::{Document, DocumentName, Head},
        ids::shown,
    },
    store::{ReplicaNote, SharedDirectory, StoreError},
};

/// `lineage`, `revision` and `write`; the tag keeps all of it in one slot.
const HEAD: &str = "quota-share:{configuration}:head";
/// Documents by name.
const DOCUMENTS: &str = "quota-share:{configuration}:documents";
/// Their names by revision.
const ORDER: &str = "quota-share:{configuration}:order";
/// The names of the last writes by revision.
const WRITES: &str = "quota-share:{configuration}:writes";
/// Redis orders by doubles, which are exact up to here.
const REVISION_MAX: u64 = 1 << 53;
/// How many writes are remembered by name.
const WRITES_MAX: u64 = 1_000;
/// Documents that are read together.
const PAGE: usize = 500;
/// How long a read or a write may take; a configuration of 100,000 pools is some ten megabytes.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long it may take to find out who is there: somebody waits for it who wants to know what is wrong.
const LOOK_TIMEOUT: Duration = Duration::from_millis(500);

/// Writes documents if the head is the one that is known. ARGV: lineage, revision and write of the known head, the same of
/// the next, the oldest write to remember, then name, revision and document of each.
const COMMIT: &str = "
local head = redis.call('HMGET', KEYS[1], 'lineage', 'revision', 'write')
for index = 1, 3 do
  if (head[index] or '') ~= ARGV[index] then return 0 end
end
for index = 8, #ARGV, 3 do
  redis.call('HSET', KEYS[2], ARGV[index], ARGV[index + 2])
  redis.call('ZADD', KEYS[3], ARGV[index + 1], ARGV[index])
end
redis.call('HSET', KEYS[1], 'lineage', ARGV[4], 'revision', ARGV[5], 'write', ARGV[6])
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', '(' .. ARGV[7])
redis.call('ZADD', KEYS[4], ARGV[5], ARGV[5] .. ':' .. ARGV[6])
return 1";

/// Forgets deletions that are the last of their documents. Who was before one must not follow past it: he could not hear of
/// it any more. ARGV: name and revision of each.
const FORGET: &str = "
for index = 1, #ARGV, 2 do
  local name, revision = ARGV[index], ARGV[index + 1]
  if redis.call('ZRANGEBYSCORE', KEYS[1], revision, revision)[1] == name then
    redis.call('ZREM', KEYS[1], name)
    redis.call('HDEL', KEYS[2], name)
    redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', '(' .. revision)
  end
end";

/// What replicas say of themselves, and when by Redis' clock.
const REPLICAS: &str = "quota-share:{configuration}:replicas";
/// How long a replica is there after it has said so.
const ALIVE_MS: u64 = 10_000;
/// ARGV: a replica's name, what it says.
const SAY: &str = "
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f:', time[1] * 1000 + math.floor(time[2] / 1000)) .. ARGV[2])
redis.call('PEXPIRE', KEYS[1], 60000)";
/// ARGV: how long they are remembered. What each has said, and how long ago.
const REPLICAS_NOW: &str = "
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local said, found = redis.call('HGETALL', KEYS[1]), {}
for index = 1, #said, 2 do
  local at, text = said[index + 1]:match('^(%d+):(.*)$')
  if now - at > tonumber(ARGV[1]) then
    redis.call('HDEL', KEYS[1], said[index])
  else
    found[#found + 1] = text
    found[#found + 1] = string.format('%.0f', math.max(0, now - at))
  end
end
return found";

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct RedisDirectory {
    client: Client,
    health: Arc<Health>,
    /// Of the one server that has everything.
    reach: Arc<Reach>,
    admits: Arc<AtomicBool>,
}

impl RedisDirectory {
    /// Of what `client` reaches; `admits` follows whether that is the right one.
    pub(super) fn new(
        client: Client,
        health: Arc<Health>,
        reach: Arc<Reach>,
        admits: Arc<AtomicBool>,
    ) -> Self {
        Self { client, health, reach, admits }
    }

    async fn call(&self, name: &'static str, args: Vec<Bytes>) -> Result<Value, StoreError> {
        self.call_within(TIMEOUT, name, args).await
    }

    async fn call_within(
        &self,
        timeout: Duration,
        name: &'static str,
        args: Vec<Bytes>,
    ) -> Result<Value, StoreError> {
        let command = Command { name, key: Bytes::from_static(HEAD.as_bytes()), args };
        self.client.call(command, timeout).await.map_err(|failure| {
            // Where nobody calls, this is who notices. In a cluster it says nothing of other nodes.
            if !self.client.is_clustered() {
                self.health.fails(&self.reach, &failure);
            }
            unavailable(failure)
        })
    }

    async fn ask(&self, name: &'static str, args: &[&str]) -> Result<Vec<Option<Bytes>>, StoreError> {
        let args = args.iter().map(|arg| Bytes::copy_from_slice(arg.as_bytes())).collect();
        Ok(entries_of(self.call(name, args).await?).into_iter().map(bytes_of).collect())
    }

    /// Documents after `revision`, the oldest first, and the revision of the last of them; at most a page.
    async fn page(&self, revision: u64) -> Result<Option<(u64, Documents)>, StoreError> {
        let after = format!("({revision}");
        let args = [ORDER, &after, "+inf", "WITHSCORES", "LIMIT", "0", &PAGE.to_string()];
        let found = self.ask("ZRANGEBYSCORE", &args).await?;
        let found: Vec<String> =
            found.into_iter().flatten().map(|text| String::from_utf8_lossy(&text).into_owned()).collect();
        let Some(last) = found.last() else { return Ok(None) };
        let last = last.parse().map_err(|_| corrupt("an order of documents", last))?;
        let names: Vec<&str> = found.iter().step_by(2).map(String::as_str).collect();
        let args: Vec<&str> = [DOCUMENTS].into_iter().chain(names.iter().copied()).collect();
        let texts = self.ask("HMGET", &args).await?;
        let mut documents = Documents::new();
        for (name, text) in names.into_iter().zip(texts) {
            // One that was forgotten meanwhile is none.
            let Some(text) = text else { continue };
            let unreadable = |error: serde_json::Error| corrupt("a document", format!("{name} ({error})"));
            let document: Document = serde_json::from_slice(&text).map_err(unreadable)?;
            documents.insert(name.parse().map_err(|_| corrupt("a document's name", name))?, document);
        }
        Ok(Some((last, documents)))
    }
}

#[async_trait]
impl SharedDirectory for RedisDirectory {
    async fn head(&self) -> Result<Option<Head>, StoreError> {
        let found = self.ask("HMGET", &[HEAD, "lineage", "revision", "write"]).await?;
        let [Some(lineage), Some(revision), Some(write)] = &found[..] else { return Ok(None) };
        let text = |bytes: &Bytes| String::from_utf8_lossy(bytes).into_owned();
        let revision = text(revision);
        let exact = revision.parse().ok().filter(|revision| *revision <= REVISION_MAX);
        let revision = exact.ok_or_else(|| corrupt("the configuration's revision", revision))?;
        Ok(Some(Head { lineage: text(lineage), revision, write: text(write) }))
    }

    async fn write_at(&self, revision: u64) -> Result<Option<String>, StoreError> {
        let score = revision.to_string();
        let found = self.ask("ZRANGEBYSCORE", &[WRITES, &score, &score]).await?;
        let named = found.into_iter().flatten().next();
        let named = named.map(|named| String::from_utf8_lossy(&named).into_owned());
        Ok(named.and_then(|named| Some(named.split_once(':')?.1.to_owned())))
    }

    async fn after(&self, revision: u64) -> Result<(Option<Head>, Documents), StoreError> {
        let (mut cursor, mut all) = (revision, Documents::new());
        loop {
            while let Some((last, documents)) = self.page(cursor).await? {
                all.extend(documents);
                cursor = last;
            }
            let head = self.head().await?;
            // What was written while pages were read comes with later pages.
            let is_last = head.as_ref().is_none_or(|head| head.revision <= cursor);
            if is_last || self.page(cursor).await?.is_none() {
                return Ok((head, all));
            }
        }
    }

    async fn commit(
        &self,
        before: Option<&Head>,
        next: &Head,
        documents: &Documents,
    ) -> Result<bool, StoreError> {
        let keys = [HEAD, DOCUMENTS, ORDER, WRITES].map(|key| Bytes::from_static(key.as_bytes()));
        let of = |head: &Head| [head.lineage.clone(), head.revision.to_string(), head.write.clone()];
        let oldest = next.revision.saturating_sub(WRITES_MAX).to_string();
        let known = before.map_or_else(Default::default, of);
        let heads = known.into_iter().chain(of(next)).chain([oldest]);
        let mut args = vec![Bytes::from_static(COMMIT.as_bytes()), Bytes::from_static(b"4")];
        args.extend(keys.into_iter().chain(heads.map(Bytes::from)));
        for (name, document) in documents {
            let text = serde_json::to_vec(document)
                .map_err(|error| corrupt("a document", format!("{name} ({error})")))?;
            args.extend([name.to_string().into(), document.revision.to_string().into(), text.into()]);
        }
        Ok(matches!(self.call("EVAL", args).await?, Value::Integer(1)))
    }

    async fn forget(&self, deleted: &[(DocumentName, u64)]) -> Result<(), StoreError> {
        let keys = [FORGET, "3", ORDER, DOCUMENTS, WRITES].map(str::to_owned).into_iter();
        let pairs = deleted.iter().flat_map(|(name, revision)| [name.to_string(), revision.to_string()]);
        self.call("EVAL", keys.chain(pairs).map(Bytes::from).collect()).await.map(drop)
    }

    async fn say(&self, note: &ReplicaNote) -> Result<(), StoreError> {
        let text = serde_json::to_vec(note).map_err(|error| corrupt("a replica", error))?;
        let head = [SAY, "1", REPLICAS, &note.replica_id].map(|arg| Bytes::copy_from_slice(arg.as_bytes()));
        self.call("EVAL", head.into_iter().chain([text.into()]).collect()).await.map(drop)
    }

    async fn leave(&self, replica_id: &str) -> Result<(), StoreError> {
        let args = [REPLICAS, replica_id].map(|arg| Bytes::copy_from_slice(arg.as_bytes())).to_vec();
        self.call_within(LOOK_TIMEOUT, "HDEL", args).await.map(drop)
    }

    async fn replicas(&self) -> Result<Vec<ReplicaNote>, StoreError> {
        let args = [REPLICAS_NOW, "1", REPLICAS, &ALIVE_MS.to_string()];
        let args = args.map(|arg| Bytes::copy_from_slice(arg.as_bytes())).to_vec();
        let found = entries_of(self.call_within(LOOK_TIMEOUT, "EVAL", args).await?).into_iter();
        let found: Vec<Bytes> = found.filter_map(bytes_of).collect();
        let notes = found.chunks_exact(2).filter_map(|pair| {
            let note: ReplicaNote = serde_json::from_slice(&pair[0]).ok()?;
            let age_ms = std::str::from_utf8(&pair[1]).ok()?.parse().ok()?;
            Some(ReplicaNote { age_ms, ..note })
        });
        Ok(notes.collect())
    }

    fn admit(&self, is_right: bool) {
        self.admits.store(is_right, Ordering::Relaxed);
    }
}

fn unavailable(failure: Failure) -> StoreError {
    StoreError::Unavailable { store: STORE, doing: "sharing the configuration", source: Arc::new(failure) }
}

fn corrupt(what: &str, found: impl std::fmt::Debug) -> StoreError {
    let expected = "what this version can read: a newer one may have written it".to_owned();
    StoreError::Corrupt { store: STORE, what: what.to_owned(), found: shown(found), expected }
}
