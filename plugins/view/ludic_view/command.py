"""`ludic view`: runs in a browser. `ludic show`: rollouts in a terminal. Both ask `ludic_view.api`; see docs/viewer.md."""

import asyncio
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import tyro
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ludic.cli.args import Switch, parse
from ludic.cli.terminal.colour import harmless, make_console
from ludic.http.address import require_port
from ludic.types import ConfigError, MissingExtra
from ludic.types.messages import text_of
from ludic.util.stop import serve_until_stopped
from ludic_view import api
from ludic_view.index import RunIndex, Runs

FOREVER = float("inf")
MAX_EXPORTED = 64


@dataclass(frozen=True)
class ViewArgs:
    """Look at the rollouts, tokens and metrics of runs in a browser, also while they train."""

    runs: tyro.conf.Positional[Path] = Path("runs")
    """A run folder, or the folder that runs are in."""
    port: int = 7711
    """Port; 0 takes a free one."""
    host: str = "127.0.0.1"
    """Address to listen on; other than loopback it wants a --token."""
    token: str | None = None
    """A secret that a browser sends in the address (?token=…) and a script as a bearer token. Default: $LUDIC_VIEW_TOKEN."""
    export: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write one HTML file of a run that opens without a server, and end. Inside are the first and the last update's best and
    worst groups, or --rollout."""
    rollout: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="ID")] = ()
    """For --export: a rollout to put in; may be repeated."""
    json: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """Print the answer to a path of the API, such as /api/runs/x/steps, and end."""

    def __post_init__(self) -> None:
        require_port(self.port)


def view(args: list[str]) -> int:
    given = parse(ViewArgs, args, prog="ludic view")
    runs = find_runs(given.runs)
    if given.json is not None:
        for id in runs.ids():
            if quote(id, safe="") in given.json or id in given.json:
                runs.get(id).refresh(FOREVER)
        found = api.encode(api.answer(runs, given.json)) + b"\n"
        sys.stdout.buffer.write(harmless(found.decode()).encode() if sys.stdout.isatty() else found)
        return 0
    if given.export is not None:
        return _export(runs, given.export, given.rollout)
    try:
        from ludic_view.server import serve
    except ImportError as error:
        raise MissingExtra("view", "ludic view") from error

    def announce(address: str) -> None:
        print(f"{len(runs.ids())} runs of {runs.root} at {address} (Ctrl-C stops)", flush=True)

    token = given.token or os.environ.get("LUDIC_VIEW_TOKEN") or None
    asyncio.run(serve_until_stopped(serve(runs, given.host, given.port, token=token, on_ready=announce)))
    print("Stopped.")
    return 0


def _export(runs: Runs, file: Path, chosen: Sequence[str]) -> int:
    from ludic_view.export import export_page

    if len(runs.ids()) != 1:
        raise ConfigError(f"--export takes one run; {runs.root} has: {', '.join(runs.ids()) or 'none'}.")
    index = runs.get(runs.ids()[0])
    index.refresh(FOREVER)
    ids = [_rollout_id(index, id) for id in chosen] or _typical_rollouts(index)
    if not ids:
        raise ConfigError(f"{index.folder} holds no rollouts to export.")
    page = export_page(partial(api.answer, runs), index.id, ids)
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write {file}: {error.strerror}.") from error
    print(f"Written: {file}, {len(ids)} rollouts, {file.stat().st_size / 1e6:.1f} MB")
    return 0


def _typical_rollouts(index: RunIndex) -> list[str]:
    """The groups with the best and the worst mean reward of the first and of the last update."""
    steps = [row["step"] for row in api.steps(index)["steps"]]
    ids: list[str] = []
    for step in dict.fromkeys([*steps[:1], *steps[-1:]]):
        groups = api.groups(index, {"step": str(step), "sort": "reward", "limit": str(api.MAX_LIMIT)})["groups"]
        for group in [*groups[:1], *groups[-1:]]:
            ids += [id for id in group["rollouts"] if id not in ids]
    return ids[:MAX_EXPORTED]


# --- which run --------------------------------------------------------------------------------------------------


def find_runs(place: Path) -> Runs:
    """The runs in a folder; a name is also looked for in runs/."""
    if not place.is_dir() and (Path("runs") / place).is_dir():
        place = Path("runs") / place
    if place.is_dir():
        return Runs(place)
    parent = place.parent if place.parent != Path() and place.parent.is_dir() else Path("runs")
    known = Runs(parent).ids() if parent.is_dir() else []
    near = difflib.get_close_matches(place.name, known, n=1)
    hint = f" Did you mean {parent / near[0]}?" if near else ""
    raise ConfigError(f"There is no {place}.{hint} Runs in {parent}: {', '.join(known[:20]) or 'none'}.")


def _find_run(place: Path) -> RunIndex:
    """One run, or one file of rollouts, all of it read."""
    if place.is_file():
        return _file_of_rollouts(place)
    runs = find_runs(place)
    if len(runs.ids()) != 1:
        raise ConfigError(f"{place} is not a run. Runs in it: {', '.join(runs.ids()[:20]) or 'none'}.")
    index = runs.get(runs.ids()[0])
    index.refresh(FOREVER)
    return index


def _file_of_rollouts(path: Path) -> RunIndex:
    index = RunIndex(path.name, path)
    index.refresh(FOREVER)
    if not index.cards:
        raise ConfigError(
            f"{path} holds no rollouts. `ludic show` takes a run folder, or a file with one rollout per line (JSON, plain or .gz)."
        )
    return index


def _rollout_id(index: RunIndex, given: str) -> str:
    """A rollout by its id, or by a part of it that no other has."""
    if index.find(given) is not None:
        return given
    found = [card.id for card in index.cards if given in card.id]
    if len(found) == 1:
        return found[0]
    known = f"{len(found)} rollouts have it in their id" if found else "no rollout has it in its id"
    raise ConfigError(f"--rollout {given}: {known}. `ludic show {index.folder} --step N` lists them.")


# --- ludic show -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShowArgs:
    """Show a run in the terminal: its updates, the rollouts of one, or one rollout turn by turn."""

    run: tyro.conf.Positional[Path]
    """A run folder, or its name in runs/; or a file of rollouts (*.jsonl, *.jsonl.gz)."""
    step: int | None = None
    """The rollouts of this update."""
    worst: Switch = False
    """The rollout with the lowest reward, of --step or of the last update."""
    best: Switch = False
    """The rollout with the highest reward."""
    failed: Switch = False
    """The last episode that failed, with its traceback."""
    task: str | None = None
    """One task over all updates, and its last rollout; with --best or --worst that one."""
    rollout: str | None = None
    """This rollout; a part of its id is enough."""

    def __post_init__(self) -> None:
        if self.worst + self.best + self.failed + (self.rollout is not None) > 1:
            raise ConfigError("Give one of --worst, --best, --failed and --rollout.")


def show(args: list[str]) -> int:
    given = parse(ShowArgs, args, prog="ludic show")
    index, console = _find_run(given.run), make_console(soft_wrap=not sys.stdout.isatty())
    if not api.live(index):
        raise ConfigError(f"{index.folder} holds no rollouts yet (or was run with --no-save-rollouts).")
    if given.task is not None:
        _show_task(console, index, given.task)
    if given.rollout or given.worst or given.best or given.failed or given.task:
        id = _rollout_id(index, given.rollout) if given.rollout else _chosen(index, given)
        _show_rollout(console, index, id)
    elif given.step is not None:
        _show_step(console, index, given.step)
    else:
        _show_run(console, index)
    return 0


def _chosen(index: RunIndex, given: ShowArgs) -> str:
    query = {"task": given.task or ""}
    if given.step is not None:
        query["step"] = str(given.step)
    elif (given.best or given.worst) and given.task is None:
        query["step"] = str(max(card.step for card in api.live(index)))
    query["sort"] = "reward" if given.worst else "-reward" if given.best else "-order"
    query |= {"failed": "1"} if given.failed else {}
    found = api.rollouts(index, {**query, "limit": "1"})["rollouts"]
    if not found:
        kind = (
            "failed" if given.failed else f"is of update {given.step}" if given.step is not None else "is of that task"
        )
        raise ConfigError(f"No rollout of {index.folder} {kind}.")
    return str(found[0]["id"])


_SHOWN_UPDATES = 20


def _show_run(console: Console, index: RunIndex) -> None:
    run, is_file = api.show_run(index), index.folder.is_file()
    updates = "" if is_file else f"{run['state']}, {run['step']} of {run['steps_planned'] or '?'} updates, "
    console.print(f"{index.folder}: {updates}{run['num_rollouts']} rollouts", markup=False)
    table = Table("update", "rollouts", "reward", "from", "to", "tokens", "same reward", "cut off", "unreadable", "failed",
                  box=None, pad_edge=False)  # fmt: skip
    rows = api.steps(index)["steps"]
    for row in rows[-_SHOWN_UPDATES:]:
        table.add_row(
            str(row["step"]), str(row["num_rollouts"]), _short(row["reward_mean"]), _short(row["reward_min"]),
            _short(row["reward_max"]), _short(row["tokens_mean"]), f"{row['num_zero_spread']}/{row['num_groups']}",
            str(row["num_truncated"]), str(row["num_unreadable"]), str(row["num_failed"]),
        )  # fmt: skip
    console.print(table)
    if len(rows) > _SHOWN_UPDATES:
        console.print(f"The last {_SHOWN_UPDATES} of {len(rows)} updates; `ludic plot` draws all.", markup=False)
    for advisory in api.advisories(index):
        console.print()
        console.print(Text(f"{advisory['level']}: {advisory['title']}. {advisory['detail']} {advisory['advice']}"))
    view = "" if is_file else f"\n      ludic view {index.folder}"
    console.print(f"\nNext: ludic show {index.folder} --worst{view}", markup=False)


def _show_step(console: Console, index: RunIndex, step: int) -> None:
    groups = api.groups(index, {"step": str(step), "limit": str(api.MAX_LIMIT)})["groups"]
    if not groups:
        steps = [row["step"] for row in api.steps(index)["steps"]]
        raise ConfigError(f"{index.folder} has no rollouts of update {step}; it has {steps[0]} to {steps[-1]}.")
    for group in groups:
        console.print(Rule(Text(f"{group['task']}  rewards {' '.join(map(_short, group['rewards']))}"), align="left"))
        console.print(Text(_one_line(group["preview"])))
        table = Table(box=None, pad_edge=False, show_header=False)
        for card in api.rollouts(index, {"group": group["group"], "limit": "1000"})["rollouts"]:
            facts = card["failure"] or card["stop"] or ""
            reward = _short(card["reward"])
            table.add_row(
                Text(card["id"][-8:]), reward, f"{card['tokens']} tokens", Text(facts), Text(_one_line(card["preview"]))
            )
        console.print(table)


def _show_task(console: Console, index: RunIndex, task: str) -> None:
    try:
        found = api.show_task(index, task)
    except api.NotFound as error:
        rows = api.tasks(index, {"limit": str(api.MAX_LIMIT)})["tasks"]
        near = difflib.get_close_matches(task, [row["task"] for row in rows], n=3, cutoff=0.3)
        raise ConfigError(
            f"{error} There are {len(rows)}, such as {', '.join(near or [r['task'] for r in rows[:3]])}."
        ) from error
    console.print(Text(f"{found['task']}: {_one_line(found['preview'])}"))
    for row in found["by_step"]:
        console.print(f"  update {row['step']:>5}: rewards {' '.join(map(_short, row['rewards']))}", markup=False)


def _show_rollout(console: Console, index: RunIndex, id: str) -> None:
    found = api.show_rollout(index, id, {})
    lag = "" if found["lag"] is None else f", lag {found['lag']}"
    console.print(f"rollout {id}: update {found['step']}{lag}, reward {_short(found['reward'])}, {found['num_turns']} turns, "
                  f"{found['num_tokens']} tokens, stop {found['stop']}", markup=False)  # fmt: skip
    console.print(Text(f"task {found['task']}, group {found['group']}"))
    if found["failure_details"]:
        details = found["failure_details"]
        console.print(Text(details.get("user_traceback") or details.get("traceback") or found["failure"]))
    for turn in found["turns"]:
        credit = "" if turn["credit"] is None else f", credit {_short(turn['credit'])}"
        console.print(Rule(f"turn {turn['number'] + 1}: reward {_short(turn['reward'])}{credit}", align="left"))
        for step in turn["steps"]:
            _show_call(console, step) if step["kind"] == "call" else _show_transition(console, step)


def _show_call(console: Console, step: Mapping[str, Any]) -> None:
    for message in step["messages_new"]:
        if message.get("role") != "assistant":
            console.print(Text(f"[{message.get('role')}] ", style="bold cyan") + Text(text_of(message.get("content"))))
    console.print(Text("[reply] ", style="bold green") + Text(step["action"]))
    for call, result in zip(step["tool_calls"] or [], [*(step["tool_results"] or []), *[None] * 99], strict=False):
        console.print(Text("[tool] ", style="bold magenta") + Text(f"{call} -> {result}"))
    tokens = step.get("tokens") or {}
    facts = [f"{len(tokens.get('id', []))} tokens", str(step.get("finish_reason"))]
    facts += [f"mean {name} {_short(mean)}" for name in ("logprob", "entropy") if (mean := _mean(tokens.get(name)))]
    facts += ["could not be read"] if step["info"].get("parse_error") else []
    console.print(Text(f"        {', '.join(facts)}", style="dim"))


def _show_transition(console: Console, step: Mapping[str, Any]) -> None:
    reward = f" (reward {_short(step['reward'])})" if step["reward"] else ""
    ended = " [ends]" if step["terminated"] else " [cut off]" if step["truncated"] else ""
    console.print(Text(f"[env]{reward}{ended} ", style="bold yellow") + Text(text_of(step["obs"])))


def _mean(values: Sequence[float | None] | None) -> float | None:
    known = [value for value in values or [] if value is not None]
    return sum(known) / len(known) if known else None


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.3g}"
