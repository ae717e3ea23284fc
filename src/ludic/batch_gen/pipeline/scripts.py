"""What must happen at once, or not at all: the Lua scripts that run inside Redis, and the keys they touch.

A script is the only writer of these keys, so every state that anybody sees is a whole one. Redis is the only clock. Scripts
that are sent again after a lost connection do nothing twice: a push by its sequence number, the rest because an entry is
acknowledged only once.

Payloads never pass through Lua, which takes longer over making a string of one than Redis over all the rest. A push writes
them beside the script, in one transaction with it, and the script only gives them their names; a learner reads them by name.
"""

from dataclasses import dataclass
from functools import cached_property

from ludic.types import ConfigError

GROUP = "learners"
LEASE_LOST = "LEASELOST"
"""How an error of a script begins that is answered to a learner whose name is somebody else's by now."""
CHUNK = 500
"""Entries per call where there may be many: Redis serves nobody else meanwhile."""
MAX_DEAD = 1000
"""How many dead letters are kept, about; older ones go."""
MAX_DEAD_PAYLOAD = 65_536
"""A dead letter keeps its payload up to so many bytes."""


@dataclass(frozen=True)
class Keys:
    """The keys of one queue. The braces put them into one slot of a Redis cluster."""

    queue_key: str

    def __post_init__(self) -> None:
        if not self.queue_key or "{" in self.queue_key or "}" in self.queue_key:
            raise ConfigError(f"queue_key={self.queue_key!r}; it must have a letter or more, and no braces.")

    @property
    def stream(self) -> str:
        """Entries of `n` (items), `v` (oldest version of any token, or nothing) and `p` (written by push)."""
        return f"{{{self.queue_key}}}"

    @property
    def payloads(self) -> str:
        """What the names of payloads begin with."""
        return f"{self.stream}:payload"

    def payload(self, entry_id: str) -> str:
        """A group's bytes, apart from its entry: whoever reads an entry has not yet read what may be large."""
        return f"{self.payloads}:{entry_id}"

    def arriving(self, actor: str, sequence: int) -> str:
        """A group's bytes within the transaction that pushes it; after it, there are none."""
        return f"{self.stream}:arriving:{actor}:{sequence}"

    @property
    def counts(self) -> str:
        """In items: produced, trained, stale, filtered, dead."""
        return f"{self.stream}:counts"

    @property
    def actors(self) -> str:
        """Actor → sequence number of its last push."""
        return f"{self.stream}:actors"

    @property
    def beats(self) -> str:
        """Actor → when it was last heard of, and how many items it is making."""
        return f"{self.stream}:beats"

    @property
    def learner(self) -> str:
        """What actors need to know of the learner."""
        return f"{self.stream}:learner"

    @property
    def leases(self) -> str:
        """Learner's name → whose it is, and when that one was last heard of."""
        return f"{self.stream}:leases"

    @property
    def dead(self) -> str:
        """Stream of groups that cannot be trained on, each with the reason."""
        return f"{self.stream}:dead"

    @property
    def tries(self) -> str:
        """Entry → how many learners' lives have begun an update with it and not ended that update, and the last such life."""
        return f"{self.stream}:tries"

    @cached_property
    def all(self) -> list[str]:
        """In the order in which the scripts take them."""
        return [
            self.stream, self.payloads, self.counts, self.actors, self.beats, self.learner, self.leases, self.dead, self.tries,
        ]  # fmt: skip

    @property
    def types(self) -> dict[str, str]:
        """What Redis calls the type of each key, where it exists."""
        hashes = (self.counts, self.actors, self.beats, self.learner, self.leases, self.tries)
        return {self.stream: "stream", self.dead: "stream", **dict.fromkeys(hashes, "hash")}


