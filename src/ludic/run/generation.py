"""Generation: where the samples of a run come from, and how new weights get there. Four implementations, chosen here.

- `EmbeddedGeneration` (engine = local): the engine in this process, which shares the trainer's weights.
- `VLLMGeneration` (engine = vllm): vLLM servers, given or started for the run.
- `SGLangGeneration` (engine = sglang): SGLang servers that are running.
- `PipelineGeneration` (engine = pipeline): actors push samples to a queue in Redis; weights go to a folder or to servers.
- `PreferenceGeneration` (--preferences): comparisons of a file, for DPO and its relatives.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ludic.batch_gen import (
    AsyncRolloutBatchSource,
    DomainTeachers,
    PreferenceBatchSource,
    RolloutBatchSource,
    TeacherAnnotatedBatchSource,
    Teachers,
)
from ludic.batch_gen.pipeline.connection import require_redis
from ludic.batch_gen.pipeline.queue import ExperienceQueue
from ludic.batch_gen.pipeline.source import PipelineBatchSource
from ludic.distributed.publish.folder import FolderPublisher
from ludic.eval import EvalReport, SnapshotEvaluator
from ludic.gateway.protocol import close_gateways
from ludic.inference import ByteTemplate, ChatTemplate, LocalTeacher, VLLMTeacher, tokenizer_fingerprint
from ludic.inference.local import LocalEngine
from ludic.inference.local.snapshot import EngineSnapshot
from ludic.models.loading import LoadedModel
from ludic.models.lora import dense_parameters
from ludic.run.config import (
    AgentSettings,
    ModelSettings,
    RunConfig,
    given_redis,
    is_served,
    redis_url,
    required_servers,
)
from ludic.run.folder import WEIGHTS, ResumePoint, rollouts_file
from ludic.run.model import ServedPolicy, load_policy, load_tokenizer, local_engine, make_template, serve_locally
from ludic.run.parts import (
    EnvsEvaluator,
    EpisodeSetup,
    check_protocol,
    first_env,
    make_algorithm,
    make_episode_setup,
    make_evaluator,
    play,
)
from ludic.run.protocols.agents import outside_agent
from ludic.run.resolve import PREFERENCE_ALGORITHMS, ResolvedRun
from ludic.run.sources import check_source, make_league, make_source, with_league, with_recorded, with_replay
from ludic.training import RLAlgorithm
from ludic.training.credit_assignment import EpisodeCredit, HybridNormalizedReturn
from ludic.training.learner.stop import run_sync
from ludic.training.losses import CorrectedLoss, SequenceMask, TokenMask
from ludic.types import (
    BatchSource,
    ConfigError,
    Evaluator,
    FollowsDrift,
    LudicError,
    PolicyPublisher,
    Rollout,
    TeacherScorer,
)

logger = logging.getLogger(__name__)

_SERVER_AWAY_S = 600.0
"""Seconds that publishing waits for a server that is down: as long as a large model takes to load."""
_FAREWELL_S = 10.0
"""Seconds that a learner which is done waits for Redis."""


class Generation(ABC):
    """Source, publisher and evaluator of one run. Made after the model is loaded; `check` comes before."""

    algorithm: RLAlgorithm
    source: BatchSource
    publisher: PolicyPublisher | None
    """None where nothing plays."""
    teacher: LoadedModel | None = None
    """For losses that compare whole distributions."""

    def __init__(self, run: ResolvedRun, loaded: LoadedModel) -> None:
        self._run = run
        self._loaded = loaded
        self._closing = ExitStack()

    @staticmethod
    def check(run: ResolvedRun) -> None:
        """ConfigError for what cannot work, before weights are loaded."""
        for own in run.each:
            outside_agent(own.config.agent, run.parts)
        check_teacher(run, make_algorithm(run))
        check_source(run)

    @staticmethod
    def open(run: ResolvedRun) -> None:
        """Called once, after `check`, before the model of a run that is to be trained is loaded."""
        return

    def begin(self, *, resume: bool, first_step: int) -> None:
        """Called once, before the first batch; the run folder is there."""
        return

    @abstractmethod
    def _evaluation(self) -> tuple[ServedPolicy, EpisodeSetup]:
        """The policy, and the episodes that evaluate it."""

    def evaluator(self) -> Evaluator:
        """For the trainer: evaluates the current weights, or a copy of them where evaluation runs in the background."""
        served, setup = self._evaluation()
        if not self._run.trainer.eval_in_background or served.snapshot is None:
            return self._evaluator_of(setup)
        snapshot = served.snapshot()
        self._closing.callback(snapshot.close)
        self._closing.callback(close_gateways, snapshot)
        beside = tuple(replace(each, client=snapshot) for each in setup.beside)
        return SnapshotEvaluator(self._evaluator_of(replace(setup, client=snapshot, beside=beside)), snapshot)

    def _evaluator_of(self, setup: EpisodeSetup) -> Evaluator:
        if not self._run.envs:
            return make_evaluator(self._run, setup)
        setups = zip(self._run.envs, (replace(setup, beside=()), *setup.beside), strict=True)
        return EnvsEvaluator({env.name: make_evaluator(env.run, own) for env, own in setups})

    def _require_one_env(self) -> None:
        if self._run.envs:
            raise ConfigError(
                "This run has several envs: trainer.eval() evaluates them all, `ludic eval ENV --model RUN` one."
            )

    async def evaluate(self) -> EvalReport:
        """Evaluates the current weights once."""
        self._require_one_env()
        evaluator = make_evaluator(self._run, self._evaluation()[1])
        await evaluator.eval()
        assert evaluator.last_report is not None, "an evaluation has just ended"
        return evaluator.last_report

    async def play(self) -> list[Rollout]:
        """Plays the evaluation's tasks once with the current weights."""
        self._require_one_env()
        return await play(self._run, self._evaluation()[1])

    def status(self) -> str:
        """A line about the queue of a pipeline; empty for others."""
        return ""

    def activity(self) -> str:
        """What is being generated now; empty when nothing is."""
        return ""

    def sampling(self) -> AbstractAsyncContextManager[Any]:
        """Open while training: background work of the source ends with it."""
        return self.source if isinstance(self.source, AbstractAsyncContextManager) else nullcontext()

    def close(self) -> None:
        self._closing.close()

    def _setup(self, served: ServedPolicy) -> EpisodeSetup:
        """Of the run's env, or of the first of several with the others beside it."""
        self._closing.callback(close_gateways, served.client)  # before the client itself is closed
        made: list[EpisodeSetup] = []
        for own in self._run.each:
            config, parts = own.config, own.parts
            template = self._template(config.agent)
            setup = make_episode_setup(
                config.env, config.agent, own.env, served.client, template, served.model, parts, reward=config.reward
            )
            self._closing.callback(setup.close)
            made.append(setup if not self._run.envs else replace(setup, protocol=f"play {len(made)}"))
        return replace(made[0], beside=tuple(made[1:]))

    def _template(self, agent: AgentSettings) -> ChatTemplate:
        with_tools = agent.may_call_tools or bool(self._run.parts.tools)
        return make_template(self._loaded.tokenizer, with_tools=with_tools, renderer=agent.renderer)


