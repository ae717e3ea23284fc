"""The answers of the viewer as plain dicts, for the server, `ludic view --json` and notebooks. docs/viewer.md has the fields.

Every function reads an index (`RunIndex`); `answer` maps a path such as /api/runs/x/steps to its function.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import msgspec
import numpy as np

from ludic.batch_gen.stitching import call_segments
from ludic.types import LudicError, Rollout, Step, spread_of
from ludic.types.rollout import plain_fields
from ludic.view.health import advisories
from ludic.view.index import Card, RunIndex, Runs, compared_groups, is_zero_spread, strict_json
from ludic.view.tokens import TokenTexts, call_tokens, has_texts, record_of, texts_of, trainer_columns

JSONObject: TypeAlias = dict[str, Any]
Query: TypeAlias = Mapping[str, str]
MAX_LIMIT = 10_000
NUM_BINS = 20
RUNNING_S = 120.0
"""A run counts as running for so long after it wrote something, and for five times its last step."""


class NotFound(LudicError):
    """There is no such run, rollout, group or task."""


class BadQuery(LudicError):
    """A parameter of a request cannot be used."""


# --- runs -------------------------------------------------------------------------------------------------------


def list_runs(runs: Runs) -> JSONObject:
    found = []
    for id in runs.ids():
        index = runs.get(id)
        index.refresh_metrics()
        found.append(_summary(index))
    return {"root": str(runs.root), "runs": found}


def _summary(index: RunIndex) -> JSONObject:
    config = index.config
    steps = sorted(index.metrics)
    last = {name: value for step in steps[-3:] for name, value in index.metrics[step].items()}
    updated = index.updated()
    planned = _setting(config, "train", "steps")
    return {
        "id": index.id,
        "name": index.id.rpartition("/")[2],
        "state": state_of(index),
        "error": index.failure(),
        "step": steps[-1] if steps else 0,
        "steps_planned": planned,
        "env": _setting(config, "env", "id"),
        "model": _setting(config, "model", "model"),
        "algo": _setting(config, "algo", "algo"),
        "seed": _setting(config, "train", "seed"),
        "started": min(index.times.values(), default=None),
        "updated": updated or None,
        "last": last,
    }


def _setting(config: Mapping[str, Any], section: str, name: str) -> Any:
    table = config.get(section)
    return table.get(name) if isinstance(table, Mapping) else None


def state_of(index: RunIndex) -> str:
    """finished, failed, running or stopped, as far as a folder tells."""
    steps, planned = sorted(index.metrics), _setting(index.config, "train", "steps")
    if steps and isinstance(planned, int) and steps[-1] >= planned:
        return "finished"
    if not steps and (index.folder / "metrics.json").is_file():  # an evaluation writes it at its end
        return "finished"
    if index.failure() is not None:
        return "failed"
    took = index.metrics[steps[-1]].get("perf/step_s") if steps else None
    return "running" if time.time() - index.updated() < max(RUNNING_S, 5 * (took or 0.0)) else "stopped"


def show_run(index: RunIndex) -> JSONObject:
    steps = sorted(index.kept("steps_seen", lambda: {card.step for card in live(index)}) | set(index.metrics))
    return {
        **_summary(index),
        "config": index.config,
        "steps": [steps[0], steps[-1]] if steps else [0, 0],
        "num_rollouts": len(live(index)),
        "num_abandoned": len(index.cards) - len(live(index)),
        "num_damaged": index.num_damaged,
        "has_tokens": bool(index.trained_files),
        "has_text": has_texts(index),
        "metrics": sorted({name for row in index.metrics.values() for name in row}),
        "is_complete": index.is_complete,
    }


def live(index: RunIndex) -> list[Card]:
    """The rollouts of the run, without those that a resumed start has played again."""
    return index.kept("live", lambda: [card for card in index.cards if not card.is_abandoned])


def metrics(index: RunIndex, query: Query) -> JSONObject:
    since = _number(query, "since", int)
    steps = [step for step in sorted(index.metrics) if since is None or step > since]
    names = [name for name in query.get("names", "").split(",") if name]
    names = names or sorted({name for step in steps for name in index.metrics[step]})
    return {"steps": steps, "columns": {name: [index.metrics[step].get(name) for step in steps] for name in names}}


def steps(index: RunIndex) -> JSONObject:
    return index.kept("steps", lambda: _steps(index))


def _steps(index: RunIndex) -> JSONObject:
    by_step: dict[int, list[Card]] = defaultdict(list)
    for card in live(index):
        by_step[card.step].append(card)
    return {"steps": [_step_row(step, by_step[step]) for step in sorted(by_step)]}


def _step_row(step: int, cards: list[Card]) -> JSONObject:
    rewards = [card.reward for card in cards if card.failure is None]
    groups = compared_groups(cards)
    return {
        "step": step,
        "num_rollouts": len(cards),
        "num_groups": len({card.group for card in cards if card.group is not None}),
        "num_zero_spread": sum(is_zero_spread(members) for members in groups.values()),
        "num_failed": sum(card.failure is not None for card in cards),
        "num_truncated": sum(card.truncated for card in cards),
        "num_parse_errors": sum(card.parse_errors > 0 for card in cards),
        "reward_mean": _mean(rewards),
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
        "tokens_mean": _mean([card.tokens for card in cards]),
        "lag_max": max((card.lag for card in cards if card.lag is not None), default=None),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# --- rollouts ---------------------------------------------------------------------------------------------------


def rollouts(index: RunIndex, query: Query) -> JSONObject:
    found = _sorted(_matching(index, query), query.get("sort", "order"))
    rewards = [card.reward for card in found if card.failure is None]
    return {"total": len(found), "rollouts": [c.shown() for c in _page(found, query)], "histogram": histogram(rewards)}


def _matching(index: RunIndex, query: Query) -> list[Card]:
    cards = live(index) if not _flag(query, "abandoned") else index.cards
    tests: list[Callable[[Card], bool]] = []
    if (step := _number(query, "step", int)) is not None:
        tests.append(lambda card: card.step == step)
    for name in ("group", "task", "stop", "agent", "env", "model"):
        if (wanted := query.get(name)) is not None and wanted != "":
            tests.append(lambda card, name=name, wanted=wanted: getattr(card, name) == wanted)  # type: ignore[misc]
    if (least := _number(query, "reward_min", float)) is not None:
        tests.append(lambda card: card.reward >= least)
    if (most := _number(query, "reward_max", float)) is not None:
        tests.append(lambda card: card.reward <= most)
    for flag, test in _FLAGS.items():
        if _flag(query, flag):
            tests.append(test)
    found = [card for card in cards if all(test(card) for test in tests)]
    if _flag(query, "zero_spread"):
        zero = index.kept("zero", lambda: _zero_spread_groups(index))
        found = [card for card in found if card.compared in zero]
    return _with_text(index, found, query["text"]) if query.get("text") else found


def _zero_spread_groups(index: RunIndex) -> set[Any]:
    return {key for key, members in compared_groups(live(index)).items() if is_zero_spread(members)}


_FLAGS: dict[str, Callable[[Card], bool]] = {
    "failed": lambda card: card.failure is not None,
    "parse_error": lambda card: card.parse_errors > 0,
    "truncated": lambda card: card.truncated,
    "trained": lambda card: card.is_trained,
}


class _TextStep(msgspec.Struct):
    action: str = ""
    next_obs: str | None = None
    prev_obs: str | None = None
    prompt_messages: msgspec.Raw = msgspec.Raw(b"")
    tool_results: msgspec.Raw = msgspec.Raw(b"")


class _Texts(msgspec.Struct):
    steps: list[_TextStep] = []


_decode_texts = msgspec.json.Decoder(_Texts).decode


def _with_text(index: RunIndex, cards: list[Card], wanted: str) -> list[Card]:
    """Rollouts whose prompts, replies or observations contain a text, in any case."""
    wanted = wanted.casefold()
    # A line is ASCII: a quick look at its bytes leaves out most of them before any is decoded.
    quick = wanted.encode() if wanted.isascii() and wanted.isprintable() and not set(wanted) & {'"', "\\"} else None
    found = []
    for card in cards:
        text = index.line_of(card).read()
        if quick is not None and quick not in text.lower():
            continue
        try:
            decoded = _decode_texts(text)
        except msgspec.DecodeError:
            decoded = _decode_texts(strict_json(text))
        if any(wanted in part.casefold() for step in decoded.steps for part in _texts_in(step)):
            found.append(card)
    return found


def _texts_in(step: _TextStep) -> Iterable[str]:
    yield step.action
    yield step.next_obs or ""
    yield step.prev_obs or ""
    for raw in (step.prompt_messages, step.tool_results):
        if bytes(raw):
            yield from _strings(msgspec.json.decode(raw))


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name != "role":
                yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


_SORTS: dict[str, Callable[[Card], Any]] = {
    "reward": lambda card: card.reward,
    "tokens": lambda card: card.tokens,
    "time": lambda card: card.started_ns or 0,
    "step": lambda card: card.step,
    "lag": lambda card: card.lag or 0,
    "turns": lambda card: card.turns,
}


def _sorted(cards: list[Card], how: str) -> list[Card]:
    name, is_down = how.removeprefix("-"), how.startswith("-")
    if name == "order":
        return cards[::-1] if is_down else cards
    if name not in _SORTS:
        raise BadQuery(f"sort={how!r:.50}; there are order, {', '.join(_SORTS)}, and each with - in front.")
    return sorted(cards, key=_SORTS[name], reverse=is_down)


def histogram(values: Sequence[float]) -> JSONObject:
    """Counts in equal bins; where there are few different values, one bin for each of `values`."""
    different = sorted(set(values))
    if not different:
        return {"edges": [], "counts": []}
    if len(different) <= NUM_BINS and len(different) > 1:
        gaps = [(a + b) / 2 for a, b in pairwise(different)]
        edges = [different[0] - (gaps[0] - different[0]), *gaps, different[-1] + (different[-1] - gaps[-1])]
    else:
        low, high = different[0], different[-1]
        edges = np.linspace(low, high, NUM_BINS + 1).tolist() if high > low else [low - 0.5, low + 0.5]
    counts, _ = np.histogram(values, bins=edges)
    found = {"edges": edges, "counts": counts.tolist()}
    return found | {"values": different} if len(different) == len(counts) else found


def _page(found: Sequence[Any], query: Query, usual: int = 100) -> Sequence[Any]:
    offset, limit = _number(query, "offset", int) or 0, _number(query, "limit", int)
    if offset < 0 or (limit is not None and limit < 0):
        raise BadQuery("offset and limit must be 0 or more.")
    return found[offset : offset + min(usual if limit is None else limit, MAX_LIMIT)]


def _number(query: Query, name: str, kind: type[int] | type[float]) -> Any:
    text = query.get(name)
    if text is None or text == "":
        return None
    try:
        number = kind(text)
    except ValueError:
        raise BadQuery(f"{name}={text!r:.50} is not a number.") from None
    if not math.isfinite(number):
        raise BadQuery(f"{name}={text!r:.50} is not a finite number.")
    return number


def _flag(query: Query, name: str) -> bool:
    return query.get(name, "") not in ("", "0", "false")


# --- groups and tasks -------------------------------------------------------------------------------------------


def groups(index: RunIndex, query: Query) -> JSONObject:
    step = _number(query, "step", int)
    rows = index.kept(("groups", step), lambda: _group_rows(index, step))
    if any(query.get(name) for name in query.keys() - {"step", "sort", "offset", "limit"}):
        matching = _by_group(_matching(index, query))
        rows = [row for row in rows if row["group"] in matching]
    how = query.get("sort", "order")
    keys: dict[str, Callable[[JSONObject], Any]] = {
        "spread": lambda row: row["spread"],
        "reward": lambda row: _mean(row["rewards"]) or 0.0,
    }
    name, is_down = how.removeprefix("-"), how.startswith("-")
    if name in keys:
        rows = sorted(rows, key=keys[name], reverse=is_down)
    elif name != "order":
        raise BadQuery(f"sort={how!r:.50}; there are order, {', '.join(keys)}, and each with - in front.")
    return {"total": len(rows), "groups": list(_page(rows, query))}


def _group_rows(index: RunIndex, step: int | None) -> list[JSONObject]:
    cards = [card for card in live(index) if step is None or card.step == step]
    return [_group_row(group, members) for group, members in _by_group(cards).items()]


def _by_group(cards: Iterable[Card]) -> dict[str, list[Card]]:
    found: dict[str, list[Card]] = defaultdict(list)
    for card in cards:
        found[card.group if card.group is not None else card.id].append(card)
    return found


def _group_row(group: str, members: list[Card]) -> JSONObject:
    rewards = [card.reward for card in members]
    return {
        "group": group,
        "task": members[0].task,
        "step": members[0].step,
        "rewards": rewards,
        "spread": float(spread_of(rewards)),
        "zero_spread": all(map(is_zero_spread, compared_groups(members).values())) and len(members) > 1,
        "failed": sum(card.failure is not None for card in members),
        "rollouts": [card.id for card in members],
        "preview": members[0].task_preview,
    }


def show_group(index: RunIndex, group: str) -> JSONObject:
    members = _by_group(live(index)).get(group)
    if members is None:
        raise NotFound(f"Run {index.id} has no group {group!r:.80}.")
    read = [_read(index, card.id) for card in members]
    tree, difference = prefix_tree(read, texts_of(index))
    facts = _group_row(group, members)
    return {**facts, "cards": [c.shown() for c in members], "tree": tree, "first_difference": difference}


def tasks(index: RunIndex, query: Query) -> JSONObject:
    rows = index.kept("tasks", lambda: _task_rows(index))
    how = query.get("sort", "task")
    name, is_down = how.removeprefix("-"), how.startswith("-")
    if name not in ("task", "num_rollouts", "reward_first", "reward_last", "reward_mean", "gain"):
        raise BadQuery(f"sort={how!r:.50}; there are task, num_rollouts, reward_first, reward_last, reward_mean, gain.")
    rows = sorted(rows, key=lambda row: row[name], reverse=is_down)
    return {"total": len(rows), "tasks": list(_page(rows, query))}


def _task_rows(index: RunIndex) -> list[JSONObject]:
    by_task: dict[str, list[Card]] = defaultdict(list)
    for card in live(index):
        by_task[card.task].append(card)
    return [_task_row(task, members) for task, members in by_task.items()]


def _task_row(task: str, members: list[Card]) -> JSONObject:
    by_step = _by_step(members)
    first, *_, last = [*by_step.values()] * 2
    means = [_mean([card.reward for card in cards]) or 0.0 for cards in (first, last)]
    return {
        "task": task,
        "num_rollouts": len(members),
        "steps": list(by_step),
        "reward_first": means[0],
        "reward_last": means[1],
        "gain": means[1] - means[0],
        "reward_mean": _mean([card.reward for card in members]),
        "preview": members[0].task_preview,
    }


def _by_step(cards: Iterable[Card]) -> dict[int, list[Card]]:
    found: dict[int, list[Card]] = defaultdict(list)
    for card in cards:
        found[card.step].append(card)
    return dict(sorted(found.items()))


def show_task(index: RunIndex, task: str) -> JSONObject:
    members = [card for card in live(index) if card.task == task]
    if not members:
        raise NotFound(f"Run {index.id} has no task {task!r:.80}.")
    by_step = [
        {
            "step": step,
            "rewards": [card.reward for card in cards],
            "rollouts": [card.id for card in cards],
            "groups": list(dict.fromkeys(card.group for card in cards)),
            "previews": [card.preview for card in cards],
        }
        for step, cards in _by_step(members).items()
    ]
    return {**_task_row(task, members), "by_step": by_step}


# --- time -------------------------------------------------------------------------------------------------------


def show_time(index: RunIndex, query: Query) -> JSONObject:
    step = _number(query, "step", int)
    cards = [card for card in live(index) if step is None or card.step == step]
    lags = [float(card.lag) for card in cards if card.lag is not None]
    shown = _page(sorted(cards, key=lambda card: card.started_ns or 0), query, usual=2_000)
    names = ("id", "group", "started_ns", "ended_ns", "step", "versions", "tokens", "reward", "stop")
    episodes = [{name: facts[name] for name in names} for card in shown if (facts := card.shown())]
    last = index.metrics.get(max(index.metrics), {}) if index.metrics else {}
    account = {name: value for name, value in last.items() if name.startswith("pipeline/")}
    return {
        "total": len(cards),
        "episodes": episodes,
        "lag_histogram": histogram(lags),
        "steps": [
            {"step": number, "time": index.times.get(number), **{n: v for n, v in row.items() if n in _TIMES}}
            for number, row in sorted(index.metrics.items())
            if step is None or number == step
        ],
        "pipeline": account or None,
    }


_TIMES = ("perf/generation_s", "perf/fetch_s", "perf/update_s", "perf/publish_s", "perf/step_s")


# --- one rollout ------------------------------------------------------------------------------------------------


def _read(index: RunIndex, id: str) -> Rollout:
    found = index.find(id)
    if found is None:
        raise NotFound(f"Run {index.id} has no rollout {id!r:.80}.")
    try:
        return Rollout.from_json(found[1].read())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotFound(f"Rollout {id!r:.80} of run {index.id} cannot be read: {error}") from error


def show_rollout(index: RunIndex, id: str, query: Query) -> JSONObject:
    rollout = _read(index, id)
    found = index.find(id)
    assert found is not None, "it has been read"
    card, texts = found[0], texts_of(index)
    record = record_of(index, id, card.step)
    columns = trainer_columns(rollout, record)
    view = _RolloutView(rollout, columns, texts, with_context=_flag(query, "context"))
    first = next((step for step in rollout.sampling_steps), None)
    prompt = [] if first is None or first.trace is None else first.trace.prompt_token_ids.tolist()
    return {
        **card.shown(),
        "num_turns": card.turns,
        "num_tokens": card.tokens,
        "meta": rollout.meta,
        "failure_details": None if rollout.failure is None else plain_fields(rollout.failure),
        "has_trainer": record is not None,
        "turns": [view.turn(turn.number, turn.steps) for turn in rollout.turns()],
        "prompt": {"text": texts.of(prompt), "id": prompt},
    }


class _RolloutView:
    """Makes the turns of a rollout."""

    def __init__(
        self,
        rollout: Rollout,
        columns: Mapping[str, tuple[int, dict[str, np.ndarray]]],
        texts: TokenTexts,
        *,
        with_context: bool,
    ) -> None:
        self._columns, self._texts, self._with_context = columns, texts, with_context
        self._messages: list[Any] = []
        self._known: list[int] = []
        """Tokens of the call before."""

    def turn(self, number: int, steps: Sequence[Step]) -> JSONObject:
        shown = [self._step(step) for step in steps]
        weights = [self._columns[step.id][1].get("weight") for step in steps if step.id in self._columns]
        given = [float(weight.mean()) for weight in weights if weight is not None and len(weight)]
        credit = _mean(given)
        return {"number": number, "reward": sum(step.reward for step in steps), "credit": credit, "steps": shown}

    def _step(self, step: Step) -> JSONObject:
        common = {
            "index": step.index,
            "action": step.action,
            "reward": step.reward,
            "reward_components": step.reward_components,
            "info": step.info,
            "terminated": step.terminated,
            "truncated": step.truncated,
            "ts_ns": step.ts_ns,
        }
        if step.kind == "env":
            shown = {"kind": "env", **common, "obs": step.next_obs, "parsed_action": step.parsed_action}
            return shown | (self._tokens(step) if step.id in self._columns else {})
        messages = list(step.prompt_messages)
        is_longer = messages[: len(self._messages)] == self._messages
        new = messages[len(self._messages) :] if is_longer else messages
        self._messages = messages
        return {
            "kind": "call",
            **common,
            "target": step.action_target,
            "messages_new": new,
            "rewrites_history": not is_longer,
            "tool_calls": None if step.tool_calls is None else [_plain(call) for call in step.tool_calls],
            "tool_results": None if step.tool_results is None else list(step.tool_results),
            **self._tokens(step),
        }

    def _tokens(self, step: Step) -> JSONObject:
        trace = step.trace
        if trace is None:
            return {}
        segment, columns = self._columns.get(step.id, (None, {}))
        prompt = trace.prompt_token_ids.tolist()
        shown = {
            "finish_reason": trace.finish_reason,
            "version_runs": [list(run) for run in trace.version_runs],
            "temperature": trace.temperature,
            "segment": segment,
            "prompt_tokens": len(prompt),
            "tokens": call_tokens(step, columns, self._texts),
        }
        if self._with_context:
            new = prompt[len(self._known) :] if prompt[: len(self._known)] == self._known else prompt
            shown["context"] = {"id": new, "text": self._texts.of(new)}
            self._known = [*prompt, *trace.completion_token_ids.tolist()]
        return shown


def _plain(value: Any) -> Any:
    return value if isinstance(value, Mapping) else msgspec.to_builtins(value)


# --- a group's tree of common prefixes --------------------------------------------------------------------------

_MAX_NODE_CHARS = 4_000


def prefix_tree(read: Sequence[Rollout], texts: TokenTexts) -> tuple[JSONObject, JSONObject | None]:
    """The tree of the rollouts' tokens, each shared run of tokens once; and where the first two of them part."""
    paths: list[tuple[int, np.ndarray, np.ndarray]] = []
    for number, rollout in enumerate(read):
        for calls in call_segments(rollout):
            ids, is_action = _sequence(calls)
            paths.append((number, ids, is_action))
    nodes: list[JSONObject] = []
    _grow(nodes, None, 0, paths, texts)
    return {"nodes": nodes}, _first_difference(nodes, read)


