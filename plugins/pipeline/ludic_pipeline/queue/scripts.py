"""The atomic operations of the queue: Lua scripts that run inside Redis, and the keys they use.

Only these scripts write the keys, so readers always see a consistent state. Redis is the only clock. The scripts are idempotent
when repeated after a lost connection: a push by its sequence number, the others because an entry is acknowledged only once.

Payloads never pass through Lua, which needs longer to copy one into a string than Redis needs for everything else. A push writes
the payloads in the same transaction as the script, which renames them; a learner reads them by name.
"""

from ludic.types import ConfigError

GROUP = "learners"
LEASE_LOST = "LEASELOST"
"""Prefix of the error a script returns when the learner's lease was taken over."""
CHUNK = 500
"""Maximum number of entries per call; Redis serves no other client during a script."""
MAX_DEAD = 1000
"""Approximate number of dead letters kept."""
MAX_DEAD_PAYLOAD = 65_536
"""A dead letter keeps a payload of at most this many bytes."""


_HASHES = ("counts", "actors", "beats", "learner", "leases", "tries", "scorers", "pushed")


class Keys:
    """The keys of one queue. The braces put them into one slot of a Redis cluster."""

    def __init__(self, queue_key: str) -> None:
        if not queue_key or "{" in queue_key or "}" in queue_key:
            raise ConfigError(f"queue_key={queue_key!r}; it must not be empty or contain braces.")
        self.queue_key = queue_key
        self.stream = f"{{{queue_key}}}"
        """Entries of `n` (items), `v` (oldest version of any token, or empty) and `p` (written by push)."""
        self.payloads = f"{self.stream}:payload"
        """Prefix of the payload keys."""
        self.dead = f"{self.stream}:dead"
        """Stream of groups that cannot be trained on, with reasons."""
        hashes = [f"{self.stream}:{name}" for name in _HASHES]
        counts, actors, beats, learner, leases, tries, scorers, pushed = hashes
        self.all = [
            self.stream,
            self.payloads,
            counts,
            actors,
            beats,
            learner,
            leases,
            self.dead,
            tries,
            scorers,
            pushed,
        ]
        """In the order of the scripts' KEYS."""
        self.types = {self.stream: "stream", self.dead: "stream", **dict.fromkeys(hashes, "hash")}
        """Redis type of each key."""

    def payload(self, entry_id: str) -> str:
        """A group's bytes, separate from its entry, so that reading an entry does not load a large payload."""
        return f"{self.payloads}:{entry_id}"

    def arriving(self, actor: str, sequence: int) -> str:
        """A group's bytes inside the transaction that pushes it."""
        return f"{self.stream}:arriving:{actor}:{sequence}"