class EmbeddedGeneration(Generation):
    """The engine in this process plays the episodes."""

    def __init__(self, run: ResolvedRun, loaded: LoadedModel, start: ResumePoint) -> None:
        super().__init__(run, loaded)
        self._served = self._serve()
        self._closing.callback(self._served.close)
        self._episodes = self._setup(self._served)
        self.publisher, self.algorithm = self._served.publisher, make_algorithm(run)
        path = rollouts_file(run.folder, start) if run.config.rollouts.save_rollouts else None
        league = make_league(run, self._served.client) if isinstance(self._served.client, LocalEngine) else None
        if league is not None:
            self._closing.callback(league.close)
            self._episodes = with_league(run, self._episodes, league, self._template(run.config.agent))
        template = self._template(run.config.agent) if self.algorithm.needs_message_spans else None
        played = make_source(run, self._episodes, self.algorithm, jsonl_path=path, league=league, spans_by=template)
        source = with_replay(run, with_recorded(run, played, loaded.tokenizer))
        if self.algorithm.loss.needs.teacher_kl is not None:
            self.teacher = load_teacher(run, run.config.all_teachers[0])
        elif run.config.all_teachers:
            teachers, fingerprint = make_teachers(run, self._closing), tokenizer_fingerprint(loaded.tokenizer)
            source = TeacherAnnotatedBatchSource(source, teachers, tokenizer_fingerprint=fingerprint)
        source = source if run.parts.source is None else run.parts.source(source)
        versions = run.trainer.steps_per_batch
        self._played = played
        self.source = source
        if run.max_lag and run.config.rollouts.close_batch_at == 1:
            self.source = AsyncRolloutBatchSource(source, max_lag=run.max_lag, versions_per_batch=versions)

    @asynccontextmanager
    async def sampling(self) -> AsyncGenerator[None, None]:
        async with super().sampling():
            try:
                yield
            finally:
                if isinstance(self._played, RolloutBatchSource):
                    await self._played.close()

    @staticmethod
    def check(run: ResolvedRun) -> None:
        Generation.check(run)
        for own in run.each:
            first_env(own)
        check_protocol(run)

    def _serve(self) -> ServedPolicy:
        run = self._run
        concurrency = max(run.config.rollouts.concurrency or 0, run.trainer.eval_concurrency or 0)
        return serve_locally(
            self._loaded,
            max_length=run.trainer.max_seq_len,
            concurrency=concurrency or None,
            bitwise=run.trainer.bitwise,
            record_experts=run.trainer.replay_experts,
        )

    def _evaluation(self) -> tuple[ServedPolicy, EpisodeSetup]:
        return self._served, self._episodes

    def activity(self) -> str:
        return self._episodes.activity()


