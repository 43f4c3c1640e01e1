-- What a pool knows of the accounts behind its connections: the twin of core/ledger/accounts.rs. `account.lua` has
-- what is done to one of them.

local signals = lazily(function(signals)
  function signals.account_field(dimension, connection)
    return ACCOUNT .. dimension[1] .. ':' .. string.format('%.0f', dimension[2]) .. ':' .. connection
  end

  -- What is known of an account; nil: nothing.
  function signals.account_of(dimension, connection)
    if pool.accounts_made == 0 then return nil end
    local field = signals.account_field(dimension, connection)
    local account = pool.accounts[field]
    if account == nil then
      local packed = not pool.all_read and redis.call('HGET', pool.keys[1], field)
      account = packed and ledger.cache_account(field, packed) or false
      pool.accounts[field] = account
    end
    return account or nil
  end

  function signals.make_account(dimension, connection)
    local account = signals.account_of(dimension, connection)
    if account then return account end
    pool.accounts_made = pool.accounts_made + 1
    local field = signals.account_field(dimension, connection)
    account = { number = pool.accounts_made, head = accounting.new_head(), field = field, unit = dimension[1],
      window = dimension[2], connection = connection }
    pool.accounts[field] = account
    return account
  end

  function signals.keep_account(account)
    pool.changed[account.field], pool.removed[account.field] = account, nil
    local head = account.head
    local stop = head[H.WINDOW_END]
    if stop and (pool.next_window_end == 0 or stop < pool.next_window_end) then pool.next_window_end = stop end
    ledger.live_until(max(head[H.TOUCHED_AT] + 2 * account.window, head[H.FRESH_UNTIL], stop or 0))
  end

  function signals.all_accounts()
    ledger.read_all()
    local all = {}
    for _, account in pairs(pool.accounts) do
      if account then all[#all + 1] = account end
    end
    return all
  end

  function signals.share_in(key, account)
    for index, share in ipairs(key[K.SHARES]) do
      if share[1] == account.number then return share, index end
    end
  end

  -- The share of a key, made where it is not yet.
  function signals.share_of(name, account)
    local key = ledger.key_of(name)
    ledger.touch(name)
    local share = signals.share_in(key, account)
    if not share then
      share = { account.number, 0, { 0, 0, 0 }, {} }
      table.insert(key[K.SHARES], share)
    end
    return share
  end

  function signals.recorder(account, name) return string.format('%d:', account.number) .. name end

  -- The names of those who have recorded on the account and no rise has been split by.
  function signals.recorders_of(account)
    local prefix = string.format('%d', account.number)
    local names, in_order = {}, true
    for _, member in ipairs(redis.call('ZRANGEBYLEX', pool.keys[3], '[' .. prefix .. ':', '(' .. prefix .. ';')) do
      if pool.recording[member] == nil then names[#names + 1] = member:sub(#prefix + 2) end
    end
    for member, is_one in pairs(pool.recording) do
      if is_one and member:sub(1, #prefix + 1) == prefix .. ':' then
        names[#names + 1] = member:sub(#prefix + 2)
        in_order = false
      end
    end
    if not in_order then table.sort(names, ledger.precedes) end
    return names
  end

  -- A share was changed that had `slices` before: nothing is kept of one that says nothing.
  function signals.keep_share(name, account, slices)
    local key = ledger.key_of(name)
    local share, index = signals.share_in(key, account)
    local records = #share[S.SINCE] > 0
    if records ~= (slices > 0) then pool.recording[signals.recorder(account, name)] = records end
    if accounting.share_is_none(share) then table.remove(key[K.SHARES], index) end
    ledger.touch(name)
  end

  function signals.each_share(account, change, order)
    local names = ledger.all_names()
    if order then table.sort(names, order) end
    for _, name in ipairs(names) do
      local share = signals.share_in(pool.counters_of[name], account)
      if share then
        local slices = #share[S.SINCE]
        change(share)
        signals.keep_share(name, account, slices)
      end
    end
  end

  -- The window has ended, or another one has begun. What was recorded since the last rise may be of the new window
  -- unless `weights` go too.
  function signals.start_over(account, weights)
    signals.each_share(account, function(share)
      accounting.set_part(account, share, 0)
      share[S.SLID] = { 0, 0, 0 }
      if weights then share[S.SINCE] = {} end
    end)
    local head = account.head
    head[H.FRACTION], head[H.EXTERNAL], head[H.SLID] = 0, 0, { 0, 0, 0 }
  end

  function signals.end_window(account)
    signals.start_over(account, true)
    local head = account.head
    head[H.WINDOW_START], head[H.WINDOW_END] = head[H.WINDOW_END], nil
    head[H.OBSERVED_AT], head[H.PREVIOUS_END] = nil, nil
    signals.keep_account(account)
  end

  -- Forgets what the provider said, and every part. What was true before `from` is not believed any more.
  function signals.forget_account(account, from)
    signals.start_over(account, true)
    local head = accounting.new_head()
    head[H.TOUCHED_AT], head[H.ALONE], head[H.WINDOW_START] =
      account.head[H.TOUCHED_AT], account.head[H.ALONE], from
    account.head = head
    signals.keep_account(account)
  end

  function signals.forget_part(account, name)
    local share = signals.share_in(ledger.key_of(name), account)
    if not share then return end
    local head, slid = account.head, account.head[H.SLID]
    local previous, current = rule.seen_from(share[S.SLID], slid[1])
    slid[2], slid[3] = max(0, slid[2] - current), max(0, slid[3] - previous)
    local part, slices = share[S.PART], #share[S.SINCE]
    accounting.set_part(account, share, 0)
    share[S.SLID], share[S.SINCE] = { 0, 0, 0 }, {}
    signals.keep_share(name, account, slices)
    if account.unit == 'Percent' then head[H.EXTERNAL] = head[H.EXTERNAL] + part end
    signals.keep_account(account)
  end

  function signals.find_next_window_end()
    pool.next_window_end = 0
    for _, account in ipairs(signals.all_accounts()) do
      local stop = account.head[H.WINDOW_END]
      if stop and (pool.next_window_end == 0 or stop < pool.next_window_end) then pool.next_window_end = stop end
    end
  end

  function signals.end_windows()
    for _, account in ipairs(signals.all_accounts()) do
      local stop = account.head[H.WINDOW_END]
      if stop and stop <= pool.now then signals.end_window(account) end
    end
    signals.find_next_window_end()
  end

  -- Of one dimension or of all; of one key its part alone.
  function signals.forget_accounts(name, dimension, from)
    for _, account in ipairs(signals.all_accounts()) do
      if not dimension or (dimension[1] == account.unit and dimension[2] == account.window) then
        if name then signals.forget_part(account, name) else signals.forget_account(account, from) end
      end
    end
    signals.find_next_window_end()
  end

  function signals.record_on(account, name, cost, at)
    if at < pool.now and accounting.began_after(account.head, account.window, at) then return end
    local share, head, window = signals.share_of(name, account), account.head, account.window
    local amount, slices = cost[IN_COST[account.unit]], #share[S.SINCE]
    if account.unit == 'Percent' then
      accounting.share_weigh(share, cost, at)
    elseif accounting.is_anchored(head, pool.now) then
      accounting.set_part(account, share, share[S.PART] + rule.room_on(head[H.PARTS], amount))
    end
    local bucket = floor(at / window)
    local in_view = bucket + 1 >= floor(pool.now / window)
    if in_view and accounting.slides_anew(head, window, pool.now) then
      rule.counter_add(share[S.SLID], bucket, rule.counter_add(head[H.SLID], bucket, amount))
    end
    signals.keep_share(name, account, slices)
    head[H.TOUCHED_AT] = pool.now
    signals.keep_account(account)
  end

  -- A rise is split over those who recorded since the last one; a fall lowers every part alike.
  function signals.move_figure(account, figure, observed_at)
    local before = rule.figure_of(account.head[H.FRACTION])
    if figure > before then
      local names, shares, slices = signals.recorders_of(account), {}, {}
      ledger.read_keys(names)
      for index, name in ipairs(names) do
        shares[index] = signals.share_of(name, account)
        slices[index] = #shares[index][S.SINCE]
      end
      local risen = accounting.split_rise(account, shares, figure - before, observed_at)
      for index, name in ipairs(names) do signals.keep_share(name, account, slices[index]) end
      if risen > 0 then ledger.sampler_add(ledger.dimension_of({ account.unit, account.window }), risen) end
    elseif figure < before then
      local left, sum = figure, 0
      signals.each_share(account, function(share)
        sum = sum + accounting.scaled(share[S.PART], figure, before)
      end)
      -- Who comes first is of concern only where rounding has made too much of the sum.
      local order = sum > figure and ledger.precedes or nil
      signals.each_share(account, function(share)
        local part = min(accounting.scaled(share[S.PART], figure, before), left)
        left = left - part
        accounting.set_part(account, share, part)
      end, order)
      account.head[H.EXTERNAL] = left
    end
  end

  -- What each key has used in the sliding window, in whole steps: {name, steps}.
  function signals.sliding_estimates(dimension, account)
    local position = ledger.position_of(dimension)
    local estimates = {}
    if not position or dimension[1] == 'Percent' then return estimates end
    for _, name in ipairs(ledger.all_names()) do
      local key = pool.counters_of[name]
      local counter = key[K.COUNTERS][position]
      if account and accounting.slides_anew(account.head, dimension[2], pool.now) then
        local share = signals.share_in(key, account)
        counter = share and share[S.SLID] or NOTHING
      end
      local steps = counter and rule.round_half_even(rule.counter_at(counter, dimension[2], pool.now)) or 0
      if steps > 0 then estimates[#estimates + 1] = { name, steps } end
    end
    return estimates
  end

  -- Reads a figure of `connection`: core/account.rs, Observation. Returns why it is not taken.
  function signals.observe(connection, observation)
    local dimension, reset = observation[1], observation[4]
    local window = dimension[2]
    local seen = { unit = dimension[1], fraction = observation[2], life = observation[5], believed = observation[6],
      age_known = observation[7], alone = observation[8] }
    if type(reset) == 'table' then
      seen.window_end = reset.WindowEnd
      seen.stop = reset.WindowEnd or reset.Refill
    end
    -- While time stands still, what is true now is not older than what was true before.
    local observed_at = min(observation[3] + pool.lag, pool.now)
    local account = signals.account_of(dimension, connection)
    local head = account and account.head or accounting.new_head()
    local why = accounting.why_unread(head, seen, window, observed_at, pool.now)
    if why then return why end
    local was_anchored = account ~= nil and accounting.is_anchored(head, pool.now)
    local carried = {}
    if seen.alone and seen.window_end and not was_anchored then
      carried = signals.sliding_estimates(dimension, account)
    end

    account = signals.make_account(dimension, connection)
    head = account.head
    if accounting.is_stale(head, window, pool.now) then
      signals.start_over(account, false)
    elseif accounting.is_followed_by(head, seen, window) then
      signals.start_over(account, false)
      head[H.PREVIOUS_END], head[H.WINDOW_START] = head[H.WINDOW_END], observed_at
    end
    if seen.unit == 'Percent' then signals.move_figure(account, rule.figure_of(seen.fraction), observed_at) end
    head[H.FRACTION], head[H.OBSERVED_AT] = seen.fraction, observed_at
    head[H.FRESH_UNTIL], head[H.HAS_END] = seen.stop or observed_at + seen.life, seen.stop ~= nil
    head[H.ALONE], head[H.TOUCHED_AT] = seen.alone, pool.now
    head[H.WINDOW_END] = seen.window_end or head[H.WINDOW_END]
    if seen.unit ~= 'Percent' and not was_anchored and accounting.is_anchored(head, pool.now) then
      for _, of in ipairs(carried) do
        local share = signals.share_of(of[1], account)
        accounting.set_part(account, share, of[2])
        signals.keep_share(of[1], account, #share[S.SINCE])
      end
    end
    signals.keep_account(account)
  end

  function signals.account_readings(dimension, connections, serving, key)
    local readings = {}
    for _, connection in ipairs(connections) do
      local account = signals.account_of(dimension, connection)
      if account then
        local head, window = account.head, account.window
        local share = signals.share_in(key, account)
        local alone = head[H.ALONE] and #connections == 1
        local slid = nil
        if alone and accounting.slides_anew(head, window, pool.now) then
          slid = { share and share[S.SLID] or { 0, 0, 0 }, head[H.SLID] }
        end
        local fresh = accounting.head_is_fresh(head, pool.now)
        if fresh or head[H.WINDOW_END] or slid then
          readings[#readings + 1] = { serving == connection, head[H.FRACTION], rule.figure_of(head[H.FRACTION]),
            fresh and head[H.FRESH_UNTIL] or nil, head[H.HAS_END], head[H.WINDOW_END], alone, slid,
            share and share[S.PART] or 0, head[H.PARTS] }
        end
      end
    end
    return readings
  end
end)
