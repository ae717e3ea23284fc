"""Checkpoints: exact, atomic, checked, pruned."""

import json
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ludic.models.loading import word_tokenizer
from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointError, CheckpointManager
from ludic.training.checkpoint.rng import restore_rng, rng_state
from ludic.types import ConfigError
from tests import forked
from tests.unit.inference.local.tiny_models import VOCAB, new_model
from tests.unit.training.endless_saver import make_parts, save_until_killed

pytestmark = pytest.mark.slow


def manager(root: Path, **settings: Any) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(root, **settings))


def trainable(family: str = "llama-mha-tied", seed: int = 0) -> Any:
    model = new_model(family, seed=seed)
    return model.requires_grad_(True)


def with_lora(model: Any, **settings: Any) -> Any:
    peft = pytest.importorskip("peft", reason="the lora extra is not installed")
    return peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **settings}))


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model: Any, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        ids = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def a_module(value: float = 1.0) -> torch.nn.Module:
    module = torch.nn.Linear(4, 4)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)
    return module


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


# --- exact round trips --------------------------------------------------------------------------------------------

MAKERS = {
    "tied": lambda seed: trainable("llama-mha-tied", seed),
    "untied": lambda seed: trainable("llama", seed),
    "lora": lambda seed: with_lora(trainable("llama-mha-tied")),
    "lora-and-whole-head": lambda seed: with_lora(trainable("llama"), modules_to_save=["lm_head"]),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_resumed_model_and_optimizer_train_on_bit_for_bit(tmp_path: Path, maker: str):
    model = MAKERS[maker](0)
    optimizer = adamw(model)
    train(model, optimizer, range(3))
    manager(tmp_path).save(3, model=model, optimizer=optimizer)
    train(model, optimizer, range(3, 5))

    resumed = MAKERS[maker](7)
    fresh = adamw(resumed)
    places = {name: tensor.data_ptr() for name, tensor in resumed.state_dict().items()}
    assert manager(tmp_path).load(model=resumed, optimizer=fresh) == {"step": 3}
    assert {name: tensor.data_ptr() for name, tensor in resumed.state_dict().items()} == places, "an engine shares them"
    train(resumed, fresh, range(3, 5))
    assert_same(values(model), values(resumed))


def test_transformers_reads_a_checkpoint_of_a_tied_model(tmp_path: Path):
    model = trainable("llama-mha-tied")
    train(model, adamw(model), range(2))
    folder = manager(tmp_path).save(2, model=model, tokenizer=word_tokenizer(["a"]))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert "a" in transformers.AutoTokenizer.from_pretrained(folder).get_vocab()
    assert_same(values(model), values(loaded))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_peft_reads_a_lora_checkpoint_which_holds_the_adapter_only(tmp_path: Path):
    peft = pytest.importorskip("peft", reason="the lora extra is not installed")
    model = with_lora(trainable())
    train(model, adamw(model), range(2))
    folder = manager(tmp_path).save(2, model=model)
    assert not list(folder.glob("model*.safetensors"))
    assert_same(values(model), values(peft.PeftModel.from_pretrained(trainable(), folder)))


def large_embedding(seed: int) -> Any:
    """More than 2^24 elements in one tensor, where a float32 cannot count any more; half precision keeps it cheap."""
    with torch.device("meta"):
        config = new_model("llama-mha-tied").config
        config.vocab_size = 2**24 // config.hidden_size + 1
        model = transformers.LlamaForCausalLM(config).bfloat16()
    model = model.to_empty(device="cpu")
    for number, parameter in enumerate(model.parameters()):
        torch.nn.init.constant_(parameter, seed + number)
    return model


@pytest.mark.parametrize("kind", ["full", "lora", "full, as a plain module"])
def test_tensor_of_more_than_2_to_the_24_elements_is_restored(tmp_path: Path, kind: str):
    wrapped = {"full": lambda model: model, "lora": with_lora, "full, as a plain module": torch.nn.Sequential}[kind]
    is_lora = kind == "lora"
    model = wrapped(large_embedding(0))
    manager(tmp_path).save(1, model=model)
    other = wrapped(large_embedding(0 if is_lora else 5))
    manager(tmp_path).load(model=other)
    assert_same(values(model), values(other))
    if is_lora:  # the very last number of the frozen tensor is looked at, too
        other.get_input_embeddings().weight.data[-1, -1] = 7.0
        with pytest.raises(ConfigError, match=r"another base.*embed_tokens"):
            manager(tmp_path).load(model=other)


def test_weights_split_over_several_files_are_restored(tmp_path: Path):
    model = trainable("llama")
    folder = manager(tmp_path, max_shard_size="20KB").save(1, model=model)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    other = trainable("llama", seed=5)
    manager(tmp_path).load(model=other)
    assert_same(values(model), values(other))


def test_family_stored_under_other_names_is_restored(tmp_path: Path):
    def mixtral(seed: int) -> Any:
        torch.manual_seed(seed)
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                vocab_size=32, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=1, num_local_experts=2,
            )
        )  # fmt: skip

    model, other = mixtral(0), mixtral(1)
    folder = manager(tmp_path).save(1, model=model)
    assert "experts.0.w1" in (folder / "model.safetensors").read_bytes()[:4096].decode("latin1"), "the hub's names"
    manager(tmp_path).load(model=other)
    assert_same(values(model), values(other))


