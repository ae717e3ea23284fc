"""From settings to the parts of a run: agents, requests, the algorithm, the batch source, loggers, the trainer.

The first half (playing) is free of training, and shared with `ludic eval`; the model itself is in run_model.py. Loads without
torch: `ludic eval --base-url` needs none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic import registry
from ludic.agents import Agent
from ludic.batch_gen import (
    AsyncRolloutBatchSource,
    GRPORequestStrategy,
    IdentityStrategy,
    RequestsFn,
    RolloutBatchSource,
    RolloutEngine,
    make_dataset_sequence_requests_fn,
)
from ludic.batch_gen.requests.samples import read_samples
from ludic.eval import EngineEvaluator, Grading, SnapshotEvaluator
from ludic.inference import ChatTemplate
from ludic.interaction import InteractionProtocol, MultiAgentProtocol, SingleAgentProtocol
from ludic.interaction.base import AnyEnv
from ludic.run.config import AgentSettings, EnvSettings, RunConfig
from ludic.run.env import EnvFactory
from ludic.run.folder import CHECKPOINTS, METRICS, wandb_id
from ludic.run.settings import values_of
from ludic.training import (
    JSONLLogger,
    PrintLogger,
    RichLiveLogger,
    TeeLogger,
    TensorBoardLogger,
    TrainerConfig,
    WandbLogger,
)
from ludic.training.schedules import LRSchedule
from ludic.types import (
    BatchSource,
    ChatClient,
    ConfigError,
    EnvSpec,
    Evaluator,
    InferenceSpec,
    PolicyPublisher,
    ProtocolSpec,
    ReturnSpec,
    RolloutRequest,
    SamplingParams,
    TrainingLogger,
    derive_seed,
)

if TYPE_CHECKING:
    from ludic.models.loading import LoadedModel
    from ludic.run.model import ServedPolicy
    from ludic.training import CheckpointConfig, RLAlgorithm, Trainer

PROTOCOL = "play"
SHOWN = (
    "avg_total_reward", "accuracy", "mean_reward", "*_rate", "avg_turns", "avg_completion_length", "num_failed",
    "loss", "entropy", "grad_norm", "grad_clipped", "ess", "lr", "lag_max", "correction_zero_frac", "queue_items",
    "step_s", "fetch_s", "update_s", "tokens_per_s",
    # Of the rates: how games ended, unreadable_rate and over_limit_rate, which count a reply that was cut off once.
    "!parse_error_rate", "!truncated_rate", "!truncation_rate", "!completion_truncated_rate", "!seq_len_truncated_rate",
    "!zero_weight_rate", "!failed_rate",
)  # fmt: skip
"""What progress displays show of the training stats; metrics.jsonl has them all."""


# --- playing ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSetup:
    """All that is needed to play an env with a policy."""

    env: EnvSettings
    found: EnvFactory
    client: ChatClient
    """What answers the agents."""
    make_protocol: Callable[[ChatClient], InteractionProtocol]
    """A new one, with new agents, for each episode."""
    max_tokens: int
    player: str | None = None
    """Who answers, as a part of every request: a file of episodes is then never taken for another player's."""
    engines: dict[str, RolloutEngine] = field(default_factory=dict)
    """Every engine that was made, by what it is for; `activity` asks them what they are playing."""

    def engine(
        self,
        *,
        jsonl_path: Path | None = None,
        resume: bool = False,
        seed: int = 0,
        max_failed_share: float = 0.5,
        purpose: str = "playing",
    ) -> RolloutEngine:
        """`purpose` is what `activity` calls it."""
        self.engines[purpose] = RolloutEngine(
            env_registry={} if self.env.id in registry.envs else {self.env.id: self.found.factory},
            protocol_registry={PROTOCOL: lambda model=None: self.make_protocol(self.client)},
            jsonl_path=jsonl_path,
            resume=resume,
            seed=seed,
            episode_timeout_s=self.env.episode_timeout or None,
            env_timeout_s=self.env.env_timeout or None,
            max_failed_share=max_failed_share,
        )
        return self.engines[purpose]

    def activity(self) -> str:
        """What is being played now, for displays; empty when nothing is."""
        return "; ".join(
            f"{purpose} {progress}"
            for purpose, engine in self.engines.items()
            if (progress := engine.progress) is not None
        )

    @property
    def max_steps(self) -> int:
        assert self.env.max_steps is not None, "resolve_play gives it one"
        return self.env.max_steps

    def inference(self, temperature: float, return_: ReturnSpec) -> InferenceSpec:
        sampling = SamplingParams(temperature=temperature, max_tokens=self.max_tokens)
        return InferenceSpec(sampling=sampling, return_=return_)

    def request(self, inference: InferenceSpec, sample: Any = None, **facts: Any) -> RolloutRequest:
        return RolloutRequest(
            env=EnvSpec(self.env.id, env_arguments(self.env, sample)),
            protocol=ProtocolSpec(PROTOCOL, {} if self.player is None else {"model": self.player}),
            inference=inference,
            **facts,
        )


