"""The evaluated models, each opened as a client and a chat template: on the embedded engine of this process, or at an endpoint,
which is evaluated without torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ludic.cli.args import need_extras
from ludic.cli.eval.config import DEFAULT_MODEL, PolicySettings
from ludic.inference import ByteTemplate, ChatTemplate, HermesToolParser
from ludic.inference.openai_client import EndpointError, OpenAIChatClient
from ludic.run.config.model import ModelSettings
from ludic.run.names import CHECKPOINTS, CONFIG
from ludic.run.resolve import slug
from ludic.types import ChatClient, ConfigError, MissingExtra

if TYPE_CHECKING:
    from ludic.models.loading import LoadedModel

_NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """One of the models of a comparison."""

    label: str
    source: str
    """The argument, or the checkpoint that it resolved to."""

    @property
    def identity(self) -> str:
        """The resolved path or name, so that two folders with the same last part are different models."""
        path = Path(self.source)
        return str(path.resolve()) if path.exists() else self.source

    @property
    def file_stem(self) -> str:
        """Stem of its rollouts file, independent of the other models."""
        return f"{slug(_label(self.source))}-{hashlib.sha256(self.identity.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class OpenPolicy:
    """A loaded model or an open endpoint."""

    client: ChatClient
    template: ChatTemplate
    model: str


def evaluated_models(settings: PolicySettings) -> list[EvaluatedModel]:
    """The models in the given order, with unique labels and files."""
    sources = list(settings.model or (DEFAULT_MODEL,))
    if settings.base_url is None:
        need_extras("local", "ludic eval without --base-url")
        sources = [pinned(source) for source in sources]
    found: dict[str, EvaluatedModel] = {}
    for source in sources:
        label = base = source if settings.base_url is not None else _label(source)
        number = 2
        while slug(label) in found:
            label, number = f"{base} ({number})", number + 1
        found[slug(label)] = EvaluatedModel(label, source)
    return list(found.values())


def pinned(source: str) -> str:
    """RUN@10 as the run's checkpoint of step 10, and RUN as its newest, so that a resumed evaluation uses the same one."""
    from ludic.run.model import checkpoint_in

    run, _, step = source.rpartition("@")
    if run and step.isdecimal() and Path(run).is_dir():
        saved = Path(run) / CHECKPOINTS
        source = str(saved / f"step_{int(step):06d}")
        if not Path(source).is_dir():
            found = sorted(int(each.name[5:]) for each in saved.glob("step_*") if each.name[5:].isdecimal())
            there = ", ".join(f"@{number}" for number in found) or "none"
            raise ConfigError(f"{run} has no checkpoint of step {step}; it has {there}.")
    return str(checkpoint_in(Path(source)) or source)


def _label(source: str) -> str:
    """`run/step_000100` for a checkpoint of a run, else the last part of a path, or the whole name."""
    path = Path(source)
    if path.parent.name == CHECKPOINTS:
        return f"{path.resolve().parents[1].name}/{path.name}"
    return path.name if path.exists() else source


async def endpoint_models(settings: PolicySettings, flag: str = "--model") -> PolicySettings:
    """Check that the endpoint answers, and fill in its model's name, which `flag` gives, if it lists its models."""
    if settings.base_url is None:
        return settings
    client = _endpoint(settings, settings.base_url)
    try:
        names = await client.list_models()
    except EndpointError as error:
        raise ConfigError(f"{error} Is the server running, and is its URL right?") from error
    except ConfigError:
        if not settings.model:
            raise
        return settings
    finally:
        await client.close()
    if settings.model:
        unknown = [name for name in settings.model if name not in names]
        if names and unknown:
            raise ConfigError(f"{settings.base_url} does not serve {unknown[0]!r}; it serves {', '.join(names[:20])}.")
        return settings
    if len(names) != 1:
        raise ConfigError(f"{settings.base_url} serves {', '.join(names) or 'no model'}; choose with {flag}.")
    return replace(settings, model=(names[0],))


@asynccontextmanager
async def opened(
    model: EvaluatedModel, settings: PolicySettings, *, with_tools: bool, seed: int, concurrency: int | None = None
) -> AsyncIterator[OpenPolicy]:
    """The model as a client, until the end of the block."""
    if settings.base_url is not None:
        client = _endpoint(settings, settings.base_url)
        try:
            template = ByteTemplate(tool_parser=HermesToolParser() if with_tools else None)
            yield OpenPolicy(client, template, model.source)
        finally:
            await client.close()
        return
    from ludic.run.model import make_template, serve_locally, use_threads

    held = ModelSettings(model=model.source, dtype=settings.dtype, device=settings.device, threads=settings.threads)
    use_threads(held)
    loaded = load(held, seed=seed)
    chat_template = make_template(loaded.tokenizer, with_tools=with_tools)
    served = serve_locally(loaded, max_length=settings.max_model_len or _NO_LIMIT, concurrency=concurrency)
    try:
        yield OpenPolicy(served.client, chat_template, loaded.name)
    finally:
        served.close()


def _endpoint(settings: PolicySettings, base_url: str) -> OpenAIChatClient:
    key = os.environ.get(settings.api_key_env or "")
    if settings.api_key_env is not None and not key:
        raise ConfigError(f"--api-key-env {settings.api_key_env}: that environment variable is not set.")
    return OpenAIChatClient(base_url, api_key=key)


def load(settings: ModelSettings, *, seed: int) -> LoadedModel:
    """Load a model of `ludic train`, or a foreign adapter on the base model that it names."""
    from ludic.models.loading import LoadedModel
    from ludic.run.model import load_policy
    from ludic.training.checkpoint.manifest import read_object
    from ludic.training.checkpoint.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS

    folder = Path(settings.model)
    is_own = (folder.resolve().parents[1] / CONFIG).is_file() if len(folder.resolve().parents) > 1 else False
    if not (folder / ADAPTER_CONFIG).is_file() or is_own:
        return load_policy(settings, seed=seed)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ConfigError(
            f"{folder} has no {ADAPTER_WEIGHTS}; adapters in other formats are pickles, and are not read."
        )
    base = read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not base:
        raise ConfigError(f"{folder} is a LoRA adapter whose {ADAPTER_CONFIG} does not say what it was trained on.")
    try:
        from peft import PeftModel
    except ImportError as error:
        raise MissingExtra("lora", f"The adapter {folder}") from error
    loaded = load_policy(replace(settings, model=base), seed=seed)
    tokenizer = loaded.tokenizer
    if (folder / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return LoadedModel(PeftModel.from_pretrained(loaded.model, folder).eval(), tokenizer, str(folder))
