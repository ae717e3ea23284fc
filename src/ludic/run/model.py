"""The model of a run: from a name in the settings to weights, an adapter, a chat template, an engine that serves it.

`ludic eval` uses the same functions.
"""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from ludic.batch_gen import DomainTeachers, Teachers
from ludic.distributed import SharedWeightsPublisher
from ludic.inference import ChatTemplate, HFChatTemplate, LocalTeacher
from ludic.inference.local import LocalEngine
from ludic.inference.local.snapshot import EngineSnapshot
from ludic.inference.templates.renderers import renderers_template
from ludic.models import SMOLLM2, TINY
from ludic.models.head import plain_model
from ludic.models.kinds import freeze_vision, image_processor_of, load_image_processor, part, vision_modules
from ludic.models.loading import (
    TINY_LENGTH,
    LoadedModel,
    best_dtype,
    character_tokenizer,
    load_gguf_tokenizer,
    load_model,
    read_model_config,
    require_model,
)
from ludic.models.lora import adapted_layers, not_adaptable
from ludic.run.config.entries import PolicyEntry
from ludic.run.config.model import ModelSettings, is_served
from ludic.run.config.run_config import RunConfig
from ludic.run.features.base import plugged
from ludic.run.folder import require_one_policy
from ludic.run.given import Parts
from ludic.run.names import CHECKPOINTS, CONFIG, METRICS
from ludic.run.protocols.agents import uses_gateway
from ludic.run.resolve import ResolvedRun, default_name
from ludic.run.settings import read_toml, with_values
from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointManager
from ludic.training.checkpoint.manifest import MANIFEST, CheckpointError, problem_with
from ludic.training.checkpoint.model_files import ADAPTER_CONFIG, read_weights
from ludic.training.checkpoint.state_files import STATE_FILE
from ludic.types import ChatClient, ConfigError, MissingExtra, PolicyPublisher, TeacherScorer, shown_url

# --- weights ---------------------------------------------------------------------------------------------------


def load_policy(settings: ModelSettings, *, seed: int = 0, given: LoadedModel | None = None) -> LoadedModel:
    """The model that the settings describe: loaded, forked, with its adapter. `given` is used instead of what they name."""
    if given is not None:
        return replace(given, model=_with_lora(given.model, settings, seed)) if settings.lora_rank else given
    folder = checkpoint_in(Path(settings.model))
    if folder is not None and is_adapter(folder):
        return _load_adapter(folder, settings)
    loaded = _load_base(settings if folder is None else replace(settings, model=str(folder)), seed)
    fork = None if settings.fork_from is None else forked_checkpoint(settings.fork_from)
    if fork is not None and not is_adapter(fork):
        read_weights(loaded.model, fork)
    if settings.freeze_vision:
        freeze_vision(loaded.model)
    if settings.lora_rank:
        loaded = replace(loaded, model=_with_lora(loaded.model, settings, seed))
    if fork is not None and is_adapter(fork):
        if not settings.lora_rank:
            raise ConfigError(f"--fork-from {fork} is a LoRA adapter; give --lora-rank, the rank it was trained with.")
        read_weights(loaded.model, fork)
    return loaded


def _load_base(settings: ModelSettings, seed: int) -> LoadedModel:
    dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    if settings.quantize_base is None:
        return load_model(settings.model, dtype=dtype, device=find_device(settings.device), seed=seed)
    device = find_device(settings.device)
    loaded = load_model(settings.model, dtype=dtype or best_dtype(device), device="cpu", seed=seed)
    return replace(loaded, model=part("quantized").quantize_linears(loaded.model, device))


