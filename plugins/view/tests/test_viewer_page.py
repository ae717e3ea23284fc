"""The page of `ludic view` in a real browser: Debian's Chromium, driven by Playwright."""

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from ludic.types import Rollout, StopReason, save_rollouts
from ludic.types.steps import AgentStep, EnvironmentStep
from ludic.types.tokens import TokenTrace
from ludic_view import api
from ludic_view.export import export_page
from ludic_view.index import Runs
from tests import forked
from tests.extended import cases

pytestmark = pytest.mark.integration

LIVE_MS = 10_000
"""On a quiet machine it takes half a second; tests share theirs."""
HOSTILE = (
    "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=1'><a href='javascript:pwned=1'>x</a><!--"
)


# --- a browser and a server ---


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (`make test` installs it)"
    )
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("Chromium is not installed (`make system`, or apt-get install chromium)")
    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=options)
        yield browser
        browser.close()


class Served:
    """The viewer's server for a folder, in its own thread."""

    def __init__(self, root: Path) -> None:
        self.runs = Runs(root)
        self.address = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> "Served":
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        from ludic_view.server import serve

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        task = asyncio.create_task(serve(self.runs, port=0, on_ready=self._set))
        await self._stop.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _set(self, address: str) -> None:
        self.address = address
        self._ready.set()