_PRELUDE = f"""
local STREAM, PAYLOADS, COUNTS, ACTORS, BEATS, LEARNER, LEASES, DEAD, TRIES = unpack(KEYS)
local GROUP = '{GROUP}'

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function whole(number) return string.format('%.0f', number) end

-- At maxmemory Redis refuses a script's first write if that takes memory, and no later one. This write takes none (there is no
-- such key): scripts that free memory, or say that a process lives, begin with it.
local function pass_when_full() redis.call('UNLINK', PAYLOADS) end

local function payload_of(id) return PAYLOADS .. ':' .. id end

-- 0 where there is none, or something of another kind that somebody else has put there.
local function payload_size(id)
  local size = redis.pcall('STRLEN', payload_of(id))
  return type(size) == 'number' and size or 0
end

-- How many groups learners have in hand. Whoever calls first makes the learners' group, and with it the stream.
local function num_pending()
  local pending = redis.pcall('XPENDING', STREAM, GROUP)
  if not pending.err then return pending[1] end
  redis.call('XGROUP', 'CREATE', STREAM, GROUP, '0', 'MKSTREAM')
  return 0
end

local function ensure_group() num_pending() end

-- Groups that no learner has taken. Those that wait for a checkpoint only must never hold up an actor.
local function num_waiting() return math.max(0, redis.call('XLEN', STREAM) - num_pending()) end

-- An entry's number of items and oldest version ('' for none); nothing where push has not written it.
local function read_entry(fields)
  if not fields or #fields ~= 6 or fields[1] ~= 'n' or fields[3] ~= 'v' or fields[5] ~= 'p' then return nil end
  local n, v = fields[2], fields[4]
  if fields[6] ~= '1' or #n > 6 or not n:match('^[1-9]%d*$') or #v > 15 or not v:match('^%d*$') then return nil end
  return tonumber(n), v
end

local function why_unreadable(fields)
  if #fields ~= 6 or fields[1] ~= 'n' or fields[3] ~= 'v' then return 'the entry was not written by push' end
  return 'the entry was not written by push: it says ' .. fields[2]:sub(1, 20) .. ' items of version ' .. fields[4]:sub(1, 20)
    .. ', but there are 1 to 999999 items, of a version that is a whole number from 0 on'
end

-- A count that another program has overwritten begins again; the account then says how many items it misses.
local function count(name, items)
  if items <= 0 then return end
  local reply = redis.pcall('HINCRBY', COUNTS, name, whole(items))
  if type(reply) == 'table' and reply.err then redis.call('HSET', COUNTS, name, whole(items)) end
end

-- True for the one caller who ends an entry's life; all others find it gone.
local function remove(id)
  if redis.call('XACK', STREAM, GROUP, id) == 0 then return false end
  redis.call('XDEL', STREAM, id)
  redis.call('UNLINK', payload_of(id))
  redis.call('HDEL', TRIES, id)
  return true
end

-- In how many lives of learners it was being trained on when the learner died, and the last of these lives.
local function tries_of(id)
  local num, life = (redis.call('HGET', TRIES, id) or ''):match('^(%d+) (%S+)$')
  return tonumber(num) or 0, life
end

-- Items that push has not counted are counted as produced here, so that the counts add up.
local function bury(id, fields, reason)
  local size = payload_size(id)
  local payload = ''
  if size > 0 and size <= {MAX_DEAD_PAYLOAD} then payload = redis.call('GET', payload_of(id)) end
  if not remove(id) then return 0 end
  local n = read_entry(fields)
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

-- Every call of a learner begins with who it is and how it stands: ARGV 1 to 7.
local function learner_calls()
  local name, token = ARGV[1], ARGV[2]
  local holder = read_lease(name)
  if holder and holder ~= token then return redis.error_reply('{LEASE_LOST} ' .. name .. ' belongs to ' .. holder) end
  pass_when_full()
  write_lease(name, token)
  redis.call('HSET', LEARNER, 'items_per_update', ARGV[4], 'max_lag', ARGV[5],
    'waiting:' .. name, ARGV[6], 'in_hand:' .. name, ARGV[7])
  -- Ranks are not in the same step at the same moment; actors that saw the version go back and forth would each time give up
  -- what they play. The first rank is the one that publishes.
  if name == 'learner-0' then redis.call('HSET', LEARNER, 'version', ARGV[3]) end
  return nil
end
"""

PUSH = (
    _PRELUDE
    + """
-- actor, max_waiting, then per group: sequence, items, oldest version; its payload has just arrived under a name of its own.
-- Nothing is taken after the first that finds no room: it must not be overtaken, or it would count as a repetition.
pass_when_full()  -- Redis had room for the payloads; they must not be left behind without their entries
local actor, max_waiting = ARGV[1], tonumber(ARGV[2])
local waiting = num_waiting()
local last = tonumber(redis.call('HGET', ACTORS, actor)) or 0
local done, is_full = 0, false
for i = 3, #ARGV, 3 do
  local sequence = tonumber(ARGV[i])
  local arriving = STREAM .. ':arriving:' .. actor .. ':' .. ARGV[i]
  is_full = is_full or (sequence > last and waiting >= max_waiting)
  if not is_full then
    if sequence > last then
      local id = redis.call('XADD', STREAM, '*', 'n', ARGV[i + 1], 'v', ARGV[i + 2], 'p', '1')
      redis.call('RENAME', arriving, payload_of(id))
      count('produced', tonumber(ARGV[i + 1]))
      redis.call('HSET', ACTORS, actor, ARGV[i])
      last, waiting = sequence, waiting + 1
    end
    done = done + 1
  end
  redis.call('UNLINK', arriving)  -- still there if it is a repetition, or found no room
end
local in_progress = (redis.call('HGET', BEATS, actor) or '0 0'):match('^%d+ (%d+)$') or '0'
redis.call('HSET', BEATS, actor, whole(now_ms()) .. ' ' .. in_progress)
return done
"""
)

