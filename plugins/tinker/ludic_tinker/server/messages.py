"""Protobuf messages of Tinker's protocol: training data in, log-probs and samples out."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ludic.types import ConfigError, FloatArray, MissingExtra, token_array
from ludic_tinker.server.bodies import MAX_ENTRIES, JsonTensor, check_sparse, from_csr, shaped
from ludic_tinker.server.losses import Row
from ludic_tinker.server.records import Refused
from ludic_tinker.server.runs import PassOutput

try:
    from google.protobuf.message import DecodeError
    from tinker.proto import tinker_public_pb2 as proto
except ImportError as error:
    raise MissingExtra("tinker", f"The Tinker server ({error})") from error

PROTOBUF = "application/x-protobuf"
_NUMPY = {proto.DTYPE_FLOAT32: np.float32, proto.DTYPE_INT64: np.int64, proto.DTYPE_INT32: np.int32}
_MASKED_LOGPROB = -99999.0
"""The value that the SDK reads as "no entry" in a table of the likeliest tokens."""
_MAX_PARTS = 1 << 17
"""Rows of a request with their chunks and tensors; the SDK sends 1,024 rows at most."""

# --- training passes ---


def read_pass(data: bytes) -> Any:
    """A `ForwardBackwardRequest`."""
    request = proto.ForwardBackwardRequest()
    try:
        request.ParseFromString(data)
    except DecodeError as error:
        raise Refused(400, f"The body is no ForwardBackwardRequest of Tinker's protobuf: {error}.") from error
    if not request.model_id or request.seq_id < 1:
        raise Refused(400, "A ForwardBackwardRequest needs a model_id, and a seq_id from 1.")
    return request


def read_head(data: bytes) -> tuple[Any, str | None]:
    """A `ForwardBackwardRequest`, and what is wrong with its size."""
    request = read_pass(data)
    try:
        _check_size(request)
    except ConfigError as error:
        return request, str(error)
    return request, None


def _check_size(request: Any) -> None:
    """Raise ConfigError for what would take too much memory, from the shapes of tensors alone."""
    num_parts = len(request.data)
    if num_parts <= _MAX_PARTS:
        num_parts += sum(len(datum.model_input) + len(datum.loss_fn_inputs) for datum in request.data)
    if num_parts > _MAX_PARTS:
        raise ConfigError(
            f"This request has {num_parts} data, chunks and tensors; this server takes {_MAX_PARTS} at once."
        )
    num_entries = 0
    for number, datum in enumerate(request.data):
        num_tokens = sum(len(chunk.encoded_text.tokens) for chunk in datum.model_input) // 4
        for name, tensor in datum.loss_fn_inputs.items():
            shape = list(tensor.shape)
            if tensor.HasField("sparse_csr"):
                check_sparse(f"Datum {number}: {name}", shape, num_tokens)
                num_entries += shape[0] * shape[1]
    if num_entries > MAX_ENTRIES:
        raise ConfigError(
            f"The sparse tensors of this request have {num_entries} entries when they are filled, more than the {MAX_ENTRIES} that "
            "this server takes. Send fewer rows in one request."
        )


def rows_of(request: Any) -> list[Row]:
    """The data of a `ForwardBackwardRequest`; ConfigError for what cannot be read."""
    _check_size(request)
    return [_row(datum, number) for number, datum in enumerate(request.data)]


def config_of(request: Any) -> dict[str, Any]:
    """Settings of the loss."""
    if request.loss_fn_config_v2:
        return {
            name: value.text if value.HasField("text") else value.number
            for name, value in request.loss_fn_config_v2.items()
        }
    return dict(request.loss_fn_config)


def _row(datum: Any, number: int) -> Row:
    if other := {kind for chunk in datum.model_input if (kind := chunk.WhichOneof("chunk")) != "encoded_text"}:
        raise ConfigError(f"Datum {number} holds {', '.join(map(str, other))}; this server takes text only.")
    try:
        parts = [np.frombuffer(chunk.encoded_text.tokens, np.int32) for chunk in datum.model_input]
        tokens = token_array(np.concatenate(parts) if parts else np.empty(0, np.int32))
        inputs = {name: _tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()}
    except (ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"Datum {number} cannot be read: {error}.") from error
    targets = inputs.pop("target_tokens", None)
    if targets is None or targets.dtype.kind != "i":
        raise ConfigError(f"Datum {number} has no target_tokens of whole numbers in its loss_fn_inputs.")
    return Row(tokens, targets.astype(np.int64), {name: values.astype(np.float32) for name, values in inputs.items()})


def _tensor(tensor: Any) -> npt.NDArray[Any]:
    """Numbers of a protobuf `Tensor`; a sparse one is filled with zeros."""
    if tensor.dtype not in _NUMPY:
        raise ValueError(f"a tensor has the number format {tensor.dtype}")
    if tensor.HasField("sparse_csr"):
        own = tensor.sparse_csr
        values = np.frombuffer(own.values, _NUMPY[tensor.dtype])
        indices = np.frombuffer(own.crow_indices, np.int64), np.frombuffer(own.col_indices, np.int64)
        return from_csr(values, *indices, list(tensor.shape), 0)
    return shaped(np.frombuffer(tensor.dense, _NUMPY[tensor.dtype]), list(tensor.shape))


def write_pass(outputs: Sequence[PassOutput]) -> bytes:
    """A `ForwardBackwardOutput` from the outputs of the parts of a pass."""
    loss = float(sum(output.metrics["loss:sum"] for output in outputs))
    answer = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": loss})
    rows = [row for output in outputs for row in output.logprobs]
    for trailing, group in itertools.groupby(rows, key=lambda row: row.shape[1:]):
        own = [np.ascontiguousarray(row, np.float32) for row in group]
        record = answer.loss_fn_outputs.add()
        record.num_datums = len(own)
        field = record.fields["logprobs"]
        field.dtype = proto.DTYPE_FLOAT32
        field.trailing_shape.extend(trailing)
        field.data = b"".join(row.tobytes() for row in own)
        field.offsets = np.cumsum([0, *(row.nbytes for row in own)], dtype=np.int64).tobytes()
    data: bytes = answer.SerializeToString()
    return data


# --- samples ---


class SampledTokens(msgspec.Struct, frozen=True):
    """One sampled sequence."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    is_stopped: bool
    top: "TopTokens | None" = None


