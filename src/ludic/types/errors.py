"""Named errors: every message says what was asked, what there is, and what to do.

They also inherit from the built-in error that a caller expects (ValueError, KeyError, …). `Failure` is the stored form of an error
that ended an episode.
"""

import difflib
import os
import random
import re
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ludic.util.errors import DISTRIBUTION as DISTRIBUTION
from ludic.util.errors import ConfigError as ConfigError
from ludic.util.errors import LudicError as LudicError
from ludic.util.errors import MissingExtra as MissingExtra
from ludic.util.errors import MissingPackage as MissingPackage
from ludic.util.errors import MissingPlugin as MissingPlugin
from ludic.util.errors import how_to_install as how_to_install
from ludic.util.errors import how_to_install_package as how_to_install_package


def encodable(text: str) -> str:
    """The text with lone surrogates replaced: tokenizers and files refuse them, and they must not fail an episode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


class RunComplete(ConfigError):
    """A resumed run has made all its updates already. Commands print it and exit with 0: a scheduler may repeat them."""


class UnknownName(LudicError, KeyError):
    """A name that nothing is registered under."""

    @classmethod
    def among(cls, kind: str, name: str, known: Iterable[str], advice: str = "") -> "UnknownName":
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
        listed = ", ".join(names) if names else "none"
        return cls(f"No {kind} named {name!r}.{hint} Known: {listed}.{' ' + advice if advice else ''}")


class PolicyGone(LudicError, RuntimeError):
    """The server of the policy has stopped: no further call, and so no further episode, can succeed."""


class EngineClosed(PolicyGone):
    """The engine was shut down or has died; the message says which."""


class TryAgain(LudicError):
    """A process lost what it needs to continue, such as a queue or a lease. A new start may succeed; commands exit with 75."""


class QueueFull(LudicError, RuntimeError):
    """An engine has more waiting requests than it accepts."""


class NotFinite(PolicyGone, FloatingPointError):
    """Weights or logits hold NaN or infinity; sampling or training with them is meaningless."""


class OutOfGPUMemory(LudicError, RuntimeError):
    """The GPU has no room for what training needs; the message says who holds it and what needs less."""


def full_gpu(error: BaseException) -> str | None:
    """Advice for a user whose GPU had no room, where no `OutOfGPUMemory` explains it (loading, say); None for other errors."""
    first = str(error).partition("\n")[0]
    if not isinstance(error, RuntimeError) or "CUDA" not in first or not re.search("out of memory|ALLOC_FAILED", first):
        return None
    first = first.partition(" If reserved but unallocated")[0].rstrip(".")
    return f"The GPU has no room. {first}. `nvidia-smi` shows who holds its memory, `ludic plan` what a run needs."


def retry_wait_s(num_failures: int, first_s: float, longest_s: float) -> float:
    """Exponential back-off: seconds to wait before the next attempt, after this many earlier failures."""
    # Jitter: processes that failed together must not all return together. The exponent is limited because floats are.
    return min(first_s * 2 ** min(num_failures, 60), longest_s) * random.uniform(0.75, 1.25)


class EnvContractError(LudicError, TypeError):
    """An environment broke the contract of LudicEnv (wrong return type, missing agent, …)."""


class EnvCrashed(LudicError, RuntimeError):
    """The process that held an env has ended or was killed, and its episode with it."""


class EnvWorkerError(LudicError, RuntimeError):
    """An exception of an env that runs in another process; `failure` is what it would be recorded as in this one."""

    def __init__(self, failure: "Failure") -> None:
        super().__init__(failure.summary)
        self.failure = failure
        self.add_note(f"In the env's process:\n{failure.traceback}")


class BrokenSample(LudicError, ValueError):
    """A sample of a dataset cannot be graded; its episodes fail, those of other samples continue."""


class ResetNeeded(LudicError, RuntimeError):
    """`step` was called before `reset`, or after the episode ended."""


class SnapshotUnsupported(LudicError, NotImplementedError):
    """The environment does not offer snapshot/restore."""


class TemplateError(LudicError, ValueError):
    """A chat template cannot render what was asked of it."""


class ContextError(LudicError, RuntimeError):
    """A context did not do what it declares."""


class ParserContractError(LudicError, TypeError):
    """A parser returned something other than a ParseResult."""


class ScorerContractError(LudicError, TypeError):
    """A scorer returned something other than one mapping of finite numbers per rollout."""


class TokenMismatch(LudicError, RuntimeError):
    """A client's response has other prompt tokens than the request; training on them would be silently wrong."""