class VLLMGeneration(EmbeddedGeneration):
    """vLLM answers the agents; it gets the weights after every update."""

    def __init__(self, run: ResolvedRun, loaded: LoadedModel, start: ResumePoint) -> None:
        super().__init__(run, loaded, start)
        if run.config.rollouts.server_sleep:
            from ludic.run.vllm import SleepAfterBatch, VLLMChatClient

            assert isinstance(self._served.client, VLLMChatClient), "what serve_on_vllm makes"
            self.source = SleepAfterBatch(self.source, self._served.client)

    def _serve(self) -> ServedPolicy:
        from ludic.run.vllm import serve_on_vllm

        return serve_on_vllm(self._run, self._loaded)


class SGLangGeneration(EmbeddedGeneration):
    """SGLang servers answer the agents; they get the weights after every update."""

    def _serve(self) -> ServedPolicy:
        from ludic.run.vllm import serve_on_sglang

        return serve_on_sglang(self._run, self._loaded)


class PreferenceGeneration(Generation):
    """Comparisons of a file (`--preferences`); nothing is played while training. With an env, an engine in this process
    evaluates."""

    def __init__(self, run: ResolvedRun, loaded: LoadedModel, start: ResumePoint) -> None:
        super().__init__(run, loaded)
        self.algorithm, self.publisher = make_algorithm(run), None
        self.source = _preferences(run, self._template(run.config.agent))
        self._served: ServedPolicy | None = None
        if run.config.env.id:
            self._served = serve_locally(loaded, max_length=run.trainer.max_seq_len)
            self._closing.callback(self._served.close)
            self.publisher = self._served.publisher

    @staticmethod
    def check(run: ResolvedRun) -> None:
        check_preferences(run)
        if run.config.env.id:
            outside_agent(run.config.agent, run.parts)
            first_env(run)

    def _evaluation(self) -> tuple[ServedPolicy, EpisodeSetup]:
        if self._served is None:
            raise ConfigError("An evaluation plays an env, and this run names none. Give one as TARGET, or env=.")
        return self._served, self._setup(self._served)


def check_preferences(run: ResolvedRun) -> PreferenceBatchSource:
    """The comparisons, read with a template that needs no model; ConfigError for a file that does not suit the algorithm."""
    source, algo = _preferences(run, ByteTemplate()), run.config.algo.algo
    if run.parts.algorithm is None and algo in PREFERENCE_ALGORITHMS and (source.kind == "labels") != (algo == "kto"):
        raise ConfigError(
            f"{run.config.rollouts.preferences} holds {source.kind}, but algo = {algo!r}: kto learns from labels, dpo and ipo from "
            "pairs."
        )
    return source


