"""`ludic export`: what it writes is loaded by transformers and peft alone, in a process that knows nothing of Ludic."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from ludic.models.loading import character_tokenizer
from ludic.run.config.model import ModelSettings
from ludic.run.model import load_policy
from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointManager
from tests import forked
from tests.unit.cli.train_parts import RUN, command_in
from tests.unit.inference.local.tiny_models import new_model

pytestmark = pytest.mark.slow

IDS = [[5, 60, 7, 80, 9, 33, 21]]
ELSEWHERE = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "ludic"]:
    del sys.modules[name]
sys.modules["ludic"] = None
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

found = {}
for name in ("full", "merged", "adapter/base"):
    model = AutoModelForCausalLM.from_pretrained(name)
    GenerationConfig.from_pretrained(name)
    tokens = AutoTokenizer.from_pretrained(name.removesuffix("/base"))
    if name.startswith("adapter"):
        model = PeftModel.from_pretrained(model, "adapter")
    text = tokens.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>?<|end|><|assistant|>", text
    with torch.no_grad():
        found[name] = model(input_ids=torch.tensor(IDS)).logits
torch.save(found, "logits.pt")
"""


@pytest.fixture
def ludic(tmp_path, monkeypatch, capsys):
    return command_in(tmp_path, monkeypatch, capsys)


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model(input_ids=torch.tensor(IDS)).logits


def trained(path: str) -> torch.Tensor:
    return logits_of(load_policy(ModelSettings(model=path, dtype="float32")).model)  # a CPU with bf16 would load it so


@pytest.mark.slow
def test_export_loads_in_transformers_and_peft(ludic, tmp_path):
    lora = [*RUN, "--lora-rank", "2", "--name", "lora", "--lr", "0.1"]
    assert ludic("train", *RUN).code == 0
    assert ludic("train", *lora).code == 0
    ended = ludic("export", "runs/first", "moved/full")
    assert ended.code == 0 and 'from_pretrained("moved/full")' in ended.out, ended.err
    assert ludic("export", "runs/lora", "moved/merged").code == 0
    ended = ludic("export", "runs/lora/checkpoints/step_000002", "moved/adapter", "--adapter")
    assert 'AutoModelForCausalLM.from_pretrained("moved/adapter/base"), "moved/adapter")' in ended.out, ended.err
    expected = {"full": trained("runs/first"), "merged": trained("runs/lora"), "adapter/base": trained("runs/lora")}
    before = logits_of(load_policy(ModelSettings(model="tiny", dtype="float32")).model)
    assert all((own - before).abs().max() > 1e-3 for own in expected.values()), "they have learned something"
    shutil.rmtree("runs")
    (tmp_path / "elsewhere.py").write_text(f"IDS = {IDS}\n{ELSEWHERE}")
    process = forked.python(tmp_path / "elsewhere.py", cwd=tmp_path / "moved")
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said[-3000:]
    found = torch.load(tmp_path / "moved" / "logits.pt")
    for name, own in expected.items():  # merged: W + BA is rounded once more than Wx + BAx
        torch.testing.assert_close(
            found[name], own, rtol=1e-4, atol=1e-4, msg=lambda said, name=name: f"{name}: {said}"
        )


def test_an_adapter_without_a_run_folder_is_merged_into_the_base_that_is_named(ludic, tmp_path):
    peft = pytest.importorskip("peft", reason="the lora extra is not installed")
    base = new_model().requires_grad_(True)
    for folder, made in (("base", base), ("other", new_model(seed=4))):
        made.save_pretrained(folder)
        character_tokenizer().save_pretrained(folder)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    torch.nn.init.normal_(model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight)
    folder = CheckpointManager(CheckpointConfig("own")).save(3, model=model)
    unnamed = ludic("export", str(folder), "merged")
    assert unnamed.code == 2 and "Give --base" in unnamed.err, unnamed.err
    assert ludic("export", str(folder), "merged", "--base", "base").code == 0
    torch.testing.assert_close(trained("merged"), logits_of(model), rtol=1e-4, atol=1e-4)
    wrong = ludic("export", str(folder), "wrong", "--base", "other")
    assert wrong.code == 2 and "another base" in wrong.err and not Path("wrong").exists()
    named = ludic("export", str(folder), "adapter", "--adapter", "--base", "org/base")
    assert named.code == 0 and 'from_pretrained("org/base")' in named.out, named.err
    assert json.loads(Path("adapter/adapter_config.json").read_text())["base_model_name_or_path"] == "org/base"


def test_the_checkpoint_is_the_newest_or_that_of_a_step(ludic):
    checkpoints = CheckpointManager(CheckpointConfig("runs/a/checkpoints"))
    model = new_model("llama-mha-tied").requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters())
    saved = []
    for step in (1, 2):
        torch.nn.init.constant_(model.model.norm.weight, step)
        saved.append(checkpoints.save(step, model=model, optimizer=optimizer, state={"at": step}))
    newest, first = (folder / "model.safetensors" for folder in reversed(saved))
    for number, (arguments, weights) in enumerate(
        [
            (["runs/a"], newest),
            (["runs/a", "--step", "1"], first),
            ([str(saved[0])], first),
            (["runs/a/checkpoints"], newest),
        ]
    ):
        target = Path(f"out-{number}")
        assert ludic("export", *arguments[:1], str(target), *arguments[1:]).code == 0
        assert (target / "model.safetensors").read_bytes() == weights.read_bytes()
        assert not (target / "ranks").exists()
    assert ludic("export", "runs/a", "whole", "--with-optimizer").code == 0
    assert checkpoints.load(model=model, optimizer=optimizer, path="whole") == {"step": 2, "at": 2}


def test_export_errors_name_the_cause(ludic):
    CheckpointManager(CheckpointConfig("runs/a/checkpoints")).save(2, model=new_model())
    Path("there").mkdir()
    for arguments, said in (
        (["runs/a", "there"], "there exists already"),
        (["runs/a", "out", "--step", "3"], "no checkpoint of step 3. It has 2."),
        (["runs/a", "out", "--adapter"], "is no adapter"),
        (["runs/b", "out"], "no complete checkpoint in runs/b: it does not exist"),
        (["there", "out", "--step", "1"], "there is not the folder of a run"),
    ):
        ended = ludic("export", *arguments)
        assert ended.code == 2 and said in ended.err and "Traceback" not in ended.err, ended.err
    assert not Path("out").exists()
