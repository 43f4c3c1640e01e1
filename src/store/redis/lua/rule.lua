-- The rule in Lua: what a check sees, and whether it passes. The twin of core/window.rs and core/admission.rs: the
-- same operations on doubles in the same order. A test feeds both the same histories.
--
-- A counter is {bucket, current, previous} and, where holds are made on it, {bucket, current, previous, reserved}; all
-- amounts are whole steps below 2^53. Times are milliseconds since 1970.

-- The ceiling of stored sums: core/units.rs, Amount::MAX.
local AMOUNT_MAX = 9e15

local floor, min, max = math.floor, math.min, math.max

-- A table of functions that are made when the first of them is wanted. A script makes its functions anew whenever it
-- runs, which costs as much as a call: what most calls do not need is left to this.
local function lazily(define)
  return setmetatable({}, { __index = function(functions, name)
    setmetatable(functions, nil)
    define(functions)
    return functions[name]
  end })
end

local rule = {}

-- How much of `amount` can be added to `sum` before it reaches the ceiling.
function rule.room_on(sum, amount)
  return min(amount, max(0, AMOUNT_MAX - sum))
end

-- Milliseconds from `earlier` to `later`; 0 if it is not earlier.
function rule.ms_since(later, earlier)
  return max(0, later - earlier)
end

-- previous, current as seen from `bucket`
function rule.seen_from(counter, bucket)
  local ahead = bucket - counter[1]
  if ahead <= 0 then return counter[3], counter[2] end
  if ahead == 1 then return counter[2], 0 end
  return 0, 0
end

function rule.counter_move(counter, bucket)
  if bucket > counter[1] then
    local previous, current = rule.seen_from(counter, bucket)
    counter[1], counter[2], counter[3] = bucket, current, previous
  end
end

-- Adds as far as the ceiling allows; returns what was added: nothing to a bucket that has left the window.
function rule.counter_add(counter, bucket, amount)
  rule.counter_move(counter, bucket)
  local place = 2 + counter[1] - bucket
  if place > 3 then return 0 end
  local added = rule.room_on(counter[place], amount)
  counter[place] = counter[place] + added
  return added
end

-- Takes `amount` out of `bucket`, if that is still in the window.
function rule.counter_take(counter, bucket, amount)
  if bucket >= counter[1] then
    counter[2] = max(0, counter[2] - amount)
  elseif bucket + 1 == counter[1] then
    counter[3] = max(0, counter[3] - amount)
  end
end

-- The clock went back to `bucket`: what was filed ahead of it counts in it.
function rule.counter_rebase(counter, bucket)
  if bucket < counter[1] then
    counter[1], counter[2], counter[3] = bucket, min(AMOUNT_MAX, counter[2] + counter[3]), 0
  end
end

function rule.counter_is_spent(counter, bucket)
  local previous, current = rule.seen_from(counter, bucket)
  return previous == 0 and current == 0
end

-- The sliding estimate.
function rule.counter_at(counter, window, at)
  local bucket = floor(at / window)
  local previous, current = rule.seen_from(counter, bucket)
  local elapsed = at - bucket * window
  local faded = previous * (window - elapsed) / window
  -- Rounding must not make it more than it was.
  return min(faded, previous) + current
end

function rule.round_half_even(number)
  local whole = floor(number)
  local rest = number - whole
  if rest > 0.5 or (rest == 0.5 and whole % 2 == 1) then return whole + 1 end
  return whole
end

-- The steps of per cent in a fraction.
function rule.figure_of(fraction) return rule.round_half_even(fraction * 1e8) end

-- What is known of one connection's account, as the rule reads it: the order of core/admission.rs, AccountReading.
local A = { SERVING = 1, FRACTION = 2, FIGURE = 3, FRESH_UNTIL = 4, HAS_END = 5, WINDOW_END = 6, ALONE = 7, SLID = 8,
  KEY_PART = 9, PARTS = 10 }

function rule.reading_is_fresh(account, at)
  if account[A.WINDOW_END] and at >= account[A.WINDOW_END] then return false end
  return account[A.FRESH_UNTIL] ~= nil and (at < account[A.FRESH_UNTIL] or not account[A.HAS_END])
end

-- What was recorded by the key and by the pool.
function rule.consumed_at(unit, window, own, total, accounts, at)
  local alone
  if unit == 'Percent' then
    local key_parts, parts, fresh = 0, 0, false
    for _, account in ipairs(accounts) do
      if rule.reading_is_fresh(account, at) then
        fresh, key_parts, parts = true, key_parts + account[A.KEY_PART], parts + account[A.PARTS]
      end
    end
    if fresh then return key_parts, parts end
  end
  for _, account in ipairs(accounts) do
    if account[A.ALONE] then alone = account break end
  end
  if alone and alone[A.WINDOW_END] then
    if alone[A.WINDOW_END] <= at then return 0, 0 end
    if unit ~= 'Percent' then return alone[A.KEY_PART], alone[A.PARTS] end
  end
  local slid = alone and alone[A.SLID]
  if slid then own, total = slid[1], slid[2] end
  return rule.counter_at(own, window, at), rule.counter_at(total, window, at)
end

-- What the provider's figures say is used, and whether the serving connection has nothing left.
function rule.signals_at(unit, per_connection, accounts, at)
  local signalled, serving_is_full = nil, false
  for _, account in ipairs(accounts) do
    if rule.reading_is_fresh(account, at) then
      local percent = unit == 'Percent'
      signalled = (signalled or 0) + (percent and account[A.FIGURE] or account[A.FRACTION] * (per_connection or 0))
      if account[A.SERVING] then
        if percent and per_connection then
          serving_is_full = account[A.FIGURE] >= per_connection
        else
          serving_is_full = account[A.FRACTION] >= 1
        end
      end
    end
  end
  return signalled, serving_is_full
end

-- Nothing is left below `bound`, or not enough for `estimate`.
function rule.reaches(used, estimate, bound)
  return bound ~= nil and (used >= bound or used + estimate > bound)
end

function rule.exceeds(estimate, bound)
  return bound ~= nil and estimate > bound
end

-- True if one check does not pass. `terms` and `check` are as core/charge.rs serializes them.
function rule.is_blocked(terms, check, own, total, accounts, at)
  local policy, exempt, threshold = terms[1], terms[2], terms[3]
  local dimension, estimate, bounds = check[1][1], check[2], check[3]
  local per_connection, limit, cap, fair_share, owner_reserve =
    bounds[1], bounds[2], bounds[3], bounds[4], bounds[5]
  if exempt then return false end
  local unit = dimension[1]
  local key_consumed, pool_consumed = rule.consumed_at(unit, dimension[2], own, total, accounts, at)
  local signalled, serving_is_full = rule.signals_at(unit, per_connection, accounts, at)
  local external = signalled and max(signalled - pool_consumed - owner_reserve, 0) or 0
  local key_used = key_consumed + own[4]
  local pool_used = pool_consumed + total[4] + external
  local unknown = unit == 'Percent' and not signalled and pool_used == 0
  if rule.exceeds(estimate, per_connection) or rule.exceeds(estimate, limit) or rule.exceeds(estimate, cap) then
    return true
  end
  if rule.reaches(key_used, estimate, cap) or rule.reaches(pool_used, estimate, limit) then return true end
  if limit and serving_is_full then return true end
  local strict = limit and not unknown and pool_used / limit >= threshold
  return (strict and policy == 'Hard' and rule.reaches(key_used, estimate, fair_share)) or false
end