def test_plain_module_with_a_shared_weight_and_a_buffer_is_restored(tmp_path: Path):
    def shared() -> torch.nn.Module:
        module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        module[1].weight = module[0].weight
        module(torch.randn(8, 3))
        return module

    model, other = shared(), shared()
    manager(tmp_path).save(1, model=model)
    manager(tmp_path).load(model=other)
    assert_same(values(model), values(other))
    assert other[1].weight is other[0].weight


@pytest.mark.slow
def test_compiled_model_is_saved_under_its_uncompiled_names(tmp_path: Path):
    manager(tmp_path).save(1, model=torch.compile(a_module(3.0)))
    plain = a_module()
    manager(tmp_path).load(model=plain)
    assert_same(values(plain), values(a_module(3.0)))


def test_state_is_restored_with_its_types(tmp_path: Path):
    state = {
        "plain": {"epoch": 2, "names": ["a", None, True], "seed": 2**100, "pi": 0.1},
        "tuples": (1, (2.5, "x")),
        "by_number": {1: float("inf"), (2, 3): [torch.tensor([1.5, float("nan")])]},
        "nothing": None,
        "rng": rng_state(),
    }
    expected = [random.random(), torch.rand(()).item()]
    folder = manager(tmp_path).save(
        4, model=a_module(), state=state, metrics={"train/loss": float("nan"), "eval/x": 0.5}
    )
    loaded = manager(tmp_path).load(model=a_module())
    assert loaded.keys() == {*state, "step"} and loaded["step"] == 4
    assert [loaded[name] for name in ("plain", "tuples", "nothing")] == [state["plain"], (1, (2.5, "x")), None]
    assert loaded["by_number"][1] == float("inf")
    torch.testing.assert_close(
        loaded["by_number"][2, 3][0], state["by_number"][2, 3][0], rtol=0, atol=0, equal_nan=True
    )
    restore_rng(loaded["rng"])
    assert [random.random(), torch.rand(()).item()] == expected
    written = json.loads((folder / "trainer_state.json").read_text())
    assert written["state"] == {"plain": state["plain"], "nothing": None}, "plain values are for people to read"
    assert written["metrics"] == {"train/loss": None, "eval/x": 0.5}


# --- what does not fit --------------------------------------------------------------------------------------------


def of_layers(num_layers: int) -> Any:
    config = new_model("llama").config
    config.num_hidden_layers = num_layers
    return transformers.LlamaForCausalLM(config)