_PRELUDE = f"""
-- Hashes: COUNTS in items (produced, trained, stale, filtered, dead), ACTORS (actor -> sequence number of its last push), BEATS
-- (actor -> time of its last heartbeat, and its items in progress), LEARNER (its state, for actors), LEASES (learner's name ->
-- token of its holder, and time of the last heartbeat), TRIES (entry -> number of learner processes that started an update with it
-- and did not end it, and the last of them), SCORERS (actor -> what its scorers report, such as a judge's cost; also of actors
-- that have ended), PUSHED (entry -> its items, as push counted them).
local STREAM, PAYLOADS, COUNTS, ACTORS, BEATS, LEARNER, LEASES, DEAD, TRIES, SCORERS, PUSHED = unpack(KEYS)
local GROUP = '{GROUP}'

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function whole(number) return string.format('%.0f', number) end

-- A reply of names and values, by name.
local function by_name(reply)
  local found = {{}}
  for i = 1, #reply, 2 do found[reply[i]] = reply[i + 1] end
  return found
end

-- At maxmemory Redis refuses only a script's first write, if that needs memory. This write needs none (the key does not exist):
-- scripts that free memory or send a heartbeat start with it.
local function pass_when_full() redis.call('UNLINK', PAYLOADS) end

local function payload_of(id) return PAYLOADS .. ':' .. id end

-- 0 if there is no payload, or another program has put a value of another type there.
local function payload_size(id)
  local size = redis.pcall('STRLEN', payload_of(id))
  return type(size) == 'number' and size or 0
end

-- Number of groups taken by learners. The first call creates the consumer group and the stream.
local function num_pending()
  local pending = redis.pcall('XPENDING', STREAM, GROUP)
  if not pending.err then return pending[1] end
  redis.call('XGROUP', 'CREATE', STREAM, GROUP, '0', 'MKSTREAM')
  return 0
end

local function ensure_group() num_pending() end

-- Groups that no learner has taken. Groups that only wait for a checkpoint must never block an actor.
local function num_waiting() return math.max(0, redis.call('XLEN', STREAM) - num_pending()) end

-- An entry's number of items and oldest version ('' for none); nil if push did not write it and count its items.
local function read_entry(id, fields)
  if not fields or #fields ~= 6 or fields[1] ~= 'n' or fields[3] ~= 'v' or fields[5] ~= 'p' then return nil end
  local n, v = fields[2], fields[4]
  if fields[6] ~= '1' or #n > 6 or not n:match('^[1-9]%d*$') or #v > 15 or not v:match('^%d*$') then return nil end
  if redis.pcall('HGET', PUSHED, id) ~= n then return nil end
  return tonumber(n), v
end

local function why_unreadable(fields)
  if #fields ~= 6 or fields[1] ~= 'n' or fields[3] ~= 'v' then return 'the entry was not written by push' end
  return 'the entry was not written by push: it says ' .. fields[2]:sub(1, 20) .. ' items of version ' .. fields[4]:sub(1, 20)
    .. ', but there are 1 to 999999 items, of a version that is a whole number from 0 on, and push has noted their number'
end

-- A count that another program has overwritten restarts here; the balance then shows the missing items.
local function count(name, items)
  if items <= 0 then return end
  local reply = redis.pcall('HINCRBY', COUNTS, name, whole(items))
  if type(reply) == 'table' and reply.err then redis.call('HSET', COUNTS, name, whole(items)) end
end

-- True for the one caller that removes the entry, false for all others.
local function remove(id)
  if redis.call('XACK', STREAM, GROUP, id) == 0 then return false end
  redis.call('XDEL', STREAM, id)
  redis.call('UNLINK', payload_of(id))
  redis.call('HDEL', TRIES, id)
  redis.pcall('HDEL', PUSHED, id)
  return true
end

-- Number of learner processes that died while training on the entry, and the last of them.
local function tries_of(id)
  local num, life = (redis.call('HGET', TRIES, id) or ''):match('^(%d+) (%S+)$')
  return tonumber(num) or 0, life
end

-- Items of foreign entries are counted as produced here, so that the counts add up.
local function dead_letter(id, fields, reason)
  local size = payload_size(id)
  local payload = ''
  if size > 0 and size <= {MAX_DEAD_PAYLOAD} then payload = redis.call('GET', payload_of(id)) end
  local n = read_entry(id, fields)
  if not remove(id) then return 0 end
  if not n then
    n = 1
    count('produced', n)
  end
  count('dead', n)
  redis.call('XADD', DEAD, 'MAXLEN', '~', {MAX_DEAD}, '*',
    'reason', reason, 'id', id, 'items', whole(n), 'bytes', whole(size), 'payload', payload)
  return n
end

local function read_lease(name)
  local token, time = (redis.call('HGET', LEASES, name) or ''):match('^(%S+) (%d+)$')
  return token, tonumber(time)
end

local function write_lease(name, token) redis.call('HSET', LEASES, name, token .. ' ' .. whole(now_ms())) end

-- Every call of a learner starts with its identity and state: ARGV 1 to 8.
local function learner_calls()
  local name, token = ARGV[1], ARGV[2]
  local holder = read_lease(name)
  if holder and holder ~= token then return redis.error_reply('{LEASE_LOST} ' .. name .. ' belongs to ' .. holder) end
  pass_when_full()
  write_lease(name, token)
  -- A learner calls from two threads and repeats lost calls, so a state may arrive after a newer one of the same process.
  local sender, latest = (redis.call('HGET', LEARNER, 'status:' .. name) or ''):match('^(%S+) (%d+)$')
  if sender == token and tonumber(latest) > tonumber(ARGV[8]) then return nil end
  redis.call('HSET', LEARNER, 'items_per_update', ARGV[4], 'max_lag', ARGV[5],
    'waiting:' .. name, ARGV[6], 'in_hand:' .. name, ARGV[7], 'status:' .. name, token .. ' ' .. ARGV[8])
  -- Only the first rank, which publishes, sets the version: ranks are not in the same step at the same moment, and actors cancel
  -- their groups whenever the version goes back.
  if name == 'learner-0' then redis.call('HSET', LEARNER, 'version', ARGV[3]) end
  return nil
end
"""


