"""Eight algorithms on GSM8K with the same questions, rollouts, tokens and optimizer steps; one table with the spread over seeds.

Each run is one `ludic train examples/configs/gsm8k.toml --algo …` in its own process; `--dry-run` prints the commands. All see the
first `--questions` training questions and `--batches` × `--rollouts` rollouts: presets that compare siblings play eight rollouts
of a question at once and see each question once; `spo` and `reinforce` play one and come back to it eight times. A batch takes
`--mini-batches` optimizer steps (GSPO's paper takes four): with one step the clipped losses are the same loss.

The learning rate is the same for all. AdamW divides a gradient by its own size, so how a preset scales its advantages, and whether
it takes a sum or a mean, changes the step little. The rate is the one that research/results/gsm8k_qwen.md found good for GRPO.

A finished run leaves `--results`/ALGO_SEED.jsonl, a few numbers for every batch, and is not run again. A run that was interrupted
starts from the beginning. The first seed of all algorithms comes first. The same command may run several times at once: each takes
runs that no other has.

    PYTHONPATH=src python research/experiments/baselines.py --model qwen2.5-coder-1.5b --data gsm8k_train.jsonl --eval-data gsm8k_test.jsonl
    PYTHONPATH=src python research/experiments/baselines.py --table
"""

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import IO, Any

import tyro

from ludic.training.loggers import read_metrics

GROUP_SIZES = {"grpo": 8, "dr_grpo": 8, "dapo": 8, "gspo": 8, "cispo": 8, "rloo": 8, "spo": 1, "reinforce": 1}
OWN_FLAGS = {"spo": ["--algo-set", "low=-0.1"]}
"""SPO's values are for rewards from 0 to 1; a reply without an answer costs 0.1."""
ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples" / "configs" / "gsm8k.toml"
KEPT = (
    "step", "time", "train/batch_index", "train/avg_total_reward", "train/avg_completion_length", "train/target_rollouts",
    "train/over_limit_rate",
    "train/num_filtered", "train/entropy", "train/clip_frac", "train/batch_mean/clip_frac", "train/kl_actor_policy", "train/ess",
    "train/grad_norm", "train/lr", "perf/fetch_s", "perf/update_s", "perf/step_s", "eval/accuracy", "eval/accuracy_low",
    "eval/accuracy_high", "eval/mean_completion_tokens", "eval/over_limit_rate", "eval/num_samples", "eval/step",
)  # fmt: skip
"""What a result keeps of a run's metrics."""
NUM_LAST = 5
"""Batches at the end of a run whose mean reward the table shows."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which runs, how large, and how many at a time."""

    model: str = "qwen2.5-coder-1.5b"
    data: Path = Path("gsm8k_train.jsonl")
    eval_data: Path = Path("gsm8k_test.jsonl")
    only: tuple[str, ...] = tuple(GROUP_SIZES)
    """Algorithms."""
    seeds: tuple[int, ...] = (0, 1, 2)
    batches: int = 20
    rollouts: int = 256
    """Of a batch."""
    mini_batches: int = 4
    """Optimizer steps of a batch."""
    questions: int | None = None
    """Training questions that all runs share. Default: as many as groups of eight see once."""
    max_tokens: int = 400
    """Of a reply."""
    lr: float = 3e-6
    eval_episodes: int = 1319
    """Test questions, answered greedily after the last batch; the first run answers them before the first, too."""
    micro_token_budget: int = 8192
    """Tokens of a forward pass; it changes speed and memory only."""
    parallel: int = 2
    """Runs side by side on one device."""
    seconds: float | None = None
    """Begin no run that would not be done by then, by the longest so far."""
    timeout: float = 600.0
    """Seconds after which a run is ended."""
    runs: Path = Path("runs/baselines")
    """Run folders and logs. A run folder without a result is removed when its run begins again."""
    results: Path = Path("results/baselines")
    """Small files, to be kept."""
    extra: str = ""
    """Further flags of `ludic train`: --extra='--max-seq-len 1024'."""
    table: bool = False
    """Run nothing; print the table of the results that are there."""
    dry_run: bool = False
    """Print the commands."""


# --- the runs ---------------------------------------------------------------------------------------------------


