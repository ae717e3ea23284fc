"""The teachers of a run (`--teacher`, `[teachers]`): what is checked before anything is loaded, and what scores samples."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

from ludic.batch_gen import DomainTeachers, Teachers
from ludic.inference import LocalTeacher
from ludic.models.loading import LoadedModel
from ludic.run.config.model import ModelSettings, is_served
from ludic.run.features.base import plugged
from ludic.run.model import load_policy, local_engine
from ludic.run.resolve import ResolvedRun
from ludic.training import RLAlgorithm
from ludic.types import TeacherScorer, shown_url


def teacher_problems(run: ResolvedRun, algorithm: RLAlgorithm) -> Iterator[str]:
    """A teacher that the algorithm does not need, or lacks, or that cannot answer what the loss needs."""
    settings, asks = run.config.algo, algorithm.needs_teacher_logps or algorithm.loss.needs.teacher_kl is not None
    teachers, served = run.config.all_teachers, [each for each in run.config.all_teachers if is_served(each)]
    if asks and not teachers:
        yield (
            f"algo = {settings.algo!r} learns from a teacher: give --teacher, a model as for --model or the URL of a vLLM server."
        )
    if teachers and not asks:
        yield (
            f"teacher = {' and '.join(map(repr, teachers))}, but algo = {settings.algo!r} learns from rewards alone. Take opd, "
            "grpo_opd or mopd."
        )
    if run.config.teachers and algorithm.loss.needs.teacher_kl is not None:
        yield (
            "[teachers] score tokens, but algo_set kl compares whole distributions with one teacher. Give --teacher, or kl=sampled."
        )
    if served and algorithm.loss.needs.teacher_kl is not None:
        yield (
            f"{served[0]} scores tokens, but algo_set kl compares whole distributions, which takes a teacher in this "
            "process. Give a model instead of a URL, or kl=sampled."
        )
    if served and run.sampling.temperature != 1:
        yield (
            f"{served[0]} is a vLLM server, which scores tokens at temperature 1, but temperature = "
            f"{run.sampling.temperature:g}. Give --temperature 1, or a model instead of a URL."
        )
    yield from _domain_problems(run)


def _domain_problems(run: ResolvedRun) -> Iterator[str]:
    """Envs of several without a teacher; stored rollouts say their domains themselves."""
    teachers, domains, config = run.config.teachers, [env.name for env in run.envs], run.config
    if not teachers or config.rollouts.rollouts:
        return
    if not domains:
        yield ("[teachers] has a teacher for each entry of [[envs]], by its name; for one env give --teacher.")
    if missing := [name for name in domains if name not in teachers]:
        yield (f"[teachers] has none for {', '.join(missing)}, an entry of [[envs]]. Give each one a teacher.")
    if unused := [name for name in teachers if name not in domains and not config.recorded]:
        yield (
            f"[teachers] has one for {', '.join(unused)}, but the entries of [[envs]] are {', '.join(domains)}. Take their names."
        )


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