def _preferences(run: ResolvedRun, template: ChatTemplate) -> PreferenceBatchSource:
    rollouts = run.config.rollouts
    assert rollouts.preferences is not None, "generation_of has looked"
    return PreferenceBatchSource(
        rollouts.preferences, template, batch_size=rollouts.rollouts_per_update, seed=run.seed, flag="--preferences"
    )


# --- teachers (`--teacher`, `[teachers]`) -----------------------------------------------------------------------


def check_teacher(run: ResolvedRun, algorithm: RLAlgorithm) -> None:
    """ConfigError unless a teacher is given exactly where the algorithm needs one, and can answer what the loss needs."""
    settings, asks = run.config.algo, algorithm.needs_teacher_logps or algorithm.loss.needs.teacher_kl is not None
    teachers, served = run.config.all_teachers, [each for each in run.config.all_teachers if is_served(each)]
    if asks and not teachers:
        raise ConfigError(
            f"algo = {settings.algo!r} learns from a teacher: give --teacher, a model as for --model or the URL of a vLLM server."
        )
    if teachers and not asks:
        raise ConfigError(
            f"teacher = {' and '.join(map(repr, teachers))}, but algo = {settings.algo!r} learns from rewards alone. Take opd, "
            "grpo_opd or mopd."
        )
    if run.config.teachers and algorithm.loss.needs.teacher_kl is not None:
        raise ConfigError(
            "[teachers] score tokens, but algo_set kl compares whole distributions with one teacher. Give --teacher, or kl=sampled."
        )
    if served and algorithm.loss.needs.teacher_kl is not None:
        raise ConfigError(
            f"{served[0]} scores tokens, but algo_set kl compares whole distributions, which takes a teacher in this "
            "process. Give a model instead of a URL, or kl=sampled."
        )
    if served and run.sampling.temperature != 1:
        raise ConfigError(
            f"{served[0]} is a vLLM server, which scores tokens at temperature 1, but temperature = "
            f"{run.sampling.temperature:g}. Give --temperature 1, or a model instead of a URL."
        )

    _check_domains(run)


def _check_domains(run: ResolvedRun) -> None:
    """ConfigError unless each env of several has its teacher; stored rollouts say their domains themselves."""
    teachers, domains, config = run.config.teachers, [env.name for env in run.envs], run.config
    if not teachers or config.rollouts.rollouts:
        return
    if not domains:
        raise ConfigError(
            "[teachers] has a teacher for each entry of [[envs]], by its name; for one env give --teacher."
        )
    if missing := [name for name in domains if name not in teachers]:
        raise ConfigError(
            f"[teachers] has none for {', '.join(missing)}, an entry of [[envs]]. Give each one a teacher."
        )
    if unused := [name for name in teachers if name not in domains and not config.recorded]:
        raise ConfigError(
            f"[teachers] has one for {', '.join(unused)}, but the entries of [[envs]] are {', '.join(domains)}. Take their names."
        )


def load_teacher(run: ResolvedRun, teacher: str) -> LoadedModel:
    """A teacher as a frozen model in this process."""
    model = run.config.model
    loaded = load_policy(ModelSettings(model=teacher, device=model.device, dtype=model.dtype))
    return replace(loaded, model=loaded.model.eval().requires_grad_(False))


def make_teachers(run: ResolvedRun, stack: ExitStack) -> TeacherScorer | Teachers:
    """What scores the samples: the only teacher, or that of each domain. Domains with the same model share it."""
    made = {teacher: _teacher_scorer(run, teacher, stack) for teacher in dict.fromkeys(run.config.all_teachers)}
    if not run.config.teachers:
        return made[run.config.all_teachers[0]]
    return DomainTeachers({domain: made[teacher] for domain, teacher in run.config.teachers.items()})