class TopTokens(msgspec.Struct, frozen=True):
    """The likeliest tokens of some positions: ids and log-probs, both [positions, k]."""

    ids: npt.NDArray[Any]
    logprobs: npt.NDArray[Any]

    def after(self, num_empty: int) -> "TopTokens":
        """The same with this many positions in front that have none."""
        width = self.ids.shape[1]
        ids = np.concatenate([np.zeros((num_empty, width), np.int32), self.ids])
        logprobs = np.concatenate([np.full((num_empty, width), _MASKED_LOGPROB, np.float32), self.logprobs])
        return TopTokens(ids, logprobs)


class ScoredPrompt(msgspec.Struct, frozen=True):
    """Log-probs of a prompt's tokens; NaN where there is none."""

    logprobs: FloatArray | None = None
    top: TopTokens | None = None
    targets: FloatArray | None = None
    """[positions - 1, K], 0 where none was asked for."""
    target_layout: JsonTensor | None = None
    """The sparse layout that was asked for, if it was one."""


def write_sample(sequences: Iterable[SampledTokens], prompt: ScoredPrompt) -> bytes:
    """A `SampleResponse`."""
    answer = proto.SampleResponse()
    for own in sequences:
        sequence = answer.sequences.add()
        sequence.stop_reason = proto.STOP_REASON_STOP if own.is_stopped else proto.STOP_REASON_LENGTH
        sequence.tokens = np.asarray(own.tokens, np.int32).tobytes()
        sequence.logprobs = np.asarray(own.logprobs, np.float32).tobytes()
        if own.top is not None:
            _write_top(sequence.topk_sampled_logprobs, own.top)
    if prompt.logprobs is not None:
        answer.prompt_logprobs = np.asarray(prompt.logprobs, np.float32).tobytes()
    if prompt.top is not None:
        _write_top(answer.topk_prompt_logprobs, prompt.top)
    if prompt.targets is not None:
        _write_targets(answer.target_prompt_logprobs, prompt.targets, prompt.target_layout)
    data: bytes = answer.SerializeToString()
    return data


def _write_top(message: Any, top: TopTokens) -> None:
    message.length, message.k = top.ids.shape
    message.token_ids = np.ascontiguousarray(top.ids, np.int32).tobytes()
    message.logprobs = np.ascontiguousarray(top.logprobs, np.float32).tobytes()


def _write_targets(message: Any, values: FloatArray, layout: JsonTensor | None) -> None:
    message.dtype = proto.DTYPE_FLOAT32
    message.shape.extend(values.shape)
    if layout is None:
        message.dense = np.ascontiguousarray(values, np.float32).tobytes()
        return
    ends, columns = np.asarray(layout.sparse_crow_indices, np.int64), np.asarray(layout.sparse_col_indices, np.int64)
    rows = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
    message.sparse_csr.values = values[rows, columns].astype(np.float32).tobytes()
    message.sparse_csr.crow_indices, message.sparse_csr.col_indices = ends.tobytes(), columns.tobytes()
