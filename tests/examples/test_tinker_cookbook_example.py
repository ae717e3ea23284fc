"""Recipes of tinker_cookbook as they are, on `ludic serve --tinker` with a tiny model: each trains and saves its checkpoints."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed (requirements/no_deps.in)")
pytest.importorskip("chz", reason="the extra 'cookbook' is not installed")
pytest.importorskip("pylatexenc", reason="the extra 'cookbook' is not installed")

from ludic.models.loading import tiny_llama
from tests import forked
from tests.chat_templates import make_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extended(
        covered_by="plugins/tinker/tests/server/test_tinker_sdk.py::test_training_lowers_the_loss_and_sampler_agrees_with_trainer"
    ),
]
EXAMPLES = Path(__file__).parents[2] / "examples" / "tinker_cookbook"
PATIENCE_S = 240  # the recipes take a tenth of it where a core is free
TINY = ("lora_rank=4", "learning_rate=1e-3", "max_steps=2")
RECIPES = {
    "sl_loop": ("batch_size=2", "save_every=1", *TINY),
    "math_rl.train": ("env=arithmetic", "groups_per_batch=2", "group_size=4", "max_tokens=2", "eval_every=0", *TINY),
    "preference.dpo.train": ("batch_size=2", *TINY[1:]),
    "distillation.on_policy_distillation": (
        *("groups_per_batch=2", "group_size=2", "max_tokens=4", "eval_every=0", "teacher_model=MODEL", *TINY),
    ),
    "multiplayer_rl.guess_number.train": (
        *("batch_size=1", "group_size=2", "max_tokens=2", "eval_every=0", "renderer_name=qwen3_instruct", *TINY[1:]),
    ),
}
SUMS = {"lora_rank": "8", "learning_rate": "3e-3", "batch_size": "16", "max_steps": "24"}
DRIVER = f"""
import json, sys
sys.path.insert(0, {str(EXAMPLES)!r})
from pathlib import Path
from learn_sums import RL, SUPERVISED, learn
from run import run_recipe
recipes, supervised, rl = json.loads(sys.argv[1])
hub, logs = map(Path, sys.argv[2:])
for recipe, settings in recipes.items():
    run_recipe(recipe, settings, hub=hub, renderer="qwen3_instruct")
learn(SUPERVISED | supervised, RL | rl, hub=hub, logs=logs, renderer="qwen3_instruct")
"""
"""One process for all recipes: importing the cookbook takes longer than any of them."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = make_tokenizer("qwen")
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_llama(len(tokenizer), width=32, layers=2, max_length=4096).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def url(model: Path, tmp_path: Path) -> Iterator[str]:
    flags = ["--tinker", "--model", model, "--dtype", "float32", "--port", 0]
    server = forked.python("-m", "ludic.cli.main", "serve", *flags, cwd=tmp_path)  # keeps its data below that folder
    try:
        yield address_of(server)
    finally:
        server.terminate()
        server.wait(60)


def address_of(server: forked.Forked) -> str:
    deadline = time.monotonic() + 120
    while not (found := re.search(r"http://[\d.]+:\d+", server.said())):
        assert server.poll() is None and time.monotonic() < deadline, server.said()
        time.sleep(0.05)
    return found[0]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def logs(url: str, model: Path, tmp_path: Path) -> Path:
    """The folders of all recipes, by name."""
    logs = tmp_path / "logs"
    asked = {
        recipe: [
            f"model_name={model}",
            f"log_path={logs / recipe}",
            *(word.replace("MODEL", str(model)) for word in settings),
        ]
        for recipe, settings in RECIPES.items()
    }
    here = {"model_name": str(model)}
    rl = here | {"lora_rank": "8", "group_size": "4", "max_tokens": "8", "max_steps": "1"}
    (tmp_path / "driver.py").write_text(DRIVER)
    process = forked.python(
        *(tmp_path / "driver.py", json.dumps([asked, here | SUMS, rl]), tmp_path / "hub", logs),
        environment={"TINKER_BASE_URL": url},
    )
    out, err = process.communicate(PATIENCE_S)
    assert process.returncode == 0, out[-2000:] + err[-4000:]
    return logs


def test_recipes_train_and_save_and_rl_continues_from_a_supervised_checkpoint(logs: Path):
    for recipe in RECIPES:
        assert len(metrics(logs / recipe)) >= 2, recipe
        saved = [json.loads(line) for line in (logs / recipe / "checkpoints.jsonl").read_text().splitlines()]
        assert re.fullmatch(r"tinker://.+/weights/final", saved[-1]["state_path"]), recipe
        assert re.fullmatch(r"tinker://.+/sampler_weights/final", saved[-1]["sampler_path"]), recipe

    [warm], cold = metrics(logs / "rl"), metrics(logs / "math_rl.train")
    for step in (warm, *cold):
        reward, correct, ended = (step[f"env/all/{name}"] for name in ("reward/total", "correct", "format"))
        assert reward == pytest.approx(correct - 0.1 * (1 - ended))
        assert step["optim/kl_sample_train_v2"] < 1e-6, "what is trained is what was sampled, with the same log-probs"
    assert warm["env/all/format"] > 0.5 > cold[0]["env/all/format"], (
        "the first samples of RL end as those of the examples"
    )
