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

/// All of the configuration, in one key: what Redis loses of it, it loses whole. Fields: `lineage`, `revision` and `write` are
/// the head, each document has its name, `at:R` is the name of the one that was written last at revision R, and `write:R` is
/// the name of the write that led there.
const CONFIGURATION: &str = "quota-share:{configuration}";
/// Lua counts by doubles, which are exact up to here.
const REVISION_MAX: u64 = 1 << 53;
/// How many writes are remembered by name.
const WRITES_MAX: &str = "1000";
/// Documents that are read together, about, and revisions at which they may have been written: some milliseconds of Redis.
const PAGE: &str = "500";
const PAGE_REVISIONS: &str = "5000";
/// Who is further behind reads all documents rather than those of each revision.
const REVISIONS_BEHIND_MAX: u64 = 20_000;
/// Deletions that are forgotten together.
const FORGOTTEN_MAX: usize = 500;
/// How long a read or a write may take; a configuration of 100,000 pools is some ten megabytes, and is put there at once.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long it may take to find out who is there: somebody waits for it who wants to know what is wrong.
const LOOK_TIMEOUT: Duration = Duration::from_millis(500);

/// What the scripts that write begin with.
const WRITING: &str = "
local hash = KEYS[1]
local head = redis.call('HMGET', hash, 'lineage', 'revision', 'write')

local function revision_of(text)
  local revision = text:match('^{\"revision\":(%d+)')
  if revision then return revision end
  local is_read, document = pcall(cjson.decode, text)
  return is_read and type(document) == 'table' and string.format('%.0f', tonumber(document.revision) or 0)
end

local function drop_name(revision, name)
  if redis.call('HGET', hash, 'at:' .. revision) == name then redis.call('HDEL', hash, 'at:' .. revision) end
end

local function drop_writes(from, to)
  for revision = math.max(from, 0), to do
    redis.call('HDEL', hash, string.format('write:%.0f', revision))
  end
end
";

/// Writes documents, each at a revision of its own, if the head is the one that is known. ARGV: lineage, revision and write of
/// the known head, the same of the next, how many writes to remember, then name, revision and document of each.
const COMMIT: &str = "
for index = 1, 3 do
  if (head[index] or '') ~= ARGV[index] then return 0 end
end
if ARGV[1] == '' and #redis.call('HSCAN', hash, 0, 'COUNT', 1)[2] > 0 then
  -- What is left without a head is nobody's.
  redis.call('UNLINK', hash)
end
for index = 8, #ARGV, 3 do
  local name, revision = ARGV[index], ARGV[index + 1]
  local former = redis.call('HGET', hash, name)
  redis.call('HSET', hash, name, ARGV[index + 2], 'at:' .. revision, name)
  local written = former and revision_of(former)
  if written and written ~= revision then drop_name(written, name) end
end
redis.call('HSET', hash, 'lineage', ARGV[4], 'revision', ARGV[5], 'write', ARGV[6], 'write:' .. ARGV[5], ARGV[6])
local before = tonumber(head[2])
if before then drop_writes(before - ARGV[7], math.min(before, ARGV[5] - ARGV[7] - 1)) end
return 1";

/// Forgets deletions that are the last of their documents. Who was before one must not follow past it: he could not hear of
/// it any more. ARGV: how many writes are remembered, then name and revision of each.
const FORGET: &str = "
local newest = 0
for index = 2, #ARGV, 2 do
  local name, revision = ARGV[index], ARGV[index + 1]
  local text = redis.call('HGET', hash, name)
  if text and revision_of(text) == revision then
    redis.call('HDEL', hash, name)
    drop_name(revision, name)
    newest = math.max(newest, revision)
  end
end
drop_writes((tonumber(head[2]) or 0) - ARGV[1], newest - 1)";

/// What the scripts begin with that read a page. ARGV: revision and write of the head that was seen last. They answer with
/// nothing if what is there has not come of that, else with the head, where to go on, and names and documents.
const READING: &str = "
local hash = KEYS[1]
if redis.call('HGET', hash, 'write:' .. ARGV[1]) ~= ARGV[2] then return {} end
local found = redis.call('HMGET', hash, 'lineage', 'revision', 'write')
";

