"""What four processes do for test_sharded_checkpoint: in one phase after another, as many of them as it needs form a job.

    python -m tests.integration.sharded_checkpoint_worker NUMBER FOLDER

Each check that passed is a line in FOLDER/results/NUMBER; a failure's traceback follows, and ends the process. Weights go
through the phases: one process saves, two ranks load and save, one loads and saves, then four, then two, then one process.
"""

import logging
import os
import random
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard

from ludic.distributed.fsdp import FSDPSettings, shard_model
from ludic.models.loading import word_tokenizer
from ludic.training.checkpoint.export import export_checkpoint
from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointError, CheckpointManager
from ludic.training.checkpoint.rng import restore_rng, rng_state
from ludic.training.learner.optimizer import FullPrecisionAdamW
from ludic.types import ConfigError

VOCAB = 37
"""Not divisible by the number of ranks, as LoRA's rank is smaller than it: some ranks have smaller, or empty, parts."""
VARIANTS = ("full-tied", "full-untied", "lora-tied", "lora-untied")


# --- models -------------------------------------------------------------------------------------------------------


def llama(*, tied: bool, seed: int = 0, layers: int = 2) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def with_lora(model: Any, *, alpha: int = 6, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=alpha, target_modules=["q_proj", "v_proj"]))


def make(variant: str, *, seed: int = 0) -> Any:
    """With another seed: other weights, of which a checkpoint leaves nothing; a base stays what it is."""
    model = llama(tied=variant.endswith("-tied"), seed=seed if variant.startswith("full") else 0)
    return with_lora(model, seed=seed) if variant.startswith("lora") else model


def sharded(model: Any, **settings: Any) -> Any:
    inner = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    for layer in inner.model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    return model


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model: Any, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    """Every rank has the same samples, so the mean gradient is that of one process."""
    for seed in seeds:
        ids = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(seed))
        ids = ids.to(torch.accelerator.current_accelerator() or "cpu")
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def whole(tensor: Any) -> torch.Tensor:
    is_part = isinstance(tensor, torch.distributed.tensor.DTensor)
    found = tensor.to(tensor.device_mesh.device_type).full_tensor() if is_part else tensor
    return found.detach().to("cpu", copy=True)


def values(model: Any, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    found = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    state = {} if optimizer is None else optimizer.state_dict()
    for index, slots in state.get("state", {}).items():
        found |= {f"{index}.{slot}": whole(value) for slot, value in slots.items()}
    return found | {f"copy {index}": whole(value) for index, value in enumerate(state.get("copies", []))}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys(), first.keys() ^ second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def assert_close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def block(value: float) -> Any:
    """A module that is quick to make; all its weights have one value."""
    module = torch.nn.Sequential(torch.nn.Linear(5, 40), torch.nn.Linear(40, 5))
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)
    return fully_shard(module)


def value_of(module: Any) -> float:
    (value,) = {float(number) for parameter in module.parameters() for number in whole(parameter).flatten()}
    return value


# --- the job ------------------------------------------------------------------------------------------------------

Check = Callable[[Path], None]