MISFITS = {
    "another family": (
        lambda: trainable("llama"),
        lambda: trainable("qwen3", 3),
        "not those of a Qwen3.*Build the model",
    ),
    "fewer layers": (
        lambda: of_layers(2),
        lambda: of_layers(1),
        "num_hidden_layers 1,.* it holds .*num_hidden_layers 2,",
    ),
    "more layers": (
        lambda: of_layers(1),
        lambda: of_layers(2),
        "num_hidden_layers 2,.* it holds .*num_hidden_layers 1,",
    ),
    "another dtype": (a_module, lambda: a_module().bfloat16(), "float32, but .* torch.bfloat16"),
    "an adapter, another base": (lambda: with_lora(trainable()), lambda: with_lora(trainable(seed=1)), "another base"),
    "an adapter of other modules": (
        lambda: with_lora(trainable()),
        lambda: with_lora(trainable(), target_modules=["k_proj"]),
        "is another one.*LoraConfig",
    ),
    "an adapter of another scale": (
        lambda: with_lora(trainable()),
        lambda: with_lora(trainable(), lora_alpha=12),
        "lora_alpha is 8 there and 12 here",
    ),
    "an adapter, a whole model": (lambda: with_lora(trainable()), trainable, "it is an adapter"),
    "a whole model, an adapter": (trainable, lambda: with_lora(trainable()), "before it is wrapped by peft"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_weights_that_do_not_fit_are_refused_before_anything_is_copied(tmp_path: Path, kind: str):
    saved, other, message = MISFITS[kind]
    manager(tmp_path).save(1, model=saved())
    model = other()
    before = values(model)
    with pytest.raises(ConfigError, match=message):
        manager(tmp_path).load(model=model)
    assert_same(before, values(model))


def test_saving_refuses_weights_trained_outside_the_adapter(tmp_path: Path):
    model = with_lora(trainable())
    model.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match="norm.weight.*modules_to_save"):
        manager(tmp_path).save(1, model=model)
    assert os.listdir(tmp_path) == []


def test_missing_or_different_optimizer_is_refused(tmp_path: Path):
    model = a_module()
    checkpoints = manager(tmp_path, save_optimizer=False)
    checkpoints.save(1, model=model, optimizer=adamw(model))
    with pytest.raises(CheckpointError, match="save_optimizer=False.*optimizer=None"):
        checkpoints.load(model=model, optimizer=adamw(model))
    manager(tmp_path).save(2, model=model, optimizer=adamw(model))
    with pytest.raises(CheckpointError, match="same parameters"):
        checkpoints.load(model=model, optimizer=torch.optim.AdamW([model.weight]))


def test_saving_refuses_state_that_could_not_be_read_back(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"state\[tracker\['x'\]\[0\]\] is a set"):
        manager(tmp_path).save(1, model=a_module(), state={"tracker": {"x": ({1},)}})


def test_state_may_repeat_the_step_but_not_contradict_it(tmp_path: Path):
    manager(tmp_path).save(3, model=a_module(), state={"step": 3})
    assert manager(tmp_path).load(model=a_module()) == {"step": 3}
    with pytest.raises(ConfigError, match="of step 4, but its state says step 3"):
        manager(tmp_path).save(4, model=a_module(), state={"step": 3})


@pytest.mark.parametrize(
    "settings",
    [{"every_n_steps": -1}, {"max_to_keep": 0}, {"best_mode": "most"}, {"keep_every": 25, "every_n_steps": 10}],
)
def test_invalid_checkpoint_settings_are_refused(settings):
    with pytest.raises(ConfigError, match=f"CheckpointConfig.{next(iter(settings))}"):
        CheckpointConfig("x", **settings)


# --- which checkpoint ---------------------------------------------------------------------------------------------


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_every_nth_step_is_saved(tmp_path: Path):
    checkpoints = manager(tmp_path, every_n_steps=5)
    assert [step for step in range(16) if checkpoints.should_save(step)] == [5, 10, 15]
    assert not any(manager(tmp_path).should_save(step) for step in range(16))
    assert checkpoints.maybe_save(4, model=a_module()) is None
    assert checkpoints.maybe_save(5, model=a_module()) == tmp_path / "step_000005"


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path):
    checkpoints = manager(tmp_path, max_to_keep=2, best_metric="eval/accuracy")
    scores = {1: 0.2, 2: 0.9, 3: float("nan"), 4: 0.9, 5: None, 6: 0.1}
    for step, score in scores.items():
        metrics = {"train/loss": 1.0} | ({} if score is None else {"eval/accuracy": score})
        checkpoints.save(step, model=a_module(step), metrics=metrics)
    assert names(tmp_path) == ["step_000002", "step_000005", "step_000006"]
    assert (checkpoints.latest(), checkpoints.best()) == (tmp_path / "step_000006", tmp_path / "step_000002")
    assert json.loads((tmp_path / "latest.json").read_text()) == {"path": "step_000006", "step": 6}
    assert json.loads((tmp_path / "best.json").read_text())["value"] == 0.9
    model = a_module()
    assert checkpoints.load(model=model, step=5) == {"step": 5} and model.weight[0, 0] == 5
    assert checkpoints.load(model=model, path=checkpoints.best()) == {"step": 2} and model.weight[0, 0] == 2
    assert checkpoints.load(model=model) == {"step": 6} and model.weight[0, 0] == 6


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"max_to_keep": 1, "best_metric": "loss", "best_mode": "min"}, [2, 8]),
        ({"max_to_keep": 1, "keep_every": 3}, [3, 6, 8]),
        ({"max_to_keep": None}, list(range(1, 9))),
    ],
)
def test_what_is_kept_is_what_the_settings_say(tmp_path: Path, settings: dict[str, Any], kept: list[int]):
    checkpoints = manager(tmp_path, **settings)
    for step in range(1, 9):
        checkpoints.save(step, model=a_module(step), metrics={"loss": abs(step - 2.0)})
    assert names(tmp_path) == [f"step_{step:06d}" for step in kept]
    assert checkpoints.latest() == tmp_path / "step_000008"