/// Some of all documents. ARGV besides: where to go on, how many.
const SCAN: &str = "
local head = {lineage = true, revision = true, write = true}
local page = redis.call('HSCAN', hash, ARGV[3], 'COUNT', ARGV[4])
found[4] = page[1]
for index = 1, #page[2], 2 do
  local name = page[2][index]
  if not (head[name] or name:find('^at:%d') or name:find('^write:%d')) then
    found[#found + 1] = name
    found[#found + 1] = page[2][index + 1]
  end
end
return found";

/// Documents that were written since a revision, the oldest first. ARGV besides: that, how many, at how many revisions.
const AFTER: &str = "
local cursor, names = tonumber(ARGV[3]), {}
local last = math.min(tonumber(found[2]) or 0, cursor + ARGV[5])
while cursor < last and #names < tonumber(ARGV[4]) do
  local fields = {}
  for revision = cursor + 1, math.min(last, cursor + 500) do fields[#fields + 1] = string.format('at:%.0f', revision) end
  for _, name in ipairs(redis.call('HMGET', hash, unpack(fields))) do
    if name then names[#names + 1] = name end
  end
  cursor = cursor + #fields
end
found[4] = string.format('%.0f', cursor)
for _, name in ipairs(names) do
  found[#found + 1] = name
  found[#found + 1] = redis.call('HGET', hash, name)
end
return found";

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
        let command = Command { name, key: Bytes::from_static(CONFIGURATION.as_bytes()), args };
        self.client.call(command, timeout).await.map_err(|failure| {
            // Where nobody calls, this is who notices. In a cluster it says nothing of other nodes.
            if !self.client.is_clustered() {
                self.health.fails(&self.reach, &failure);
            }
            if failure.is_of_one_key() {
                return corrupt("a key of the configuration", failure.to_string());
            }
            unavailable(failure)
        })
    }

    async fn ask(&self, name: &'static str, args: &[&str]) -> Result<Vec<Option<Bytes>>, StoreError> {
        let args = args.iter().map(|arg| Bytes::copy_from_slice(arg.as_bytes())).collect();
        Ok(entries_of(self.call(name, args).await?).into_iter().map(bytes_of).collect())
    }

    /// Runs a script on the configuration.
    async fn run(
        &self,
        [begin, rest]: [&str; 2],
        args: impl IntoIterator<Item = Bytes>,
    ) -> Result<Value, StoreError> {
        let script = Bytes::from([begin, rest].concat());
        let head = [script, Bytes::from_static(b"1"), Bytes::from_static(CONFIGURATION.as_bytes())];
        self.call("EVAL", head.into_iter().chain(args).collect()).await
    }

    /// A page of documents; `None`: what is there has not come of `known`.
    async fn page(&self, script: &str, known: &Head, args: &[&str]) -> Result<Option<Page>, StoreError> {
        let revision = known.revision.to_string();
        let args = [&*revision, &*known.write].into_iter().chain(args.iter().copied());
        let args = args.map(|arg| Bytes::copy_from_slice(arg.as_bytes()));
        let found = entries_of(self.run([READING, script], args).await?).into_iter().map(bytes_of);
        let found: Vec<Option<Bytes>> = found.collect();
        let [_, _, _, Some(cursor), pairs @ ..] = &found[..] else { return Ok(None) };
        let Some(head) = head_of(&found)? else { return Ok(None) };
        let mut documents = Documents::new();
        for pair in pairs.chunks_exact(2) {
            let name = pair[0].as_ref().map(text_of).unwrap_or_default();
            let text = pair[1].as_ref().ok_or_else(|| corrupt("a document", format!("no {name}")))?;
            let unreadable = |error: serde_json::Error| corrupt("a document", format!("{name} ({error})"));
            let document: Document = serde_json::from_slice(text).map_err(unreadable)?;
            documents.insert(name.parse().map_err(|_| corrupt("a document's name", name))?, document);
        }
        Ok(Some(Page { head, cursor: text_of(cursor), documents }))
    }

    /// `head` is there and none that a write has left.
    async fn is_made_up(&self, head: &Head) -> Result<bool, StoreError> {
        let write = format!("write:{}", head.revision);
        let found = self.ask("HMGET", &[CONFIGURATION, "lineage", "revision", "write", &write]).await?;
        Ok(head_of(&found)?.as_ref() == Some(head)
            && found[3].as_ref().map(text_of).as_ref() != Some(&head.write))
    }

    /// Documents after `revision`, and the head that they lead to; `None`: another configuration came there meanwhile.
    async fn pages(&self, revision: u64, mut known: Head) -> Result<Option<(Head, Documents)>, StoreError> {
        let (mut reached, mut all) = (revision, Documents::new());
        if known.revision.saturating_sub(revision) > REVISIONS_BEHIND_MAX {
            // What is written meanwhile comes again below.
            reached = known.revision;
            let mut cursor = "0".to_owned();
            loop {
                let Some(page) = self.page(SCAN, &known, &[&cursor, PAGE]).await? else { return Ok(None) };
                all.extend(page.documents);
                (known, cursor) = (page.head, page.cursor);
                if cursor == "0" {
                    break;
                }
            }
        }
        loop {
            let args = [&reached.to_string(), PAGE, PAGE_REVISIONS];
            let Some(page) = self.page(AFTER, &known, &args).await? else { return Ok(None) };
            all.extend(page.documents);
            known = page.head;
            reached = page.cursor.parse().map_err(|_| corrupt("a revision", page.cursor))?;
            if reached >= known.revision {
                return Ok(Some((known, all)));
            }
            if known.revision - reached > REVISIONS_BEHIND_MAX {
                return Ok(None);
            }
        }
    }
}

/// What is read at one instant.
struct Page {
    head: Head,
    /// Where to go on.
    cursor: String,
    documents: Documents,
}

/// The head by its fields; `None`: there is no configuration.
fn head_of(fields: &[Option<Bytes>]) -> Result<Option<Head>, StoreError> {
    let [lineage, revision, write, ..] = fields else { return Ok(None) };
    let (Some(lineage), Some(revision), Some(write)) = (lineage, revision, write) else {
        let is_none = lineage.is_none() && revision.is_none() && write.is_none();
        return if is_none { Ok(None) } else { Err(corrupt("the configuration's head", "a part of it")) };
    };
    let revision = text_of(revision);
    let exact = revision.parse().ok().filter(|revision| *revision <= REVISION_MAX);
    let revision = exact.ok_or_else(|| corrupt("the configuration's revision", revision))?;
    Ok(Some(Head { lineage: text_of(lineage), revision, write: text_of(write) }))
}

fn text_of(bytes: &Bytes) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[async_trait]
impl SharedDirectory for RedisDirectory {
    async fn head(&self) -> Result<Option<Head>, StoreError> {
        head_of(&self.ask("HMGET", &[CONFIGURATION, "lineage", "revision", "write"]).await?)
    }

    async fn write_at(&self, revision: u64) -> Result<Option<String>, StoreError> {
        let named = self.ask("HMGET", &[CONFIGURATION, &format!("write:{revision}")]).await?;
        Ok(named.into_iter().flatten().next().map(|named| text_of(&named)))
    }

    async fn after(&self, revision: u64) -> Result<(Option<Head>, Documents), StoreError> {
        let Some(known) = self.head().await? else { return Ok(Default::default()) };
        match self.pages(revision, known.clone()).await? {
            Some((head, documents)) => Ok((Some(head), documents)),
            None if self.is_made_up(&known).await? => {
                let Head { revision, write, .. } = known;
                Err(corrupt(
                    "the configuration's head",
                    format!("revision {revision}, where no write {write} led"),
                ))
            }
            None => Ok(Default::default()),
        }
    }

    async fn commit(
        &self,
        before: Option<&Head>,
        next: &Head,
        documents: &Documents,
    ) -> Result<bool, StoreError> {
        let of = |head: &Head| [head.lineage.clone(), head.revision.to_string(), head.write.clone()];
        let known = before.map_or_else(Default::default, of);
        let heads = known.into_iter().chain(of(next)).chain([WRITES_MAX.to_owned()]);
        let mut args: Vec<Bytes> = heads.map(Bytes::from).collect();
        for (name, document) in documents {
            let text = serde_json::to_vec(document)
                .map_err(|error| corrupt("a document", format!("{name} ({error})")))?;
            args.extend([name.to_string().into(), document.revision.to_string().into(), text.into()]);
        }
        Ok(matches!(self.run([WRITING, COMMIT], args).await?, Value::Integer(1)))
    }

    async fn forget(&self, deleted: &[(DocumentName, u64)]) -> Result<(), StoreError> {
        for some in deleted.chunks(FORGOTTEN_MAX) {
            let pairs = some.iter().flat_map(|(name, revision)| [name.to_string(), revision.to_string()]);
            let args = [WRITES_MAX.to_owned()].into_iter().chain(pairs).map(Bytes::from);
            self.run([WRITING, FORGET], args).await?;
        }
        Ok(())
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
