"""Plans each engine step: continuous batching over a block pool.

A step has two parts: parts of prompts, first come first served within a token budget, and one or more decoding rounds for
every sequence with a finished prompt. When blocks run out, the youngest sequence returns its blocks and waits again; a lack
of memory fails a request only if that single sequence is larger than the pool. With `Limits.keeps_room` a sequence is admitted
only if the blocks that it is expected to take are free, beside a share for the running ones, so that fewer give theirs back.

The engine may launch a plan before it has read the tokens of the one before. A plan therefore counts unread tokens
(`Sequence.num_ahead`) as sampled; only a preemption has to wait until they are read.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from ludic.inference.local.blocks import BlockPool
from ludic.inference.local.sequence import TOKEN_BYTES, Chunk, Sequence, tokens_as_bytes
from ludic.types import ImageSpan


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one step."""

    max_sequences: int
    """Sequences running at the same time."""
    max_prefill_tokens: int
    """Prompt tokens computed in one step; longer prompts are computed in several steps."""
    max_rounds: int = 1
    """Decoding rounds per step. More than one saves host time on a GPU; a sequence that stops in between wastes the rest of
    its rounds."""
    copies_prompts: bool = True
    """True if the runner computes equal prompts of one step once and samples from the same logits."""
    keeps_room: bool = False
    """True if admission leaves blocks for the expected growth of running sequences."""
    shares_prefixes: bool = True
    """True if a sequence can continue from the blocks of another; not if its state is kept elsewhere than in blocks."""


@dataclass(slots=True)
class Plan:
    """The work of one step."""

    prefill: list[Chunk] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)
    num_rounds: int = 1
    preempted: list[Sequence] = field(default_factory=list)
    """Sequences that gave up their blocks to older ones."""
    needs_reading: bool = False
    """Blocks ran out while some tokens are unread: read them, then plan again. This plan must not run."""

    @property
    def is_plain(self) -> bool:
        """True if the device samples every token without the host."""
        return all(s.is_plain for s in self.decode) and all(chunk.sequence.is_plain for chunk in self.prefill)


_WINDOW = 256
"""Completions over which the mean length is taken, about."""
_FEW = 8
"""Completions below which half of max_tokens is expected instead."""


_KEPT_SHARE = 0.25
"""Share of the running sequences' expected growth that stays free: others end meanwhile and give their blocks back. Measured with
admission.py in research/: keeping all of it halves the sequences that run at once, and costs more time than preemptions do."""