TAKE = (
    _PRELUDE
    + """
-- 8 items wanted, 9 bytes a payload may have, 10 bytes after which the answer ends, 11 entries to look at, 12 learners that may
-- die of an entry, 13 where to go on among our own unacknowledged entries ('' for new ones only), 14… which of those we hold.
local lost = learner_calls()
if lost then return lost end
local name, version, max_lag = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[5])
local wanted, max_bytes, enough_bytes, may_look = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])
local max_tries, cursor = tonumber(ARGV[12]), ARGV[13]
local held = {}
for i = 14, #ARGV do held[ARGV[i]] = true end
ensure_group()

local groups, stale, items, bytes, dead, looked = {}, {}, 0, 0, {}, 0

local function set_aside(id, fields, reason)
  dead[#dead + 1] = reason
  dead[#dead + 1] = bury(id, fields, reason)
end

local function look_at(id, fields)
  looked = looked + 1
  if not fields then  -- somebody deleted it; there is nothing to acknowledge but its name
    remove(id)
    return
  end
  local n, v = read_entry(fields)
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
  -- A version of the future is of a life that ended after the checkpoint we began with: another policy than ours. One ahead
  -- is our own next: weights are published before the learner says so.
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
"""
)

SETTLE = (
    _PRELUDE
    + """
-- Then per entry: id, items trained, stale, filtered.
local lost = learner_calls()
if lost then return lost end
ensure_group()
local settled = 0
for i = 8, #ARGV, 4 do
  if remove(ARGV[i]) then
    count('trained', tonumber(ARGV[i + 1]))
    count('stale', tonumber(ARGV[i + 2]))
    count('filtered', tonumber(ARGV[i + 3]))
    settled = settled + 1
  end
end
return settled
"""
)

BURY = (
    _PRELUDE
    + """
-- Then per entry: id, reason.
local lost = learner_calls()
if lost then return lost end
ensure_group()
local dead = 0
for i = 8, #ARGV, 2 do
  local entries = redis.call('XRANGE', STREAM, ARGV[i], ARGV[i])
  if entries[1] then dead = dead + bury(ARGV[i], entries[1][2], ARGV[i + 1]) end
end
return dead
"""
)

ANNOUNCE = (
    _PRELUDE
    + """
local lost = learner_calls()
if lost then return lost end
return 1
"""
)

HAND_OUT = (
    _PRELUDE
    + """
-- 8 how many entries follow whose update is over, then these, then the entries that an update begins with now. A life counts
-- once for an entry, however often this is sent.
local lost = learner_calls()
if lost then return lost end
local token, num_over = ARGV[2], tonumber(ARGV[8])
for i = 9, 8 + num_over do redis.call('HDEL', TRIES, ARGV[i]) end
for i = 9 + num_over, #ARGV do
  local tries, life = tries_of(ARGV[i])
  if life ~= token then redis.call('HSET', TRIES, ARGV[i], whole(tries + 1) .. ' ' .. token) end
end
return 1
"""
)

ACQUIRE = (
    _PRELUDE
    + """
-- name, token, how long a lease holds, the lease as the caller saw it so long ago. Answers whose it is, for how long still
-- where that is not the caller, and the lease itself. One that has not changed since has not been renewed, whatever Redis's
-- clock says: that may have been set back.
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
return {token, '0', ''}
"""
)

RELEASE = (
    _PRELUDE
    + """
local name, token = ARGV[1], ARGV[2]
if read_lease(name) ~= token then return 0 end
pass_when_full()
redis.call('HSET', LEARNER, 'waiting:' .. name, '0')
return redis.call('HDEL', LEASES, name)
"""
)

RECLAIM = (
    _PRELUDE
    + """
-- 8 how long a lease holds, 9 number of learners, 10 entries at most. Entries of names that are nobody's in this world go to
-- the caller. A rank of this world is left alone: it comes back under its own name, and knows what it has trained on.
local lost = learner_calls()
if lost then return lost end
ensure_group()
local name, lease_ms, num_learners, left = ARGV[1], tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])

-- A lease of the future was written before the clock was set back; a learner that lives has renewed it by now.
local function is_gone(other)
  local rank = tonumber(other:match('^learner%-(%d+)$'))
  if rank and rank < num_learners then return false end
  local _, time = read_lease(other)
  return not time or math.abs(now_ms() - time) >= lease_ms
end

local moved = 0
for _, row in ipairs(redis.call('XINFO', 'CONSUMERS', STREAM, GROUP)) do
  local facts = {}
  for i = 1, #row, 2 do facts[row[i]] = row[i + 1] end
  local other = facts['name']
  if other ~= name and left > 0 and is_gone(other) then
    local pending = redis.call('XPENDING', STREAM, GROUP, '-', '+', left, other)
    for _, entry in ipairs(pending) do
      redis.call('XCLAIM', STREAM, GROUP, name, '0', entry[1], 'JUSTID')
    end
    -- Whoever had it learns from its next call that it is not its own any more.
    redis.call('HSET', LEASES, other, 'reclaimed 0')
    redis.call('HDEL', LEARNER, 'waiting:' .. other, 'in_hand:' .. other)
    moved, left = moved + #pending, left - #pending
    if #redis.call('XPENDING', STREAM, GROUP, '-', '+', 1, other) == 0 then
      redis.call('XGROUP', 'DELCONSUMER', STREAM, GROUP, other)
    end
  end
end
return moved
"""
)