def test_on_committed_is_called_once_the_checkpoint_is_complete(tmp_path: Path):
    told: list[tuple[Path, Path | None]] = []
    checkpoints = manager(tmp_path)
    path = checkpoints.save(1, model=a_module(), on_committed=lambda path: told.append((path, checkpoints.latest())))
    assert told == [(path, path)]


def test_newest_is_the_one_saved_last_also_after_going_back(tmp_path: Path):
    checkpoints = manager(tmp_path, max_to_keep=2)
    for step in (5, 10):
        checkpoints.save(step, model=a_module(step))
    checkpoints.load(model=a_module(), step=5)
    checkpoints.save(6, model=a_module(6))
    assert checkpoints.latest() == tmp_path / "step_000006"
    assert names(tmp_path) == ["step_000006", "step_000010"]


def test_step_can_be_saved_again(tmp_path: Path):
    checkpoints = manager(tmp_path, max_to_keep=1)
    checkpoints.save(1, model=a_module(1))
    checkpoints.save(1, model=a_module(2))
    model = a_module(0)
    checkpoints.load(model=model)
    assert model.weight[0, 0] == 2 and names(tmp_path) == ["step_000001"]


def test_load_without_a_checkpoint_is_refused(tmp_path: Path):
    checkpoints = manager(tmp_path / "nowhere")
    assert (checkpoints.latest(), checkpoints.best()) == (None, None)
    with pytest.raises(CheckpointError, match="without resuming"):
        checkpoints.load(model=a_module())
    manager(tmp_path).save(1, model=a_module())
    with pytest.raises(CheckpointError, match="step_000009: it does not exist. Complete .*: step_000001"):
        manager(tmp_path).load(model=a_module(), step=9)


# --- damage -------------------------------------------------------------------------------------------------------

