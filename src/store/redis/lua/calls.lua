-- What a pool is asked. Calls come as store/redis/wire.rs writes them: {name, arguments}; an answer is {Ok = value} or
-- {Err = why}.

function ledger.advance()
  if pool.next_deadline > 0 and pool.next_deadline <= pool.now then
    local ended = redis.call('ZRANGEBYSCORE', pool.keys[2], '-inf', string.format('%.0f', pool.now))
    if #ended == 0 then ended = upkeep.read_deadlines() end
    for _, random in ipairs(ended) do
      local of = ledger.hold_of(random)
      if of then
        ledger.give_back(random, of)
        pool.ended.expired = pool.ended.expired + 1
      else
        pool.deadlines[random] = false
      end
    end
  end
  if pool.next_window_end > 0 and pool.next_window_end <= pool.now then signals.end_windows() end
end

-- What the counters of a charge (core/charge.rs) hold, and whether any of its checks does not pass.
function ledger.read(charge)
  local name, connections, serving, terms, checks = charge[2], charge[3], charge[4], charge[5], charge[6]
  local key = ledger.key_of(name)
  local counters, blocked = {}, false
  for at, check in ipairs(checks) do
    local own, total = ledger.read_counters(key, check[1])
    local readings = {}
    if pool.accounts_made > 0 and not check[1][2] then
      readings = signals.account_readings(check[1][1], connections, serving, key)
    end
    blocked = rule.is_blocked(terms, check, own, total, readings, pool.now) or blocked
    counters[at] = { own, total, readings }
  end
  local releases = blocked and pool.open > 0 and ledger.releases_of(charge, counters) or {}
  return counters, releases, blocked
end

function ledger.copy_of(counter) return { counter[1], counter[2], counter[3], counter[4] } end

-- Copied: what the call does changes the counters.
function ledger.reading_of(counters, releases)
  local copies = {}
  for at, of in ipairs(counters) do
    local readings = {}
    for index, account in ipairs(of[3]) do readings[index] = ledger.without_holes(account, A.PARTS) end
    copies[at] = { ledger.copy_of(of[1]), ledger.copy_of(of[2]), readings }
  end
  return { pool.now, copies, releases }
end

local call = {}

function call.nothing() return { Ok = null } end

function call.check(charge)
  local counters, releases = ledger.read(charge)
  return { Ok = ledger.reading_of(counters, releases) }
end

