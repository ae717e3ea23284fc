"""Tenants and their limits; sessions, training runs and samplers as plain data.

The service makes these records and asks the store to keep them; the store gives them back after a restart.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from ludic.models.adapters import AdapterSpec
from ludic.types import ConfigError, LudicError
from ludic.util.urls import is_same_secret

CheckpointKind = Literal["training", "sampler", "external"]
RequestKind = Literal[
    "create_model",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "load_weights",
    "refused",
]
"""Training requests that change a run or depend on its state. The runs carry them out in the order of their numbers.
`refused` keeps only the number and the reason of a request that was refused."""

_FOLDER_OF: dict[CheckpointKind, str] = {
    "training": "weights",
    "sampler": "sampler_weights",
    "external": "external_weights",
}
_KIND_OF = {folder: kind for kind, folder in _FOLDER_OF.items()}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RETRY_S = 1.0
_KEY_PREFIX = "tml-"
LOCAL_TENANT = "local"
"""The tenant of every client of a server without keys."""


class Refused(LudicError):
    """The server does not carry out a request; `status` is HTTP's."""

    def __init__(self, status: int, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantLimits:
    """Limits of one tenant at a time."""

    max_runs: int = 16
    """Training runs in memory: an adapter, its gradient and its optimizer each."""
    max_rank: int = 256
    max_requests: int = 4096
    """Requests that are accepted and not finished."""
    max_tokens: int = 1 << 24
    """Tokens of those requests: of training data, or of prompts and completions."""
    max_samplers: int = 64
    """Unnamed sampler weights of one run; the oldest are forgotten first."""
    max_ended_runs: int = 1024
    """Runs that ended without a checkpoint; the oldest are forgotten first."""
    max_session_samplers: int = 1 << 14
    """Sampling sessions of one session. They end with it."""
    max_sessions: int = 1024
    """Sessions, of which those that have ended are forgotten first, with their runs that left no checkpoint."""
    max_metadata_bytes: int = 1 << 16
    """Size of the metadata of one session, run or checkpoint."""

    def check_metadata(self, *given: Any) -> None:
        """Refused(400) for metadata that are too large to be kept."""
        size = len(msgspec.json.encode(given))
        if size > self.max_metadata_bytes:
            raise Refused(400, f"The metadata have {size} bytes, and this server keeps {self.max_metadata_bytes}.")


class Usage:
    """Requests of each tenant that are accepted and not finished, and their tokens."""

    def __init__(self, limits: TenantLimits) -> None:
        self._limits = limits
        self._num_requests: Counter[str] = Counter()
        self._num_tokens: Counter[str] = Counter()

    def check(self, tenant: str) -> None:
        """Refused(429) if the tenant has too much waiting. One request may pass the limit of tokens."""
        for what, held, limit in (
            ("requests", self._num_requests[tenant], self._limits.max_requests),
            ("tokens", self._num_tokens[tenant], self._limits.max_tokens),
        ):
            if held >= limit:
                raise Refused(
                    429, f"{held} {what} of yours are waiting, and this server allows {limit}.", retry_after_s=_RETRY_S
                )

    def add(self, tenant: str, num_tokens: int) -> None:
        self._num_requests[tenant] += 1
        self._num_tokens[tenant] += num_tokens

    def remove(self, tenant: str, num_tokens: int) -> None:
        self._num_requests[tenant] -= 1
        self._num_tokens[tenant] -= num_tokens


class Keys:
    """API keys and the tenants they belong to. Without keys, every client is the same tenant."""

    def __init__(self, tenant_of: Mapping[str, str]) -> None:
        if wrong := [tenant for key, tenant in tenant_of.items() if not key.startswith(_KEY_PREFIX)]:
            raise ConfigError(
                f"The key of {', '.join(wrong)} does not begin with {_KEY_PREFIX!r}; Tinker's SDK sends no other keys."
            )
        self._tenant_of = dict(tenant_of)

    @classmethod
    def read(cls, file: Path) -> "Keys":
        """Read lines of `name key`; `#` begins a comment. Several keys may have the same name."""
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The file of API keys {file} cannot be read: {error}") from error
        tenant_of: dict[str, str] = {}
        for number, line in enumerate(lines, start=1):
            if not (words := line.partition("#")[0].split()):
                continue
            if len(words) != 2:
                raise ConfigError(f"Line {number} of {file} has {len(words)} words; it must be `name key`.")
            if words[1] in tenant_of:
                raise ConfigError(f"Line {number} of {file} repeats the key of {tenant_of[words[1]]}.")
            tenant_of[words[1]] = words[0]
        if not tenant_of:
            raise ConfigError(f"There are no keys in {file}; it must have lines of `name key`.")
        return cls(tenant_of)

    def __bool__(self) -> bool:
        return bool(self._tenant_of)

    def tenant(self, key: str | None) -> str:
        """Whose key this is."""
        if not self._tenant_of:
            return LOCAL_TENANT
        # Every key is compared, so that the time says nothing about them.
        found = [tenant for known, tenant in self._tenant_of.items() if is_same_secret(key or "", known)]
        if not found:
            raise Refused(401, "This server does not know the API key. The SDK takes it from $TINKER_API_KEY.")
        return found[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One client process."""

    id: str
    tenant: str
    created: float
    tags: tuple[str, ...] = ()
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    sdk_version: str = ""
    display_name: str | None = None
    finished: str | None = None
    """The client's word for its end: success, errored or interrupted."""
    detail: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run: an adapter of the base model."""

    id: str
    session: str
    tenant: str
    base_model: str
    spec: AdapterSpec
    """Its seed is always set, so that the same run can be made again."""
    created: float
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    ended: float | None = None
    """Seconds of the epoch; from then on it is listed and takes no more requests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """A sampling session: weights that a client samples from."""

    id: str
    session: str
    tenant: str
    path: str | None
    """The path of the weights; None is the base model."""
    created: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Facts about a saved state, written next to it."""

    path: "CheckpointPath"
    tenant: str
    base_model: str
    spec: AdapterSpec
    created: float
    expires: float | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    number: int = 0
    """Number of the request that saved it: the same request, repeated after a restart, finds its checkpoint."""
    is_unnamed: bool = False
    """Sampler weights that only their sampling session knows; they are not listed."""


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """tinker://RUN/weights/NAME, or tinker://RUN/sampler_weights/NAME."""

    run: str
    kind: CheckpointKind
    name: str

    @classmethod
    def parse(cls, text: str) -> "CheckpointPath":
        run, _, rest = text.removeprefix("tinker://").partition("/")
        folder, _, name = rest.partition("/")
        is_path = text.startswith("tinker://") and run and folder in _KIND_OF and _NAME.fullmatch(name)
        if not is_path:
            raise Refused(
                400,
                f"{text!r:.200} is no path of a checkpoint, such as tinker://RUN/weights/NAME or …/sampler_weights/NAME.",
            )
        return cls(run, _KIND_OF[folder], name)

    @classmethod
    def named(cls, run: str, kind: CheckpointKind, name: str) -> "CheckpointPath":
        """Refuses names that are no file names."""
        if not _NAME.fullmatch(name):
            raise Refused(
                400,
                f"{name!r:.200} cannot name a checkpoint; use up to 128 letters, digits, dots, dashes and underscores.",
            )
        return cls(run, kind, name)

    def __str__(self) -> str:
        return f"tinker://{self.run}/{_FOLDER_OF[self.kind]}/{self.name}"
