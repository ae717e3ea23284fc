"""`ludic train --preferences`: DPO, IPO and KTO on stored preferences, without an env or with one to evaluate on."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ludic.batch_gen import PreferenceBatchSource
from ludic.envs.gsm8k import GSM8KEnv
from ludic.inference import ByteTemplate, HFChatTemplate
from ludic.models.loading import make_tiny
from ludic.run import build
from ludic.run.session import check_preferences
from ludic.training import Trainer, TrainerConfig, make_dpo
from ludic.training.loggers import read_metrics
from ludic.types import ConfigError
from tests.unit.cli.train_parts import RUN, command_in

pytestmark = pytest.mark.slow

PAIRS = [{"prompt": f"{a} + 1 = ?", "chosen": f"{a + 1}", "rejected": f"Well, {a}?"} for a in range(8)]
LABELS = [
    {"prompt": row["prompt"], "completion": row[key], "label": key == "chosen"} for row in PAIRS for key in ("chosen", "rejected")
]  # fmt: skip
DPO = ["--algo", "dpo", "--preferences", "pairs.jsonl"]
ANSWERS = [{"question": row["prompt"], "answer": row["chosen"]} for row in PAIRS]
SMALL = ["--model", "tiny", "--rollouts-per-update", "4", "--lr", "1e-3", "--logger", "none", "--threads", "1"]


@pytest.fixture
def ludic(tmp_path, monkeypatch, capsys):
    for name, rows in (("pairs", PAIRS), ("labels", LABELS), ("qa", ANSWERS)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return command_in(tmp_path, monkeypatch, capsys)


def logged(name: str, run: str) -> list[float]:
    return [row[name] for row in read_metrics(Path("runs") / run / "metrics.jsonl") if name in row]


def weights(run: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(Path("runs") / run / "checkpoints" / f"step_{step:06d}" / "model.safetensors")


def test_the_command_does_what_the_trainer_does_by_hand(ludic):
    ended = ludic("train", *DPO, *SMALL, "--steps", "3", "--algo-set", "beta=0.2")
    assert ended.code == 0, ended.err
    assert "learns from pairs.jsonl with dpo, 3 updates of 4 preferences" in ended.out
    assert "ludic eval ENV --model runs/pairs-tiny-dpo" in ended.out
    margins = logged("train/margin", "pairs-tiny-dpo")
    assert margins[0] == pytest.approx(0, abs=1e-5) and margins[-1] > 0.05
    loaded = make_tiny(seed=0)
    config = build(preferences="pairs.jsonl", algo="dpo", model="tiny", lr=1e-3).resolved.trainer
    trainer = Trainer(
        model=loaded.model,
        algo=make_dpo(beta=0.2),
        batch_source=PreferenceBatchSource("pairs.jsonl", HFChatTemplate(loaded.tokenizer), batch_size=4, seed=0),
        reference=copy.deepcopy(loaded.model),
        cfg=config,
    )
    trainer.train_sync(3)
    assert isinstance(config, TrainerConfig)
    trained = weights("pairs-tiny-dpo", 3)
    for name, value in loaded.model.named_parameters():
        if name in trained:
            torch.testing.assert_close(trained[name], value.detach(), rtol=0, atol=1e-5)


def test_sft_learns_the_answers_of_a_file_in_one_command(ludic):
    ended = ludic("train", "--algo", "sft", "--data", "qa.jsonl", *SMALL, "--lr", "1e-2", "--steps", "8")
    assert ended.code == 0 and "learns from qa.jsonl with sft, 8 updates of 4 answers" in ended.out, ended.err
    surprise = logged("train/nll_mean", "qa-tiny-sft")
    assert surprise[-1] < 0.7 * surprise[0]
    refused = ludic("train", "--algo", "sft", "--data", "pairs.jsonl", *SMALL)
    assert refused.code == 2 and "pairs.jsonl holds pairs, but algo = 'sft'" in refused.err


async def test_answers_are_learned_behind_the_prompt_that_the_env_shows(tmp_path):
    (tmp_path / "qa.jsonl").write_text(json.dumps({"question": "1 + 1 = ?", "answer": "#### 2"}) + "\n")
    run = build(env="gsm8k", algo="sft", data=tmp_path / "qa.jsonl", model="tiny", rollouts_per_update=1)
    (item,) = (await check_preferences(run.resolved).next_batch()).items
    env = GSM8KEnv({"question": "1 + 1 = ?", "answer": "#### 2"})
    prompt = [{"role": "system", "content": env.suggested_sysprompt}, {"role": "user", "content": env.question}]
    shown = ByteTemplate().apply(prompt).prompt_token_ids
    assert item.input_ids[: len(shown)].tolist() == shown.tolist() and not item.action_mask[: len(shown)].any()
    assert ByteTemplate().decode_reply(item.input_ids[item.action_mask]) == "#### 2"


def test_resumed_run_equals_an_uninterrupted_one(ludic):
    assert ludic("train", *DPO, *SMALL, "--steps", "3", "--name", "whole").code == 0
    assert ludic("train", *DPO, *SMALL, "--steps", "1", "--name", "parts").code == 0
    ended = ludic("train", "runs/parts", "--resume", "--steps", "3")
    assert ended.code == 0, ended.err
    whole, parts = weights("whole", 3), weights("parts", 3)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_ipo_and_kto_learn_from_their_rows(ludic):
    assert (
        ludic("train", "--algo", "ipo", "--preferences", "pairs.jsonl", *SMALL, "--steps", "3", "--name", "ipo").code
        == 0
    )
    assert logged("train/loss", "ipo")[-1] < logged("train/loss", "ipo")[0]
    assert (
        ludic("train", "--algo", "kto", "--preferences", "labels.jsonl", *SMALL, "--steps", "3", "--name", "kto").code
        == 0
    )
    assert logged("train/wanted_reward", "kto")[-1] > logged("train/unwanted_reward", "kto")[-1]


def test_an_env_is_for_evaluation(ludic):
    play = ["--max-tokens", "1", "--eval-at-start", "--eval-every", "1", "--eval-episodes", "4", "--name", "judged"]
    ended = ludic("train", "letter.py:Letter", *DPO, *SMALL, "--steps", "1", *play)
    assert ended.code == 0 and "Evaluation:" in ended.out and "Next: ludic eval runs/judged" in ended.out, ended.err
    assert len(logged("eval/mean_reward", "judged")) == 2
    assert not Path("runs/judged/rollouts").exists()


def test_evaluation_of_a_run_without_an_env_says_what_to_type(ludic):
    assert ludic("train", *DPO, *SMALL, "--steps", "1", "--name", "first").code == 0
    ended = ludic("eval", "runs/first")
    assert ended.code == 2 and "ludic eval ENV --model runs/first" in ended.err


def test_plan_counts_the_passes(ludic):
    ended = ludic("train", *DPO, *SMALL, "--steps", "3", "--dry-run")
    assert ended.code == 0 and "3 batches × 4 pairs: 1.50 passes over 8; nothing is played." in ended.out, ended.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "TARGET is missing"),
        (["letter.py:Letter", "--algo", "dpo"], "give --preferences"),
        (["letter.py:Letter", "--algo", "sft"], "or --rollouts FILE.jsonl"),
        (["--preferences", "pairs.jsonl"], "is for dpo, ipo, kto, but algo = 'grpo'"),
        (["--preferences", "labels.jsonl", "--algo", "dpo"], "holds labels, but algo = 'dpo'"),
        (["--preferences", "none.jsonl", "--algo", "dpo"], "Cannot read --preferences none.jsonl"),
        ([*DPO, "--eval-at-start"], "An evaluation plays an env"),
    ],
)
def test_mistakes_are_explained(ludic, flags, message):
    ended = ludic("train", *flags, *SMALL, "--dry-run")
    assert ended.code == 2 and message in ended.err and "Traceback" not in ended.err, ended.err


def test_sft_imitates_the_rollouts_of_a_run(ludic):
    assert ludic("train", *RUN).code == 0
    stored = sorted(Path("runs/first/rollouts").iterdir())
    ended = ludic(
        "train",
        "letter.py:Letter",
        "--algo",
        "sft",
        *SMALL,
        "--rollouts-per-update",
        "16",
        "--steps",
        "2",
        "--name",
        "sft",
        "--rollouts",
        str(stored[0]),
    )
    assert ended.code == 0, ended.err
    losses = logged("train/loss", "sft")
    assert losses[-1] < losses[0]


# --- replay ---

REPLAY = """
[env]
id = "letter.py:Letter"
[model]
model = "tiny"
threads = 1
[agent]
max_tokens = 1
[algo]
group_size = 4
[rollouts]
rollouts_per_update = 8
[train]
lr = 1e-2
[run]
logger = ["none"]
[replay]
replay = 6
replay_half_life = 2.0
"""


def test_replayed_samples_are_trained_on_again_also_after_a_resume(ludic):
    Path("replay.toml").write_text(REPLAY)
    ended = ludic("train", "replay.toml", "--steps", "3", "--name", "whole")
    assert ended.code == 0, ended.err
    assert logged("train/num_replayed", "whole") == [0.0, 6.0, 6.0]
    assert logged("train/replay_lag_mean", "whole")[0] == 1.0
    assert ludic("train", "replay.toml", "--steps", "2", "--name", "parts").code == 0
    assert ludic("train", "runs/parts", "--resume", "--steps", "3").code == 0
    whole, parts = weights("whole", 3), weights("parts", 3)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_sft_says_that_it_takes_no_list():
    for env in (None, "gsm8k"):
        with pytest.raises(ConfigError, match="reads its answers from a file"):
            build(env=env, algo="sft", data=[{"question": "2 + 2", "answer": "4"}], model="tiny")
