"""JSON bodies of Tinker's protocol as typed structs, under the names of its SDK.

A field that this server does not know is refused by name if it holds anything, since ignoring it could change the answer.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from ludic.types import ConfigError
from ludic_tinker.server.records import Refused

B = TypeVar("B", bound=Struct)

Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Lifetime = Annotated[int, Meta(ge=1, le=100 * 366 * 24 * 3600)]
"""Seconds, a century at most: dates end in the year 9999."""


class Body(Struct, kw_only=True):
    """A field that many bodies have, and nobody reads."""

    type: str = ""


class CreateSession(Body, kw_only=True):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionBody(Body, kw_only=True):
    session_id: str


class FinishReason(Struct, kw_only=True):
    type: str = "success"


class FinishSession(Struct, kw_only=True):
    reason: FinishReason = msgspec.field(default_factory=FinishReason)
    detail: str | None = None


class _LoraSettings(Struct, kw_only=True):
    rank: Annotated[int, Meta(ge=1)] = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerSettings(Struct, kw_only=True):
    type: str = "adamw"


class CreateModel(Body, kw_only=True):
    session_id: str
    model_seq_id: Number
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: _LoraSettings = msgspec.field(default_factory=_LoraSettings)
    optimizer_config: OptimizerSettings = msgspec.field(default_factory=OptimizerSettings)


class ModelBody(Body, kw_only=True):
    model_id: str


class AdamSettings(Struct, kw_only=True):
    """The settings of one optimizer step (`tinker.AdamParams`), checked when its turn comes."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """0 does not clip."""

    def checked(self) -> Self:
        """Raise ConfigError for a number that AdamW cannot have."""
        for name, value in msgspec.structs.asdict(self).items():
            limit = 1.0 if name in ("beta1", "beta2") else math.inf
            if not 0 <= value < limit:
                raise ConfigError(f"{name}={value}; it must be at least 0 and less than {limit:g}.")
        return self


class OptimStep(Body, kw_only=True):
    model_id: str
    seq_id: Number
    adam_params: AdamSettings | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(Body, kw_only=True):
    """A request to save a checkpoint of either kind."""

    model_id: str
    seq_id: Number
    path: str | None = None
    sampling_session_seq_id: Number | None = None
    ttl_seconds: Lifetime | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    kind: Literal["snapshot"] = "snapshot"
    """A field of SDK 0.38, whose inflight saves are refused."""


class SaveExternal(Body, kw_only=True):
    """Weights to download."""

    model_id: str
    seq_id: Number
    path: str
    ttl_seconds: Lifetime | None = None
    age_encryption_recipients: list[str] | None = None


class LoadWeights(Body, kw_only=True):
    """Into a run (`model_id` and `seq_id`), or into a new one (`session_id` and `model_seq_id`)."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerSettings | None = None
    weights_access_token: str | None = None


class WeightsInfo(Struct, kw_only=True):
    tinker_path: str


class CreateSamplingSession(Body, kw_only=True):
    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class SamplingSessionBody(Body, kw_only=True):
    sampling_session_id: str


class Chunk(Struct, kw_only=True):
    tokens: list[Annotated[int, Meta(ge=0, lt=2**31)]] | None = None
    type: str = "encoded_text"


class Prompt(Struct, kw_only=True):
    chunks: list[Chunk]

    @property
    def tokens(self) -> list[int]:
        if other := {chunk.type for chunk in self.chunks if chunk.tokens is None}:
            raise ConfigError(f"The prompt holds {', '.join(sorted(other))}; this server takes text only.")
        return [token for chunk in self.chunks for token in chunk.tokens or ()]


class _SamplingBody(Struct, kw_only=True):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class JsonTensor(Struct, kw_only=True):
    data: list[int]
    dtype: Literal["int64"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    def dense(self, pad: int) -> npt.NDArray[np.int64]:
        try:
            values = np.asarray(self.data, np.int64)
            if self.sparse_crow_indices is None:
                return shaped(values, self.shape)
            rows, columns = (
                np.asarray(own, np.int64) for own in (self.sparse_crow_indices, self.sparse_col_indices or [])
            )
            return from_csr(values, rows, columns, self.shape or [], pad)
        except (ValueError, IndexError, OverflowError) as error:
            raise ConfigError(f"A tensor cannot be read: {error}.") from error


class SampleBody(Body, kw_only=True):
    prompt: Prompt
    sampling_params: _SamplingBody
    num_samples: Annotated[int, Meta(ge=1, le=1024)] = 1
    sampling_session_id: str | None = None
    seq_id: Number | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: Annotated[int, Meta(ge=0, le=1024)] = 0
    topk_sample_logprobs: Annotated[int, Meta(ge=0, le=1024)] = 0
    target_prompt_logprobs: JsonTensor | None = None
    prompt_logprobs_last_n: Annotated[int, Meta(ge=1)] | None = None


class RetrieveFuture(Struct, kw_only=True):
    request_id: str
    allow_metadata_only: bool = False


class CancelFuture(Struct, kw_only=True):
    request_id: str


def read_json(data: bytes, kind: type[B]) -> B:
    """A body of this kind; Refused(400) says what is wrong with it."""
    try:
        body = msgspec.json.decode(data or b"{}")
        if not isinstance(body, dict):
            raise Refused(400, "The body must be a JSON object.")
        known = {field.encode_name for field in msgspec.structs.fields(kind)}
        if unknown := sorted(name for name, value in body.items() if name not in known and value):
            raise Refused(400, f"This server does not know {', '.join(unknown)} of {kind.__name__}; leave it out.")
        return msgspec.convert({name: value for name, value in body.items() if value is not None}, kind, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"The body is not what {kind.__name__} should be: {error}.") from error


# --- tensors ---


MAX_ENTRIES = 1 << 24
"""Numbers in the tensors of one request when sparse ones are filled; a dense body of the largest size holds as many."""
_MAX_WIDTH = 1024
"""Columns of a sparse tensor: targets of one token."""


def check_sparse(name: str, shape: Sequence[int], num_rows: int) -> None:
    """ConfigError unless a sparse tensor has this many rows and few columns; called before it is filled."""
    if len(shape) != 2 or shape[0] != num_rows or not 1 <= shape[1] <= _MAX_WIDTH:
        raise ConfigError(
            f"{name} has the shape {list(shape)}; a sparse tensor here has the shape [{num_rows}, K], with K from 1 to "
            f"{_MAX_WIDTH}."
        )


def shaped(values: npt.NDArray[Any], shape: Sequence[int] | None) -> npt.NDArray[Any]:
    """The values in this shape; without one, flat."""
    return values.reshape(list(shape)) if shape else values


def from_csr(
    values: npt.NDArray[Any], ends: npt.NDArray[Any], columns: npt.NDArray[Any], shape: Sequence[int], pad: int
) -> npt.NDArray[Any]:
    """A dense table from compressed rows: the entries of row i are those from ends[i] to ends[i + 1]."""
    is_sound = len(shape) == 2 and len(ends) == shape[0] + 1 and len(columns) == len(values)
    if not is_sound or ends[0] != 0 or ends[-1] != len(values) or (np.diff(ends) < 0).any():
        raise ValueError("a sparse tensor's indices do not fit its shape")
    if ((columns < 0) | (columns >= shape[1])).any():
        raise ValueError("a sparse tensor's columns are outside of its shape")
    table = np.full(shape, pad, values.dtype)
    table[np.repeat(np.arange(shape[0]), np.diff(ends)), columns] = values
    return table