def env_arguments(env: EnvSettings, sample: Any = None) -> dict[str, Any]:
    return dict(env.set) if sample is None else {"sample": sample, **env.set}


def first_env(env: EnvSettings, found: EnvFactory) -> AnyEnv:
    """One env as it will be played, about the first sample: mistakes in it, or in the data, are named here."""
    return found.make(env_arguments(env, None if env.data is None else read_samples(env.data)[0]))


def make_episode_setup(
    env: EnvSettings, agent: AgentSettings, found: EnvFactory, client: ChatClient, template: ChatTemplate, model: str
) -> EpisodeSetup:
    """`env` and `agent` are resolved: nothing in them is left open. An env with several roles is played by copies."""
    agent_ids = first_env(env, found).agent_ids
    make_protocol = protocol_factory(agent, agent_ids, template, model)
    make_protocol(client)  # a wrong name or argument is found now, not in the first episode
    assert agent.max_tokens is not None, "resolve_play gives it one"
    return EpisodeSetup(env=env, found=found, client=client, make_protocol=make_protocol, max_tokens=agent.max_tokens)


def protocol_factory(
    agent: AgentSettings, agent_ids: Sequence[str], template: ChatTemplate, model: str
) -> Callable[[ChatClient], InteractionProtocol]:
    make_agent = agent_factory(agent, template, model)
    if len(agent_ids) == 1:
        return lambda client: SingleAgentProtocol(make_agent(client), stop_on_parse_error=agent.unreadable == "stop")
    if agent.unreadable == "stop":
        raise ConfigError(f"unreadable=stop is for envs with one agent; this one has {', '.join(agent_ids)}.")
    return lambda client: MultiAgentProtocol({agent_id: make_agent(client) for agent_id in agent_ids})


def agent_factory(agent: AgentSettings, template: ChatTemplate, model: str) -> Callable[[ChatClient], Agent]:
    """Makes a new agent, with a memory of its own, each time."""
    parser = registry.parsers.make(agent.parser or "raw", **agent.parser_set)
    arguments = dict(agent.agent_set) | ({"tools": agent.tools} if agent.tools else {})
    for scope in ("tools", "external_tools"):
        if scope in arguments:
            arguments[scope] = [registry.tools.make(name) for name in arguments[scope]]
    if agent.cut_off == "read":
        arguments["reject_incomplete_completions"] = False

    def make_agent(client: ChatClient) -> Agent:
        context = registry.contexts.make(agent.context, system_prompt=agent.system_prompt, **agent.context_set)
        made: Agent = registry.agents.make(
            agent.agent or "agent",
            client=client,
            model=model,
            ctx=context,
            parser=parser,
            chat_template=template,
            **arguments,
        )
        if not isinstance(made, Agent):
            raise ConfigError(
                f"agent = {agent.agent!r} makes a {type(made).__name__}; it must be an Agent of ludic.agents."
            )
        return made

    return make_agent


# --- requests --------------------------------------------------------------------------------------------------

_EVAL_ENV_SEEDS, _EVAL_SAMPLING_SEEDS = 101, 102