def _teacher_scorer(run: ResolvedRun, teacher: str, stack: ExitStack) -> TeacherScorer:
    """Scores tokens with the teacher: an engine in this process, or a vLLM server; closed with the stack."""
    longest = run.trainer.max_seq_len
    if not is_served(teacher):
        engine = local_engine(
            load_teacher(run, teacher), max_length=longest, kv_tokens=longest
        )  # scoring needs no cache
        stack.callback(engine.close)
        return LocalTeacher(engine)
    from ludic.inference.vllm.client import VLLMChatClient

    client = VLLMChatClient(servers=[teacher])
    stack.callback(lambda: run_sync(client.close()))
    model = run_sync(client.control_get(client.servers[0], "/v1/models"))["data"][0]
    place = (
        run.config.algo.teacher_tokenizer or model.get("root") or model["id"]
    )  # files that the server was started with
    try:
        tokenizer = load_tokenizer(ModelSettings(model=str(Path(place))))
    except ConfigError as error:
        raise ConfigError(
            f"The teacher at {teacher} serves {model['id']!r} from {place!r}, whose tokenizer cannot be read here: "
            f"{error} "
            + (
                "Start its server with one that can."
                if run.config.teachers
                else "Give --teacher-tokenizer, its folder or hub id."
            )
        ) from error
    return VLLMTeacher(client, model["id"], tokenizer)


# --- pipelines -------------------------------------------------------------------------------------------------

TOKEN_BAND, SAMPLE_BAND = (0.125, 8.0), (0.5, 2.0)
"""Ratios of trained to sampled probability that count: of a token, and on the geometric mean of a sample.

Samples of a pipeline are older than those of a run that plays its own episodes, and the clipping of the losses bounds only one
side: a token with a negative weight that has become much likelier since keeps its full, growing gradient. Masks and no
truncation, since the losses multiply by the ratio already. The bands are wide: at a lag of a few updates nearly everything is
inside."""


class PipelineGeneration(Generation):
    """Samples come from a queue. To evaluate it uses the servers, or an engine in this process that shares the weights. See
    docs/pipeline.md."""

    def __init__(self, run: ResolvedRun, loaded: LoadedModel, start: ResumePoint) -> None:
        super().__init__(run, loaded)
        self.algorithm = pipeline_algorithm(run)
        self._served: ServedPolicy | None = None
        if run.config.samples_on_vllm:
            self._served = self._on_servers()
        elif run.config.is_evaluated:
            self._served = self._in_this_process()
        if self._served is not None:
            self._closing.callback(self._served.close)
        self.publisher = FolderPublisher(run.folder / WEIGHTS) if self._served is None else self._served.publisher
        pipeline, size = run.config.pipeline, run.config.rollouts.rollouts_per_update
        self.source = self._queue = PipelineBatchSource(
            redis_url(pipeline),
            run.queue_key,
            size,
            max_lag=run.max_lag,
            acknowledge=pipeline.acknowledge,
            versions_per_batch=run.trainer.steps_per_batch,
        )

    @staticmethod
    def check(run: ResolvedRun) -> None:
        Generation.check(run)
        require_redis("engine = 'pipeline'")
        redis_url(run.config.pipeline)
        if run.config.samples_on_vllm:
            required_servers(run.config.rollouts.server)
        pipeline_algorithm(run)

    @staticmethod
    def open(run: ResolvedRun) -> None:
        """Removes the mark of an earlier, finished run of this name: actors that start while the model loads would end by it."""
        run_sync(reopen_queue(run))

    def begin(self, *, resume: bool, first_step: int) -> None:
        """An empty queue for a new run, and weights that actors can begin with."""
        if not resume:
            run_sync(clear_queue(self._run))
        assert self.publisher is not None, "__init__ has made one"
        if not first_step:  # a trainer that is resumed publishes its own version
            self.publisher.publish(dict(dense_parameters(self._loaded.model)), version=0)

    def _evaluation(self) -> tuple[ServedPolicy, EpisodeSetup]:
        if self._served is None:
            raise ConfigError("This pipeline does not evaluate; set eval_every or eval_at_start, or use `ludic eval`.")
        return self._served, self._setup(self._served)

    def status(self) -> str:
        return self._queue.stats().identity()

    def activity(self) -> str:
        return "waiting for samples of the actors" if self._queue.is_waiting else ""

    def _on_servers(self) -> ServedPolicy:
        """The servers that actors use, too."""
        from ludic.distributed import create_vllm_publisher
        from ludic.run.vllm import connect_to_servers

        client, model = connect_to_servers(self._run)
        transport = self._run.config.rollouts.transport
        publisher = create_vllm_publisher(client, transport=transport, wait_s=_SERVER_AWAY_S)
        return ServedPolicy(client=client, publisher=publisher, close=lambda: run_sync(client.close()), model=model)

    def _in_this_process(self) -> ServedPolicy:
        trainer = self._run.trainer
        engine = local_engine(self._loaded, max_length=trainer.max_seq_len, concurrency=trainer.eval_concurrency)
        return ServedPolicy(
            client=engine,
            publisher=FolderAndEngine(FolderPublisher(self._run.folder / WEIGHTS), engine),
            snapshot=partial(EngineSnapshot, engine, max_sequences=engine.max_sequences),
            close=engine.close,
            model=self._loaded.name,
        )


