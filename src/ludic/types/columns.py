"""The facts that a sample holds of its tokens, as one table.

`SampleAttachments` has a typed field for each entry of `COLUMNS`. Joining the calls of a sample, truncation, removal of padding,
checks of lengths, the wire format and packing for the device follow from the entry, so a new fact of every token is an entry
here, a field there, and the code that uses it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ludic.types.messages import ImageSpan, MessageSpan, spans_with_reply
from ludic.types.tokens import (
    CandidateSets,
    ExpertArray,
    LogprobArray,
    TokenTrace,
    VersionRun,
    float_array,
    number_array,
)

Kept: TypeAlias = npt.NDArray[np.bool_]
"""True for each token that is kept."""
Joins: TypeAlias = Callable[[Sequence[TokenTrace]], Any]
"""Makes the value of a sample from its model calls, each of whose prompts extends the call before it."""


@dataclass(frozen=True, slots=True, eq=False)
class ActorTokenLogps:
    """Log-probability of every action token under the policy that sampled it."""

    token_logps: LogprobArray

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_logps", float_array(self.token_logps, "token_logps"))

    def __len__(self) -> int:
        return len(self.token_logps)


@dataclass(frozen=True, slots=True)
class Column:
    """One field of `SampleAttachments`: an array with one entry per token. Subclasses hold something else."""

    name: str
    of: Literal["action tokens", "all tokens", "sampling", "sample"] = "action tokens"
    """The subject of the fact. "sampling": the sampling of all action tokens. "sample": the sample as a whole."""
    dtype: type[Any] = np.float32
    shape: tuple[str, ...] = ()
    """Names of the dimensions of each token's entry."""
    missing: float | None = None
    """Entry of tokens of which it is not known, in a batch where others know it. None: no such tokens. For whole numbers, also
    the least one."""
    join: Joins | None = None
    """None: stitching, credit assignment or the learner computes it."""
    is_finite: bool = True
    repeats: bool = False
    """Neighbours usually have equal values, so it is sent as runs."""
    is_sent: bool = True
    """True if actors send it to a learner."""
    is_packed: bool = False
    """True if losses read it: packing makes a tensor of it."""

    @property
    def nothing(self) -> Any:
        """The value of a sample that does not have it."""
        return None

    @property
    def is_of_actions(self) -> bool:
        """True if it is meaningless for other action tokens than the sampled ones."""
        return self.of in ("action tokens", "sampling")

    def array(self, value: Any) -> npt.NDArray[Any]:
        """The entries of a value that is not None."""
        found: npt.NDArray[Any] = value
        return found

    def value(self, array: npt.NDArray[Any]) -> Any:
        """Inverse of `array`."""
        return array

    def checked(self, value: Any) -> Any:
        """The value as it is stored; ValueError or TypeError for a wrong one."""
        if self.dtype != np.float32:
            return number_array(value, self.dtype, self.shape, self.name)
        array = float_array(value, self.name)
        if self.is_finite and not np.isfinite(array).all():
            raise ValueError(f"{self.name} holds values that are not finite.")
        return array

    def num_tokens(self, value: Any) -> int | None:
        """Number of tokens that the value is of; None where it does not say."""
        return len(value)

    def only(self, value: Any, kept: Kept) -> Any:
        """The value of the kept tokens alone; `kept` has an entry for each token that the column is of."""
        return value[kept]


class _LogpColumn(Column):
    """Log-probs in an `ActorTokenLogps`."""

    __slots__ = ()

    def array(self, value: ActorTokenLogps) -> npt.NDArray[Any]:
        return value.token_logps

    def value(self, array: npt.NDArray[Any]) -> ActorTokenLogps:
        return ActorTokenLogps(array)

    def checked(self, value: Any) -> Any:
        return value

    def only(self, value: ActorTokenLogps, kept: Kept) -> ActorTokenLogps:
        return ActorTokenLogps(value.token_logps[kept])


class ValueColumn(Column):
    """One value for the whole sample: a number of at least 0 where `dtype` is float, else text."""

    __slots__ = ()

    def checked(self, value: Any) -> Any:
        return value

    def num_tokens(self, value: Any) -> None:
        return None

    def only(self, value: Any, kept: Kept) -> Any:
        return value


class CandidateColumn(Column):
    """A `CandidateSets`."""

    __slots__ = ()

    def checked(self, value: Any) -> Any:
        return value

    def only(self, value: CandidateSets, kept: Kept) -> CandidateSets:
        return value.only(kept)


class _TupleColumn(Column):
    """A tuple, empty where nothing is known."""

    __slots__ = ()

    @property
    def nothing(self) -> Any:
        return ()

    def checked(self, value: Any) -> Any:
        return tuple(value)

    def num_tokens(self, value: Any) -> int | None:
        return None


class VersionColumn(_TupleColumn):
    """Version runs that cover the action tokens."""

    __slots__ = ()

    def checked(self, value: Any) -> Any:
        return tuple(VersionRun(*run) for run in value)

    def num_tokens(self, value: tuple[VersionRun, ...]) -> int | None:
        return sum(run.length for run in value) if value else None

    def only(self, value: tuple[VersionRun, ...], kept: Kept) -> tuple[VersionRun, ...]:
        new = _new_places(kept)
        edges = new[np.cumsum([0, *(run.length for run in value)])].tolist()
        lengths = zip(value, edges[:-1], edges[1:], strict=True)
        return tuple(VersionRun(run.version, end - start) for run, start, end in lengths if end > start)


