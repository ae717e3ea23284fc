"""The answers of the viewer as plain dicts, for the server, `ludic view --json` and notebooks. docs/viewer-api.md has the fields.

Every function reads an index (`RunIndex`); `answer` maps a path such as /api/runs/x/steps to its function.
"""

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import msgspec

from ludic_view.files import Card, compared_groups, is_zero_spread, strict_json
from ludic_view.health import advisories
from ludic_view.index import RunIndex, Runs
from ludic_view.queries import (
    MAX_LIMIT,
    BadQuery,
    JSONObject,
    NotFound,
    Query,
    histogram,
    live,
    matching_cards,
    mean,
    number_in,
    page_of,
    sorted_cards,
)
from ludic_view.rollouts import groups, show_group, show_rollout, show_task, tasks
from ludic_view.tokens import has_texts

__all__ = [
    "MAX_LIMIT", "BadQuery", "NotFound", "answer", "encode", "groups", "histogram", "list_runs", "live", "metrics", "rollouts",
    "show_group", "show_rollout", "show_run", "show_task", "show_time", "state_of", "steps", "tasks",
]  # fmt: skip

RUNNING_S = 120.0
"""A run counts as running for so long after it wrote something, and for five times its last step."""


# --- paths ------------------------------------------------------------------------------------------------------


def answer(runs: Runs, path: str, *, seconds: float = float("inf")) -> JSONObject:
    """The answer to a path of the API with its query, such as /api/runs/x/rollouts?step=3; NotFound, BadQuery.

    `seconds`: for how long new files are read before the answer, which then is of what was read so far (`is_complete`).
    """
    parts = urlsplit(path)
    route = [unquote(part) for part in parts.path.strip("/").removeprefix("api").strip("/").split("/")]
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if route[:1] != ["runs"]:
        raise NotFound(f"There is no {path!r:.200}; the API begins at /api/runs.")
    if len(route) == 1:
        return list_runs(runs)
    id, rest = _split_id(runs, route[1:])
    index = runs.get(id)
    index.refresh(seconds)
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
    raise NotFound(f"The API has no {'/'.join(map(quote, rest))!r:.200}. docs/viewer-api.md lists what it has.")


def encode(found: JSONObject) -> bytes:
    """An answer as JSON that every reader takes."""
    try:
        return msgspec.json.encode(found)
    except (UnicodeEncodeError, TypeError):  # half of a surrogate pair in a reply
        return strict_json(json.dumps(found, default=str))


# --- runs -------------------------------------------------------------------------------------------------------


def list_runs(runs: Runs) -> JSONObject:
    """Every run below the root, with its state, settings and last metrics."""
    found = []
    for id in runs.ids():
        index = runs.get(id)
        index.refresh_metrics()
        found.append(_summary(index))
    return {"root": str(runs.root), "runs": found}


def _summary(index: RunIndex) -> JSONObject:
    steps = sorted(index.metrics)
    last = {name: value for step in steps[-3:] for name, value in index.metrics[step].items()}
    updated = index.updated()
    return {
        "id": index.id,
        "name": index.id.rpartition("/")[2],
        "state": state_of(index),
        "error": index.failure(),
        "damage": index.damage(),
        "step": steps[-1] if steps else 0,
        "steps_planned": _steps_planned(index),
        "env": index.setting("env", "id"),
        "model": index.setting("model", "model"),
        "algo": index.setting("algo", "algo"),
        "seed": index.setting("train", "seed"),
        "started": min(index.times.values(), default=None),
        "updated": updated or None,
        "last": last,
    }


def _steps_planned(index: RunIndex) -> int | None:
    planned = index.setting("train", "steps")
    return planned if isinstance(planned, int) else None


def state_of(index: RunIndex) -> str:
    """finished, failed, running or stopped, as far as a folder tells."""
    if index.failure() is not None:
        return "failed"
    steps, planned = sorted(index.metrics), _steps_planned(index)
    if steps and planned is not None and steps[-1] >= planned:
        return "finished"
    if not steps and (index.folder / "metrics.json").is_file():  # an evaluation writes it at its end
        return "finished"
    row = index.metrics[steps[-1]] if steps else {}
    took = sum(
        seconds or 0.0 for name, seconds in row.items() if name.endswith("perf/step_s")
    )  # of several policies each
    return "running" if time.time() - index.updated() < max(RUNNING_S, 5 * took) else "stopped"


def show_run(index: RunIndex) -> JSONObject:
    """One run: its settings, first and last step, names of metrics.

    `has_tokens`: the trainer wrote records; `has_text`: a tokenizer was found; `is_complete`: no large file is being read.
    """
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


def metrics(index: RunIndex, query: Query) -> JSONObject:
    """`steps`, and for each metric a number or null per step; `names` and `since` choose."""
    since = number_in(query, "since", int)
    steps = [step for step in sorted(index.metrics) if since is None or step > since]
    names = [name for name in query.get("names", "").split(",") if name]
    names = names or sorted({name for step in steps for name in index.metrics[step]})
    return {"steps": steps, "columns": {name: [index.metrics[step].get(name) for step in steps] for name in names}}


def steps(index: RunIndex) -> JSONObject:
    """One row per update: counts of rollouts, groups and failures, and their rewards."""
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
        "num_unreadable": sum(card.unreadable > 0 for card in cards),
        "reward_mean": mean(rewards),
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
        "tokens_mean": mean([card.tokens for card in cards]),
        "lag_max": max((card.lag for card in cards if card.lag is not None), default=None),
    }


def rollouts(index: RunIndex, query: Query) -> JSONObject:
    """The cards that match, and a histogram of the rewards of all of them."""
    found = sorted_cards(matching_cards(index, query), query.get("sort", "order"))
    rewards = [card.reward for card in found if card.failure is None]
    return {
        "total": len(found),
        "rollouts": [c.shown() for c in page_of(found, query)],
        "histogram": histogram(rewards),
    }


def show_time(index: RunIndex, query: Query) -> JSONObject:
    """Start, end and policy versions of episodes, lags, and what each update spent its time on."""
    step = number_in(query, "step", int)
    cards = [card for card in live(index) if step is None or card.step == step]
    lags = [float(card.lag) for card in cards if card.lag is not None]
    shown = page_of(sorted(cards, key=lambda card: card.started_ns or 0), query, usual=2_000)
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