def _script(body: str) -> str:
    return _PRELUDE + body


def _learner_script(body: str) -> str:
    """A script that first checks the learner's lease and stores its state: ARGV 1 to 8 (`LearnerStatus.arguments`)."""
    return _PRELUDE + "local lost = learner_calls()\nif lost then return lost end\n" + body


PUSH = _script("""
-- actor, max_waiting, sequence, items, oldest version; the payload has just arrived under a temporary key. Returns 0 if the
-- queue is full, else 1, also after a repetition.
pass_when_full()  -- Redis had room for the payload; it must not stay without its entry
local actor, sequence = ARGV[1], tonumber(ARGV[3])
local arriving = STREAM .. ':arriving:' .. actor .. ':' .. ARGV[3]
local is_new = sequence > (tonumber(redis.call('HGET', ACTORS, actor)) or 0)
local is_full = is_new and num_waiting() >= tonumber(ARGV[2])
if is_new and not is_full then
  local id = redis.call('XADD', STREAM, '*', 'n', ARGV[4], 'v', ARGV[5], 'p', '1')
  redis.call('RENAME', arriving, payload_of(id))
  redis.call('HSET', PUSHED, id, ARGV[4])
  count('produced', tonumber(ARGV[4]))
  redis.call('HSET', ACTORS, actor, ARGV[3])
end
redis.call('UNLINK', arriving)  -- still there after a repetition, or without room
local in_progress = (redis.call('HGET', BEATS, actor) or '0 0'):match('^%d+ (%d+)$') or '0'
redis.call('HSET', BEATS, actor, whole(now_ms()) .. ' ' .. in_progress)
return is_full and 0 or 1
""")