def _with_lora(model: Any, settings: ModelSettings, seed: int) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingExtra("lora", f"--lora-rank {settings.lora_rank}") from error
    alpha = settings.lora_rank * settings.lora_alpha_mult
    experts = part("experts").expert_parameters(model) if settings.lora_experts else []
    if settings.lora_experts and not experts:
        raise ConfigError(f"--lora-experts: {type(model).__name__} is no mixture of experts. Leave it out.")
    config = LoraConfig(
        r=settings.lora_rank,
        # peft says int, but only divides it by the rank.
        lora_alpha=int(alpha) if alpha.is_integer() else alpha,  # type: ignore[arg-type]
        lora_dropout=settings.lora_dropout,
        target_modules=adapted_layers(model),
        exclude_modules=vision_modules(model) or not_adaptable(model) or None,
        target_parameters=experts or None,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def _load_adapter(folder: Path, settings: ModelSettings) -> LoadedModel:
    """An adapter fits only the base of the run that made it; that run's folder names the base."""
    run = _run_of(folder, settings)
    loaded = load_policy(_held_as(run.model, settings), seed=run.trainer.seed)
    read_weights(loaded.model, folder)
    return replace(loaded, name=str(folder))


def load_reference(config: RunConfig, loaded: LoadedModel, given: LoadedModel | None) -> Any:
    """A frozen model to compare the policy with. None where the policy is an adapter and the settings name no other model: the
    trainer uses the model under the adapter."""
    name = config.algo.reference
    if name is None and plain_model(loaded.model) is not loaded.model:
        return None
    if name is None and given is not None:
        return copy.deepcopy(loaded.model)  # the trainer has not loaded a checkpoint into it yet
    settings = (
        config.model
        if name is None
        else ModelSettings(model=name, dtype=config.model.dtype, device=config.model.device)
    )
    found = load_policy(settings, seed=config.trainer.seed)
    if dict(found.tokenizer.get_vocab()) != dict(loaded.tokenizer.get_vocab()):
        raise ConfigError(
            f"reference = {name!r} has another tokenizer than the policy; take a model of the same family."
        )
    return found.model


def without_adapter(settings: ModelSettings) -> ModelSettings:
    """The model of a process that only samples: it is sent all weights, adapters merged, so it needs no adapter."""
    return replace(base_settings(settings), lora_rank=0, quantize_base=None, fork_from=None)


def load_tokenizer(settings: ModelSettings) -> Any:
    """The model's tokenizer, without loading weights if it has tokenizer files."""
    base = base_settings(settings)
    if base.model == TINY:
        return character_tokenizer()
    if base.model == SMOLLM2 or Path(base.model).suffix == ".gguf":
        return load_gguf_tokenizer(base.model)
    if Path(base.model).suffix == ".json":
        return load_policy(base).tokenizer
    from transformers import AutoConfig, AutoTokenizer

    place = str(checkpoint_in(Path(base.model)) or base.model)
    require_model(place)
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        return load_image_processor(tokenizer, place, AutoConfig.from_pretrained(place, trust_remote_code=False))
    except (OSError, ValueError) as error:
        raise cannot(f"find the tokenizer of {base.model!r}", error) from error


def cannot(do: str, error: Exception) -> ConfigError:
    """The first line of an error of transformers, which has many, as a ConfigError."""
    return ConfigError(f"Cannot {do}: {str(error).strip().splitlines()[0]}")


def base_settings(settings: ModelSettings) -> ModelSettings:
    """The settings; if the model is an adapter, those of the run that trained it."""
    folder = checkpoint_in(Path(settings.model))
    if folder is None or not is_adapter(folder):
        return settings
    return base_settings(_held_as(_run_of(folder, settings).model, settings))


def _held_as(own: ModelSettings, settings: ModelSettings) -> ModelSettings:
    """The run's settings on this device. An adapter fits its base only in the number format that it was trained with."""
    return replace(own, device=settings.device, dtype=own.dtype if settings.dtype == "auto" else settings.dtype)


def _run_of(folder: Path, settings: ModelSettings) -> RunConfig:
    """The run of the adapter that `settings.model` is; an error if the settings ask for another adapter as well."""
    names, usual = ("lora_rank", "lora_alpha_mult", "lora_dropout", "fork_from"), ModelSettings()
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(settings, name) != getattr(usual, name)]
    if given:
        raise ConfigError(
            f"--model {settings.model} is a LoRA adapter, {folder}, which is trained on as it is: {', '.join(given)} would be "
            "ignored. Leave that out; for another adapter, give the base as --model."
        )
    description = folder.resolve().parents[1] / CONFIG
    if not description.is_file():
        raise ConfigError(
            f"{folder} is a LoRA adapter, and there is no {description} that says what it was trained on. Give "
            f"--model BASE --lora-rank RANK --fork-from {folder}."
        )
    return read_toml(RunConfig, description)


def with_pinned_checkpoints(config: RunConfig, parts: Parts | None = None) -> RunConfig:
    """Each run folder replaced by its newest checkpoint, so that a resumed run uses the same one. The run's name is fixed too:
    it is made of the model's name as it was given; and the length of samples where it depends on the model."""
    values: dict[str, Any] = {"model": str(checkpoint_in(Path(config.model.model)) or config.model.model)}
    values["name"] = config.run.name or default_name(config)
    if config.model.fork_from is not None:
        values["fork_from"] = checkpoint_in(config.model.fork_from) or config.model.fork_from
    if config.algo.teacher is not None and not config.algo.teacher_is_served:
        values["teacher"] = str(checkpoint_in(Path(config.algo.teacher)) or config.algo.teacher)
    values["teachers"] = {
        domain: teacher if is_served(teacher) else str(checkpoint_in(Path(teacher)) or teacher)
        for domain, teacher in config.teachers.items()
    }
    if config.algo.reference is not None:
        values["reference"] = str(checkpoint_in(Path(config.algo.reference)) or config.algo.reference)
    if config.reward.judge is not None and not config.reward.judge_is_served:
        values["judge"] = str(checkpoint_in(Path(config.reward.judge)) or config.reward.judge)
    values["policies"] = {name: _pinned_policy(entry) for name, entry in config.policies.items()}
    config = with_values(config, values)
    parts = parts or Parts()
    if config.train.max_seq_len is None and uses_gateway(config.agent, parts):
        file = config.run.runs / values["name"] / CONFIG
        stored = read_toml(RunConfig, file).train.max_seq_len if file.is_file() else None  # of a run that is resumed
        longest = stored or usual_length(config.model, parts.model)
        config = with_values(config, {"max_seq_len": min(longest, config.train.micro_token_budget or longest)})
    return config