def pipeline_algorithm(run: ResolvedRun) -> RLAlgorithm:
    """The run's algorithm, its loss corrected for samples of older versions."""
    algorithm = make_algorithm(run)
    rule = algorithm.credit_assigner
    if isinstance(rule, EpisodeCredit):
        rule = rule.inner
    if isinstance(rule, HybridNormalizedReturn):
        raise ConfigError(
            f"algo = {run.config.algo.algo!r} scales weights by the whole batch, but actors assign credit group by group. "
            "Take cispo, which has the same loss, or another (`ludic parts algorithm`)."
        )
    if isinstance(rule, FollowsDrift):
        raise ConfigError(
            f"algo = {run.config.algo.algo!r} tracks how each prompt went, but every actor would track only its own, and "
            "none is told how far the policy moves. Take grpo, or train without a pipeline."
        )
    if not run.config.pipeline.corrections or not algorithm.loss.needs.old_logps:
        return algorithm  # imitation takes no ratio
    corrected = CorrectedLoss(algorithm.loss, [TokenMask(*TOKEN_BAND), SequenceMask(*SAMPLE_BAND)])
    return replace(algorithm, loss=corrected)


async def clear_queue(run: ResolvedRun) -> None:
    """Remove what an earlier run of the same name left."""
    async with ExperienceQueue(redis_url(run.config.pipeline), run.queue_key) as queue:
        await queue.clear()


async def reopen_queue(run: ResolvedRun) -> None:
    """Remove the mark of `mark_finished`, and nothing else."""
    async with ExperienceQueue(redis_url(run.config.pipeline), run.queue_key) as queue:
        await queue.reopen()


async def mark_finished(run: ResolvedRun, num_updates: int) -> None:
    """Tell the actors of a pipeline that there is nothing left to do; they end. Where Redis fails they are not told: the run is
    saved, and must not fail after its end. Nor are they while another learner works on the run."""
    if given_redis(run.config.pipeline) is None:
        return
    from redis.exceptions import RedisError

    url, key = redis_url(run.config.pipeline), run.queue_key
    try:
        async with ExperienceQueue(url, key, patience_s=_FAREWELL_S) as queue:
            is_told = await queue.finish(num_updates)
    except (LudicError, RedisError) as error:
        logger.warning("the actors are not told that the run is finished: %s", error)
        return
    if not is_told:
        logger.warning("another learner works on %s, so its actors go on", run.folder)


class FolderAndEngine:
    """Publishes weights to a folder; the engine that evaluates shares the trainer's weights and only gets the new version. It
    is idle whenever the weights change: training waits for an evaluation, or evaluates a copy."""

    def __init__(self, folder: FolderPublisher, engine: LocalEngine) -> None:
        self._folder = folder
        self._engine = engine

    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None:
        self._engine.new_version(version)
        self._folder.publish(state_dict, version)

    def is_current(self, version: int) -> bool:
        return self._folder.is_current(version)


GENERATIONS: Mapping[str, type[EmbeddedGeneration] | type[PipelineGeneration]] = {
    "local": EmbeddedGeneration,
    "vllm": VLLMGeneration,
    "sglang": SGLangGeneration,
    "pipeline": PipelineGeneration,
}
"""Engine of the settings -> what generates."""


def generation_of(
    config: RunConfig,
) -> type[EmbeddedGeneration] | type[PipelineGeneration] | type[PreferenceGeneration]:
    return PreferenceGeneration if config.rollouts.preferences is not None else GENERATIONS[config.rollouts.engine]