TAKE = _learner_script("""
-- 9 items wanted, 10 max bytes of a payload, 11 max bytes of the answer, 12 max entries to read, 13 max failed tries of an entry,
-- 14 cursor in the learner's own unacknowledged entries ('' for new ones only), 15… the entries that it holds.
local name, version, max_lag = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[5])
local wanted, max_bytes, enough_bytes, may_look = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])
local max_tries, cursor = tonumber(ARGV[13]), ARGV[14]
local held = {}
for i = 15, #ARGV do held[ARGV[i]] = true end
ensure_group()

local groups, stale, items, bytes, dead, looked = {}, {}, 0, 0, {}, 0

local function set_aside(id, fields, reason)
  dead[#dead + 1] = reason
  dead_letter(id, fields, reason)
end

local function look_at(id, fields)
  looked = looked + 1
  if not fields then  -- another program deleted the entry; only its id is left to acknowledge
    remove(id)
    return
  end
  local n, v = read_entry(id, fields)
  if not n then
    return set_aside(id, fields, why_unreadable(fields))
  end
  local size = payload_size(id)
  if size == 0 then
    return set_aside(id, fields, 'the payload is missing; if Redis evicts keys, set its maxmemory-policy to noeviction')
  end
  if size > max_bytes then
    return set_aside(id, fields, 'the payload has ' .. whole(size) .. ' bytes, the limit is ' .. whole(max_bytes))
  end
  local tries, life = tries_of(id)
  if tries >= max_tries then
    local times = whole(tries) .. ' times (the last was ' .. life .. ')'
    return set_aside(id, fields, 'it was being trained on when a learner died, ' .. times)
  end
  local lag = v ~= '' and version and version - tonumber(v)
  -- A future version comes from a run that went on after the checkpoint we resumed from: another policy than ours. One version
  -- ahead is our own: weights are published before the learner announces the version.
  if lag and max_lag and (lag > max_lag or -lag > max_lag + 1) then
    if remove(id) then
      count('stale', n)
      stale[#stale + 1] = whole(lag)
      stale[#stale + 1] = whole(n)
    end
    return
  end
  items, bytes = items + n, bytes + size
  groups[#groups + 1] = id
  groups[#groups + 1] = whole(n)
  groups[#groups + 1] = v
  groups[#groups + 1] = whole(tries)
end

local function may_go_on() return items < wanted and bytes < enough_bytes and looked < may_look end

while cursor ~= '' and may_go_on() do
  local reply = redis.call('XREADGROUP', 'GROUP', GROUP, name, 'COUNT', '32', 'STREAMS', STREAM, cursor)
  local entries = reply and reply[1][2] or {}
  if #entries == 0 then cursor = '' end
  for _, entry in ipairs(entries) do
    if not may_go_on() then break end
    cursor = entry[1]
    if not held[entry[1]] then look_at(entry[1], entry[2]) end
  end
end

local is_empty = 0
while cursor == '' and may_go_on() do
  local reply = redis.call('XREADGROUP', 'GROUP', GROUP, name, 'COUNT', '1', 'STREAMS', STREAM, '>')
  if not reply then
    is_empty = 1
    break
  end
  local entry = reply[1][2][1]
  look_at(entry[1], entry[2])
end
return {groups, cursor, is_empty, stale, dead}
""")

SETTLE = _learner_script("""
-- Then per entry: id, items trained, stale, filtered.
ensure_group()
local settled = 0
for i = 9, #ARGV, 4 do
  if remove(ARGV[i]) then
    count('trained', tonumber(ARGV[i + 1]))
    count('stale', tonumber(ARGV[i + 2]))
    count('filtered', tonumber(ARGV[i + 3]))
    settled = settled + 1
  end
end
return settled
""")

DEAD_LETTER = _learner_script("""
-- Then per entry: id, reason.
ensure_group()
local dead = 0
for i = 9, #ARGV, 2 do
  local entries = redis.call('XRANGE', STREAM, ARGV[i], ARGV[i])
  if entries[1] then dead = dead + dead_letter(ARGV[i], entries[1][2], ARGV[i + 1]) end
end
return dead
""")

ANNOUNCE = _learner_script("""
return 1
""")

HAND_OUT = _learner_script("""
-- 9 number of entries whose update is over, then these entries, then the entries whose update starts now. A learner process
-- counts once per entry, also if the call is repeated.
local token, num_over = ARGV[2], tonumber(ARGV[9])
for i = 10, 9 + num_over do redis.call('HDEL', TRIES, ARGV[i]) end
for i = 10 + num_over, #ARGV do
  local tries, life = tries_of(ARGV[i])
  if life ~= token then redis.call('HSET', TRIES, ARGV[i], whole(tries + 1) .. ' ' .. token) end
end
return 1
""")

ACQUIRE = _script("""
-- name, token, lease duration, the lease record as the caller read it one duration ago. Returns the holder and, if that is
-- another learner, the time left and the record. An unchanged record was not renewed, whatever Redis's clock says: the clock may
-- have been set back.
local name, token, lease_ms, seen = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local holder, time = read_lease(name)
local lease = redis.call('HGET', LEASES, name) or ''
if holder and holder ~= token and lease ~= seen then
  local left = math.min(time + lease_ms - now_ms(), lease_ms)
  if left > 0 then return {holder, whole(left), lease} end
end
pass_when_full()
ensure_group()
write_lease(name, token)
redis.call('HSET', LEARNER, 'waiting:' .. name, '0', 'in_hand:' .. name, '0')
redis.call('HDEL', LEARNER, 'finished')
return {token, '0', ''}
""")

