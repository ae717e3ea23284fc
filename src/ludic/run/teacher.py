"""The teacher of a run (`--teacher`): a model in this process, or one behind a vLLM server."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from ludic.batch_gen import TeacherAnnotatedBatchSource
from ludic.inference import LocalTeacher, VLLMTeacher, tokenizer_fingerprint
from ludic.models.loading import LoadedModel
from ludic.run.config import AlgoSettings, ModelSettings
from ludic.run.model import load_policy, load_tokenizer, local_engine
from ludic.run.resolve import ResolvedRun
from ludic.training import RLAlgorithm
from ludic.training.learner.stop import run_sync
from ludic.types import BatchSource, ConfigError, TeacherScorer

Annotate: TypeAlias = Callable[[BatchSource], BatchSource]
"""From a source to one whose samples a teacher has scored, if there is a teacher."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Teaching:
    """What the teacher of a run does."""

    annotate: Annotate = lambda source: source
    """To samples before they are trained on."""
    frozen: LoadedModel | None = None
    """For losses that compare whole distributions: the teacher itself."""


def check_teacher(run: ResolvedRun, algorithm: RLAlgorithm) -> None:
    """A teacher is given exactly where the algorithm asks one, and can be asked what it wants to know."""
    settings, asks = run.config.algo, algorithm.needs_teacher_logps or algorithm.loss.needs.teacher_kl is not None
    if asks and settings.teacher is None:
        raise ConfigError(
            f"algo = {settings.algo!r} learns from a teacher: give --teacher, a model as for --model or the URL of a vLLM server."
        )
    if settings.teacher is not None and not asks:
        raise ConfigError(
            f"teacher = {settings.teacher!r}, but algo = {settings.algo!r} learns from rewards alone. Take opd or grpo_opd."
        )
    if settings.teacher_is_served and algorithm.loss.needs.teacher_kl is not None:
        raise ConfigError(
            f"{settings.teacher} scores tokens, but algo_set kl compares whole distributions, which takes a teacher in this "
            "process. Give a model instead of a URL, or kl=sampled."
        )
    if settings.teacher_is_served and run.sampling.temperature != 1:
        raise ConfigError(
            f"{settings.teacher} is a vLLM server, which scores tokens at temperature 1, but temperature = "
            f"{run.sampling.temperature:g}. Give --temperature 1, or a model instead of a URL."
        )


def make_teaching(
    run: ResolvedRun, algorithm: RLAlgorithm, student: LoadedModel, stack: contextlib.ExitStack
) -> Teaching:
    """Loads the teacher, or finds its server; what it needs is closed with the stack."""
    if run.config.algo.teacher is None:
        return Teaching()
    if algorithm.loss.needs.teacher_kl is not None:
        return Teaching(frozen=_load(run))
    scorer = _served(run.config.algo, stack) if run.config.algo.teacher_is_served else _local(run, stack)
    fingerprint = tokenizer_fingerprint(student.tokenizer)
    return Teaching(
        annotate=lambda source: TeacherAnnotatedBatchSource(source, scorer, tokenizer_fingerprint=fingerprint)
    )


def _load(run: ResolvedRun) -> LoadedModel:
    model = run.config.model
    held = ModelSettings(model=run.config.algo.teacher or "", device=model.device, dtype=model.dtype)
    loaded = load_policy(held)
    return replace(loaded, model=loaded.model.eval().requires_grad_(False))


def _local(run: ResolvedRun, stack: contextlib.ExitStack) -> TeacherScorer:
    longest = run.trainer.max_seq_len
    engine = local_engine(_load(run), max_length=longest, kv_tokens=longest)  # scoring needs no cache
    stack.callback(engine.close)
    return LocalTeacher(engine)


def _served(settings: AlgoSettings, stack: contextlib.ExitStack) -> TeacherScorer:
    from ludic.inference.vllm.client import VLLMChatClient

    client = VLLMChatClient(servers=[settings.teacher or ""])
    stack.callback(lambda: run_sync(client.close()))
    model = run_sync(_first_model(client))
    return VLLMTeacher(client, model["id"], _tokenizer(settings, model))


async def _first_model(client: Any) -> dict[str, Any]:
    model: dict[str, Any] = (await client.control_get(client.servers[0], "/v1/models"))["data"][0]
    return model


def _tokenizer(settings: AlgoSettings, model: dict[str, Any]) -> Any:
    """What the ids of the served model mean: from the files it was started with, if they can be seen from here."""
    place = settings.teacher_tokenizer or model.get("root") or model["id"]
    try:
        return load_tokenizer(ModelSettings(model=str(Path(place))))
    except ConfigError as error:
        raise ConfigError(
            f"The teacher at {settings.teacher} serves {model['id']!r} from {place!r}, whose tokenizer cannot be read here: "
            f"{error} Give --teacher-tokenizer, the folder or hub id of the teacher."
        ) from error