def _pinned_policy(entry: PolicyEntry) -> PolicyEntry:
    model, fork = entry.model, entry.fork_from
    return replace(
        entry,
        model=None if model is None else str(checkpoint_in(Path(model)) or model),
        fork_from=None if fork is None else checkpoint_in(fork) or fork,
    )


# --- checkpoints of other runs ---------------------------------------------------------------------------------


def checkpoint_in(path: Path) -> Path | None:
    """The path itself if it is a checkpoint, or the newest undamaged one of a run folder, with a warning for each newer one that
    is damaged; None where there is neither. ConfigError where all are damaged, where a run has saved none, or where several
    policies have theirs."""
    require_one_policy(path)
    if (path / MANIFEST).exists() and (path / STATE_FILE).exists():  # other programs write a manifest.json as well
        _require_undamaged(path, (path / MANIFEST).stat().st_mtime_ns)
        return path
    for root in (path / CHECKPOINTS, path):
        checkpoints = CheckpointManager(CheckpointConfig(root))
        if not checkpoints.is_empty():
            try:
                return checkpoints.find()
            except CheckpointError as error:
                raise ConfigError(f"All checkpoints in {root} are damaged. Take another run, or a backup.") from error
    if (path / CONFIG).is_file() and (path / METRICS).is_file():
        raise ConfigError(
            f"The run {path} has no checkpoint: it ended before its first (--checkpoint-every). Take another."
        )
    return None


@lru_cache
def _require_undamaged(folder: Path, _written: int) -> None:
    """Reads the whole checkpoint, so once per process."""
    problem = problem_with(folder, checksums=True)
    if problem is not None:
        raise ConfigError(f"The checkpoint {folder} is damaged: {problem}. Take another one of that run.")


def forked_checkpoint(path: Path) -> Path:
    folder = checkpoint_in(path)
    if folder is None:
        raise ConfigError(
            f"--fork-from {path}: there is no complete checkpoint. Give a folder such as runs/NAME/checkpoints/step_000020, or "
            "the run folder for its newest."
        )
    return folder


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


# --- where and how ---------------------------------------------------------------------------------------------


def find_device(name: str | None) -> torch.device:
    """The named device; without a name, the GPU if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device = {name!r} is no device; try cpu, cuda or cuda:1.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device = {name!r}: PyTorch sees no GPU here. Leave it out to use the CPU.")
    return device


def dtype_of(settings: ModelSettings) -> torch.dtype:
    """Number format of the weights."""
    if settings.dtype != "auto":
        found: torch.dtype = getattr(torch, settings.dtype)
        return found
    return torch.float32 if settings.model == TINY else best_dtype(find_device(settings.device))


def use_threads(settings: ModelSettings) -> None:
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)


def make_template(tokenizer: Any, *, with_tools: bool = False, renderer: str | None = None) -> ChatTemplate:
    """The model's own chat template, and its own way of calling tools; a model without a template cannot play.

    `renderer`: one of the renderers package instead, or "auto".
    """
    if renderer is not None:
        return renderers_template(tokenizer, None if renderer == "auto" else renderer)
    processor = image_processor_of(tokenizer)
    if processor is not None:
        vision = part("vision")
        count = vision.Pictures(processor).num_tokens
        made: HFChatTemplate = vision.VisionTemplate(tokenizer, vision.image_token(tokenizer), count)
    else:
        made = HFChatTemplate(tokenizer)
    made.tool_parser = made.find_tool_parser() if with_tools else None
    return made


_MAX_SEQUENCES = 4096
"""Most sequences of an engine: beyond it a larger batch is not faster, and its buffers and CUDA graphs take memory."""

# --- engines ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedPolicy:
    """The client that samples the policy, and the publisher of its new weights."""

    client: ChatClient
    publisher: PolicyPublisher
    snapshot: Callable[[], EngineSnapshot] | None = None
    """Serves a copy of the weights, for evaluating while they change; made when asked for. None: it has no copies."""
    close: Callable[[], None]
    model: str
    """The client's name for it."""