RANK_FILE = "ranks/00000-000.safetensors"
DAMAGE = {
    "a truncated file": (lambda folder: os.truncate(folder / RANK_FILE, 100), f"{RANK_FILE} has 100 bytes"),
    "a changed byte": (lambda folder: damage(folder / "model.safetensors"), "checksum"),
    "a missing file": (lambda folder: (folder / RANK_FILE).unlink(), f"{RANK_FILE} is missing"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "no complete manifest"),
    "half a manifest": (lambda folder: os.truncate(folder / "manifest.json", 10), "no complete manifest"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoint_is_skipped_with_one_warning(tmp_path: Path, caplog, kind: str):
    checkpoints = manager(tmp_path)
    for step in (1, 2):
        model = a_module(step)
        checkpoints.save(step, model=model, optimizer=adamw(model), state={"x": torch.tensor(step)})
    do, message = DAMAGE[kind]
    do(tmp_path / "step_000002")
    model = a_module(0)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(model=model, step=2)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.load(model=model, optimizer=adamw(model)) == {"step": 1, "x": torch.tensor(1)}
    assert model.weight[0, 0] == 1
    (warning,) = caplog.messages
    assert "step_000002" in warning and message in warning


def test_killed_replacement_leaves_the_old_one_and_the_next_save_cleans_up(tmp_path: Path):
    checkpoints = manager(tmp_path, max_to_keep=1, best_metric="x")
    checkpoints.save(3, model=a_module(3), metrics={"x": 1.0})
    # what a kill between the two renames leaves
    (tmp_path / "step_000003").rename(tmp_path / ".replaced-step_000003")
    shutil.copytree(tmp_path / ".replaced-step_000003", tmp_path / ".unfinished-step_000003")
    model = a_module(0)
    assert checkpoints.load(model=model) == {"step": 3} and model.weight[0, 0] == 3
    checkpoints.save(4, model=a_module(4), metrics={"x": 0.0})
    assert names(tmp_path) == ["step_000003", "step_000004"]
    assert checkpoints.best() == tmp_path / "step_000003"


@pytest.mark.slow
def test_kill_9_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path: Path):
    dice = random.Random(0)
    checkpoints = manager(tmp_path)
    model, optimizer = make_parts()
    step, leftovers = 0, 0
    for _ in range(12):
        saver = forked.call(save_until_killed, tmp_path, step + 1)
        wait_for_newer(checkpoints, step)
        time.sleep(dice.uniform(0, 0.04))
        saver.kill()
        saver.join()
        leftovers += any(name.startswith(".") for name in os.listdir(tmp_path))
        state = checkpoints.load(model=model, optimizer=optimizer)
        assert state["step"] > step
        step = state["step"]
        assert state == {"step": step, "plain": step, "tensor": torch.tensor(step)}
        assert all((parameter == step).all() for parameter in model.parameters())
        assert all((own["exp_avg"] == step).all() for own in optimizer.state.values())
    assert leftovers > 0, "no kill fell into a save; this test has shown nothing"


def wait_for_newer(checkpoints: CheckpointManager, step: int) -> None:
    pointer = checkpoints.root / "latest.json"
    deadline = time.monotonic() + 60
    while not (pointer.exists() and json.loads(pointer.read_text())["step"] > step):
        assert time.monotonic() < deadline, "the saver never saved"
        time.sleep(0.001)


# --- a full disk --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["weights", "optimizer", "state"])
def test_failed_write_leaves_earlier_checkpoints_intact(tmp_path: Path, what: str):
    """The kernel refuses to write files beyond a limit: the same calls fail as on a full disk."""
    checkpoints = manager(tmp_path)
    checkpoints.save(1, model=a_module(1))
    large = torch.nn.Linear(1000, 10)
    model, optimizer = (large if what == "weights" else a_module(2)), None
    if what == "optimizer":
        optimizer = adamw(large)
        large(torch.ones(1000)).sum().backward()
        optimizer.step()
    state = {"x": torch.ones(10_000)} if what == "state" else {}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointError, match="step_000001 is intact.*MiB are free.*max_to_keep"):
            checkpoints.save(2, model=model, optimizer=optimizer, state=state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step_000001"]
    assert checkpoints.load(model=a_module()) == {"step": 1}


FULL_DISK = """
import sys, torch
from ludic.models.loading import word_tokenizer
from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointError, CheckpointManager
checkpoints = CheckpointManager(CheckpointConfig(sys.argv[1], max_to_keep=2))
model = torch.nn.Linear(300, 300)
checkpoints.save(1, model=model)
checkpoints.save(2, model=model)
try:
    checkpoints.save(3, model=model)
except CheckpointError as error:
    print(error)
print(checkpoints.load(model=model), sorted(p.name for p in checkpoints.root.iterdir()))
"""


@pytest.mark.slow
def test_full_disk_leaves_earlier_checkpoints_intact(tmp_path: Path):
    small_disk = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1M tmpfs "$1" && exec "$2" -c "$3" "$1"', "sh"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*small_disk, tmp_path, "true"], capture_output=True).returncode
    ):
        pytest.skip("no right to mount a small disk here")
    done = subprocess.run([*small_disk, tmp_path, sys.executable, FULL_DISK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    message, after = done.stdout.splitlines()[-2:]
    assert "No space left" in message and "step_000002 is intact" in message, message
    assert after == "{'step': 2} ['latest.json', 'step_000001', 'step_000002']"
