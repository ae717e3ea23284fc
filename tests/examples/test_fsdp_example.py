"""The example for several GPUs as two CPU processes with a tiny model, within 60 seconds; and its Slurm script with stand-ins."""

import json
import os
import subprocess
import time
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason="the train extra is not installed")

from ludic.distributed.ranks import Ranks  # noqa: E402
from ludic.types import ConfigError  # noqa: E402
from tests import forked, programs  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.integration]
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "fsdp2_training"
BUDGET_S = 60
# One core is what is sure; a shared machine can be several times slower than its clock.
PATIENCE_S = 4 * BUDGET_S


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    rows = [{"problem": f"What is {i} + 0?", "solution": rf"It is \boxed{{{i}}}."} for i in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(problems: Path, out: Path, *arguments: object) -> tuple[int | None, str]:
    flags: list[object] = [
        "--model", "tiny", "--engine", "local", "--device", "cpu", "--data", problems, "--parser", "final_number",
        "--runs", out.parent, "--name", out.name, "--rollouts-per-update", 32, "--group-size", 8, "--concurrency", 32,
        "--max-tokens", 32,
        "--max-seq-len", 512, "--micro-token-budget", 1024, "--lr", 1e-3, "--timeout-s", PATIENCE_S, *arguments,
    ]  # fmt: skip
    finished = forked.ranks(2, "examples.fsdp2_training.train_math_fsdp2", *map(str, flags), timeout_s=PATIENCE_S)
    return finished.code, finished.output


@pytest.fixture(scope="module")
def trained(problems, tmp_path_factory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("runs") / "math"
    code, output = train(problems, out, "--steps", 2, "--eval-data", problems, "--eval-every", 2, "--eval-at-start")
    assert code == 0, output[-6000:]
    return out, output


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_train_evaluate_and_write_a_model(trained):
    out, output = trained
    rows = metrics(out)
    steps = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["train/num_rollouts"] == 32 and row["train/grad_norm"] > 0 for row in steps)
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2]
    # The second batch was generated while the first was trained on, and ranks agree with the sampler.
    assert [row["train/lag_max"] for row in steps] == [0, 1]
    assert steps[0]["train/logp_difference_abs"] < 1e-4
    assert f"The model is in {out}/model_step_000002" in output and output.count("The model is in") == 1


def test_the_written_model_is_the_trained_one(trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ludic.models.loading import tiny_llama

    out, _ = trained
    folder = out / "model_step_000002"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    start = tiny_llama(len(tokenizer), width=64, layers=2, max_length=512, seed=0)
    moved = max(float((a - b).abs().max()) for a, b in zip(model.parameters(), start.parameters(), strict=True))
    assert 5e-4 < moved < 5e-3  # two steps of Adam at 1e-3


@pytest.mark.extended(
    covered_by="tests/integration/test_fsdp.py::test_two_processes_resume_in_the_middle_of_a_batch_bit_for_bit"
)
def test_fsdp_run_resumes_where_it_stopped(trained, problems):
    out, _ = trained
    code, output = train(problems, out, "--steps", 3, "--resume")
    assert code == 0, output[-6000:]
    assert [row["step"] for row in metrics(out) if "train/loss" in row] == [1, 2, 3]
    assert (out / "model_step_000003" / "model.safetensors").exists()


def test_a_mistake_of_the_first_rank_ends_all_of_them(tmp_path):
    """Only it reads the problems; the other is waiting for it meanwhile."""
    code, output = train(tmp_path / "none.jsonl", tmp_path / "run")
    assert code == 1, output[-6000:]
    assert f"train_math_fsdp2: Cannot read --data {tmp_path}/none.jsonl: No such file or directory." in output


# --- without processes ---


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return programs.load(FOLDER / "train_math_fsdp2.py")


def test_single_process_is_refused_with_advice(script, tmp_path):
    with pytest.raises(ConfigError, match="torchrun"):
        script.main(["--device", "cpu", "--runs", str(tmp_path)])


def test_existing_run_is_resumed_and_not_overwritten(script, tmp_path):
    class TwoRanks(Ranks):
        world_size = 2

    def check(*arguments: str) -> None:
        script.checked(*script.settings(["--runs", str(tmp_path), "--name", "run", *arguments]), TwoRanks())

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="There is a run in .* already"):
        check()
    check("--resume")
    with pytest.raises(ConfigError, match="not a multiple of group_size = 8"):
        check("--rollouts-per-update", "100")