_LOOK_AROUND = """
-- Actors heard of lately, and the items they are making; those of long ago are forgotten. A time of the future was written
-- before the clock was set back: an actor that lives overwrites it within a second.
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

-- What should be in the queue.
local function accounted()
  return counted('produced') - counted('trained') - counted('stale') - counted('filtered') - counted('dead')
end
"""

BEAT_ACTOR = (
    _PRELUDE
    + _LOOK_AROUND
    + """
-- actor, items it is making, for how long a beat counts, after how long an actor is forgotten, how long a lease holds
pass_when_full()
redis.call('HSET', BEATS, ARGV[1], whole(now_ms()) .. ' ' .. ARGV[2])
local num_actors, in_progress = living_actors(tonumber(ARGV[3]), tonumber(ARGV[4]))
local lease_ms = tonumber(ARGV[5])
local learner = redis.call('HGETALL', LEARNER)
local facts, is_waiting, in_hand, num_learners = {}, 0, 0, 0
for i = 1, #learner, 2 do
  facts[learner[i]] = learner[i + 1]
  local what, name = learner[i]:match('^(%a+_?%a*):(.*)$')
  if what == 'waiting' and learner[i + 1] == '1' then is_waiting = 1 end
  if what == 'in_hand' then
    in_hand = in_hand + (tonumber(learner[i + 1]) or 0)
    local _, time = read_lease(name)
    if time and math.abs(now_ms() - time) < lease_ms then num_learners = num_learners + 1 end
  end
end
local in_queue = accounted() - (tonumber(facts['missing']) or 0)
return {facts['version'] or '', facts['items_per_update'] or '', facts['max_lag'] or '', is_waiting,
  math.max(0, in_queue - in_hand), in_progress, num_actors, num_waiting(), num_learners}
"""
)

LEAVE = (
    _PRELUDE
    + """
redis.call('HDEL', BEATS, ARGV[1])
redis.call('HDEL', ACTORS, ARGV[1])
return 1
"""
)

CLEAR = (
    _PRELUDE
    + """
local from = '-'
while true do
  local entries = redis.pcall('XRANGE', STREAM, from, '+', 'COUNT', '500')
  if entries.err or #entries == 0 then break end
  for _, entry in ipairs(entries) do redis.call('UNLINK', payload_of(entry[1])) end
  from = '(' .. entries[#entries][1]
end
return redis.call('UNLINK', unpack(KEYS))
"""
)

CENSUS = (
    _PRELUDE
    + _LOOK_AROUND
    + """
-- for how long a beat counts. What is in the queue is summed from its entries, not worked out from the counts.
pass_when_full()
ensure_group()
local last = '0-0'
for _, row in ipairs(redis.call('XINFO', 'GROUPS', STREAM)) do
  local facts = {}
  for i = 1, #row, 2 do facts[row[i]] = row[i + 1] end
  if facts['name'] == GROUP then last = facts['last-delivered-id'] end
end

local function sum(from, to)
  local groups, items, foreign, first = 0, 0, 0, ''
  while true do
    local entries = redis.call('XRANGE', STREAM, from, to, 'COUNT', '500')
    if #entries == 0 then return groups, items, foreign, first end
    for _, entry in ipairs(entries) do
      local n = read_entry(entry[2])
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
-- Actors must not wait for items that somebody has deleted.
local missing = whole(accounted() - taken_items - waiting_items)
if (redis.call('HGET', LEARNER, 'missing') or '0') ~= missing then redis.call('HSET', LEARNER, 'missing', missing) end
return {counted('produced'), counted('trained'), counted('stale'), counted('filtered'), counted('dead'),
  taken_groups, taken_items, waiting_groups, waiting_items, taken_foreign + waiting_foreign, age_ms,
  num_actors, in_progress, redis.call('XLEN', DEAD), redis.call('HGET', LEARNER, 'version') or ''}
"""
)
