-- What seldom happens to a whole pool: a clock that goes back, what has aged out, a reset.

local upkeep = lazily(function(upkeep)
  function upkeep.each_counter(name, change)
    local key = pool.counters_of[name]
    for position, counter in ipairs(key[K.COUNTERS]) do
      change(counter, pool.dimensions[position][D.WINDOW], pool.dimensions[position][D.TOTAL])
    end
    for _, of in ipairs(key[K.MODELS]) do change(of[4], of[3]) end
  end

  -- Ends every memory by `latest`; what had ended by `before` does not come back.
  function upkeep.cut_ids(before, latest_record, latest_request)
    for index, generation in ipairs(pool.generations) do
      local stored = redis.call('HGETALL', pool.keys[3 + index])
      for at = 1, #stored, 2 do
        local id, packed = stored[at], stored[at + 1]
        local ends_at, late = struct.unpack('>I6B', packed)
        local latest = #packed > 19 and latest_request or latest_record
        -- One that has ended is written as such.
        local stop = ends_at > before and min(ends_at, latest) or 0
        if stop ~= ends_at then pool.ids_written[index][id] = struct.pack('>I6B', stop, late) .. packed:sub(8) end
      end
      generation[G.BEGAN] = min(generation[G.BEGAN], pool.now)
      generation[G.ENDS] = min(generation[G.ENDS], max(latest_record, latest_request))
      generation[G.EXPIRES] = 0
    end
  end

  -- What was filed ahead of the clock and was still in view counts in its bucket; nothing lives longer from there than
  -- it could have.
  function upkeep.step_back()
    local before = pool.now
    -- What was to expire by the clock of before is told anew.
    pool.now, pool.expires_at = pool.clock, 0
    local names = ledger.all_names()
    for _, of in ipairs(pool.dimensions) do
      local reserved = of[D.TOTAL][4]
      of[D.TOTAL] = { floor(pool.now / of[D.WINDOW]), 0, 0, reserved }
    end
    for _, name in ipairs(names) do
      upkeep.each_counter(name, function(counter, window, total)
        local bucket = floor(pool.now / window)
        rule.counter_move(counter, floor(before / window))
        rule.counter_rebase(counter, bucket)
        if total then
          local previous, current = rule.seen_from(counter, bucket)
          total[2] = total[2] + rule.room_on(total[2], current)
          total[3] = total[3] + rule.room_on(total[3], previous)
        end
      end)
      ledger.touch(name)
    end
    local latest = pool.now + RESERVE_MS_MAX
    for _, random in ipairs(redis.call('ZRANGEBYSCORE', pool.keys[2], string.format('(%.0f', latest), '+inf')) do
      local of = ledger.hold_of(random)
      ledger.give_back(random, of)
      of[R.DEADLINE] = latest
      ledger.hold(random, of)
    end
    signals.forget_accounts(nil, nil, 0)
    upkeep.cut_ids(before, latest + ID_LIFE_MS_MAX, latest)
  end

  -- The set of deadlines is gone though something is held: it is made again of what is held. Returns what has ended.
  function upkeep.read_deadlines()
    local ended = {}
    pool.open = 0
    local fields = redis.call('HGETALL', pool.keys[1])
    for index = 1, #fields, 2 do
      local field = fields[index]
      if field:sub(1, 1) == HOLD then
        local random = field:sub(2)
        local of = ledger.cache_hold(random, fields[index + 1])
        pool.open = pool.open + 1
        pool.deadlines[random] = of[R.DEADLINE]
        if of[R.DEADLINE] <= pool.now then ended[#ended + 1] = random end
      end
    end
    return ended
  end

  function upkeep.is_idle(counter, window)
    return counter[4] == 0 and rule.counter_is_spent(counter, floor(pool.now / window))
  end

  -- Forgets what was recorded on accounts longer ago than a window, and accounts of which nothing is left to know.
  function upkeep.compact_accounts()
    local by_number = {}
    for _, account in ipairs(signals.all_accounts()) do by_number[account.number] = account end
    for name, key in pairs(pool.counters_of) do
      for index = #key[K.SHARES], 1, -1 do
        local share = key[K.SHARES][index]
        local account, slices = by_number[share[1]], #share[S.SINCE]
        if account and slices > 0 then
          accounting.share_forget(share, max(0, pool.now - account.window))
          if #share[S.SINCE] < slices then signals.keep_share(name, account, slices) end
        end
      end
    end
    for _, account in pairs(by_number) do
      if accounting.head_is_idle(account.head, account.window, pool.now) then
        signals.forget_account(account, 0)
        pool.changed[account.field], pool.removed[account.field] = nil, true
        pool.accounts[account.field] = false
      end
    end
    signals.find_next_window_end()
  end

  -- Which dimensions stay: where each will stand.
  function upkeep.compact_dimensions()
    local kept, place = {}, {}
    for position, of in ipairs(pool.dimensions) do
      local is_live = of[D.SAMPLED_AT] and rule.ms_since(pool.now, of[D.SAMPLED_AT]) < SAMPLES_MAX * SAMPLE_INTERVAL_MS
      if is_live or not upkeep.is_idle(of[D.TOTAL], of[D.WINDOW]) then
        kept[#kept + 1] = of
        place[position] = #kept
      else
        pool.removed[SAMPLES .. of[D.UNIT] .. ':' .. string.format('%.0f', of[D.WINDOW])] = true
      end
    end
    return kept, place
  end

  -- Drops keys and dimensions whose counters have aged out, and what ended senders have left.
  function upkeep.compact()
    upkeep.compact_accounts()
    local kept, place = upkeep.compact_dimensions()
    local all_stay = #kept == #pool.dimensions
    for _, name in ipairs(ledger.all_names()) do
      local key, counters, models, is_used = pool.counters_of[name], {}, {}, false
      for position, counter in ipairs(key[K.COUNTERS]) do
        is_used = is_used or not upkeep.is_idle(counter, pool.dimensions[position][D.WINDOW])
        if place[position] then counters[place[position]] = counter end
      end
      for _, of in ipairs(key[K.MODELS]) do
        if not upkeep.is_idle(of[4], of[3]) then models[#models + 1] = of end
      end
      if not is_used then counters = {} end
      if not all_stay or #counters ~= #key[K.COUNTERS] or #models ~= #key[K.MODELS] then
        pool.counters_of[name] = { counters, models, key[K.SHARES] }
        ledger.touch(name)
      end
    end
    pool.dimensions = kept
    local fields = redis.call('HGETALL', pool.keys[1])
    for index = 1, #fields, 2 do
      local field = fields[index]
      if field:sub(1, 1) == BATCH and rule.ms_since(pool.now, unpack_message(fields[index + 1])[2]) > DAY_MS then
        pool.removed[field] = true
      end
    end
    -- Not all pools at once.
    pool.compact_at = pool.now + HOUR_MS + pool.born % HOUR_MS
  end

  -- Sets what is recorded to zero: of one key or of all, in one dimension or, model caps included, in all.
  function upkeep.reset(only, dimension)
    for _, name in ipairs(ledger.all_names()) do
      if not only or only == name then
        local key = pool.counters_of[name]
        for position, counter in ipairs(key[K.COUNTERS]) do
          local of_dimension = pool.dimensions[position]
          if not dimension or (of_dimension[D.UNIT] == dimension[1] and of_dimension[D.WINDOW] == dimension[2]) then
            rule.counter_take(of_dimension[D.TOTAL], counter[1], counter[2])
            rule.counter_take(of_dimension[D.TOTAL], counter[1] - 1, counter[3])
            counter[2], counter[3] = 0, 0
          end
        end
        for _, model in ipairs(dimension and {} or key[K.MODELS]) do model[4][2], model[4][3] = 0, 0 end
        ledger.touch(name)
      end
    end
    signals.forget_accounts(only, dimension, pool.now)
  end
end)
