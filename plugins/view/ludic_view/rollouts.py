"""Rollouts as the API shows them: one with its turns and tokens, and what the trainer knows of these; groups; tasks."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ludic.types import Rollout, Step, spread_of
from ludic.types.rollout import DAMAGE, plain_fields
from ludic.types.segments import call_segments
from ludic_view.files import Card, compared_groups, is_zero_spread
from ludic_view.index import RunIndex
from ludic_view.queries import (
    BadQuery,
    JSONObject,
    NotFound,
    Query,
    flag_in,
    live,
    matching_cards,
    mean,
    number_in,
    page_of,
)
from ludic_view.tokens import TokenTexts, call_tokens, record_of, texts_of, trainer_columns


def _read_rollout(index: RunIndex, id: str) -> Rollout:
    found = index.find(id)
    if found is None:
        raise NotFound(f"Run {index.id} has no rollout {id!r:.80}.")
    try:
        return Rollout.from_json(found[1].read())
    except (OSError, *DAMAGE) as error:
        raise NotFound(f"Rollout {id!r:.80} of run {index.id} cannot be read: {error}") from error


def show_rollout(index: RunIndex, id: str, query: Query) -> JSONObject:
    rollout = _read_rollout(index, id)
    found = index.find(id)
    assert found is not None, "it has been read"
    card, texts = found[0], texts_of(index)
    record = record_of(index, id, card.step)
    columns = trainer_columns(rollout, record)
    view = _RolloutView(rollout, columns, texts, with_context=flag_in(query, "context"))
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
        credit = mean(given)
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


# --- groups and tasks -------------------------------------------------------------------------------------------


def groups(index: RunIndex, query: Query) -> JSONObject:
    """The groups that have a rollout which matches."""
    step = number_in(query, "step", int)
    rows = index.kept(("groups", step), lambda: _group_rows(index, step))
    if any(query.get(name) for name in query.keys() - {"step", "sort", "offset", "limit"}):
        matching = _by_group(matching_cards(index, query))
        rows = [row for row in rows if row["group"] in matching]
    how = query.get("sort", "order")
    keys: dict[str, Callable[[JSONObject], Any]] = {
        "spread": lambda row: row["spread"],
        "reward": lambda row: mean(row["rewards"]) or 0.0,
    }
    name, is_down = how.removeprefix("-"), how.startswith("-")
    if name in keys:
        rows = sorted(rows, key=keys[name], reverse=is_down)
    elif name != "order":
        raise BadQuery(f"sort={how!r:.50}; there are order, {', '.join(keys)}, and each with - in front.")
    return {"total": len(rows), "groups": list(page_of(rows, query))}


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
    """One group with its cards, the tree of their tokens, and where they part.

    A node of the tree has its position (`start`), `length` and text (`is_cut` if shortened), whether it was sampled (`is_action`),
    the numbers of the `rollouts` that pass through it, and those that end with it (`ends`).
    """
    members = _by_group(live(index)).get(group)
    if members is None:
        raise NotFound(f"Run {index.id} has no group {group!r:.80}.")
    read = [_read_rollout(index, card.id) for card in members]
    tree, difference = prefix_tree(read, texts_of(index))
    facts = _group_row(group, members)
    return {**facts, "cards": [c.shown() for c in members], "tree": tree, "first_difference": difference}


_TASK_SORTS = (
    "task", "num_rollouts", "num_failed", "step_last", "reward_first", "reward_last", "reward_mean", "gain", "trend",
)  # fmt: skip


def tasks(index: RunIndex, query: Query) -> JSONObject:
    """One row per task. `rewards` has the mean of each update in `steps`; `trend` is the change per update, by least squares.

    A task is the request's `task_id`, else its env and `sample_index`, else its env and a hash of the first prompt. Failed episodes
    have no reward.
    """
    rows = index.kept("tasks", lambda: _task_rows(index))
    how = query.get("sort", "task")
    name, is_down = how.removeprefix("-"), how.startswith("-")
    if name not in _TASK_SORTS:
        raise BadQuery(f"sort={how!r:.50}; there are {', '.join(_TASK_SORTS)}, and each with - in front.")
    # Tasks without a number, all of whose episodes failed, come last.
    numbered = sorted((row for row in rows if row[name] is not None), key=lambda row: row[name], reverse=is_down)
    rows = numbered + [row for row in rows if row[name] is None]
    return {"total": len(rows), "tasks": list(page_of(rows, query))}


def _task_rows(index: RunIndex) -> list[JSONObject]:
    by_task: dict[str, list[Card]] = defaultdict(list)
    for card in live(index):
        by_task[card.task].append(card)
    return [_task_row(task, members) for task, members in by_task.items()]


def _task_row(task: str, members: list[Card]) -> JSONObject:
    by_step = _by_step(members)
    rewards = {
        step: [None if card.failure is not None else card.reward for card in cards] for step, cards in by_step.items()
    }
    return {"task": task, **task_numbers(rewards), "preview": members[0].task_preview}


def task_numbers(rewards: Mapping[int, Sequence[float | None]]) -> JSONObject:
    """Statistics of a task from the rewards of each update, in order; None is an episode that failed."""
    earned = {step: [reward for reward in values if reward is not None] for step, values in rewards.items()}
    means = {step: mean(values) for step, values in earned.items()}
    points = [(step, reward) for step, reward in means.items() if reward is not None]
    first, last = (points[0][1], points[-1][1]) if points else (None, None)
    num_rollouts = sum(map(len, rewards.values()))
    return {
        "num_rollouts": num_rollouts,
        "num_failed": num_rollouts - sum(map(len, earned.values())),
        "steps": list(rewards),
        "step_last": max(rewards),
        "rewards": list(means.values()),
        "reward_first": first,
        "reward_last": last,
        "gain": None if first is None or last is None else last - first,
        "trend": _slope(points),
        "reward_mean": mean([reward for values in earned.values() for reward in values]),
    }


def _slope(points: Sequence[tuple[int, float]]) -> float | None:
    """Change per update, by least squares; None for fewer than two updates."""
    if len(points) < 2:
        return None
    steps, rewards = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    away = steps - steps.mean()
    return float(away @ rewards / (away @ away))


def _by_step(cards: Iterable[Card]) -> dict[int, list[Card]]:
    found: dict[int, list[Card]] = defaultdict(list)
    for card in cards:
        found[card.step].append(card)
    return dict(sorted(found.items()))


def show_task(index: RunIndex, task: str) -> JSONObject:
    """One task, with rewards and rollouts of each update."""
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
    """The place at which the first of these paths differs from another, in id or kind, or ends."""
    _, ids, mask = branch[0]
    end = len(ids)
    for _, other, other_mask in branch[1:]:
        shortest = min(end, len(other))
        is_other = (ids[start:shortest] != other[start:shortest]) | (mask[start:shortest] != other_mask[start:shortest])
        found = np.flatnonzero(is_other)
        end = start + int(found[0]) if len(found) else shortest
    return end


def _run_end(mask: np.ndarray, start: int) -> int:
    """The place after `start` at which tokens change between sampled and given."""
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