def _sequence(calls: Sequence[Step]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of one sample, and which of them are sampled."""
    traces = [call.trace for call in calls if call.trace is not None]
    ids = np.concatenate([traces[-1].prompt_token_ids, traces[-1].completion_token_ids])
    is_action = np.zeros(len(ids), dtype=bool)
    for trace in traces:
        start = len(trace.prompt_token_ids)
        is_action[start : start + len(trace.completion_token_ids)] = True
    return ids, is_action


def _grow(
    nodes: list[JSONObject],
    parent: int | None,
    start: int,
    paths: Sequence[tuple[int, np.ndarray, np.ndarray]],
    texts: TokenTexts,
) -> None:
    """Add the nodes below `parent` for paths that are the same up to `start`; a stack, since dialogs are long."""
    todo = [(parent, start, list(paths))]
    while todo:
        parent, start, members = todo.pop()
        branches: dict[tuple[int, bool], list[tuple[int, np.ndarray, np.ndarray]]] = defaultdict(list)
        for path in members:
            if len(path[1]) > start:
                branches[int(path[1][start]), bool(path[2][start])].append(path)
        for (_, is_action), branch in branches.items():
            end = min(_common_end(branch, start), _run_end(branch[0][2], start))
            ids = branch[0][1][start:end]
            text = texts.joined(ids.tolist())
            nodes.append(
                {
                    "id": len(nodes),
                    "parent": parent,
                    "start": start,
                    "length": end - start,
                    "text": text[:_MAX_NODE_CHARS],
                    "is_cut": len(text) > _MAX_NODE_CHARS,
                    "rollouts": sorted({number for number, _, _ in branch}),
                    "ends": sorted({number for number, path, _ in branch if len(path) == end}),
                    "is_action": is_action,
                }
            )
            todo.append((len(nodes) - 1, end, branch))


def _common_end(branch: Sequence[tuple[int, np.ndarray, np.ndarray]], start: int) -> int:
    """Where the first of these paths differs from another, in id or kind, or ends."""
    _, ids, mask = branch[0]
    end = len(ids)
    for _, other, other_mask in branch[1:]:
        shortest = min(end, len(other))
        is_other = (ids[start:shortest] != other[start:shortest]) | (mask[start:shortest] != other_mask[start:shortest])
        found = np.flatnonzero(is_other)
        end = start + int(found[0]) if len(found) else shortest
    return end


def _run_end(mask: np.ndarray, start: int) -> int:
    """Where the tokens after `start` change between sampled and given."""
    found = np.flatnonzero(mask[start:] != mask[start])
    return start + int(found[0]) if len(found) else len(mask)


def _first_difference(nodes: Sequence[JSONObject], read: Sequence[Rollout]) -> JSONObject | None:
    """The first token at which the rollouts part: the call that samples it, and its number in the reply."""
    children: dict[int | None, list[JSONObject]] = defaultdict(list)
    for node in nodes:
        children[node["parent"]].append(node)
    parent, position = None, 0
    while len(children[parent]) == 1:
        node = children[parent][0]
        if node["ends"] and len(node["rollouts"]) > len(node["ends"]):
            position = node["start"] + node["length"]
            break
        parent, position = node["id"], node["start"] + node["length"]
    if len(read) < 2 or not children[parent]:
        return None
    for number, step in enumerate(read[0].sampling_steps):
        if step.trace is not None and position < len(step.trace.prompt_token_ids) + len(
            step.trace.completion_token_ids
        ):
            token = position - len(step.trace.prompt_token_ids)
            return {"call": number, "token": max(token, 0), "position": position, "is_action": token >= 0}
    return {"call": 0, "token": 0, "position": position, "is_action": False}


def encode(found: JSONObject) -> bytes:
    """An answer as JSON that every reader takes."""
    try:
        return msgspec.json.encode(found)
    except (UnicodeEncodeError, TypeError):  # half of a surrogate pair in a reply
        return strict_json(json.dumps(found, default=str))


# --- paths ------------------------------------------------------------------------------------------------------


def answer(runs: Runs, path: str) -> JSONObject:
    """The answer to a path of the API with its query, such as /api/runs/x/rollouts?step=3; NotFound, BadQuery."""
    parts = urlsplit(path)
    route = [unquote(part) for part in parts.path.strip("/").removeprefix("api").strip("/").split("/")]
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if route[:1] != ["runs"]:
        raise NotFound(f"There is no {path!r:.200}; the API begins at /api/runs.")
    if len(route) == 1:
        return list_runs(runs)
    id, rest = _split_id(runs, route[1:])
    index = runs.get(id)
    index.refresh()
    return _of_run(index, rest, query)


def _split_id(runs: Runs, route: Sequence[str]) -> tuple[str, list[str]]:
    """The run's id may have slashes, quoted or not."""
    ids = set(runs.ids())
    for end in range(len(route), 0, -1):
        if (id := "/".join(route[:end])) in ids:
            return id, list(route[end:])
    known = ", ".join(sorted(ids)[:20]) or "none"
    raise NotFound(f"There is no run {route[0]!r:.80} in {runs.root}. There are: {known}.")


def _of_run(index: RunIndex, rest: Sequence[str], query: Query) -> JSONObject:
    match list(rest):
        case []:
            return show_run(index)
        case ["metrics"]:
            return metrics(index, query)
        case ["steps"]:
            return steps(index)
        case ["rollouts"]:
            return rollouts(index, query)
        case ["rollouts", id]:
            return show_rollout(index, id, query)
        case ["groups"]:
            return groups(index, query)
        case ["groups", group]:
            return show_group(index, group)
        case ["tasks"]:
            return tasks(index, query)
        case ["tasks", *task]:
            return show_task(index, "/".join(task))
        case ["time"]:
            return show_time(index, query)
        case ["health"]:
            return {"advisories": advisories(index)}
    raise NotFound(f"The API has no {'/'.join(map(quote, rest))!r:.200}. docs/viewer.md lists what it has.")