class CompletionLengths:
    """A moving mean of the lengths of finished completions."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._mean = 0.0

    def add(self, length: int) -> None:
        self._num_seen += 1
        self._mean += max(1 / self._num_seen, 1 / _WINDOW) * (length - self._mean)

    def expected(self, sequence: Sequence) -> int:
        """Tokens of the sequence when it ends, prompt included: the mean, a little more for one that is there already."""
        usual = sequence.max_tokens / 2 if self._num_seen < _FEW else self._mean
        so_far = sequence.length - sequence.num_prompt
        return sequence.num_prompt + min(sequence.max_tokens, int(max(usual, so_far + usual / 4)) + 1)


class Scheduler:
    """Waiting and running sequences over one block pool."""

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        """Sequences by number, in order of admission."""
        self.version = 0
        self.num_preemptions = 0
        self.num_prefix_tokens = 0
        """Prompt tokens taken from shared blocks instead of computed."""
        self._lengths = CompletionLengths()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def sequences(self) -> list[Sequence]:
        return [*self.waiting, *self.running.values()]

    def plan(self) -> Plan:
        """Choose the work of the next step and allocate its blocks."""
        plan, budget = Plan(), self.limits.max_prefill_tokens
        decoding: list[Sequence] = []
        in_prompt: list[Sequence] = []
        for sequence in self.running.values():
            if not sequence.is_decoding:
                in_prompt.append(sequence)
            elif sequence.num_left > 0:
                decoding.append(sequence)
        for sequence in in_prompt:
            budget -= self._plan_chunk(sequence, budget, plan)
        if self.waiting:
            self._admit_waiting(in_prompt, plan, budget)
        if decoding:
            self._plan_decoding(decoding, plan)
        if plan.needs_reading:  # the next plan may compute the sources of copies elsewhere
            for chunk in plan.prefill:
                if chunk.source is not None:
                    self._return(chunk.sequence)
        return plan

    # --- prompts ---

    def _admit_waiting(self, in_prompt: list[Sequence], plan: Plan, budget: int) -> None:
        """Admit in order of arrival. A sequence that continues with a block that another prompt is computing waits for it in place:
        the members of a group compute their common prompt once."""
        in_progress = {self._next_block(s, s.chain, s.num_published) for s in in_prompt}
        first = {_prompt_key(c.sequence): c.sequence for c in plan.prefill if c.reaches_the_end}
        held_back: list[Sequence] = []
        room = self._room()
        while budget > 0 and self.waiting and len(self.running) + len(held_back) < self.limits.max_sequences:
            sequence = self.waiting.popleft()
            tokens, key = tokens_as_bytes(sequence.tokens), _prompt_key(sequence)
            if self.limits.copies_prompts and key in first:
                growth = self._growth(sequence, len(sequence.tokens) // self.pool.block_size)
                if growth <= room and self._admit_copy(sequence, first[key], plan):
                    room -= growth
                    continue
            # The last token must always be computed: its output predicts the next one.
            known = tokens[:-TOKEN_BYTES] if self.limits.shares_prefixes else b""
            shared, chain = self.pool.match(self.version, known, TOKEN_BYTES, sequence.adapter_number)
            following = self._next_block(sequence, chain, len(shared))
            if following is not None and following in in_progress:
                held_back.append(sequence)
                continue
            growth = self._growth(sequence, self.pool.num_with_users(shared))
            if (self.running and growth > room) or not self._admit(sequence, shared, chain):
                held_back.append(sequence)
                break
            room -= growth
            self.running[sequence.number] = sequence
            in_progress.add(following)
            budget -= self._plan_chunk(sequence, budget, plan)
            if plan.prefill[-1].reaches_the_end:
                first.setdefault(key, sequence)
        self.waiting.extendleft(reversed(held_back))

    def _room(self) -> float:
        """Blocks that are not kept for the running sequences; without a limit where admission keeps no room."""
        if not self.limits.keeps_room:
            return math.inf
        growth = sum(self._growth(sequence, len(sequence.blocks)) for sequence in self.running.values())
        return self.pool.num_available - _KEPT_SHARE * growth

    def _growth(self, sequence: Sequence, num_held: int) -> int:
        """Blocks that the sequence is expected to take in addition to those that it holds."""
        if not self.limits.keeps_room:
            return 0
        return max(self.pool.blocks_for(self._lengths.expected(sequence)) - num_held, 0)

    def _next_block(self, sequence: Sequence, chain: int, num_blocks: int) -> tuple[int, bytes] | None:
        """The key under which the first block after a known prefix will be published; all tokens where only equal prompts share."""
        if not self.limits.shares_prefixes:
            return -sequence.adapter_number, tokens_as_bytes(sequence.tokens)
        start, end = num_blocks * self.pool.block_size, (num_blocks + 1) * self.pool.block_size
        return (chain, tokens_as_bytes(sequence.tokens[start:end])) if end < len(sequence.tokens) else None

    def _admit(self, sequence: Sequence, shared: list[int], chain: int) -> bool:
        """Give a waiting sequence the blocks of its known prefix, if the rest can be allocated too."""
        self.pool.share(shared)
        rest = self.pool.take(self.pool.blocks_for(len(sequence.tokens)) - len(shared))
        if rest is None:
            self.pool.give_back(shared)
            return False
        sequence.blocks, sequence.chain = [*shared, *rest], chain
        sequence.num_published = len(shared)
        sequence.num_computed = len(shared) * self.pool.block_size
        self.num_prefix_tokens += sequence.num_computed
        return True

    def _admit_copy(self, sequence: Sequence, source: Sequence, plan: Plan) -> bool:
        """Admit a sequence whose tokens this step computes for `source`: it shares the full blocks and copies the last."""
        num_tokens = len(sequence.tokens)
        shared = source.blocks[: num_tokens // self.pool.block_size]
        own = self.pool.take(self.pool.blocks_for(num_tokens) - len(shared))
        if own is None:
            return False
        self.pool.share(shared)
        sequence.blocks, sequence.num_computed = [*shared, *own], num_tokens
        self.num_prefix_tokens += num_tokens
        self.running[sequence.number] = sequence
        plan.prefill.append(Chunk(sequence, num_tokens, 0, source))
        return True

    def _plan_chunk(self, sequence: Sequence, budget: int, plan: Plan) -> int:
        length = min(sequence.num_pending, budget)
        if length > 0:
            plan.prefill.append(Chunk(sequence, sequence.num_computed, length))
        return max(length, 0)

    def launched(self, plan: Plan) -> None:
        """Count the tokens of this plan as computed, and those that it samples as unread."""
        for chunk in plan.prefill:
            sequence = chunk.sequence
            sequence.num_computed = chunk.end
            self._publish(sequence)
            if chunk.reaches_the_end:
                sequence.is_decoding = True
                sequence.length += 1
                sequence.num_left -= 1
        num_rounds = plan.num_rounds
        for sequence in plan.decode:
            num_sampled = num_rounds if num_rounds < sequence.num_left else sequence.num_left
            sequence.num_computed += num_sampled
            sequence.length += num_sampled
            sequence.num_left -= num_sampled

    # --- decoding ---

    def _plan_decoding(self, decoding: list[Sequence], plan: Plan) -> None:
        num_rounds = plan.num_rounds = self._num_rounds(decoding, plan)
        size = self.pool.block_size
        for sequence in decoding:
            num_tokens = sequence.length + min(num_rounds, sequence.num_left) - 1
            if num_tokens > len(sequence.blocks) * size and sequence.number in self.running:
                self._make_room(sequence, num_tokens, plan)
                if plan.needs_reading:
                    return
        preempted = {victim.number for victim in plan.preempted}
        plan.decode = [sequence for sequence in decoding if sequence.number not in preempted] if preempted else decoding

    def _num_rounds(self, decoding: list[Sequence], plan: Plan) -> int:
        """Several rounds only if no prompt waits for its next part and the device can sample without the host."""
        if self.limits.max_rounds == 1 or plan.prefill or not all(sequence.is_plain for sequence in decoding):
            return 1
        return min(self.limits.max_rounds, max(sequence.num_left for sequence in decoding))

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: Plan) -> None:
        """Allocate blocks for the first `num_tokens` tokens; preempts the youngest sequences, in the end this one."""
        missing = self.pool.blocks_for(num_tokens) - len(sequence.blocks)
        while missing > 0:
            taken = self.pool.take(missing)
            if taken is not None:
                sequence.blocks.extend(taken)
                return
            if any(other.num_ahead for other in self.running.values()):
                plan.needs_reading = True
                return
            victim = self.running[max(self.running)]
            self._preempt(victim, plan)
            if victim is sequence:
                return

    def _preempt(self, victim: Sequence, plan: Plan) -> None:
        self._return(victim)
        self.num_preemptions += 1
        plan.preempted.append(victim)
        plan.prefill = [chunk for chunk in plan.prefill if chunk.sequence is not victim]
        assert all(chunk.source is not victim for chunk in plan.prefill), "copies are younger than their source"

    def _return(self, sequence: Sequence) -> None:
        """Put a running sequence back among the waiting ones, in its place by number."""
        del self.running[sequence.number]
        self.pool.give_back(sequence.blocks)
        sequence.forget_computed()
        place = next((i for i, other in enumerate(self.waiting) if other.number > sequence.number), len(self.waiting))
        self.waiting.insert(place, sequence)

    # --- common ---

    def _publish(self, sequence: Sequence) -> None:
        """Publish full blocks for sharing."""
        size = self.pool.block_size
        first, end = sequence.num_published, sequence.num_computed // size
        if first >= end:
            return
        if first == 0:
            sequence.chain = self.pool.root(self.version, sequence.adapter_number)
        data, width = tokens_as_bytes(sequence.tokens[first * size : end * size]), size * TOKEN_BYTES
        for number in range(first, end):
            key = data[(number - first) * width : (number - first + 1) * width]
            sequence.chain = self.pool.publish(sequence.blocks[number], sequence.chain, key)
        sequence.num_published = end

    def remove(self, sequence: Sequence) -> None:
        """Finished, failed or cancelled: return its blocks, which stay findable by prefix."""
        if sequence.finish_reason is not None:
            self._lengths.add(len(sequence.logprobs))
        if self.running.pop(sequence.number, None) is not None:
            # Unread tokens have no name to publish them under, and the last token may have been sampled after the end.
            sequence.drop_unread()
            sequence.num_computed = min(sequence.num_computed, len(sequence.tokens) - bool(sequence.logprobs))
            self._publish(sequence)  # the completion is part of the next turn's prompt
            self.pool.give_back(sequence.blocks)
            sequence.blocks = []
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def new_version(self, version: int) -> list[Sequence]:
        """Drop all computed keys and values after a change of weights.

        Running sequences start again as if they had just arrived, each in its place by number; they are returned.
        """
        self.version = version
        restarted = list(self.running.values())
        for sequence in restarted:
            self.pool.give_back(sequence.blocks)
            sequence.forget_computed()
        self.waiting = deque(sorted([*restarted, *self.waiting], key=lambda sequence: sequence.number))
        self.running = {}
        self.pool.forget_all()
        return restarted


def _prompt_key(sequence: Sequence) -> tuple[bytes, tuple[ImageSpan, ...], int]:
    """Equal for sequences that the same adapter sees alike: the same tokens, and the same pictures in their places."""
    return tokens_as_bytes(sequence.tokens), sequence.request.images, sequence.adapter_number
