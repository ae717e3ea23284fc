"""One self-contained HTML file with chosen rollouts: to attach to an issue or a paper, or to keep with an evaluation.

The file holds the page's own modules as one script, its style, and the server's answers as JSON. Its policy (CSP) allows exactly
this script and this style, by hash, and no request at all; `<` is escaped in the JSON, so that no text of a model can end it.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ludic_view import api
from ludic_view.index import Runs
from ludic_view.rollouts import task_numbers

PAGE = Path(__file__).parent / "page"

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w-]+)\.js";\n', flags=re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", flags=re.MULTILINE)

Answer = Callable[[str], Mapping[str, Any]]
"""Maps a path of the JSON API ("/api/runs/x/rollouts/r1") to the server's answer; it raises if there is none."""


def export_page(answer: Answer, run: str, rollouts: Iterable[str], *, title: str | None = None) -> str:
    """A page with these rollouts of a run, their groups and tasks, and the run's metrics."""
    return page_of(answers_for(answer, run, rollouts), title=title or f"{run} · ludic view")


def evaluation_page(folder: Path) -> str:
    """The page of an evaluation: its worst rollouts and some of the best. `ludic eval` finds it as a report."""
    runs = Runs(folder)
    index = runs.get(folder.resolve().name)
    index.refresh(float("inf"))
    worst, best = (api.rollouts(index, {"sort": way, "limit": "32"})["rollouts"] for way in ("reward", "-reward"))
    ids = dict.fromkeys(card["id"] for card in [*worst[:24], *best[:8]])
    return export_page(partial(api.answer, runs), index.id, ids, title=folder.name)


def answers_for(answer: Answer, run: str, rollouts: Iterable[str]) -> dict[str, Any]:
    """The answers that the page will ask for, by relative path, limited to these rollouts."""
    base = f"api/runs/{quote(run, safe='')}"

    def ask(rest: str) -> dict[str, Any]:
        return dict(answer(f"/{base}{rest}"))

    chosen = {id: ask(f"/rollouts/{quote(id, safe='')}") for id in rollouts}
    if not chosen:
        raise ValueError("There is nothing to export: choose at least one rollout.")
    cards = [{k: v for k, v in found.items() if k not in ("turns", "prompt", "meta")} for found in chosen.values()]
    for card, found in zip(cards, chosen.values(), strict=True):
        card["turns"] = len(found["turns"])
    listed = answer("/api/runs")
    answers: dict[str, Any] = {
        "start": f"#/run/{quote(run, safe='')}/step/all",
        "api/runs": {**listed, "root": "", "runs": [found for found in listed["runs"] if found["id"] == run]},
        base: ask("") | {"num_rollouts": len(chosen)},
        f"{base}/metrics": ask("/metrics"),
        f"{base}/steps": {
            "steps": [row for row in ask("/steps")["steps"] if row["step"] in {c["step"] for c in cards}]
        },
        f"{base}/health": ask("/health"),
        f"{base}/rollouts": {"rollouts": cards},
        f"{base}/groups": {"groups": []},
        f"{base}/tasks": {"total": 0, "tasks": []},
    }
    answers |= {f"{base}/rollouts/{quote(id, safe='')}": found for id, found in chosen.items()}
    _add_groups(answers, base, ask, cards)
    _add_tasks(answers, base, cards)
    _add_time(answers, base, cards)
    return answers


def _add_groups(
    answers: dict[str, Any], base: str, ask: Callable[[str], dict[str, Any]], cards: list[dict[str, Any]]
) -> None:
    """A group is exported with its tree if all its rollouts are."""
    by_group: dict[str, list[dict[str, Any]]] = {}
    for card in cards:
        if card.get("group") is not None:
            by_group.setdefault(card["group"], []).append(card)
    for group, members in by_group.items():
        rewards = [card["reward"] for card in members]
        row = {key: members[0].get(key) for key in ("group", "task", "step", "preview")}
        row |= {"rewards": rewards, "spread": max(rewards) - min(rewards), "rollouts": [card["id"] for card in members]}
        answers[f"{base}/groups"]["groups"].append(row)
        found = ask(f"/groups/{quote(group, safe='')}")
        if {card["id"] for card in found["cards"]} <= {card["id"] for card in members}:
            answers[f"{base}/groups/{quote(group, safe='')}"] = found