RELEASE = _script("""
local name, token = ARGV[1], ARGV[2]
if read_lease(name) ~= token then return 0 end
pass_when_full()
redis.call('HSET', LEARNER, 'waiting:' .. name, '0')
return redis.call('HDEL', LEASES, name)
""")

FINISH = _script("""
-- number of updates, lease duration. Until a learner starts again. Does nothing while a learner holds a lease, and returns the time
-- until the last one expires unless it is renewed. A lease in the future was written before the clock was set back.
local lease_ms, left = tonumber(ARGV[2]), 0
for _, name in ipairs(redis.call('HKEYS', LEASES)) do
  local _, time = read_lease(name)
  local age = now_ms() - (time or 0)
  if math.abs(age) < lease_ms then left = math.max(left, lease_ms - age) end
end
if left > 0 then return left end
pass_when_full()
redis.call('HSET', LEARNER, 'finished', ARGV[1])
return 0
""")

REOPEN = _script("""
return redis.call('HDEL', LEARNER, 'finished')
""")

RECLAIM = _learner_script("""
-- 9 lease duration, 10 number of learners, 11 max entries. Moves entries of dead learners whose rank does not exist in this world
-- size to the caller. Ranks of this world keep theirs: they come back under their name and know what they have trained on.
ensure_group()
local name, lease_ms, num_learners, left = ARGV[1], tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])

-- A lease in the future was written before the clock was set back; a live learner has renewed it by now.
local function is_gone(other)
  local rank = tonumber(other:match('^learner%-(%d+)$'))
  if rank and rank < num_learners then return false end
  local _, time = read_lease(other)
  return not time or math.abs(now_ms() - time) >= lease_ms
end

local moved = 0
for _, row in ipairs(redis.call('XINFO', 'CONSUMERS', STREAM, GROUP)) do
  local other = by_name(row)['name']
  if other ~= name and left > 0 and is_gone(other) then
    local pending = redis.call('XPENDING', STREAM, GROUP, '-', '+', left, other)
    for _, entry in ipairs(pending) do
      redis.call('XCLAIM', STREAM, GROUP, name, '0', entry[1], 'JUSTID')
    end
    -- If the old holder calls again, it gets LEASELOST.
    redis.call('HSET', LEASES, other, 'reclaimed 0')
    redis.call('HDEL', LEARNER, 'waiting:' .. other, 'in_hand:' .. other, 'status:' .. other)
    moved, left = moved + #pending, left - #pending
    if #redis.call('XPENDING', STREAM, GROUP, '-', '+', 1, other) == 0 then
      redis.call('XGROUP', 'DELCONSUMER', STREAM, GROUP, other)
    end
  end
end
return moved
""")

_LOOK_AROUND = """
-- Number of live actors and their items in progress; removes actors whose heartbeat is older than forget_ms. A time in the future
-- was written before the clock was set back: a live actor overwrites it within a second.
local function living_actors(living_ms, forget_ms)
  local now, num, in_progress = now_ms(), 0, 0
  local beats = redis.call('HGETALL', BEATS)
  for i = 1, #beats, 2 do
    local time, making = beats[i + 1]:match('^(%d+) (%d+)$')
    local age = now - (tonumber(time) or 0)
    if math.abs(age) <= living_ms then
      num, in_progress = num + 1, in_progress + tonumber(making)
    elseif forget_ms and age > forget_ms then
      redis.call('HDEL', BEATS, beats[i])
      redis.call('HDEL', ACTORS, beats[i])
    end
  end
  return num, in_progress
end

local function counted(name) return tonumber(redis.call('HGET', COUNTS, name)) or 0 end

-- Items that should be in the queue.
local function accounted()
  return counted('produced') - counted('trained') - counted('stale') - counted('filtered') - counted('dead')
end
"""