def command(settings: Settings, algo: str, seed: int) -> list[str]:
    """`ludic train …` of one run."""
    steps = settings.batches * settings.mini_batches
    flags: dict[str, Any] = {
        "model": settings.model,
        "data": question_file(settings),
        "eval-data": settings.eval_data,
        "algo": algo,
        "group-size": GROUP_SIZES[algo],
        "rollouts-per-update": settings.rollouts,
        "mini-batches": settings.mini_batches,
        "steps": steps,
        "warmup-steps": min(settings.mini_batches, steps - 1),
        "lr": settings.lr,
        "max-tokens": settings.max_tokens,
        "micro-token-budget": settings.micro_token_budget,
        "eval-every": steps,
        "eval-episodes": settings.eval_episodes,
        "checkpoint-every": 0,
        "save-tokens": "off",
        "logger": "print",
        "seed": seed,
        "runs": settings.runs,
        "name": f"{algo}_{seed}",
    }
    is_first = (algo, seed) == (settings.only[0], settings.seeds[0])
    switches = ["--no-save-rollouts", "--no-save-optimizer", "--eval-at-start" if is_first else "--no-eval-at-start"]
    pairs = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return ["train", str(CONFIG), *pairs, *switches, *OWN_FLAGS.get(algo, []), *shlex.split(settings.extra)]


def question_file(settings: Settings) -> Path:
    return settings.runs / "questions.jsonl"


def write_questions(settings: Settings) -> None:
    """The first questions of the training file, which is in no order."""
    settings.runs.mkdir(parents=True, exist_ok=True)
    count = settings.questions or settings.batches * settings.rollouts // 8
    with settings.data.open() as file:
        lines = list(islice((line for line in file if line.strip()), count))
    if len(lines) < count:
        raise SystemExit(f"{settings.data} has {len(lines)} questions; --questions {count} asks for more.")
    text = "".join(lines)
    if not question_file(settings).exists() or question_file(settings).read_text() != text:  # a run may be reading it
        question_file(settings).write_text(text)


class Queue:
    """The runs that have no result yet; several threads take from it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        wanted = [(algo, seed) for seed in settings.seeds for algo in settings.only]
        self._waiting = [run for run in wanted if not result_file(settings, *run).exists()]
        self._lock, self._began, self._longest = threading.Lock(), time.monotonic(), 0.0
        self.failed: list[str] = []
        say(f"{len(wanted) - len(self._waiting)} of {len(wanted)} runs are done, {len(self._waiting)} to go.")

    def work(self) -> None:
        """Run one after the other until none is left, or no time for one."""
        while (run := self._take()) is not None:
            began = time.monotonic()
            with lock_file(self._settings, *run).open("w") as held:
                if not is_free(held) or result_file(self._settings, *run).exists():
                    continue
                is_done = run_one(self._settings, *run)
            with self._lock:
                self._longest = max(self._longest, time.monotonic() - began)
                if not is_done:
                    self.failed.append(f"{run[0]}_{run[1]}")

    def _take(self) -> tuple[str, int] | None:
        limit = self._settings.seconds
        with self._lock:
            is_late = limit is not None and time.monotonic() - self._began + self._longest > limit
            if is_late and self._waiting:
                say(f"No time left for {len(self._waiting)} runs; the same command goes on with them.")
                self._waiting.clear()
            return self._waiting.pop(0) if self._waiting else None


def is_free(file: IO[str]) -> bool:
    """Lock the file, until it is closed or this process ends; False if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def run_one(settings: Settings, algo: str, seed: int) -> bool:
    """Whether the run ended well; its result is written then."""
    name, began = f"{algo}_{seed}", time.monotonic()
    folder, log = settings.runs / name, settings.runs / f"{name}.log"
    shutil.rmtree(folder, ignore_errors=True)
    say(f"{name} begins")
    try:
        with log.open("w") as file:
            line = [sys.executable, "-m", "ludic.cli.main", *command(settings, algo, seed)]
            code = subprocess.run(
                line, stdout=file, stderr=subprocess.STDOUT, timeout=settings.timeout, env=environment(), check=False
            ).returncode
    except subprocess.TimeoutExpired:
        code = -1
    seconds = time.monotonic() - began
    if code != 0:
        say(f"{name} FAILED (exit code {code}) after {seconds:.0f} s; the end of {log}:\n{log.read_text()[-1500:]}")
        return False
    rows = [short(row) for row in read_metrics(folder / "metrics.jsonl")]
    rows[-1]["run/seconds"] = round(seconds, 1)
    rows[-1]["run/parallel"] = settings.parallel
    temporary = result_file(settings, algo, seed).with_suffix(".part")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    temporary.replace(result_file(settings, algo, seed))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    say(f"{name} done in {seconds:.0f} s: accuracy {100 * rows[-1]['eval/accuracy']:.1f} %")
    return True


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def short(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _rounded(row[name]) for name in KEPT if name in row}


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) and abs(value) < 1e6 else value


