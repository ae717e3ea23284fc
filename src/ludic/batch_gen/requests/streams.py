"""Task streams: samples that a function generates, usually without end, and a curriculum that makes them harder.

    def stream(seed, difficulty=1):               # sums.py; `--data sums.py:stream`
        rng = random.Random(seed)
        while True:
            a, b = (rng.randrange(10**difficulty) for _ in range(2))
            yield {"question": f"{a}+{b}=", "answer": str(a + b)}

The position is checkpointed. A generator cannot be copied, so a resumed run calls the function again and skips what was drawn; an
iterator that has `state_dict` and `load_state_dict` is restored by them instead.
"""

import inspect
import json
import random
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from ludic import registry
from ludic.batch_gen.requests.dataset import RequestBuilder
from ludic.batch_gen.requests.samples import Sample, read_samples
from ludic.seeds import BatchSeeds
from ludic.types import (
    ConfigError,
    Failure,
    LudicError,
    RequestsExhausted,
    Rollout,
    RolloutRequest,
    Stateful,
    by_session,
    derive_seed,
)

StreamFunction: TypeAlias = Callable[..., Iterator[Sample]]
"""Called with `seed`, and with `difficulty` where it takes one."""


def is_stream(place: str | Path | None) -> bool:
    """True if --data names a function, `file.py:name` or `module:name`, and no file."""
    return place is not None and bool(re.fullmatch(r"(?!hub:)(?:.*\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*", str(place)))


def load_stream(place: str | Path, flag: str = "--data") -> StreamFunction:
    """The function that `place` names."""
    found: StreamFunction = registry.load_own(str(place), f"function for {flag}")
    return found


class SampleStream:
    """The samples of a function, with a position that is checkpointed."""

    def __init__(self, function: StreamFunction, *, seed: int, difficulty: int | None = None) -> None:
        """Without `difficulty` the function's own default counts."""
        self._function = function
        self._arguments: dict[str, Any] = {"seed": seed}
        if difficulty is not None:
            self._arguments["difficulty"] = difficulty
        self.name = getattr(function, "__qualname__", type(function).__name__)
        self.num_drawn = 0
        self._last_crc = 0
        """State before the last sample, so that a resumed run draws the same again."""
        self._check_signature()
        self._samples = self._started()

    def next_sample(self) -> Sample:
        """RequestsExhausted after the last one, if there is a last one."""
        try:
            sample = next(self._samples)
        except StopIteration:
            raise RequestsExhausted(f"The stream {self.name} ended after {self.num_drawn} samples.") from None
        except Exception as error:
            raise self._failed(error) from error
        if not isinstance(sample, dict):
            raise ConfigError(
                f"The stream {self.name} yields {sample!r:.80}; a sample is a dict, such as {{'question': …}}."
            )
        self.num_drawn += 1
        self._last_crc = self._crc(sample)
        return sample

    def state_dict(self) -> dict[str, Any]:
        own = {"own": self._samples.state_dict()} if isinstance(self._samples, Stateful) else {}
        return {"num_drawn": self.num_drawn, "last_crc": self._last_crc, **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "own" in state and isinstance(self._samples, Stateful):
            self._samples.load_state_dict(state["own"])
            self.num_drawn, self._last_crc = state["num_drawn"], state["last_crc"]
            return
        if state["num_drawn"] < self.num_drawn:
            self._samples, self.num_drawn, self._last_crc = self._started(), 0, 0
        try:
            while self.num_drawn < state["num_drawn"]:
                self.next_sample()
        except RequestsExhausted:
            self._last_crc = -1
        if self._last_crc != state["last_crc"]:
            raise ConfigError(
                f"The stream {self.name} does not yield what it yielded before: sample {state['num_drawn']} is another one. A "
                "resumed run needs the same function, and one that takes all its random numbers from `seed`."
            )

    def _check_signature(self) -> None:
        try:
            inspect.signature(self._function).bind(**self._arguments)
        except TypeError as error:
            given = ", ".join(f"{name}={value}" for name, value in self._arguments.items())
            advice = "It takes `seed`, and yields samples."
            if "difficulty" in self._arguments:
                advice = "A curriculum of difficulties needs a function of `seed` and `difficulty`."
            elif "'difficulty'" in str(error):
                advice = "Give `difficulty` a default, or take --curriculum rising_difficulty, which chooses it."
            raise ConfigError(f"The stream {self.name} cannot be called with {given}: {error}. {advice}") from error

    def _started(self) -> Iterator[Sample]:
        try:
            return iter(self._function(**self._arguments))
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> LudicError:
        if isinstance(error, LudicError):
            return error
        failure = Failure.from_exception(error)
        return ConfigError(
            f"The stream {self.name} failed after {self.num_drawn} samples: {failure.summary}\n{failure.user_traceback}".rstrip()
        )

    def _crc(self, sample: Sample) -> int:
        try:
            return zlib.crc32(json.dumps(sample, sort_keys=True).encode())
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"A sample of the stream {self.name} cannot be saved with its rollouts: {error}. Samples hold text, numbers, "
                "true/false, lists and dicts."
            ) from error


def held_out(seed: int) -> int:
    """The seed of a stream for evaluation: other samples than those that training draws with `seed`."""
    return derive_seed(seed, BatchSeeds.HELD_OUT)


def read_or_generate(place: str | Path, flag: str = "--data", *, num: int, seed: int) -> list[Sample]:
    """All samples of a file, or the first `num` of a stream."""
    return first_samples(load_stream(place, flag), num, seed=seed) if is_stream(place) else read_samples(place, flag)