BEAT_ACTOR = _script(
    _LOOK_AROUND
    + """
-- actor, its items in progress, heartbeat duration, time after which an actor is removed, lease duration, report of its scorers
pass_when_full()
if ARGV[6] ~= '' then redis.call('HSET', SCORERS, ARGV[1], ARGV[6]) end
redis.call('HSET', BEATS, ARGV[1], whole(now_ms()) .. ' ' .. ARGV[2])
local num_actors, in_progress = living_actors(tonumber(ARGV[3]), tonumber(ARGV[4]))
local lease_ms = tonumber(ARGV[5])
local learner = by_name(redis.call('HGETALL', LEARNER))
local is_waiting, in_hand, num_learners = 0, 0, 0
for field, value in pairs(learner) do
  local what, name = field:match('^(%a+_?%a*):(.*)$')
  if what == 'waiting' and value == '1' then is_waiting = 1 end
  if what == 'in_hand' then
    in_hand = in_hand + (tonumber(value) or 0)
    local _, time = read_lease(name)
    if time and math.abs(now_ms() - time) < lease_ms then num_learners = num_learners + 1 end
  end
end
local in_queue = accounted() - (tonumber(learner['missing']) or 0)
return {learner['version'] or '', learner['items_per_update'] or '', learner['max_lag'] or '', is_waiting,
  math.max(0, in_queue - in_hand), in_progress, num_actors, num_waiting(), num_learners, learner['finished'] or ''}
"""
)

CLEAR = _script("""
local from = '-'
while true do
  local entries = redis.pcall('XRANGE', STREAM, from, '+', 'COUNT', '500')
  if entries.err or #entries == 0 then break end
  for _, entry in ipairs(entries) do redis.call('UNLINK', payload_of(entry[1])) end
  from = '(' .. entries[#entries][1]
end
return redis.call('UNLINK', unpack(KEYS))
""")

COUNT_ITEMS = _script(
    _LOOK_AROUND
    + """
-- heartbeat duration. Sums the entries in the queue instead of deriving them from the counts.
pass_when_full()
ensure_group()
local last = '0-0'
for _, row in ipairs(redis.call('XINFO', 'GROUPS', STREAM)) do
  local facts = by_name(row)
  if facts['name'] == GROUP then last = facts['last-delivered-id'] end
end

local function sum(from, to)
  local groups, items, foreign, first = 0, 0, 0, ''
  while true do
    local entries = redis.call('XRANGE', STREAM, from, to, 'COUNT', '500')
    if #entries == 0 then return groups, items, foreign, first end
    for _, entry in ipairs(entries) do
      local n = read_entry(entry[1], entry[2])
      if first == '' then first = entry[1] end
      if n then groups, items = groups + 1, items + n else foreign = foreign + 1 end
    end
    from = '(' .. entries[#entries][1]
  end
end

local taken_groups, taken_items, taken_foreign = sum('-', last)
local waiting_groups, waiting_items, waiting_foreign, oldest = sum('(' .. last, '+')
local age_ms = 0
if oldest ~= '' then age_ms = math.max(0, now_ms() - tonumber(oldest:match('^%d+'))) end
local num_actors, in_progress = living_actors(tonumber(ARGV[1]), nil)
-- Actors must not wait for items that another program has deleted.
local missing = whole(accounted() - taken_items - waiting_items)
if (redis.call('HGET', LEARNER, 'missing') or '0') ~= missing then redis.call('HSET', LEARNER, 'missing', missing) end
return {counted('produced'), counted('trained'), counted('stale'), counted('filtered'), counted('dead'),
  taken_groups, taken_items, waiting_groups, waiting_items, taken_foreign + waiting_foreign, age_ms,
  num_actors, in_progress, redis.call('XLEN', DEAD), redis.call('HGET', LEARNER, 'version') or '', redis.call('HVALS', SCORERS)}
"""
)