def _add_tasks(answers: dict[str, Any], base: str, cards: list[dict[str, Any]]) -> None:
    by_task: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for card in cards:
        if card.get("task") is not None:
            by_task.setdefault(str(card["task"]), {}).setdefault(card["step"], []).append(card)
    for task, by_step in by_task.items():
        rewards = {step: [card["reward"] for card in by_step[step]] for step in sorted(by_step)}
        earned = {s: [None if c.get("failure") else c["reward"] for c in by_step[s]] for s in rewards}
        facts = {"task": task, **task_numbers(earned)}
        answers[f"{base}/tasks"]["tasks"].append(facts | {"preview": next(iter(by_step.values()))[0].get("preview")})
        rows = [{"step": s, "rewards": rewards[s], "rollouts": [card["id"] for card in by_step[s]]} for s in rewards]
        answers[f"{base}/tasks/{quote(task, safe='')}"] = {"task": task, "by_step": rows}
    answers[f"{base}/tasks"]["total"] = len(by_task)


def _add_time(answers: dict[str, Any], base: str, cards: list[dict[str, Any]]) -> None:
    names = ("id", "group", "started_ns", "ended_ns", "step", "versions", "tokens", "reward")
    episodes = [{name: card.get(name) for name in names} for card in cards]
    answers[f"{base}/time"] = {"episodes": episodes, "lag_histogram": None, "pipeline": None}


# --- the file ---


def page_of(answers: Mapping[str, Any], *, title: str) -> str:
    """The page with these answers inside."""
    script, style = bundled(PAGE / "main.js"), (PAGE / "style.css").read_text()
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    data = json.dumps(answers, allow_nan=False).replace("<", "\\u003c")
    page = (PAGE / "index.html").read_text()
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<title>{html.escape(title)}</title>\n'
        f"<style>{style}</style>\n"
    )
    tail = f'<script type="application/json" id="answers">{data}</script>\n<script type="module">{script}</script>\n'
    parts = {
        "<title>ludic view</title>\n": head,
        '<link rel="icon" href="data:,">\n': "",
        '<link rel="stylesheet" href="style.css">\n': "",
        '<script type="module" src="main.js"></script>\n': "",
        "</body>": f"{tail}</body>",
    }
    for old, new in parts.items():
        assert page.count(old) == 1, old
        page = page.replace(old, new)
    return page


def bundled(main: Path) -> str:
    """A module and all that it imports as one script: each becomes a function that returns its exports, after those it needs.

    A file:// page may not import modules. This knows the forms of import and export that the page uses, and no others.
    """
    done: dict[str, str] = {}

    def add(name: str, above: tuple[str, ...] = ()) -> None:
        if name in above:
            raise ValueError(f"The modules import each other in a circle: {' → '.join([*above, name])}.")
        if name in done:
            return
        text = (main.parent / f"{name}.js").read_text()
        for _, needed in _IMPORT.findall(text):
            add(needed, (*above, name))
        exports = _EXPORT.findall(text)
        body = _IMPORT.sub(lambda found: f"const {{{found[1]}}} = modules.{found[2]};\n", text)
        body = _EXPORT.sub("", body)
        if re.search(r"^(import|export) ", body, flags=re.MULTILINE):
            raise ValueError(f"{name}.js has an import or export in a form that the export does not know.")
        done[name] = f"modules.{name} = (() => {{\n{body}\nreturn {{ {', '.join(exports)} }};\n}})();\n"

    add(main.stem)
    script = "const modules = {};\n" + "".join(done.values())
    if "</script" in script.lower() or "<!--" in script:
        raise ValueError("The page's modules contain text that would end their script element.")
    return script


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