function call.enforce(charge, random, connection, model, life, request, request_id, fingerprint, not_after)
  if not_after and pool.clock > not_after then return { Err = 'Late' } end
  local counters, releases, blocked = ledger.read(charge)
  local memory = request and ledger.memory_of(request)
  if memory then
    if memory.fingerprint ~= fingerprint then return { Err = 'RequestId' } end
    return { Ok = { ledger.reading_of(counters, releases), { memory.random, memory.ends_at, true } } }
  end
  if blocked and not charge[7] then return { Ok = { ledger.reading_of(counters, releases), null } } end
  local reading = ledger.reading_of(counters, releases)
  local deadline = pool.now + life
  if request then ledger.remember(request, deadline, false, fingerprint, random) end
  local amounts = {}
  for at, check in ipairs(charge[6]) do
    local steps = rule.room_on(max(counters[at][1][4], counters[at][2][4]), check[2])
    if steps > 0 then amounts[#amounts + 1] = { check[1], steps } end
  end
  ledger.hold(random, { charge[2], connection, model, request_id, deadline, amounts })
  return { Ok = { reading, { random, deadline, false } } }
end

-- Why a record is refused: it says something else than what is known.
function ledger.disagrees(record, held, settled, counted)
  local fingerprint = record.fingerprint
  if held and held[R.KEY] ~= record.name then return 'ForeignKey' end
  if settled and settled.fingerprint:sub(1, 4) ~= fingerprint:sub(1, 4) then return 'ForeignKey' end
  if settled and settled.fingerprint ~= fingerprint then return 'Settled' end
  if counted and counted.fingerprint ~= fingerprint then return 'IdempotencyKey' end
end

function ledger.count(record)
  local key = ledger.key_of(record.name)
  for _, of in ipairs(record.counts) do
    local counter, amount = of[1], of[2]
    if amount > 0 then
      local window = counter[1][2]
      local bucket = floor(record.at / window)
      if bucket + 1 >= floor(pool.now / window) then
        local own, total = ledger.counters_for(key, counter)
        if total then amount = rule.counter_add(total, bucket, amount) end
        local added = rule.counter_add(own, bucket, amount)
        if total then ledger.sampler_add(ledger.dimension_of(counter[1]), added) end
        ledger.live_until(pool.now + 2 * window)
      end
    end
  end
  ledger.touch(record.name)
end

function ledger.record_on_accounts(record)
  if not record.connection then return end
  for _, of in ipairs(record.counts) do
    local counter = of[1]
    local concerns = pool.accounts_made > 0 or counter[1][1] == 'Percent'
    if concerns and not counter[2] then
      local account = signals.account_of(counter[1], record.connection)
      if not account and counter[1][1] == 'Percent' then
        account = signals.make_account(counter[1], record.connection)
      end
      if account then signals.record_on(account, record.name, record.cost, record.at) end
    end
  end
end

function call.record(name, connection, cost, observations, counts, settles, random, held_elsewhere, idempotency,
  fingerprint, life, at)
  local record = { name = name, connection = connection, cost = cost, counts = counts, fingerprint = fingerprint,
    at = min(at or pool.now, pool.now) }
  local settled = settles and ledger.memory_of(settles)
  local counted = idempotency and ledger.memory_of(idempotency)
  local held = random and ledger.hold_of(random)
  local why = ledger.disagrees(record, held, settled, counted)
  if why then return { Err = why } end

  local duplicate = (settled or counted) and true or false
  local late = false
  if settles then
    if settled then late = settled.late else late = not held and not held_elsewhere end
  end
  if held then
    ledger.give_back(random, held)
    pool.ended.settled = pool.ended.settled + 1
  end
  if not duplicate then
    ledger.count(record)
    ledger.record_on_accounts(record)
  end
  local unread = 0
  if connection then
    for _, observation in ipairs(observations) do
      if signals.observe(connection, observation) then unread = unread + 1 end
    end
  end
  if not duplicate then
    for _, of in ipairs(counts) do
      if not of[1][2] then ledger.sample(of[1][1]) end
    end
  end
  if settles and not settled then
    local from = held and max(held[R.DEADLINE], pool.now) or pool.now
    ledger.remember(settles, from + life, late, fingerprint)
  end
  if idempotency and not counted then ledger.remember(idempotency, pool.now + life, late, fingerprint) end
  return { Ok = { duplicate, late, unread } }
end

-- With `request`, of a caller that has heard of nothing: the request that made it is to be decided afresh.
function call.release(random, name, request)
  if request then ledger.forget(request, random) end
  local held = ledger.hold_of(random)
  if not held then return { Ok = false } end
  if name and name ~= held[R.KEY] then return { Err = 'ForeignKey' } end
  ledger.give_back(random, held)
  pool.ended.released = pool.ended.released + 1
  return { Ok = true }
end

-- What is known of a reservation that a record, which counts in another pool, settles.
function call.reservation(name, fingerprint, id, random)
  local record = { name = name, fingerprint = fingerprint }
  local settled = ledger.memory_of(id)
  local held = random and ledger.hold_of(random)
  local why = ledger.disagrees(record, held, settled)
  if why then return { Err = why } end
  return { Ok = settled and 'Settled' or held and 'Open' or 'Unknown' }
end

function call.report(connection, observations)
  local taken = {}
  for index, observation in ipairs(observations) do
    local why = signals.observe(connection, observation)
    taken[index] = why and { Err = why } or { Ok = null }
  end
  return { Ok = taken }
end

function call.reset(only, dimension)
  upkeep.reset(only, dimension)
  return { Ok = null }
end