class Tab:
    """A page that remembers what went wrong in it and what it asked for."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 860}, **options)
        self.page = self.context.new_page()
        self.address = address
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console", lambda said: self.problems.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, route: str) -> None:
        self.page.goto(f"{self.address}{route}")
        self.page.wait_for_selector("main h1")

    def see(self, text: str, within_ms: int = 10_000) -> None:
        self.page.wait_for_function(
            "text => document.querySelector('main').innerText.includes(text)", arg=text, timeout=within_ms
        )

    def close(self) -> None:
        """Nothing was said on the console, and no other host was asked."""
        self.context.close()
        assert self.problems == []
        assert [url for url in self.requests if not url.startswith((self.address, "data:,"))] == []

    def __enter__(self) -> "Tab":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.context.close()


# --- runs ---


def rollout(
    *,
    id: str,
    reward: float = 1.0,
    version: int = 0,
    group: str = "g",
    task: str = "t",
    says: str = "the answer",
    turns: int = 2,
) -> Rollout:
    steps: list[Any] = []
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"question of {task}"}]
    ids = [10, 11, 12]
    for turn in range(turns):
        is_last = turn == turns - 1
        sampled = [20 + turn, 30 + len(id) % 7, 40 + int(reward)]
        trace = TokenTrace(ids, sampled, [-0.1, -2.0, -0.7], "stop", [(version, 3)])
        reply = says if is_last else "I look it up."
        call = AgentStep(
            index=len(steps), prompt_messages=list(messages), action=reply, trace=trace, turn_id=f"{id}{turn}", ts_ns=10**9 * (turn + 1)
        )  # fmt: skip
        env = EnvironmentStep(
            index=len(steps) + 1, prev_obs=None, action=reply, parsed_action=reply, next_obs=None if is_last else "found nothing",
            source_agent_step_id=call.id, agent_step_ids=[call.id], reward=reward if is_last else 0.0, terminated=is_last, trace=trace,
            turn_id=f"{id}{turn}", ts_ns=10**9 * (turn + 2), info={"expected": "42"},
        )  # fmt: skip
        steps += [call, env]
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "found nothing"}]
        ids = [*ids, *sampled, 13]
    meta = {"task_id": task, "env_name": "Quiz", "request_meta": {"group_id": group}}
    return Rollout(id=id, steps=steps, meta=meta, stop=StopReason.TERMINATED)


def metrics_line(step: int, reward: float) -> str:
    return (
        json.dumps({"step": step, "time": 1.0 + step, "train/avg_total_reward": reward, "train/entropy": 1.0 / step})
        + "\n"
    )


def write_run(folder: Path, rollouts: list[Rollout]) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text('[env]\nid = "quiz"\n[train]\nsteps = 9\n')
    (folder / "metrics.jsonl").write_text("".join(metrics_line(step, 0.1 * step) for step in (1, 2, 3)))
    save_rollouts(rollouts, folder / "rollouts" / "from_step_000000.jsonl")
    return folder


def quiz_rollouts() -> list[Rollout]:
    return [
        rollout(id=f"r{version}{group}{k}", version=version, group=f"g{version}{group}", task=f"quiz-{group}", reward=float((k + version) % 2), says=f"answer {k}")
        for version in range(3)
        for group in range(2)
        for k in range(4)
    ]  # fmt: skip


@pytest.fixture
def quiz(tmp_path) -> Iterator[Served]:
    write_run(tmp_path / "runs" / "quiz", quiz_rollouts())
    with Served(tmp_path / "runs") as served:
        yield served


# --- every view ---


def routes_of(runs: Runs, run: str) -> list[str]:
    base = f"#/run/{quote(run, safe='')}"
    (card, *_) = api.answer(runs, f"/api/runs/{quote(run, safe='')}/rollouts?limit=1")["rollouts"]
    rollout, group, task = (quote(card[name], safe="") for name in ("id", "group", "task"))
    colours = ("advantage", "gradient", "logprob", "entropy", "ratio", "mismatch", "version", "mask", "none")
    return [
        "#/runs",
        f"#/compare?runs={quote(run, safe='')}",
        *(f"{base}/{view}" for view in ("metrics", "step/last", "step/all?show=groups", "tasks", "time", "health")),
        f"{base}/group/{group}",
        f"{base}/task/{task}",
        f"{base}/rollout/{rollout}",
        *(f"{base}/rollout/{rollout}?view=tokens&color={colour}" for colour in colours),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme",
    cases(["light", "dark"], default=["light"]),
)
def test_every_view_of_a_run_that_was_trained_shows_without_an_error(chromium, trained_run, scheme):
    with Served(trained_run) as served, Tab(chromium, served.address, color_scheme=scheme) as tab:
        for route in routes_of(served.runs, "tiny"):
            tab.open(route)
            assert tab.page.query_selector("main .state.error") is None, route
        tab.open(next(route for route in routes_of(served.runs, "tiny") if "color=logprob" in route))
        tab.page.hover(".tok[data-i='0']")
        assert "log-prob, sampler" in tab.page.inner_text(".inspector") and "of 8 in call 1" in tab.page.inner_text(
            ".inspector"
        )


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory) -> Path:
    """A folder with a run of two updates of the tiny model."""
    folder = tmp_path_factory.mktemp("trained")
    options = "--model tiny --steps 2 --rollouts-per-update 8 --group-size 4 --max-tokens 8 --name tiny --logger none"
    process = forked.python("-m", "ludic.cli.main", "train", "tic_tac_toe", *options.split(), "--runs", folder)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return folder


def test_the_tree_of_a_group_and_its_replies_are_shown(chromium, quiz):
    with Tab(chromium, quiz.address) as tab:
        tab.open("#/run/quiz/group/g00")
        assert len(tab.page.query_selector_all("svg.tree .end")) == 4
        assert len(tab.page.query_selector_all("svg.tree .node")) >= 3
        assert len(tab.page.query_selector_all(".column")) == 4
        tab.page.query_selector_all("svg.tree .node")[0].hover()
        assert "shared by #1 #2 #3 #4" in tab.page.inner_text(".tree-reader")


def test_filters_and_the_histogram_choose_rollouts_and_are_kept_in_the_address(chromium, quiz):
    with Tab(chromium, quiz.address) as tab:
        tab.open("#/run/quiz/step/all")
        tab.see("24 rollouts")
        tab.page.click(".histogram .bin:not(.none) >> nth=0")
        tab.see("12 rollouts")
        assert "reward_max=" in tab.page.url
        tab.page.fill("input[type=search]", "answer 3")
        tab.page.wait_for_function("() => document.querySelectorAll('a.row').length < 12")
        assert "text=answer+3" in tab.page.url
        kept = tab.page.url
        tab.page.goto("about:blank")
        tab.page.goto(kept)
        tab.page.wait_for_selector("a.row")
        assert tab.page.input_value("input[type=search]") == "answer 3"


def test_run_with_several_policies_shows_the_reward_of_each_in_the_list(chromium, quiz, tmp_path):
    rows = [{"step": n, "ann/train/avg_total_reward": 0.1 * n, "bob/train/avg_total_reward": 0.5} for n in (1, 2)]
    (tmp_path / "runs" / "duel").mkdir()
    (tmp_path / "runs" / "duel" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "runs" / "duel" / "config.toml").write_text('[env]\nid = "duel"\n')
    with Tab(chromium, quiz.address) as tab:
        tab.open("#/runs")
        figures = {row.inner_text().split()[0]: row.query_selector(".figure").inner_text().split() for row in tab.page.query_selector_all(".run-link")}  # fmt: skip
        assert figures["duel"] == ["ann", "0.2", "bob", "0.5", "reward"] and figures["quiz"] == ["0.3", "reward"]


DRAWN = """window.drawn = [];
const draw = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  window.drawn.push([text, this.textAlign === "right" ? x - this.measureText(text).width : x]);
  draw.call(this, text, x, y);
};"""
"""Notes each label of a canvas, and where it begins."""


def test_labels_of_an_axis_are_whole_and_a_rate_of_zero_is_drawn_from_zero_to_one(chromium, tmp_path):
    folder = write_run(tmp_path / "runs" / "x", quiz_rollouts())
    rows = [{"step": s, "time": 1.0, "train/clip_frac": 0.0, "train/kl_actor_policy": -1.25e-8 * s} for s in range(9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Served(tmp_path / "runs") as served, Tab(chromium, served.address) as tab:
        tab.page.add_init_script(DRAWN)
        tab.open("#/run/x/metrics")
        tab.page.wait_for_function("window.drawn.some(([text]) => text.startsWith('−5.0e'))")
        drawn = tab.page.evaluate("window.drawn")
    texts = {text for text, _ in drawn}
    assert all(begins >= 2 for _, begins in drawn) and "0.5" in texts and "−1" not in texts and "−0.5" not in texts


def test_names_of_tasks_that_begin_alike_keep_their_ends(chromium, tmp_path):
    names = [f"countdown_numbers_hard/level_3/problem_{n:04d}" for n in range(3)]
    write_run(tmp_path / "runs" / "x", [rollout(id=name, task=name) for name in names])
    with Served(tmp_path / "runs") as served, Tab(chromium, served.address) as tab:
        tab.open("#/run/x/tasks")
        tab.see("3 tasks")
        ends = tab.page.query_selector_all(".named > span:last-child")
        assert [end.inner_text() for end in ends] == [name[-10:] for name in names]
        assert all(
            end.evaluate(
                "e => e.getBoundingClientRect().right <= e.closest('[role=cell]').getBoundingClientRect().right + 1"
            )
            for end in ends
        )


# --- live ---


def test_what_a_run_appends_appears_by_itself(chromium, quiz, tmp_path):
    folder = tmp_path / "runs" / "quiz"
    with Tab(chromium, quiz.address) as tab:
        tab.open("#/run/quiz/step/all")
        tab.page.wait_for_selector(".live.up")
        tab.see("24 rollouts")
        save_rollouts(
            [rollout(id="new", version=2, group="new", task="quiz-9")], folder / "rollouts" / "from_step_000000.jsonl"
        )
        tab.see("25 rollouts", LIVE_MS)
        tab.open("#/run/quiz/metrics")
        tab.page.wait_for_selector(".live.up")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(metrics_line(4, 0.75))
        tab.see("0.75", LIVE_MS)


# --- many rollouts ---


@pytest.mark.extended(covered_by="test_filters_and_the_histogram_choose_rollouts_and_are_kept_in_the_address")
@pytest.mark.slow
def test_thirty_thousand_rollouts_open_and_scroll(chromium, tmp_path):
    folder = write_run(tmp_path / "runs" / "large", [])
    line = rollout(id="ID-OF-IT", task="TASK", group="GROUP", turns=1).to_json()
    with (folder / "rollouts" / "from_step_000000.jsonl").open("w") as file:
        for i in range(30_000):
            file.write(
                line.replace("ID-OF-IT", f"r{i}").replace("TASK", f"task-{i}").replace("GROUP", f"g{i // 8}") + "\n"
            )
    with Served(tmp_path / "runs") as served, Tab(chromium, served.address) as tab:
        tab.open("#/run/large/step/all")
        tab.see("30,000 rollouts", 120_000)
        assert len(tab.page.query_selector_all(".row")) < 100
        for place in (0.5, 0.25, 1.0):
            tab.page.evaluate(
                "place => { const rows = document.querySelector('.rows'); rows.scrollTop = place * rows.scrollHeight; }",
                place,
            )
            tab.page.wait_for_function(
                "() => !document.querySelector('.row.pending') && document.querySelectorAll('a.row').length > 5"
            )
        tab.see("task-29999")
        assert len(tab.page.query_selector_all(".row")) < 100


# --- hostile text ---


def hostile_rollouts() -> list[Rollout]:
    made = [
        rollout(id=f"h{k}", group="g", task=f"task {HOSTILE}", says=f"reply {k} {HOSTILE}", reward=float(k))
        for k in range(2)
    ]
    for one in made:
        one.meta["note"] = HOSTILE
        one.meta["env_name"] = HOSTILE
        one.env_steps[-1].info[HOSTILE] = HOSTILE
        one.env_steps[-1].reward_components[HOSTILE] = 1.0
    return made


def assert_inert(tab: Tab) -> None:
    assert tab.page.evaluate("window.pwned") is None
    found = tab.page.query_selector_all("main img, main script, main iframe, main a[href^='javascript']")
    assert found == []


def test_hostile_text_is_shown_as_text_everywhere(chromium, tmp_path):
    write_run(tmp_path / "runs" / "a <b>run<", hostile_rollouts())
    with Served(tmp_path / "runs") as served, Tab(chromium, served.address) as tab:
        for route in routes_of(served.runs, "a <b>run<"):
            tab.open(route)
            assert_inert(tab)
        tab.open(next(route for route in routes_of(served.runs, "a <b>run<") if "/rollout/" in route))
        tab.see(f"reply 0 {HOSTILE}")
        assert_inert(tab)


# --- export ---


def test_an_exported_file_opens_without_a_server_and_without_a_network(chromium, tmp_path):
    write_run(tmp_path / "runs" / "quiz", [*quiz_rollouts(), *hostile_rollouts()])
    runs = Runs(tmp_path / "runs")
    runs.get("quiz").refresh(60)
    file = tmp_path / "page.html"
    file.write_text(export_page(partial(api.answer, runs), "quiz", ["h0", "h1", "r000"], title=f"Title {HOSTILE}"))
    with Tab(chromium, file.as_uri(), offline=True) as tab:
        tab.open("")
        tab.see("3 rollouts")
        for route in (
            "metrics",
            "tasks",
            "time",
            "health",
            "step/all?show=groups",
            "group/g",
            "rollout/h0",
            "rollout/h1?view=tokens",
        ):
            tab.open(f"#/run/quiz/{route}")
            assert tab.page.query_selector("main .state.error") is None, route
            assert_inert(tab)
        tab.open("#/run/quiz/rollout/h0")
        tab.see(f"reply 0 {HOSTILE}")
        assert_inert(tab)
        assert set(tab.requests) == {file.as_uri()} | {
            url for url in tab.requests if url.startswith(f"{file.as_uri()}#")
        }


# --- keyboard ---


def test_everything_can_be_reached_with_the_keyboard(chromium, quiz):
    with Tab(chromium, quiz.address) as tab:
        press = tab.page.keyboard.press
        hash_is = partial(tab.page.wait_for_function, "start => location.hash.startsWith(start)")
        tab.open("#/runs")
        press("j")
        press("Enter")
        hash_is(arg="#/run/quiz/metrics")
        tab.page.wait_for_selector("canvas.plot")
        press("2")
        hash_is(arg="#/run/quiz/step/last")
        tab.page.wait_for_selector("a.row")
        press("j")
        assert tab.page.get_attribute(".row.at", "aria-rowindex") == "2"
        press("k")
        press("Enter")
        hash_is(arg="#/run/quiz/rollout/r200")
        tab.page.wait_for_selector(".turn")
        press("v")
        tab.page.wait_for_selector(".tok[data-i]")
        tab.page.focus(".tok[data-i='0']")
        press("ArrowRight")
        assert "2 of 3 in call 1" in tab.page.inner_text(".inspector")
        press("c")
        assert "color=" in tab.page.url and "view=tokens" in tab.page.url
        press("]")
        hash_is(arg="#/run/quiz/rollout/r201")
        tab.page.wait_for_selector(".here[href*='r201']")
        press("Escape")
        hash_is(arg="#/run/quiz/group/g20")
        tab.page.wait_for_selector(".column")
        press("Escape")
        hash_is(arg="#/run/quiz/step/3")
        tab.page.wait_for_selector("input[type=search]")
        press("/")
        tab.page.keyboard.type("answer 1")
        tab.page.wait_for_function("() => location.hash.includes('text=answer+1')")
        press("Escape")
        press("?")
        assert tab.page.is_visible("dialog.help")
        press("Escape")
        tab.page.wait_for_selector("dialog.help", state="detached")
        theme = tab.page.evaluate("document.documentElement.dataset.theme")
        press("t")
        assert tab.page.evaluate("document.documentElement.dataset.theme") != theme


def test_a_missing_rollout_an_unknown_view_and_an_empty_folder_are_explained(chromium, quiz, tmp_path):
    with Tab(chromium, quiz.address) as tab:
        tab.page.goto(f"{quiz.address}#/run/quiz/what")
        tab.see("There is no view called")
        tab.page.goto(f"{quiz.address}#/run/quiz/step/all?text=nowhere-to-be-found")
        tab.see("No rollout matches the filters.")
        tab.page.goto(f"{quiz.address}#/run/quiz/rollout/none")
        tab.see("This could not be shown")
        assert len(tab.problems) == 1 and "404" in tab.problems.pop()
    (tmp_path / "empty").mkdir()
    with Served(tmp_path / "empty") as served, Tab(chromium, served.address) as tab:
        tab.page.goto(served.address)
        tab.see("No run here yet")