def train_requests(config: RunConfig, play: EpisodeSetup) -> RequestsFn:
    """The tasks of one update: the next samples of the data, or new seeds (which the strategy and the engine deal)."""
    inference = play.inference(config.rollouts.temperature, ReturnSpec.for_rl())
    if config.env.data is None:
        return lambda: [play.request(inference)] * config.num_groups
    return make_dataset_sequence_requests_fn(
        read_samples(config.env.data),
        batch_size=config.num_groups,
        env_kind=config.env.id,
        protocol_kind=PROTOCOL,
        inference=inference,
        env_kwargs_fn=partial(env_arguments, config.env),
        shuffle=True,
        rng_seed=config.train.seed,
    )


def fixed_requests(
    play: EpisodeSetup,
    num_episodes: int,
    inference: InferenceSpec,
    *,
    samples: Sequence[Any] | None = None,
    seed: int = 0,
) -> list[RolloutRequest]:
    """The same tasks every time: the first samples, or seeds that training does not use."""
    tasks = [None] * num_episodes if samples is None else samples[:num_episodes]
    return [
        play.request(
            inference,
            sample,
            env_seed=derive_seed(seed, _EVAL_ENV_SEEDS, index),
            sampling_seed=derive_seed(seed, _EVAL_SAMPLING_SEEDS, index),
            meta={"sample_index": index},
        )
        for index, sample in enumerate(tasks)
    ]


# --- training --------------------------------------------------------------------------------------------------


def make_algorithm(config: RunConfig) -> RLAlgorithm:
    """The registered algorithm, or the user's own, with the group size if it takes one, and the reduction."""
    from ludic.training import RLAlgorithm

    factory = registry.algorithms.spec(config.algo.algo).load()
    arguments = dict(config.algo.algo_set)
    if "group_size" in inspect.signature(factory).parameters:
        arguments.setdefault("group_size", config.group_size)
    if config.algo.reduction is not None:
        arguments["reduction"] = config.algo.reduction
    algorithm = registry.algorithms.make(config.algo.algo, **arguments)
    if not isinstance(algorithm, RLAlgorithm):
        raise ConfigError(
            f"algo = {config.algo.algo!r} gives a {type(algorithm).__name__}; it must return an RLAlgorithm, as make_grpo() does."
        )
    return algorithm


def make_source(
    config: RunConfig,
    play: EpisodeSetup,
    algorithm: RLAlgorithm,
    *,
    jsonl_path: Path | None,
    annotate: Callable[[BatchSource], BatchSource] = lambda source: source,
) -> BatchSource:
    """`annotate` sees every batch before it is trained on, in the background where batches are made there."""
    seed, size = config.train.seed, config.group_size
    rollouts = RolloutBatchSource(
        play.engine(jsonl_path=jsonl_path, seed=seed, max_failed_share=config.rollouts.max_failed_share),
        requests_fn=train_requests(config, play),
        strategy=GRPORequestStrategy(size, seed=seed) if size > 1 else IdentityStrategy(),
        algorithm=algorithm,
        max_steps=play.max_steps,
        concurrency=config.rollouts.concurrency,
    )
    source = annotate(rollouts)
    return source if config.max_lag == 0 else AsyncRolloutBatchSource(source, max_lag=config.max_lag)


def make_evaluator(config: RunConfig, play: EpisodeSetup) -> EngineEvaluator:
    """The same tasks at every evaluation."""
    settings = config.eval
    samples = None if settings.eval_data is None else read_samples(settings.eval_data, "--eval-data")
    inference = play.inference(settings.eval_temperature, ReturnSpec.for_eval())
    requests = fixed_requests(play, settings.eval_episodes, inference, samples=samples, seed=config.train.seed)
    env = play.found.make(env_arguments(play.env, None if samples is None else samples[0]))
    return EngineEvaluator(
        play.engine(seed=config.train.seed, max_failed_share=config.rollouts.max_failed_share, purpose="evaluating"),
        requests_fn=lambda: requests,
        max_steps=play.max_steps,
        timeout_s=settings.eval_timeout_s,
        concurrency=settings.eval_concurrency,
        grading=Grading(success_reward=env.full_reward),
    )


Status = Callable[[], str]
"""A line about how things stand, made anew each time."""


