"""`ludic launch` as a process: the tiny model, two actors, a Redis; interrupted, killed in parts and as a whole, resumed."""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("redis", reason="the pipeline extra is not installed")

from ludic.training.loggers import read_metrics
from plugins.judges.tests.test_rescore import judge
from plugins.pipeline.tests.pipeline_harness import counted_by_hand
from tests import forked, warm_python
from tests.redis_fixtures import end_redis, start_redis
from tests.unit.cli.train_parts import ENV

__all__ = ["judge"]  # a fixture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed"),
]
SIZES = [
    "--max-tokens", "1", "--group-size", "4", "--rollouts-per-update", "16", "--lr", "1e-2", "--logger", "print",
    "--checkpoint-every", "5", "--name", "run",
]  # fmt: skip
RUN = [
    "own/letter.py:Paid", "--model", "tiny", "--algo", "own/algos.py:steady", "--parser", "own/algos.py:as_it_is", *SIZES,
]  # fmt: skip
IDENTITY = re.compile(
    r"produced (\d+) = (\d+) acknowledged \+ (\d+) stale \+ (\d+) filtered \+ (\d+) dead \+ (\d+) fetched \+ (\d+) waiting"
)


OWN = {
    "letter.py": f"{ENV}\nfrom wages import WAGE\n\nclass Paid(Letter):\n    def __init__(self):\n        super().__init__(WAGE)\n",
    "wages.py": "WAGE = 0.5",
    "algos.py": "from ludic.parsers import raw_parser as as_it_is\nfrom ludic.training import make_grpo as steady\n",
}
"""Every role finds an env, an algorithm and a parser in files, and the module beside the env's."""


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    (tmp_path / "own").mkdir()
    for name, text in OWN.items():
        (tmp_path / "own" / name).write_text(text)
    yield tmp_path
    for name in ("redis", "learner", "actor-0", "actor-1"):
        pid = pid_of(tmp_path, name)
        assert pid is None or not is_alive(pid), f"{name} was left behind"


def launch(folder: Path, *arguments: str, **environment: str) -> forked.Forked:
    output = folder / f"said-{len(list(folder.glob('said-*')))}"
    return forked.python(
        "-m", "ludic.cli.main", "launch", *arguments, cwd=folder, output=output,
        environment={"LUDIC_REDIS_URL": None, **environment}, executable=warm_python.executable(),
    )  # fmt: skip


def pid_of(folder: Path, name: str) -> int | None:
    file = folder / "runs" / "run" / "logs" / f"{name}.pid"
    return int(file.read_text()) if file.exists() and file.read_text().strip() else None


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def steps(folder: Path) -> list[int]:
    path = folder / "runs" / "run" / "metrics.jsonl"
    return [row["step"] for row in read_metrics(path)] if path.exists() else []


def until(condition: Callable[[], bool], process: forked.Forked, what: str) -> None:
    deadline = time.monotonic() + 300  # a vLLM server takes half a minute to start, more on a busy machine
    while not condition():
        ended = process.poll() is not None
        assert not ended and time.monotonic() < deadline, f"{what}: {process.communicate()[0] if ended else ''}"
        time.sleep(0.05)


def kill(folder: Path, name: str) -> int:
    """As kill -9; returns whom."""
    pid = pid_of(folder, name)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def account(said: str) -> dict[str, int]:
    """The learner's last line of account."""
    names = ("produced", "acknowledged", "stale", "filtered", "dead", "fetched", "waiting")
    counts = dict(zip(names, map(int, IDENTITY.findall(said)[-1]), strict=True))
    assert counts["produced"] == sum(counts[name] for name in names[1:]), said
    return counts


def test_pipeline_resumes_after_interrupts_and_kills(folder):
    process = launch(folder, *RUN, "--steps", "1000")
    until(lambda: len(steps(folder)) >= 3, process, "no three updates")
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    done = steps(folder)
    assert process.returncode == 130 and "Traceback" not in said, said
    assert f"Stopped after update {done[-1]} of 1000" in said and "To go on: ludic launch runs/run --resume" in said
    first = account(said)
    assert first["acknowledged"] == 16 * done[-1], "all that was trained is acknowledged by the checkpoint at the end"

    last = done[-1] + 14
    again = launch(folder, "runs/run", "--resume", "--steps", str(last))
    until(lambda: len(steps(folder)) >= len(done) + 2, again, "no two updates more")
    kill(folder, "learner")
    kill(folder, "actor-0")
    until(lambda: len(steps(folder)) >= len(done) + 6, again, "no updates after the learner's death")
    redis = kill(folder, "redis")
    until(lambda: len(steps(folder)) >= len(done) + 10, again, "no updates after Redis's death")
    assert kill(folder, "redis") != redis
    said, _ = again.communicate(timeout=240)
    assert again.returncode == 0 and f"Going on after update {done[-1]}" in said, said
    for name in ("learner", "actor-0"):
        assert f"{name} was ended by SIGKILL; restart 1 of at most 5" in said, said
    assert "redis was ended by SIGKILL; restart 2 of at most 5" in said, said
    assert steps(folder) == list(range(1, last + 1)) and f"Done after update {last} of {last}" in said
    assert account(said)["acknowledged"] == 16 * last, (
        "what the killed learner had not saved was trained on again, once"
    )
    counts, in_queue = counted_by_hand(folder / "runs" / "run")
    assert counts["trained"] == 16 * last
    assert counts["produced"] == counts["trained"] + counts["stale"] + counts["filtered"] + counts["dead"] + in_queue


def test_killing_the_launcher_ends_all_roles_and_the_learner_logs_what_the_actors_judge_costs(folder, judge):
    judged = ["--judge", judge, "--reward-weight", "judge=0.1"]
    process = launch(folder, *RUN, "--steps", "1000", "--actors", "1", *judged)
    metrics = folder / "runs" / "run" / "metrics.jsonl"
    until(
        lambda: steps(folder) and any("train/judge/calls" in row for row in read_metrics(metrics)), process, "no cost"
    )
    cost = [row for row in read_metrics(metrics) if "train/judge/calls" in row][-1]
    assert 0 < cost["train/judge/calls"] <= cost["train/judge/verdicts"], "an equal reply is judged once"
    assert cost["train/judge/prompt_tokens"] == 100 * cost["train/judge/calls"]
    assert cost["train/judge/cache_hits"] == cost["train/judge/verdicts"] - cost["train/judge/calls"]
    pids = [pid_of(folder, name) or 0 for name in ("redis", "learner", "actor-0")]
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, [pid for pid in pids if is_alive(pid)]
        time.sleep(0.05)
    log = (folder / "runs" / "run" / "logs" / "learner.log").read_text()
    assert "Stopped after update" in log, "the learner had its Redis to the end, and saved"


def test_the_roles_of_a_pipeline_run_on_ray(folder):
    """A local Ray is the cluster; the launcher connects to it as to any other."""
    ray = pytest.importorskip("ray")
    redis = start_redis()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        address = ray.get_runtime_context().gcs_address
        run = [*RUN, "--steps", "4", "--actors", "1", "--ray", "--ray-address", address]
        process = launch(folder, *run, LUDIC_REDIS_URL=redis.url)
        said, _ = process.communicate(timeout=240)
    finally:
        ray.shutdown()
        end_redis(redis)
    assert process.returncode == 0, said
    assert steps(folder) == [1, 2, 3, 4] and account(said)["acknowledged"] == 64
    assert "Done after update 4 of 4" in (folder / "runs" / "run" / "logs" / "learner.log").read_text()