class OutOfRoom(LudicError):
    """An agent cannot make another model call. This ends a running episode; its samples are kept."""


class TokenBudgetSpent(OutOfRoom):
    """The tokens that an agent may sample in this episode are used up."""


class PromptTooLong(OutOfRoom, ValueError):
    """A prompt does not fit the client's limit."""

    RAISE = "Where the model's context is longer, raise max_seq_len (--max-seq-len) of a run, or --max-model-len of a server."

    def __init__(self, num_tokens: int, limit: int, advice: str = "") -> None:
        self.num_tokens = num_tokens
        self.limit = limit
        advice = advice or "Raise the limit, shorten the observations, or use a context that drops old turns."
        super().__init__(f"The prompt has {num_tokens} tokens, but the limit is {limit}. {advice}")


class RequestsExhausted(LudicError, RuntimeError):
    """There are no more requests: the data is used up. A trainer ends its run then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why an episode could not be finished."""

    error: str
    """Name of the exception's type."""
    message: str
    traceback: str = ""
    """All of it, Ludic's frames included."""
    user_traceback: str = ""
    """Traceback from the first frame of code that is neither Ludic's nor installed; empty if there is none."""
    place: str = ""
    """Place that raised it, `file.py:12 in name`: the deepest user frame, else the deepest frame; empty for Ludic's own errors."""
    by_scorer: bool = False
    """True if the episode ended well and a judge or reward function failed on it: it has no reward."""

    @classmethod
    def from_exception(cls, error: BaseException) -> "Failure":
        if isinstance(error, EnvWorkerError):
            return error.failure
        try:
            message = str(error)
        except BaseException as broken:  # noqa: BLE001 - an exception of the user's, whose __str__ raises
            message = f"(its text cannot be shown: {type(broken).__name__})"
        # Ludic's own errors explain themselves; the frame that raised them adds nothing.
        user_traceback, place = ("", "") if isinstance(error, LudicError) else _user_part(error)
        return cls(
            error=encodable(type(error).__name__),
            message=_shortened(message, _MAX_MESSAGE),
            traceback=_shortened("".join(traceback.format_exception(error)), _MAX_TRACEBACK),
            user_traceback=_shortened(user_traceback, _MAX_TRACEBACK),
            place=encodable(place),
        )

    @property
    def summary(self) -> str:
        return f"{self.error}: {self.message}"

    @property
    def summary_and_place(self) -> str:
        return f"{self.summary} (at {self.place})" if self.place else self.summary


_MAX_MESSAGE, _MAX_TRACEBACK = 4_000, 40_000
"""Characters. An exception may hold megabytes, and every failed episode is stored."""


def _shortened(text: str, limit: int) -> str:
    """The two ends of a long text, without lone surrogates, which cannot be written to a file."""
    if len(text) > limit:
        text = f"{text[: limit // 2]} … ({len(text) - limit:,} characters) … {text[-limit // 2 :]}"
    return encodable(text)


_INSTALLED = tuple(
    f"{Path(folder).resolve()}{os.sep}"
    for folder in (
        str(Path(__file__).parents[1]),
        *map(str, Path(__file__).parents[3].glob("plugins/*/ludic_*")),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)
"""Folders whose code is not the user's: Ludic, the standard library, installed packages."""


def is_users_file(name: str) -> bool:
    """True if a frame's file is neither Ludic's nor installed."""
    return not name.startswith(("<", *_INSTALLED)) and not str(Path(name).resolve()).startswith(_INSTALLED)


def _user_part(error: BaseException) -> tuple[str, str]:
    """(the traceback from the user's first frame on, where it was raised)."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [number for number, frame in enumerate(frames) if is_users_file(frame.filename)]
    raised = [frames[users[-1]]] if users else frames[-1:]
    place = "".join(f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in raised)
    if not users:
        return "", place
    shown = traceback.format_list(frames[users[0] :]) + traceback.format_exception_only(error)
    return "".join(shown), place