# --- the Slurm script ---

RECORD = 'echo "$(basename "$0") GPUS=${CUDA_VISIBLE_DEVICES:-} $*" >> "$RECORD"\n'
STAND_INS = {
    "ludic": 'trap \'echo "server ended" >> "$RECORD"; exit 0\' TERM\n' + RECORD + "while true; do sleep 0.1; done\n",
    "curl": 'until grep -qs "^ludic" "$RECORD"; do sleep 0.05; done\n',  # the server is up when it has said so
    "torchrun": RECORD
    + 'trap \'echo "run ended" >> "$RECORD"; exit 143\' TERM\n[ -z "${HANG:-}" ] && exit ${CODE:-0}\n'
    'echo begun >> "$RECORD"\nwhile true; do sleep 0.1; done\n',
    "scontrol": RECORD,
}


def slurm(
    folder: Path, *arguments: str, instead: dict[str, str] | None = None, **variables: str
) -> "subprocess.Popen[str]":
    for name, body in (STAND_INS | (instead or {})).items():
        (folder / name).write_text("#!/bin/bash\n" + body)
        (folder / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(folder / "record"), "OUT": str(folder / "run"),
        "SLURM_JOB_ID": "77", **variables,
    }  # fmt: skip
    return subprocess.Popen(
        ["bash", str(FOLDER / "slurm.sh"), *arguments], cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE
    )


def lines(folder: Path) -> list[str]:
    return (folder / "record").read_text().splitlines()


def test_slurm_gives_one_gpu_to_the_server_and_three_to_the_trainers(tmp_path):
    job = slurm(tmp_path, "--data", "math.jsonl")
    assert job.wait(timeout=30) == 0, job.stderr.read()
    server, trainer, end = lines(tmp_path)
    assert server.startswith("ludic GPUS=0 serve --engine vllm --model Qwen/Qwen2.5-1.5B-Instruct --port 8000")
    assert trainer.startswith(
        "torchrun GPUS=1,2,3 --standalone --nproc-per-node 3 --max-restarts 2 examples/fsdp2_training/"
    )
    assert trainer.endswith("--resume --data math.jsonl") and (ROOT / trainer.split()[7]).is_file()
    assert end == "server ended"


def test_the_flags_that_slurm_hands_on_are_those_of_the_script(tmp_path, script):
    slurm(tmp_path).wait(timeout=30)
    arguments = lines(tmp_path)[1].split("train_math_fsdp2.py ")[1].split()
    flags, config = script.settings(arguments)
    assert flags.resume and config.rollouts.server == ("http://127.0.0.1:8000",)
    assert config.rollouts.control_token == tmp_path / "run" / "vllm"
    assert config.run.runs / config.run.name == tmp_path / "run"


def test_slurm_says_that_the_run_failed(tmp_path):
    job = slurm(tmp_path, CODE="3")
    assert job.wait(timeout=30) == 3
    deadline = time.monotonic() + 20
    while lines(tmp_path)[-1] != "server ended":  # it was told to end, and says so in its own time
        assert time.monotonic() < deadline, lines(tmp_path)
        time.sleep(0.05)


def test_slurm_says_that_the_server_did_not_start(tmp_path):
    job = slurm(tmp_path, instead={"ludic": "echo no such model\nexit 1\n", "curl": "sleep 0.3\nexit 1\n"})
    assert job.wait(timeout=30) == 1
    told = job.stderr.read()
    assert "vLLM did not start" in told and "no such model" in told
    assert not (tmp_path / "record").exists()  # nothing was trained


def test_slurm_saves_and_queues_again_when_the_time_is_up(tmp_path):
    job = slurm(tmp_path, HANG="1")
    while not (tmp_path / "record").exists() or "begun" not in lines(tmp_path):
        assert job.poll() is None, job.stderr.read()
        time.sleep(0.05)
    job.terminate()
    assert job.wait(timeout=30) == 0
    assert lines(tmp_path)[-3:] == ["run ended", "scontrol GPUS= requeue 77", "server ended"]