class ImageColumn(_TupleColumn):
    """Spans of tokens that stand for pictures; a picture is kept whole or not at all."""

    __slots__ = ()

    def only(self, value: tuple[ImageSpan, ...], kept: Kept) -> tuple[ImageSpan, ...]:
        new = _new_places(kept)
        whole = (span for span in value if new[span.end] - new[span.start] == span.length)
        return tuple(ImageSpan(span.image, int(new[span.start]), span.length) for span in whole)


class MessageColumn(_TupleColumn):
    """Spans of tokens that came from one message; together they cover all tokens."""

    __slots__ = ()

    def only(self, value: tuple[MessageSpan, ...], kept: Kept) -> tuple[MessageSpan, ...]:
        new = _new_places(kept)
        moved = (MessageSpan(span.message, span.role, *(int(new[place]) for place in span[2:])) for span in value)
        return tuple(span for span in moved if span.end > span.start)


def _new_places(kept: Kept) -> npt.NDArray[np.int64]:
    """Place of each token, and of the end, among the kept ones."""
    return np.concatenate([[0], np.cumsum(kept, dtype=np.int64)])


# --- joining calls ---


def _all_logps(traces: Sequence[TokenTrace]) -> ActorTokenLogps | None:
    logps = [trace.completion_logprobs for trace in traces if trace.completion_logprobs is not None]
    return ActorTokenLogps(np.concatenate(logps)) if logps else None


def _all_candidates(traces: Sequence[TokenTrace]) -> CandidateSets | None:
    if all(trace.candidates is None for trace in traces):
        return None
    return CandidateSets.joined(
        len(trace.completion_token_ids) if trace.candidates is None else trace.candidates for trace in traces
    )


def _merged_versions(traces: Sequence[TokenTrace]) -> tuple[VersionRun, ...]:
    merged: list[VersionRun] = []
    for run in (run for trace in traces for run in trace.version_runs):
        if merged and merged[-1].version == run.version:
            merged[-1] = VersionRun(run.version, merged[-1].length + run.length)
        else:
            merged.append(run)
    return tuple(merged)


def _first_known_experts(traces: Sequence[TokenTrace]) -> ExpertArray | None:
    """The experts of each token as first recorded, because its log-prob and those after it were computed with them. A later call
    fills in tokens that were not known, such as the last one of a completion."""
    found: ExpertArray | None = None
    for trace in traces:
        if trace.experts is None:
            return None
        now = trace.experts.copy()
        if found is not None:
            is_known = (found >= 0).all(axis=(1, 2))
            now[: len(found)][is_known] = found[is_known]
        found = now
    return found


def _first_reason(traces: Sequence[TokenTrace]) -> str | None:
    return next((reason for trace in traces if (reason := trace.untrainable_sampling) is not None), None)


def _last_spans(traces: Sequence[TokenTrace]) -> tuple[MessageSpan, ...]:
    last = traces[-1]
    return tuple(spans_with_reply(last.message_spans, len(last.completion_token_ids))) if last.message_spans else ()


COLUMNS: tuple[Column, ...] = (
    _LogpColumn("actor_logps", missing=np.nan, join=_all_logps, is_finite=False, is_packed=True),
    Column("token_weights", repeats=True),
    Column("token_rewards", repeats=True),
    Column("token_values", is_packed=True),
    Column("token_returns", is_packed=True),
    Column("teacher_logps"),
    Column("token_turns", repeats=True),
    ValueColumn("temperature", of="sampling", dtype=float, join=lambda traces: traces[-1].temperature),
    CandidateColumn("candidates", join=_all_candidates),
    ValueColumn("untrainable_sampling", of="sampling", dtype=str, join=_first_reason),
    VersionColumn("version_runs", join=_merged_versions),
    Column("proximal_logps", is_sent=False, is_packed=True),
    ImageColumn("images", of="all tokens", join=lambda traces: traces[-1].images),
    Column(
        "experts", of="all tokens", dtype=np.int16, shape=("layers", "experts per token"), missing=-1,
        join=_first_known_experts,
    ),
    MessageColumn("message_spans", of="all tokens", join=_last_spans),
    ValueColumn("observed_roles", of="sample", is_sent=False),
)  # fmt: skip

PER_TOKEN = tuple(column.name for column in COLUMNS if type(column) is Column and column.of == "action tokens")
"""Columns of one number per action token."""
NOTHING_SAMPLED: dict[str, Any] = {column.name: column.nothing for column in COLUMNS if column.is_of_actions}
"""The columns of a sample whose action tokens were chosen, not sampled."""


def joined(traces: Sequence[TokenTrace]) -> dict[str, Any]:
    """The columns of the sample that these calls make, as far as the calls say them."""
    return {column.name: column.join(traces) for column in COLUMNS if column.join is not None}
