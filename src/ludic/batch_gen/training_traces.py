"""OpenEnv's training traces (schema 1) as rollouts: what its capture proxy recorded trains here, token for token.

A trace holds the selected model calls of one session: prompt and sampled ids, log-probs, and a loss mask. A sampled token whose
mask is 0 becomes state. The prompt is the engine's own; nothing is tokenised again. A trace carries no reward: it stands beside
the turns in a line of the file (as in OpenEnv's Harbor export), or is passed.
"""

import gzip
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ludic.batch_gen.external_rollouts import ExternalCall, rollout_of_calls
from ludic.types import ConfigError, Rollout, TokenTrace
from ludic.util.files import parse_json

logger = logging.getLogger(__name__)

_OPEN = {"top_p": (1, 1.0), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,), "presence_penalty": (0,),
         "frequency_penalty": (0,)}  # fmt: skip
"""Sampling settings and their values that leave the distribution as it is."""
_FACTS = ("task_id", "task_name", "dataset", "harness", "session_id", "rewards")
"""Kept in the rollout's meta, if the document has them."""


def read_training_traces(path: str | Path, *, rewards: Iterable[float] | None = None) -> Iterator[Rollout]:
    """The rollouts of a file with one trace per line, or one trace in the whole file; *.gz is read too.

    A line is a `TrainingTrace`, a Harbor export, or either with `reward` and `task_id` added. Rollouts of one `task_id` form a
    group. `rewards` has one number per trace, for files without them. Traces without a trained token are skipped with a warning.
    """
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"There is no file {path} to read training traces from.")
    given = None if rewards is None else iter(rewards)
    num_empty = 0
    for where, document in _documents(path):
        reward = None
        if given is not None:
            try:
                reward = next(given)
            except StopIteration:
                raise ConfigError(f"rewards has no number for {where}; give one per trace.") from None
        try:
            found = rollout_of_trace(document, reward=reward)
        except ValueError as error:
            raise ConfigError(f"{where} is no training trace of OpenEnv (schema 1): {error}") from error
        if found is None:
            num_empty += 1
        else:
            yield found
    if num_empty:
        logger.warning("%d traces of %s have no token to train on and were skipped.", num_empty, path)


def _documents(path: Path) -> Iterator[tuple[str, Any]]:
    """Every document of a file and its place, read as a stream if there is one per line."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"Line {number} of {path}"
            try:
                document = parse_json(line)
            except ValueError as error:
                if number > 1:
                    raise ConfigError(f"{where} is not JSON: {error}") from error
                where, document = str(path), _whole(path, line + file.read())
            yield where, document


def _whole(path: Path, text: bytes) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{path} holds neither one JSON document nor one per line: {error}") from error


def rollout_of_trace(
    document: Mapping[str, Any], *, reward: float | None = None, group_id: str | None = None
) -> Rollout | None:
    """The rollout of one trace; None if no token of it is trained. ValueError says what is wrong with the document.

    `reward` and `group_id` default to the document's `reward` and `task_id`. A turn whose mask has gaps gives one call per run of
    trained tokens, all in one turn; a turn that is masked as a whole is only part of later prompts.
    """
    if not isinstance(document, Mapping) or document.get("schema_version") != 1:
        version = document.get("schema_version") if isinstance(document, Mapping) else None
        raise ValueError(f"schema_version is {version!r}, not 1.")
    reward = document.get("reward") if reward is None else reward
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ValueError(f"its reward is {reward!r}; add a finite `reward` to the document, or pass one.")
    turns = document.get("trace_entries", document.get("turns"))
    if not isinstance(turns, list):
        raise ValueError("it has neither `turns` nor `trace_entries`.")
    names = [_name(turn, number) for number, turn in enumerate(turns)]
    if len(set(names)) != len(names):
        raise ValueError("it has the same node_id twice.")
    calls = [call for name, turn in zip(names, turns, strict=True) for call in _calls(name, turn)]
    if not calls:
        return None
    task = document.get("task_id")
    group = group_id or (str(task) if task is not None else f"trace {names[0]}")
    rollout = rollout_of_calls(calls, reward=float(reward), is_finished=True, group_id=group)
    rollout.meta["openenv"] = {fact: document[fact] for fact in _FACTS if document.get(fact) is not None}
    return rollout


def _name(turn: Any, number: int) -> str:
    if not isinstance(turn, Mapping):
        raise ValueError(f"turn {number} is no object.")
    name = turn.get("node_id") or (turn.get("metadata") or {}).get("node_id")
    if not isinstance(name, str):
        raise ValueError(f"turn {number} has no node_id.")
    return name


def _calls(name: str, turn: Mapping[str, Any]) -> list[ExternalCall]:
    """One call per run of trained tokens."""
    prompt, sampled, logps, mask = (
        _numbers(turn, name, key)
        for key in ("prompt_token_ids", "completion_token_ids", "per_token_logps", "loss_mask")
    )
    if len(logps) != len(sampled) or not all(math.isfinite(logp) for logp in logps):
        raise ValueError(f"turn {name} has {len(sampled)} sampled tokens and {len(logps)} log-probs; one finite each.")
    if len(mask) != len(prompt) + len(sampled) or not set(mask) <= {0, 1} or any(mask[: len(prompt)]):
        raise ValueError(
            f"turn {name}: loss_mask must be 0 over the {len(prompt)} tokens of the prompt and 0 or 1 behind."
        )
    trained = mask[len(prompt) :]
    choice = ((turn.get("response") or {}).get("choices") or [{}])[0]
    sampling = (turn.get("metadata") or {}).get("sampling_params") or {}
    temperature = sampling.get("temperature")
    runs = list(_runs(trained))
    calls = []
    for start, end in runs:
        is_last = (start, end) == runs[-1]
        trace = TokenTrace(
            prompt + sampled[:start],
            sampled[start:end],
            logps[start:end],
            finish_reason=choice.get("finish_reason") if is_last else None,
            temperature=None if temperature is None else float(temperature),
            untrainable_sampling=_untrainable(sampling),
        )
        text = (choice.get("message") or {}).get("content") or ""
        messages = (turn.get("request") or {}).get("messages") or []
        calls.append(ExternalCall(messages, text if is_last else "", trace, turn_id=name))
    return calls


def _numbers(turn: Mapping[str, Any], name: str, key: str) -> list[Any]:
    values = turn.get(key)
    kinds = (int, float) if key == "per_token_logps" else (int,)
    if not isinstance(values, list) or not all(isinstance(v, kinds) and not isinstance(v, bool) for v in values):
        raise ValueError(f"turn {name}: {key} is no list of {'numbers' if len(kinds) == 2 else 'whole numbers'}.")
    return values


def _runs(trained: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and end of each run of ones."""
    edges = [i for i, (before, now) in enumerate(zip([0, *trained], [*trained, 0], strict=True)) if before != now]
    return zip(edges[::2], edges[1::2], strict=True)


def _untrainable(sampling: Mapping[str, Any]) -> str | None:
    """Settings that cut or reshaped the distribution, which a trainer cannot reproduce from the trace."""
    cut = [f"{key}={sampling[key]}" for key, open_ in _OPEN.items() if sampling.get(key) not in (None, *open_)]
    return ", ".join(cut) or None