def manager(
    root: Path, kind: type[CheckpointManager] = CheckpointManager, per_rank: tuple[str, ...] = ("rng",), **settings: Any
) -> Any:
    return kind(CheckpointConfig(root, **settings), is_sharded=True, per_rank=per_rank)


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def first_does(action: Callable[[], Any]) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def error_of(action: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


class Warnings(logging.Handler):
    """What was said."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> "Warnings":
        logging.getLogger("ludic.training").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("ludic.training").removeHandler(self)


def passes_on(variant: str, source: str, target: str) -> Check:
    """Load what another number of ranks has saved, save it again, and train on as one process would have."""

    def check(folder: Path) -> None:
        reference = torch.load(folder / "reference" / f"{variant}.pt")
        model = sharded(make(variant, seed=7))
        optimizer = adamw(model)
        state = manager(folder / source / variant).load(model=model, optimizer=optimizer)
        assert (state["step"], state["epoch"]) == (3, (1, 2))
        assert_same(values(model, optimizer), reference["saved"])
        checkpoints = manager(folder / target / variant)
        checkpoints.save(3, model=model, optimizer=optimizer, state={**state, "rng": rng_state()})
        train(model, optimizer, range(3, 5))  # while it is being written
        checkpoints.finish()
        assert_close(values(model, optimizer), reference["trained"])

    return check


# --- one process, before ------------------------------------------------------------------------------------------


def one_process_saves(folder: Path) -> None:
    (folder / "reference").mkdir()
    for variant in VARIANTS:
        model = make(variant)
        optimizer = adamw(model)
        train(model, optimizer, range(3))
        state = {"epoch": (1, 2), "rng": rng_state()}
        root = folder / "one" / variant
        CheckpointManager(CheckpointConfig(root)).save(3, model=model, optimizer=optimizer, state=state)
        saved = values(model, optimizer)
        train(model, optimizer, range(3, 5))
        torch.save({"saved": saved, "trained": values(model, optimizer)}, folder / "reference" / f"{variant}.pt")


def the_manager_asks_for_a_process_group(folder: Path) -> None:
    message = error_of(lambda: manager(folder), ConfigError)
    assert "torchrun" in message and "CheckpointManager" in message, message


# --- two ranks ----------------------------------------------------------------------------------------------------


def the_same_ranks_go_on_bit_for_bit(folder: Path) -> None:
    model = sharded(make("full-tied"))
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    checkpoints = manager(folder / "same")
    torch.manual_seed(100 + dist.get_rank())
    checkpoints.save(2, model=model, optimizer=optimizer, state={"rng": rng_state(), "step": 2})
    drawn = [torch.rand(3), random.random()]
    train(model, optimizer, range(2, 4))

    other = sharded(make("full-tied", seed=5))
    fresh = adamw(other)
    state = manager(folder / "same").load(model=other, optimizer=fresh) if checkpoints.finish() is None else {}
    restore_rng(state["rng"])
    again = [torch.rand(3), random.random()]
    assert torch.equal(again[0], drawn[0]) and again[1] == drawn[1], "each rank has its own random numbers"
    train(other, fresh, range(2, 4))
    assert_same(values(model, optimizer), values(other, fresh))
    tied = other.state_dict(keep_vars=True)
    assert tied["lm_head.weight"] is tied["model.embed_tokens.weight"]


def half_precision_keeps_its_exact_copies(folder: Path) -> None:
    def parts(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        model = sharded(llama(tied=True, seed=seed).bfloat16())
        return model, FullPrecisionAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

    model, optimizer = parts(0)
    with torch.no_grad():  # less than bfloat16 can show
        for copied in optimizer.param_groups[0]["params"]:
            copied.mul_(1.0001)
    checkpoints = manager(folder / "half")
    checkpoints.save(2, model=model, optimizer=optimizer)
    other, fresh = parts(1)
    checkpoints.load(model=other, optimizer=fresh)
    assert_same(values(model, optimizer), values(other, fresh))


class Gated(CheckpointManager):
    """Writes when it is let."""

    gate = threading.Event()

    def _write(self, job: Any) -> None:
        self.gate.wait(60)
        super()._write(job)


def training_goes_on_while_it_is_written(folder: Path) -> None:
    module, told = block(1.0), []
    checkpoints = manager(folder / "gated", Gated)
    path = checkpoints.save(1, model=module, on_committed=told.append)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(2.0)
    assert not path.exists() and told == [] and checkpoints.latest() is None
    checkpoints.gate.set()
    checkpoints.finish()
    assert told == [path] and checkpoints.latest() == path
    checkpoints.load(model=module)
    assert value_of(module) == 1.0, "what it was when it was saved"


def a_full_disk_of_one_rank_fails_the_save_of_all(folder: Path) -> None:
    checkpoints = manager(folder / "full")
    checkpoints.save(1, model=block(1.0))
    checkpoints.finish()
    large = fully_shard(torch.nn.Linear(300, 300))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for ask in (checkpoints.finish, lambda: checkpoints.save(4, model=block(4.0))):
        if dist.get_rank() == 1:  # the kernel refuses longer files: the calls that fail are those of a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        checkpoints.save(2, model=large)
        message = error_of(ask, CheckpointError)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "rank 1: " in message and "step_000001 is intact" in message and "MiB are free" in message, message
        assert dist.get_rank() or folders(folder / "full") == ["step_000001"], "rank 0 has tidied up"
    checkpoints.save(3, model=block(3.0))
    checkpoints.finish()
    assert folders(folder / "full") == ["step_000001", "step_000003"]


def state_that_one_rank_cannot_store_fails_on_all(folder: Path) -> None:
    checkpoints = manager(folder / "unstorable")
    rng = {1} if dist.get_rank() == 1 else 0
    kind = ConfigError if dist.get_rank() == 1 else CheckpointError
    message = error_of(lambda: checkpoints.save(1, model=block(1.0), state={"rng": rng}), kind)
    assert "state[rng] is a set" in message, message


def a_damaged_checkpoint_is_skipped_with_a_message(folder: Path) -> None:
    checkpoints = manager(folder / "damaged", max_to_keep=4)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, model=block(float(step)))
    checkpoints.finish()
    shard = folder / "damaged" / "step_000004" / "ranks" / "00001-000.safetensors"
    first_does(lambda: os.truncate(shard, 100))
    first_does(lambda: flip_last_byte(folder / "damaged" / "step_000003" / "ranks" / "00001-000.safetensors"))
    first_does(lambda: (folder / "damaged" / "step_000002" / "manifest.json").unlink())
    module = block(0.0)
    with Warnings() as said:
        assert checkpoints.load(model=module)["step"] == 1
    assert value_of(module) == 1.0
    if dist.get_rank() == 0:
        text = "\n".join(said.texts)
        assert "step_000004: ranks/00001-000.safetensors has 100 bytes instead of" in text, text
        assert "step_000003: ranks/00001-000.safetensors is not what was written" in text, text
        assert "step_000002: it has no complete manifest.json" in text, text
    else:
        assert said.texts == [], "one rank says it"
    message = error_of(lambda: checkpoints.load(model=module, step=3), CheckpointError)
    assert "checksum" in message and "Complete checkpoints" in message, message
    dist.barrier()


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def the_newest_the_best_and_every_nth_are_kept(folder: Path) -> None:
    checkpoints = manager(folder / "kept", max_to_keep=1, keep_every=4, best_metric="eval/accuracy")
    module = block(1.0)
    tokenizer = word_tokenizer(["a"]) if dist.get_rank() == 0 else None  # what rank 0 has is enough
    for step, score in enumerate((0.1, 0.9, 0.2, 0.3, 0.4, 0.5), start=1):
        metrics = {"eval/accuracy": score if dist.get_rank() == 0 else 1.0}
        checkpoints.save(step, model=module, metrics=metrics, tokenizer=tokenizer)
    checkpoints.finish()
    assert "a" in transformers.AutoTokenizer.from_pretrained(folder / "kept" / "step_000006").get_vocab()
    assert folders(folder / "kept") == ["step_000002", "step_000004", "step_000006"]
    assert checkpoints.best() == folder / "kept" / "step_000002"
    dist.barrier()


def a_large_frozen_tensor_is_saved_and_exported(folder: Path) -> None:
    """More than 2^24 elements, where a float32 cannot count any more."""

    def made() -> Any:
        with torch.device("meta"):
            config = llama(tied=True, layers=1).config
            config.vocab_size = 2**24 // config.hidden_size + 1
            model = transformers.LlamaForCausalLM(config).bfloat16()
        for number, parameter in enumerate(model.to_empty(device="cpu").parameters()):
            torch.nn.init.constant_(parameter, number)
        return with_lora(model)

    checkpoints = manager(folder / "large")
    model = sharded(made())
    path = checkpoints.save(1, model=model)
    checkpoints.finish()
    checkpoints.load(model=sharded(made()))
    exported = export_checkpoint(path, folder / "exported-large")
    CheckpointManager(CheckpointConfig(folder / "unused")).load(model=made(), path=exported)


def a_critic_beside_the_shards_goes_on(folder: Path) -> None:
    """Its weights are whole on every rank, in the same optimizer."""

    def parts(value: float) -> tuple[Any, Any, torch.optim.Optimizer]:
        module, critic = block(value), torch.nn.Linear(5, 1)
        both = [*module.parameters(), *critic.parameters()]
        return module, critic, torch.optim.AdamW(both, lr=value, foreach=False)

    def step(module: Any, critic: Any, optimizer: torch.optim.Optimizer) -> None:
        (critic(torch.ones(2, 5)).sum() + module(torch.ones(2, 5)).sum()).backward()
        optimizer.step()

    module, critic, optimizer = parts(0.5)
    step(module, critic, optimizer)
    optimizer.param_groups[0]["foreach"] = True  # as one process would have it
    checkpoints = manager(folder / "critic")
    checkpoints.save(1, model=module, optimizer=optimizer, state={"critic": critic.state_dict()})
    other, other_critic, fresh = parts(0.25)
    other_critic.load_state_dict(checkpoints.load(model=other, optimizer=fresh)["critic"])
    assert_same(values(other, fresh), values(module, optimizer))
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["foreach"]) == (0.5, False), "how is decided here"
    step(other, other_critic, fresh)


# --- other numbers of ranks ---------------------------------------------------------------------------------------


def new_ranks_draw_other_numbers(folder: Path) -> None:
    module = block(1.0)
    with Warnings() as said:
        state = manager(folder / "per_rank").load(model=module, step=1)
    restore_rng(state["rng"])
    drawn: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(drawn, torch.rand(()).item())
    assert len(set(drawn)) == 4, "each rank draws its own"
    torch.manual_seed(100), torch.rand(())
    assert drawn[0] == torch.rand(()).item(), "rank 0 goes on"
    assert dist.get_rank() or "saved by 2 ranks and there are 4 now" in said.texts[0]


def data_that_each_rank_reads_is_not_divided_again(folder: Path) -> None:
    module = block(1.0)
    checkpoints = manager(folder / "per_rank", per_rank=("rng", "batch_source"))
    message = error_of(lambda: checkpoints.load(model=module, step=2), CheckpointError)
    assert "saved by 2 ranks" in message and "its own batch_source" in message and "Resume with 2" in message, message
    message = error_of(lambda: checkpoints.load(model=module, step=3), CheckpointError)
    assert "has one batch_source for all ranks, but each of the 4 ranks" in message, message


def each_rank_gets_its_own_state(folder: Path) -> None:
    module, rank = block(1.0), dist.get_rank()
    torch.manual_seed(100 + rank)
    torch.rand(())
    checkpoints = manager(folder / "per_rank", per_rank=("rng", "batch_source"), max_to_keep=None)
    rng = rng_state()
    checkpoints.save(1, model=module, state={"rng": rng})
    checkpoints.save(2, model=module, state={"rng": rng, "batch_source": {"at": rank}, "tracker": torch.tensor(rank)})
    state = checkpoints.load(model=module)
    assert (state["batch_source"], state["tracker"].item()) == ({"at": rank}, 0), "of the rest rank 0's counts"
    assert torch.equal(state["rng"]["torch"], rng["torch"])
    by_first = manager(folder / "per_rank", max_to_keep=None)
    assert "each with its own batch_source" in error_of(lambda: by_first.load(model=module), CheckpointError)
    by_first.save(3, model=module, state={"rng": rng, "batch_source": {"at": 5}})
    by_first.finish()


def replicas_of_shards_go_on(folder: Path) -> None:
    """Sharded as a trainer would: two groups of two ranks, each with the whole model."""
    for variant in ("full-tied", "lora-untied"):
        saved = torch.load(folder / "reference" / f"{variant}.pt")["saved"]
        model = shard_model(make(variant, seed=7), FSDPSettings(replicas=2))
        optimizer = adamw(model)
        manager(folder / "one" / variant).load(model=model, optimizer=optimizer)
        assert_same(values(model, optimizer), saved)
        checkpoints = manager(folder / "replicas" / variant)
        checkpoints.save(3, model=model, optimizer=optimizer)
        other = shard_model(make(variant, seed=8), FSDPSettings())
        fresh = adamw(other)
        checkpoints.load(model=other, optimizer=fresh)
        assert_same(values(other, fresh), saved)


# --- one process, after -------------------------------------------------------------------------------------------


def goes_on_in_one_process(variant: str, *, by_export: bool) -> Check:
    def check(folder: Path) -> None:
        reference = torch.load(folder / "reference" / f"{variant}.pt")
        path = folder / "four" / variant / "step_000003"
        if by_export:
            path = export_checkpoint(path, folder / "exported" / variant, with_optimizer=True)
        model = make(variant, seed=3)
        optimizer = adamw(model)
        checkpoints = CheckpointManager(CheckpointConfig(folder / "unused"))
        state = checkpoints.load(model=model, optimizer=optimizer, path=path)
        assert (state["step"], state["epoch"]) == (3, (1, 2)) and "torch" in state["rng"]
        assert_same(values(model, optimizer), reference["saved"])
        train(model, optimizer, range(3, 5))
        assert_same(values(model, optimizer), reference["trained"])

    return check


def transformers_and_peft_read_the_export(folder: Path) -> None:
    for path in sorted((folder / "exported").iterdir()):
        variant = path.name
        saved = torch.load(folder / "reference" / f"{variant}.pt")["saved"]
        if variant.startswith("full"):
            loaded = transformers.AutoModelForCausalLM.from_pretrained(path)
            assert loaded.config.architectures == ["LlamaForCausalLM"]
        else:
            loaded = peft.PeftModel.from_pretrained(llama(tied=variant == "lora-tied"), path)
            assert not list(path.glob("model*.safetensors"))
        weights = values(loaded)
        assert_same(weights, {name: saved[name] for name in weights})


# --- killed -------------------------------------------------------------------------------------------------------


class NeverDone(CheckpointManager):
    """All has been written, but rank 0 does not come to the manifest."""

    def _commit(self, job: Any, entries: Any) -> None:
        if job.step == 2:
            (self.root.parent / "all-may-be-killed").touch()
            time.sleep(600)
        super()._commit(job, entries)


def waits_to_be_killed(folder: Path) -> None:
    checkpoints = manager(folder / "killed", NeverDone)
    checkpoints.save(1, model=block(1.0))
    checkpoints.save(2, model=block(2.0))
    checkpoints.finish()


class Stuck(CheckpointManager):
    """Rank 1 does not come to writing."""

    def _write(self, job: Any) -> None:
        if job.step == 2 and self.rank == 1:
            (self.root.parent / "one-may-be-killed").touch()
            time.sleep(600)
        super()._write(job)


def hears_of_the_death_of_another(folder: Path) -> None:
    checkpoints = manager(folder / "bereft", Stuck)
    checkpoints.save(1, model=block(1.0))
    checkpoints.save(2, model=block(2.0))
    message = error_of(checkpoints.finish, CheckpointError)
    assert "Could not write" in message and "step_000001 is intact" in message, message


# --- phases -------------------------------------------------------------------------------------------------------

Phase = tuple[str, tuple[int, ...], dict[str, Check]]


def all_variants(words: str, source: str, target: str) -> dict[str, Check]:
    return {f"{words}, {variant}": passes_on(variant, source, target) for variant in VARIANTS}


PHASES: list[Phase] = [
    (
        "before",
        (0,),
        {
            "one process saves": one_process_saves,
            "without a process group the manager says what to do": the_manager_asks_for_a_process_group,
        },
    ),
    (
        "two",
        (0, 1),
        {
            **all_variants("two ranks go on from one process", "one", "two"),
            "two ranks go on bit for bit": the_same_ranks_go_on_bit_for_bit,
            "half precision keeps its exact copies": half_precision_keeps_its_exact_copies,
            "training goes on while a checkpoint is written": training_goes_on_while_it_is_written,
            "a full disk of one rank fails the save of all": a_full_disk_of_one_rank_fails_the_save_of_all,
            "state that one rank cannot store fails on all": state_that_one_rank_cannot_store_fails_on_all,
            "a damaged checkpoint is skipped with a message": a_damaged_checkpoint_is_skipped_with_a_message,
            "the newest, the best and every nth are kept": the_newest_the_best_and_every_nth_are_kept,
            "a critic beside the shards goes on": a_critic_beside_the_shards_goes_on,
            "each rank gets its own state": each_rank_gets_its_own_state,
        },
    ),
    (
        "alone",
        (0,),
        {
            **all_variants("one rank goes on from two", "two", "alone"),
            "a large frozen tensor is saved and exported": a_large_frozen_tensor_is_saved_and_exported,
        },
    ),
    (
        "four",
        (0, 1, 2, 3),
        {
            **all_variants("four ranks go on from one", "alone", "four"),
            "replicas of shards go on": replicas_of_shards_go_on,
            "new ranks draw other numbers": new_ranks_draw_other_numbers,
            "data that each rank reads is not divided again": data_that_each_rank_reads_is_not_divided_again,
        },
    ),
    ("two again", (0, 1), all_variants("two ranks go on from four", "four", "two again")),
    (
        "after",
        (0,),
        {
            f"one process goes on from {words}, {variant}": goes_on_in_one_process(variant, by_export=by_export)
            for words, by_export in (("four ranks", False), ("an export", True))
            for variant in VARIANTS
        }
        | {
            "transformers and peft read the export": transformers_and_peft_read_the_export,
        },
    ),
    ("killed", (0, 1), {"waits to be killed": waits_to_be_killed}),
    ("bereft", (2, 3), {"a rank hears of the death of another": hears_of_the_death_of_another}),
]


def join(name: str, rank: int, size: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store-{name.replace(' ', '-')}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )


def main(number: int, folder: Path) -> None:
    """All processes leave out the checks that FOLDER/left_out names."""
    results = folder / "results" / str(number)
    left_out = (folder / "left_out").read_text().splitlines()
    with results.open("w", buffering=1) as out:
        for name, members, checks in PHASES:
            if number not in members:
                continue
            if name not in ("before", "after"):
                join(name, members.index(number), len(members), folder)
            for check, run in checks.items():
                if check in left_out:
                    continue
                try:
                    run(folder)
                except BaseException:  # noqa: BLE001 - the test shows what it was
                    out.write(f"FAILED {check}\n{traceback.format_exc()}")
                    out.flush()
                    os._exit(1)  # the others hear of it at once
                out.write(f"ok {check}\n")
            if dist.is_initialized():
                dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