def local_engine(
    loaded: LoadedModel,
    *,
    max_length: int,
    kv_tokens: int | None = None,
    kv_memory_fraction: float | None = None,
    concurrency: int | None = None,
    record_experts: bool = False,
) -> LocalEngine:
    """`concurrency`: episodes at a time. A GPU computes all their requests together; a CPU is not faster above its default."""
    longest = loaded.model.config.get_text_config().max_position_embeddings
    on_gpu = next(loaded.model.parameters()).is_cuda
    return LocalEngine(
        loaded.model,
        loaded.tokenizer,
        max_model_len=min(max_length, longest),
        kv_tokens=kv_tokens,
        kv_memory_fraction=kv_memory_fraction,
        keep_room=True,
        max_sequences=None if concurrency is None or not on_gpu else min(max(concurrency, 512), _MAX_SEQUENCES),
        record_experts=record_experts,
    )


LONGEST_USUAL = 32_768
"""Tokens of a sample that training usually has memory for."""
_CONTEXTS = {TINY: TINY_LENGTH, SMOLLM2: 8192}


def usual_length(settings: ModelSettings, given: LoadedModel | None = None) -> int:
    """Tokens of a sample of an agent with its own prompts: all that the model takes, up to `LONGEST_USUAL`."""
    model = base_settings(settings).model
    if given is None and model in _CONTEXTS:
        return _CONTEXTS[model]
    config = read_model_config(str(checkpoint_in(Path(model)) or model)) if given is None else given.model.config
    return min(getattr(config.get_text_config(), "max_position_embeddings", LONGEST_USUAL), LONGEST_USUAL)


_JUDGE_CONTEXT = 16_384
"""Tokens of a judge's prompt and verdict, if its model can."""
_JUDGE_SEQUENCES = 16
"""The longest prompts that a judge's cache holds, or more short ones: the policy needs memory as well."""


def load_judge(model: str, *, device: str | None = None) -> tuple[LocalEngine, ChatTemplate, str]:
    """A frozen model that judges on an engine in this process: client, chat template, name."""
    loaded = load_policy(ModelSettings(model=model, device=device))
    engine = local_engine(loaded, max_length=_JUDGE_CONTEXT, kv_tokens=_JUDGE_SEQUENCES * _JUDGE_CONTEXT)
    return engine, make_template(loaded.tokenizer), loaded.name


def serve_locally(
    loaded: LoadedModel,
    *,
    max_length: int,
    kv_memory_fraction: float | None = None,
    concurrency: int | None = None,
    record_experts: bool = False,
) -> ServedPolicy:
    engine = local_engine(
        loaded,
        max_length=max_length,
        kv_memory_fraction=kv_memory_fraction,
        concurrency=concurrency,
        record_experts=record_experts,
    )
    return ServedPolicy(
        client=engine,
        publisher=SharedWeightsPublisher(engine),
        snapshot=partial(EngineSnapshot, engine, max_sequences=engine.max_sequences),
        close=engine.close,
        model=loaded.name,
    )


# --- teachers ---


def load_teacher(run: ResolvedRun, teacher: str) -> LoadedModel:
    """A teacher as a frozen model in this process."""
    model = run.config.model
    loaded = load_policy(ModelSettings(model=teacher, device=model.device, dtype=model.dtype))
    return replace(loaded, model=loaded.model.eval().requires_grad_(False))


def make_teachers(run: ResolvedRun, stack: ExitStack) -> TeacherScorer | Teachers:
    """The scorer of the samples: the only teacher, or that of each domain. Domains with the same model share it."""
    made = {teacher: _teacher_scorer(run, teacher, stack) for teacher in dict.fromkeys(run.config.all_teachers)}
    if not run.config.teachers:
        return made[run.config.all_teachers[0]]
    return DomainTeachers({domain: made[teacher] for domain, teacher in run.config.teachers.items()})


def _teacher_scorer(run: ResolvedRun, teacher: str, stack: ExitStack) -> TeacherScorer:
    """Scores tokens with the teacher: an engine in this process, or a vLLM server; closed with the stack."""
    if is_served(teacher):
        made: TeacherScorer = plugged("vllm", f"teacher = {shown_url(teacher)!r}").served_teacher(run, teacher, stack)
        return made
    longest = run.trainer.max_seq_len
    engine = local_engine(load_teacher(run, teacher), max_length=longest, kv_tokens=longest)  # scoring needs no cache
    stack.callback(engine.close)
    return LocalTeacher(engine)