def make_loggers(config: RunConfig, folder: Path, status: Status | None = None) -> TeeLogger:
    """metrics.jsonl in any case, and what was asked for; a console also shows the status line, if there is one."""
    made: list[TrainingLogger] = [JSONLLogger(folder / METRICS)]
    made += [_LOGGERS[name](config, folder, status) for name in config.run.logger if name != "none"]
    return TeeLogger(*made)


_LOGGERS: Mapping[str, Callable[[RunConfig, Path, Status | None], TrainingLogger]] = {
    "rich": lambda config, _, status: RichLiveLogger(keys=SHOWN, total_steps=config.train.steps, status=status),
    "print": lambda config, _, status: PrintLogger(keys=SHOWN, status=status),
    "tensorboard": lambda config, folder, _: TensorBoardLogger(folder / "events"),
    "wandb": lambda config, folder, _: WandbLogger(
        {"id": wandb_id(folder), "resume": "allow"}, name=folder.name, config=values_of(config), dir=folder
    ),
}


def trainer_config(config: RunConfig) -> TrainerConfig:
    train, settings = config.train, config.eval
    return TrainerConfig(
        lr=train.lr,
        critic_lr=train.critic_lr,
        lr_schedule=LRSchedule(
            kind=train.schedule, warmup_steps=train.warmup_steps, total_steps=max(train.steps, train.warmup_steps + 1)
        ),
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm or None,
        max_seq_len=train.max_seq_len,
        micro_token_budget=train.micro_token_budget,
        gradient_checkpointing=train.gradient_checkpointing,
        compile=train.compile,
        # In a pipeline the source leaves out what is too old, by whole groups; the trainer would do it by the item.
        max_lag=None if config.is_pipeline else config.max_lag or None,
        seed=train.seed,
        eval_at_start=settings.eval_at_start,
        eval_every_n_steps=settings.eval_every or None,
        eval_in_background=settings.eval_in_background,
        eval_max_steps=config.env.max_steps or 1,
        eval_concurrency=settings.eval_concurrency,
        eval_timeout_s=settings.eval_timeout_s,
    )


def checkpoint_config(config: RunConfig, folder: Path) -> CheckpointConfig:
    from ludic.training import CheckpointConfig

    return CheckpointConfig(
        folder / CHECKPOINTS, every_n_steps=config.run.checkpoint_every, max_to_keep=config.run.checkpoint_keep
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingParts:
    """What differs between a run that plays itself and one that is fed by actors."""

    algorithm: RLAlgorithm
    source: BatchSource
    publisher: PolicyPublisher
    evaluator: Evaluator | None = None
    status: Status | None = None
    """How the samples of a pipeline stand; shown with every update and at the end."""
    activity: Status | None = None
    """What is being played now; displays ask for it between updates."""
    teacher: LoadedModel | None = None
    """For losses that compare whole distributions."""


def make_trainer(
    config: RunConfig,
    loaded: LoadedModel,
    parts: TrainingParts,
    *,
    folder: Path,
    logger: TrainingLogger,
    critic: LoadedModel | None = None,
    resume_from: Path | None = None,
) -> Trainer:
    from ludic.training import Trainer

    return Trainer(
        model=loaded.model,
        critic=None if critic is None else critic.model,
        algo=parts.algorithm,
        batch_source=parts.source,
        cfg=trainer_config(config),
        publisher=parts.publisher,
        checkpoint_config=checkpoint_config(config, folder),
        resume_from=None if resume_from is None else str(resume_from),
        train_logger=logger,
        evaluator=parts.evaluator,
        teacher=parts.teacher,
        tokenizer=loaded.tokenizer,
    )


def evaluator_of(config: RunConfig, served: ServedPolicy, play: EpisodeSetup, stack: ExitStack) -> Evaluator | None:
    """As asked for: none, one that training waits for, or one on a copy of the weights."""
    if not config.eval.is_on:
        return None
    if not config.eval.eval_in_background:
        return make_evaluator(config, play)
    assert served.snapshot is not None, "resolve refuses it for engines without copies"
    snapshot = served.snapshot()
    stack.callback(snapshot.close)
    return SnapshotEvaluator(make_evaluator(config, replace(play, client=snapshot)), snapshot)