def result_file(settings: Settings, algo: str, seed: int) -> Path:
    return settings.results / f"{algo}_{seed}.jsonl"


def lock_file(settings: Settings, algo: str, seed: int) -> Path:
    return settings.runs / f"{algo}_{seed}.lock"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


# --- the table --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One run in numbers."""

    accuracy: float
    reward: float
    """Mean of the last batches."""
    cut_off: float
    """Share of test replies that ran out of tokens."""
    reply_tokens: float
    """Of a test reply."""
    sampled: float
    """Tokens sampled while training."""
    seconds: float
    """Of all updates, generation included, without loading and without the evaluation."""
    entropy: float
    clip_frac: float
    """Share of tokens at a clip in the last step of a batch, mean over batches."""


def outcome(rows: Sequence[Mapping[str, Any]]) -> Outcome:
    updates = [row for row in rows if "train/batch_index" in row]
    last_of_batch = list({row["train/batch_index"]: row for row in updates}.values())
    end = rows[-1]
    return Outcome(
        accuracy=end["eval/accuracy"],
        reward=fmean(row["train/avg_total_reward"] for row in last_of_batch[-NUM_LAST:]),
        cut_off=end["eval/over_limit_rate"],
        reply_tokens=end["eval/mean_completion_tokens"],
        sampled=sum(row["train/avg_completion_length"] * row["train/target_rollouts"] for row in last_of_batch),
        seconds=sum(row["perf/step_s"] for row in updates),
        entropy=last_of_batch[-1]["train/entropy"],
        clip_frac=fmean(row.get("train/clip_frac", 0.0) for row in last_of_batch),
    )


def print_table(settings: Settings) -> None:
    """Results of all algorithms that have one, best first."""
    found: dict[str, list[Outcome]] = {}
    for algo in GROUP_SIZES:
        for path in sorted(settings.results.glob(f"{algo}_[0-9]*.jsonl")):
            rows = list(read_metrics(path))
            found.setdefault(algo, []).append(outcome(rows))
            start = next(row for row in rows if "eval/accuracy" in row)
            if start["step"] == 0:
                low, high = 100 * start["eval/accuracy_low"], 100 * start["eval/accuracy_high"]
                print(f"Before training: {100 * start['eval/accuracy']:.1f} % [{low:.1f}, {high:.1f}], {path.name}\n")
    print(
        "| algorithm | seeds | accuracy, % | lowest – highest | reward, last batches | cut off, % | reply tokens | entropy "
        "| clipped, % | sampled, M tokens | updates, s |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for algo, runs in sorted(found.items(), key=lambda each: -fmean(run.accuracy for run in each[1])):
        mean = {name: fmean(getattr(run, name) for run in runs) for name in Outcome.__slots__}
        accuracies = [100 * run.accuracy for run in runs]
        print(
            f"| {algo} | {len(runs)} | {100 * mean['accuracy']:.1f} | {min(accuracies):.1f} – {max(accuracies):.1f} "
            f"| {mean['reward']:.3f} | {100 * mean['cut_off']:.1f} | {mean['reply_tokens']:.0f} | {mean['entropy']:.3f} "
            f"| {100 * mean['clip_frac']:.2f} | {mean['sampled'] / 1e6:.2f} | {mean['seconds']:.0f} |"
        )


def main(settings: Settings) -> None:
    unknown = sorted(set(settings.only) - set(GROUP_SIZES))
    if unknown:
        raise SystemExit(f"--only {' '.join(unknown)}: there are {', '.join(GROUP_SIZES)}.")
    if settings.dry_run:
        for seed in settings.seeds:
            for algo in settings.only:
                print("ludic", *command(settings, algo, seed))
        return
    failed: list[str] = []
    if not settings.table:
        settings.results.mkdir(parents=True, exist_ok=True)
        write_questions(settings)
        queue = Queue(settings)
        threads = [threading.Thread(target=queue.work) for _ in range(settings.parallel)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed = queue.failed
    print_table(settings)
    if failed:
        raise SystemExit(f"Failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
