-- What is known of one connection's account in one dimension: the twin of core/account.rs and core/account/share.rs,
-- where everything is argued.
--
-- An account is a table of this call alone:
--   number      names it in keys' shares
--   head        the order of core/account.rs, Head
--   field       where its head is kept
--   unit, window, connection
-- A share is what a key keeps of an account: {number, part, counter, slices}, a slice {first, last, weight}, a weight
-- {requests, tokens, usd, percent, unpriced}.

local H = { FRACTION = 1, OBSERVED_AT = 2, FRESH_UNTIL = 3, HAS_END = 4, WINDOW_END = 5, PREVIOUS_END = 6,
  WINDOW_START = 7, ALONE = 8, EXTERNAL = 9, PARTS = 10, SLID = 11, TOUCHED_AT = 12 }
local S = { PART = 2, SLID = 3, SINCE = 4 }
-- In a cost, and in a weight.
local REQUESTS, TOKENS, USD, PERCENT, UNPRICED = 1, 2, 3, 4, 5
local IN_COST = { Requests = REQUESTS, Tokens = TOKENS, Usd = USD, Percent = PERCENT }

local SLICE_MS, SLICES_MAX = 2000, 16
local EARLY_RESET_MS = 10000

-- The functions of accounts and shares.
local accounting = lazily(function(accounting)
  function accounting.new_head()
    return { 0, nil, 0, false, nil, nil, 0, false, 0, 0, { 0, 0, 0 }, 0 }
  end

  function accounting.head_is_fresh(head, at)
    return head[H.OBSERVED_AT] ~= nil and at < head[H.FRESH_UNTIL]
  end

  function accounting.is_anchored(head, at)
    return head[H.ALONE] and head[H.WINDOW_END] ~= nil and at < head[H.WINDOW_END]
  end

  -- What was recorded since the last end of a window counts, as long as a sliding window could see what was before it.
  function accounting.slides_anew(head, window, at)
    local start = head[H.WINDOW_START]
    return head[H.ALONE] and start > 0 and rule.ms_since(at, start) < 2 * window
  end

  function accounting.is_stale(head, window, at)
    local said = head[H.OBSERVED_AT] ~= nil and head[H.WINDOW_END] == nil
    return said and rule.ms_since(at, head[H.FRESH_UNTIL]) >= window
  end

  -- The window that is known began after `at`: ends wander by up to a twentieth of a window.
  function accounting.began_after(head, window, at)
    local stop = head[H.WINDOW_END]
    return at < head[H.WINDOW_START] or (stop ~= nil and rule.ms_since(stop, at) > window + floor(window / 20))
  end

  function accounting.head_is_idle(head, window, at)
    return not accounting.head_is_fresh(head, at) and rule.ms_since(at, head[H.TOUCHED_AT]) > 2 * window
  end

  -- A window that ends at `stop` is an earlier one than the known.
  function accounting.is_after(head, stop, window)
    local known, previous = head[H.WINDOW_END], head[H.PREVIOUS_END]
    if not known then return false end
    if rule.ms_since(known, stop) >= window / 20 then return true end
    return previous ~= nil and math.abs(previous - stop) < math.abs(known - stop)
  end

  -- What was observed is of a later window than what is known.
  function accounting.is_followed_by(head, seen, window)
    local known, stop = head[H.WINDOW_END], seen.window_end
    if not known or not stop then return false end
    local later = rule.ms_since(stop, known)
    local before, now = rule.figure_of(head[H.FRACTION]), rule.figure_of(seen.fraction)
    local early = seen.age_known and later >= EARLY_RESET_MS and now <= floor(before / 2)
    return now < before and (later >= window / 20 or early)
  end

  -- Why a figure is not taken: core/account.rs, Unread; nil if it is.
  function accounting.why_unread(head, seen, window, observed_at, now)
    if rule.ms_since(now, observed_at) > window then return 'TooOld' end
    if (seen.stop and seen.stop <= now) or observed_at < head[H.WINDOW_START] then return 'Ended' end
    if head[H.OBSERVED_AT] and observed_at < head[H.OBSERVED_AT] then return 'Older' end
    local may_be_old = seen.window_end and not seen.believed
    if may_be_old and accounting.is_after(head, seen.window_end, window) then return 'Ended' end
    local in_a_window = seen.unit == 'Percent' or head[H.WINDOW_END] ~= nil
    local lower = rule.figure_of(seen.fraction) < rule.figure_of(head[H.FRACTION])
    if lower and not seen.believed and in_a_window and accounting.head_is_fresh(head, now)
      and not accounting.is_followed_by(head, seen, window) then return 'Lower' end
    return nil
  end

  function accounting.weight_is_none(weight)
    return weight[REQUESTS] == 0 and weight[TOKENS] == 0 and weight[USD] == 0 and weight[PERCENT] == 0
      and not weight[UNPRICED]
  end

  function accounting.weight_add(weight, cost)
    if cost[PERCENT] > 0 then
      weight[PERCENT] = weight[PERCENT] + rule.room_on(weight[PERCENT], cost[PERCENT])
      return
    end
    for _, unit in ipairs({ REQUESTS, TOKENS, USD }) do
      weight[unit] = weight[unit] + rule.room_on(weight[unit], cost[unit])
    end
    local nothing = cost[REQUESTS] == 0 and cost[TOKENS] == 0
    weight[UNPRICED] = weight[UNPRICED] or (cost[USD] == 0 and not nothing)
  end

  function accounting.weight_join(weight, other)
    for unit = REQUESTS, PERCENT do weight[unit] = weight[unit] + other[unit] end
    weight[UNPRICED] = weight[UNPRICED] or other[UNPRICED]
  end

  -- Joins the two neighbours that span the smallest part of the time until `now`.
  function accounting.join_neighbours(slices, now)
    local least, at
    for index = 1, #slices - 1 do
      local span = rule.ms_since(slices[index + 1][2], slices[index][1])
      local part = span / (rule.ms_since(now, slices[index + 1][2]) + SLICE_MS)
      if not least or part < least then least, at = part, index end
    end
    local older = table.remove(slices, at)
    slices[at][1] = older[1]
    accounting.weight_join(slices[at][3], older[3])
  end

  -- `cost` was recorded at `at`, or with what was recorded last if that was later.
  function accounting.share_weigh(share, cost, at)
    local slices = share[S.SINCE]
    local slice = slices[#slices]
    if slice then at = max(at, slice[2]) end
    if slice and rule.ms_since(at, slice[1]) < SLICE_MS then
      slice[2] = at
    else
      slice = { at, at, { 0, 0, 0, 0, false } }
      slices[#slices + 1] = slice
    end
    accounting.weight_add(slice[3], cost)
    if #slices > SLICES_MAX then accounting.join_neighbours(slices, at) end
  end

  -- What was recorded by `last`.
  function accounting.share_weight(share, last)
    local sum = { 0, 0, 0, 0, false }
    for _, slice in ipairs(share[S.SINCE]) do
      if slice[2] <= last then accounting.weight_join(sum, slice[3]) end
    end
    return sum
  end

  function accounting.share_forget(share, last)
    local kept = {}
    for _, slice in ipairs(share[S.SINCE]) do
      if slice[2] > last then kept[#kept + 1] = slice end
    end
    share[S.SINCE] = kept
  end

  function accounting.share_is_none(share)
    local slid = share[S.SLID]
    return share[S.PART] == 0 and slid[1] == 0 and slid[2] == 0 and slid[3] == 0 and #share[S.SINCE] == 0
  end

  function accounting.set_part(account, share, part)
    account.head[H.PARTS] = account.head[H.PARTS] - share[S.PART] + part
    share[S.PART] = part
  end

  function accounting.scaled(amount, numerator, denominator)
    return floor(amount * numerator / denominator)
  end

  function accounting.split_of(weights, unit)
    local split = { sum = 0 }
    for index, weight in ipairs(weights) do
      split[index] = weight[unit]
      split.sum = split.sum + weight[unit]
    end
    return split
  end

  -- By price if everything has one, else by tokens if there are any, else by requests.
  function accounting.split_by_weight(weights)
    local priced = true
    for _, weight in ipairs(weights) do priced = priced and not weight[UNPRICED] end
    for _, unit in ipairs(priced and { USD, TOKENS, REQUESTS } or { TOKENS, REQUESTS }) do
      local split = accounting.split_of(weights, unit)
      if split.sum > 0 then return split end
    end
    return { sum = 0 }
  end

  -- Gives `amount` to `shares` by `split`; returns what nobody got.
  function accounting.give(account, shares, split, amount)
    if split.sum == 0 or amount == 0 then return amount end
    local left, largest = amount, 1
    for index = 1, #split do
      local given = min(accounting.scaled(amount, split[index], split.sum), left)
      left = left - given
      if split[index] > split[largest] then largest = index end
      accounting.set_part(account, shares[index], shares[index][S.PART] + given)
    end
    -- What rounding has left, less than a step for each key.
    accounting.set_part(account, shares[largest], shares[largest][S.PART] + left)
    return 0
  end

  -- Splits a rise over `shares`, which have recorded since the last one and come by the name of their keys. Returns how
  -- much of it was split beyond what was stated.
  function accounting.split_rise(account, shares, rise, observed_at)
    local explained = false
    for _, share in ipairs(shares) do
      explained = explained or not accounting.weight_is_none(accounting.share_weight(share, observed_at))
    end
    local last = explained and observed_at or math.huge
    local weights = {}
    for index, share in ipairs(shares) do weights[index] = accounting.share_weight(share, last) end
    local stated = accounting.split_of(weights, PERCENT)
    local by_statement = min(rise, stated.sum)
    accounting.give(account, shares, stated, by_statement)
    local rest = rise - by_statement
    local left = accounting.give(account, shares, accounting.split_by_weight(weights), rest)
    left = accounting.give(account, shares, stated, left)
    account.head[H.EXTERNAL] = account.head[H.EXTERNAL] + left
    for _, share in ipairs(shares) do accounting.share_forget(share, last) end
    return rest - left
  end
end)