def first_samples(function: StreamFunction, num: int, *, seed: int) -> list[Sample]:
    """The first `num` samples, or all if there are fewer; for evaluations, and for curricula over a fixed list."""
    stream = SampleStream(function, seed=seed)
    found: list[Sample] = []
    try:
        found.extend(stream.next_sample() for _ in range(num))
    except RequestsExhausted:
        if not found:
            raise ConfigError(f"The stream {stream.name} yields nothing.") from None
    return found


class StreamRequests:
    """Requests for the next samples of a stream; the last batch of a stream that ends may be smaller."""

    def __init__(self, stream: SampleStream, builder: RequestBuilder, *, batch_size: int, rng_seed: int = 0) -> None:
        self._stream = stream
        self._builder = builder
        self._batch_size = batch_size
        self._rng_seed = rng_seed

    def __call__(self) -> list[RolloutRequest]:
        requests: list[RolloutRequest] = []
        try:
            while len(requests) < self._batch_size:
                requests.append(self._next())
        except RequestsExhausted:
            if not requests:
                raise
        return requests

    def _next(self) -> RolloutRequest:
        sample, index = self._stream.next_sample(), self._stream.num_drawn - 1
        return self._builder.build(index, sample, fresh_seed=derive_seed(self._rng_seed, index))

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream.load_state_dict(state)


class RisingDifficultyCurriculum:
    """Draws new samples of one difficulty, raises it when the policy succeeds and lowers it when it fails.

    `stream` is called with each difficulty; a part of the tasks (`review`) is of lower ones, so that they are not forgotten.
    """

    def __init__(
        self,
        stream: StreamFunction,
        build: Callable[[int, Sample], RolloutRequest],
        *,
        batch_size: int,
        seed: int = 0,
        first: int = 1,
        last: int | None = None,
        advance_at: float = 0.8,
        retreat_at: float = 0.1,
        window: int = 64,
        review: float = 0.2,
        success_at: float = 1.0,
    ) -> None:
        """`build` makes the request of a sample and its number. `advance_at`, `retreat_at`: success rates of the last `window`
        episodes of the present difficulty at which it changes by one. `success_at`: the smallest total reward that counts as a
        success."""
        if not 0 <= retreat_at < advance_at <= 1:
            raise ConfigError(
                f"retreat_at={retreat_at}, advance_at={advance_at}; they are success rates, 0 <= retreat_at < advance_at <= 1."
            )
        if not 0 <= review < 1:
            raise ConfigError(f"review={review}; it is a share of the tasks, from 0 to below 1.")
        if window < 1 or batch_size < 1 or (last is not None and last < first):
            raise ConfigError(
                f"window={window}, first={first}, last={last}: a window has at least one episode, and last is not below first."
            )
        self._function, self._build = stream, build
        self.batch_size, self._seed, self._success_at = batch_size, seed, success_at
        self._first, self._last = first, last
        self._advance_at, self._retreat_at, self._review = advance_at, retreat_at, review
        self.difficulty = first
        self._recent: deque[bool] = deque(maxlen=window)
        """Successes at the present difficulty."""
        self._num_draws = self._num_tasks = 0
        self._streams: dict[int, SampleStream] = {}
        self._stream_of(first)  # a function that takes no difficulty is refused now

    def next_requests(self) -> list[RolloutRequest]:
        rng = random.Random(derive_seed(self._seed, self._num_draws))
        self._num_draws += 1
        return [self._next(self._draw(rng)) for _ in range(self.batch_size)]

    def _draw(self, rng: random.Random) -> int:
        is_review = rng.random() < self._review and self.difficulty > self._first
        return rng.randrange(self._first, self.difficulty) if is_review else self.difficulty

    def _next(self, difficulty: int) -> RolloutRequest:
        request = self._build(self._num_tasks, self._stream_of(difficulty).next_sample())
        self._num_tasks += 1
        return replace(request, meta={**request.meta, "difficulty": difficulty})

    def _stream_of(self, difficulty: int) -> SampleStream:
        if difficulty not in self._streams:
            seed = derive_seed(self._seed, difficulty)
            self._streams[difficulty] = SampleStream(self._function, seed=seed, difficulty=difficulty)
        return self._streams[difficulty]

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        for session in by_session(rollouts):
            if session[0].request_meta.get("difficulty") == self.difficulty:
                self._recent.append(sum(part.own_reward for part in session) >= self._success_at)
        if len(self._recent) < (self._recent.maxlen or 0):
            return
        if self.success_rate >= self._advance_at and self.difficulty != self._last:
            self.difficulty += 1
            self._recent.clear()
        elif self.success_rate <= self._retreat_at and self.difficulty > self._first:
            self.difficulty -= 1
            self._recent.clear()

    @property
    def success_rate(self) -> float:
        """Success rate of the last episodes at the present difficulty; 0 before the first."""
        return sum(self._recent) / len(self._recent) if self._recent else 0.0

    def metrics(self) -> Mapping[str, float]:
        return {"difficulty": float(self.difficulty), "difficulty_success": self.success_rate}

    def state_dict(self) -> dict[str, Any]:
        return {
            "difficulty": self.difficulty,
            "recent": [int(success) for success in self._recent],
            "num_draws": self._num_draws,
            "num_tasks": self._num_tasks,
            "streams": {str(difficulty): stream.state_dict() for difficulty, stream in self._streams.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.difficulty, self._num_draws, self._num_tasks = state["difficulty"], state["num_draws"], state["num_tasks"]
        self._recent.clear()
        self._recent.extend(map(bool, state["recent"]))
        for difficulty in self._streams.keys() - {int(text) for text in state["streams"]}:
            del self._streams[difficulty]
        for text, own in state["streams"].items():
            self._stream_of(int(text)).load_state_dict(own)
