"""From a resolved run to its parts: episodes, requests, the algorithm, the batch source, the evaluator, loggers.

The first half (episodes) is free of training, and `ludic eval` uses it too; the model itself is in model.py. Loads without torch:
`ludic eval --base-url` needs none.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ludic import registry
from ludic.batch_gen import (
    GRPORequestStrategy,
    IdentityStrategy,
    RequestsFn,
    RequestStrategy,
    RolloutEngine,
    make_dataset_sequence_requests_fn,
)
from ludic.batch_gen.requests.dataset import RequestBuilder
from ludic.batch_gen.requests.samples import read_samples
from ludic.batch_gen.requests.streams import (
    SampleStream,
    StreamFunction,
    StreamRequests,
    first_samples,
    held_out,
    is_stream,
    load_stream,
    read_or_generate,
)
from ludic.envs.workers import EnvPool
from ludic.eval import EngineEvaluator, Grading
from ludic.inference import ByteTemplate, ChatTemplate, HermesToolParser, ScriptedClient
from ludic.interaction import DelegatingProtocol, InteractionProtocol, Policies, RoleAssignment
from ludic.interaction.base import AnyEnv
from ludic.judges import LazyJudge
from ludic.rewards import RenamedScorer, Rewards, as_scorer
from ludic.rewards.shaping import SoftOverlong
from ludic.run.config import AgentSettings, AlgoSettings, EnvSettings, RewardSettings
from ludic.run.entries import RecordedEntry
from ludic.run.folder import METRICS, wandb_id
from ludic.run.given import EnvFactory, Parts
from ludic.run.protocols.agents import uses_gateway
from ludic.run.protocols.factory import delegates_tasks, protocol_factory
from ludic.run.resolve import ResolvedRun, open_reduction
from ludic.run.settings import values_of
from ludic.sandbox.backends import BACKEND_VARIABLE, require_server
from ludic.training import (
    JSONLLogger,
    PrintLogger,
    RichLiveLogger,
    TeeLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
)
from ludic.training.learner.stop import run_sync
from ludic.types import (
    ChatClient,
    ConfigError,
    EnvSpec,
    InferenceSpec,
    ProtocolSpec,
    ReturnSpec,
    Rollout,
    RolloutRequest,
    Scorer,
    TrainingLogger,
    derive_seed,
)
from ludic.types.interfaces import BatchingClient

if TYPE_CHECKING:
    from ludic.training import RLAlgorithm

PROTOCOL = "play"
PLAYED = "played"
"""Objective of the samples that the run plays, where recorded ones are beside them."""
_CONCURRENCY = 64
"""Episodes at a time with servers, where the settings do not say."""
SHOWN = (
    "avg_total_reward", "reward/*", "score/*", "!reward/env", "!reward/parser", "accuracy", "mean_reward", "*_rate", "avg_turns",
    "avg_completion_length", "num_failed",
    "loss", "entropy", "grad_norm", "grad_clipped", "ess", "lr", "lag_max", "correction_zero_frac", "queue_items",
    "difficulty", "num_open_tasks", "margin", "preference_accuracy", "wanted_reward", "unwanted_reward",
    "step_s", "fetch_s", "update_s", "tokens_per_s",
    # Of the rates: how games ended, unreadable_rate and over_limit_rate, which count a reply that was cut off once.
    "!parse_error_rate", "!truncated_rate", "!truncation_rate", "!completion_truncated_rate", "!seq_len_truncated_rate",
    "!zero_weight_rate", "!failed_rate",
    "!healed_rate", "!foreign_rate", "!retried_rate", "!undelivered_rate", "!limited_rate",
)  # fmt: skip
"""What progress displays show of the training stats; metrics.jsonl has them all."""


# --- episodes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSetup:
    """What episodes of an env with a policy need."""

    env: EnvSettings
    factory: EnvFactory
    client: ChatClient
    """What answers the agents."""
    make_protocol: Callable[[ChatClient], InteractionProtocol]
    """A new one, with new agents, for each episode."""
    max_steps: int
    player: str | None = None
    """Name of the model, a part of every request: the episodes of another model in the same file do not count."""
    rewards: Rewards | None = None
    """What scores the episodes, beside the env."""
    protocol: str = PROTOCOL
    """Name of its protocol in requests."""
    beside: tuple[EpisodeSetup, ...] = ()
    """Of the other envs of the run: its engines play their episodes, too."""
    policies: Policies | None = None
    """Which policy plays which role, for requests that say it."""
    with_prompt: Callable[[str], Callable[[ChatClient], InteractionProtocol]] | None = None
    """From a system prompt to `make_protocol` with it, for requests that name one."""
    pool: EnvPool | None = None
    """What holds the envs; None: this process."""
    engines: dict[str, RolloutEngine] = field(default_factory=dict)
    """Every engine that was made, by its purpose; `activity` reports their progress."""

    def engine(
        self,
        *,
        jsonl_path: Path | None = None,
        resume: bool = False,
        seed: int = 0,
        max_failed_share: float = 0.5,
        max_unscored_share: float = 1.0,
        purpose: str = "playing",
    ) -> RolloutEngine:
        """A new rollout engine; `purpose` is its name in `activity`."""
        self.engines[purpose] = RolloutEngine(
            env_registry=self._env_registry(),
            protocol_registry={s.protocol: s.new_protocol for s in (self, *self.beside)},
            jsonl_path=jsonl_path,
            resume=resume,
            seed=seed,
            episode_timeout_s=self.env.episode_timeout or None,
            env_timeout_s=self.env.env_timeout or None,
            max_failed_share=max_failed_share,
            max_unscored_share=max_unscored_share,
            rewards=self.rewards,
        )
        return self.engines[purpose]

    def _env_registry(self) -> dict[str, Callable[..., Any]]:
        """What makes the envs: a pool, or a factory of this process where the registry has none."""
        setups = (self, *self.beside)
        own = {s.env.id: s.factory.factory for s in setups if s.env.id not in registry.envs}
        return own | {s.env.id: s.pool.make for s in setups if s.pool is not None}

    def close(self) -> None:
        """End the env workers, if there are some."""
        if self.pool is not None:
            self.pool.close()

    def new_protocol(
        self, model: str | None = None, policies: RoleAssignment | None = None, system_prompt: str | None = None
    ) -> InteractionProtocol:
        """For one episode."""
        seats = None if policies is None else self.policies
        if seats is not None:
            made: InteractionProtocol = seats.protocol(policies or {})
        elif self.with_prompt is not None and system_prompt is not None:
            made = self.with_prompt(system_prompt)(self.client)
        else:
            made = self.make_protocol(self.client)
        made.max_steps = self.max_steps
        return made

    @property
    def concurrency(self) -> int:
        """Episodes at a time where the settings do not say: as many as the client answers together."""
        return self.client.max_sequences if isinstance(self.client, BatchingClient) else _CONCURRENCY

    def activity(self) -> str:
        """What is being played now, for displays; empty when nothing is."""
        return "; ".join(
            f"{purpose} {progress}"
            for purpose, engine in self.engines.items()
            if (progress := engine.progress) is not None
        )

    def request(self, inference: InferenceSpec, sample: Any = None, **facts: Any) -> RolloutRequest:
        return RolloutRequest(
            env=EnvSpec(self.env.id, env_arguments(self.env, sample)),
            protocol=ProtocolSpec(self.protocol, {} if self.player is None else {"model": self.player}),
            inference=inference,
            **facts,
        )


def env_arguments(env: EnvSettings, sample: Any = None) -> dict[str, Any]:
    return dict(env.set) if sample is None else {"sample": sample, **env.set}


def train_stream(run: ResolvedRun) -> StreamFunction | None:
    """The function that generates the samples; None where they are in a file or a list, or where there are none."""
    return _stream_of(run.config.env, run.parts)


def _stream_of(env: EnvSettings, parts: Parts) -> StreamFunction | None:
    if parts.samples is not None:
        return parts.samples if callable(parts.samples) else None
    return load_stream(env.data) if env.data is not None and is_stream(env.data) else None


def train_samples(run: ResolvedRun) -> Sequence[Any] | None:
    """All samples; None where there are none, or where a stream generates them."""
    given, data = run.parts.samples, run.config.env.data
    if given is not None:
        return None if callable(given) else given
    return None if data is None or is_stream(data) else read_samples(data)


def eval_samples(run: ResolvedRun) -> Sequence[Any] | None:
    data, given, num = run.config.eval.eval_data, run.parts.eval_samples, run.config.eval.eval_episodes
    seed = held_out(run.seed)
    if callable(given):
        return first_samples(given, num, seed=seed)
    return given if given is not None or data is None else read_or_generate(data, "--eval-data", num=num, seed=seed)


def first_sample(env: EnvSettings, parts: Parts) -> Any:
    """One sample, to make an env with; None if there are none."""
    stream = _stream_of(env, parts)
    if stream is not None:
        takes_difficulty = "difficulty" in inspect.signature(stream).parameters
        return SampleStream(stream, seed=0, difficulty=1 if takes_difficulty else None).next_sample()
    given = parts.samples or (None if env.data is None else read_samples(env.data))
    return None if given is None or callable(given) else given[0]


def first_env(run: ResolvedRun) -> AnyEnv:
    """One env of the run, about the first sample: mistakes in it, or in the data, are named here."""
    return run.env.make(env_arguments(run.config.env, first_sample(run.config.env, run.parts)))


def make_episode_setup(
    env: EnvSettings,
    agent: AgentSettings,
    factory: EnvFactory,
    client: ChatClient,
    template: ChatTemplate,
    model: str,
    parts: Parts | None = None,
    *,
    reward: RewardSettings | None = None,
) -> EpisodeSetup:
    """`env` and `agent` are resolved. In an env with several players, each is a copy of the agent."""
    parts = parts or Parts()
    if env.sandbox is not None:
        run_sync(require_server(env.sandbox))
        os.environ[BACKEND_VARIABLE] = env.sandbox  # env workers, which are other processes, read it too
    made = factory.make(env_arguments(env, first_sample(env, parts)))
    make_protocol = protocol_factory(agent, made.agent_ids, template, model, parts)
    make_protocol(client)  # a wrong name or argument is found now, not in the first episode
    return EpisodeSetup(
        env=env,
        factory=factory,
        client=client,
        make_protocol=make_protocol,
        max_steps=env.max_steps or 1,
        rewards=make_rewards(reward or RewardSettings(), agent, parts),
        pool=make_pool(env, factory),
    )


def make_pool(env: EnvSettings, factory: EnvFactory) -> EnvPool | None:
    """For envs in other processes; None if the settings have none. Workers are started by the first episode."""
    if env.env_server is not None:
        return EnvPool(env.id, server=env.env_server)
    if not env.env_workers:
        return None
    return EnvPool(
        factory.id if factory.id in registry.envs else factory.factory,
        workers=env.env_workers,
        timeout_s=env.env_timeout or None,
        memory_mb=env.env_memory_mb,
    )


def make_rewards(settings: RewardSettings, agent: AgentSettings, parts: Parts | None = None) -> Rewards | None:
    """The scorers of the settings and the given ones, with their weights; None if nothing is scored or weighted."""
    scorers = [_scorer(settings, name, id, agent.max_tokens) for name, id in settings.named]
    scorers += [_judge(settings)] if settings.judge is not None else []
    scorers += [as_scorer(given) for given in (parts.scorers if parts is not None else ())]
    if not scorers and not settings.reward_weight:
        return None
    return Rewards(scorers, settings.reward_weight, max_concurrent=max(64, settings.judge_concurrency))


_judges: weakref.WeakValueDictionary[Hashable, LazyJudge] = weakref.WeakValueDictionary()


def _judge(settings: RewardSettings) -> LazyJudge:
    """Those of several envs, and of evaluations, are the same object, so that its model is loaded once."""
    key = tuple(getattr(settings, one.name) for one in fields(settings) if one.name.startswith("judge"))
    made = _judges.get(key)
    if made is None:
        made = _judges[key] = _make_judge(settings)
    return made


def _make_judge(settings: RewardSettings) -> LazyJudge:
    def load(model: str) -> Any:
        from ludic.run.model import load_judge  # needs torch; a judge behind a URL does not

        return load_judge(model, device=settings.judge_device)

    return LazyJudge(
        settings.judge or "",
        load=load,
        criteria=settings.judge_criteria,
        by=settings.judge_by,
        reference=settings.judge_reference,
        model=settings.judge_model,
        key_env=settings.judge_key_env,
        max_tokens=settings.judge_tokens,
        concurrency=settings.judge_concurrency,
        cache=settings.judge_cache,
    )


def _scorer(settings: RewardSettings, name: str, id: str, max_tokens: int | None) -> Scorer:
    given = {key.partition(".")[2]: value for key, value in settings.reward_set.items() if key.startswith(f"{name}.")}
    factory = registry.rewards.spec(id).load()
    is_renamed = f"{name}={id}" in settings.reward
    if factory is SoftOverlong:
        given.setdefault("max_tokens", max_tokens)  # of the run's replies
    parameters = inspect.signature(factory).parameters
    if is_renamed and inspect.isclass(factory) and "name" in parameters:
        given["name"] = name
    made = registry.rewards.make(id, **given)
    if not inspect.isclass(factory) and all(one.default is not one.empty for one in parameters.values()):
        made = made()  # a reward function takes a rollout; this one makes a scorer
        if not isinstance(made, Scorer):
            raise ConfigError(
                f"{id} takes no rollout and returned {made!r:.60}; without a rollout, it must return a scorer, such as a judge."
            )
    if is_renamed and isinstance(made, Scorer) and made.name != name:
        return RenamedScorer(made, name)
    return as_scorer(made, name if is_renamed or not isinstance(made, Scorer) else None)


def check_protocol(run: ResolvedRun) -> None:
    """ConfigError if the protocol of the settings cannot be made for an env of the run."""
    for own in run.each:
        agent = own.config.agent
        if agent.protocol is not None and own.parts.protocol is None:
            template = ByteTemplate(tool_parser=HermesToolParser())
            make = protocol_factory(agent, first_env(own).agent_ids, template, "checked", own.parts)
            made = make(ScriptedClient(lambda request: ""))
            for delegate in made.delegates.values() if isinstance(made, DelegatingProtocol) else ():
                delegate.make_agent()


# --- requests --------------------------------------------------------------------------------------------------

_EVAL_ENV_SEEDS, _EVAL_SAMPLING_SEEDS = 101, 102


def train_inference(run: ResolvedRun) -> InferenceSpec:
    """How the policy that is trained is sampled from."""
    algo = run.config.algo
    return InferenceSpec(
        sampling=run.sampling,
        return_=ReturnSpec.for_rl(),
        message_spans=bool(algo.train_on or algo.algo_set.get("train_on")),
    )


def train_requests(
    run: ResolvedRun, setup: EpisodeSetup, seed: int | None = None, num_groups: int | None = None
) -> RequestsFn:
    """The tasks of one update: the next samples of the data, or new seeds (which strategy and engine give out)."""
    num_groups = run.num_groups if num_groups is None else num_groups
    inference = train_inference(run)
    seed = run.seed if seed is None else seed
    samples, stream = train_samples(run), train_stream(run)
    if stream is not None:
        builder = RequestBuilder(
            env_kind=run.config.env.id,
            protocol_kind=setup.protocol,
            inference=inference,
            env_kwargs_fn=partial(env_arguments, run.config.env),
        )
        return StreamRequests(SampleStream(stream, seed=seed), builder, batch_size=num_groups, rng_seed=seed)
    if samples is None:
        return lambda: [setup.request(inference)] * num_groups
    return make_dataset_sequence_requests_fn(
        samples,
        batch_size=num_groups,
        env_kind=run.config.env.id,
        protocol_kind=setup.protocol,
        inference=inference,
        env_kwargs_fn=partial(env_arguments, run.config.env),
        shuffle=True,
        rng_seed=seed,
    )


def request_strategy(run: ResolvedRun, seed: int) -> RequestStrategy:
    return GRPORequestStrategy(run.group_size, seed=seed) if run.group_size > 1 else IdentityStrategy()


def fixed_requests(
    setup: EpisodeSetup,
    num_episodes: int,
    inference: InferenceSpec,
    *,
    samples: Sequence[Any] | None = None,
    seed: int = 0,
) -> list[RolloutRequest]:
    """The same tasks every time: the first samples, or seeds that training does not use."""
    tasks = [None] * num_episodes if samples is None else samples[:num_episodes]
    return [
        setup.request(
            inference,
            sample,
            env_seed=derive_seed(seed, _EVAL_ENV_SEEDS, index),
            sampling_seed=derive_seed(seed, _EVAL_SAMPLING_SEEDS, index),
            meta={"sample_index": index},
        )
        for index, sample in enumerate(tasks)
    ]


# --- training --------------------------------------------------------------------------------------------------


def make_algorithm(run: ResolvedRun) -> RLAlgorithm:
    """What is learned from a batch: from played episodes, of one env or several, and from recorded ones beside them."""
    from ludic.training.algorithms import Objective, mix_objectives

    objectives = {}
    if run.has_own_algorithms:  # weighted as if the samples of all envs were one batch
        objectives = {env.name: Objective(algorithm=_played_algorithm(env.run), weight=env.share) for env in run.envs}
    elif run.config.recorded:
        objectives = {PLAYED: Objective(algorithm=_played_algorithm(run.each[0]))}
    if not objectives:
        return _played_algorithm(run.each[0])
    for entry in run.config.recorded:
        objectives[entry.name] = Objective(algorithm=recorded_algorithm(entry), weight=entry.weight)
    return mix_objectives(objectives, default=PLAYED if PLAYED in objectives else None)


def recorded_algorithm(entry: RecordedEntry) -> RLAlgorithm:
    reduction = open_reduction(AlgoSettings(algo=entry.algo, algo_set=entry.algo_set))
    arguments = entry.algo_set if reduction is None else {**entry.algo_set, "reduction": reduction}
    made: RLAlgorithm = registry.algorithms.make(entry.algo, **arguments)
    return made


def _played_algorithm(run: ResolvedRun) -> RLAlgorithm:
    """The given or named algorithm, with the group size if it takes one, reduction, regularisers, a given loss. For agents behind
    the gateway its credit is that of whole episodes."""
    from ludic.training import RLAlgorithm, with_episode_credit

    config, given = run.config.algo, run.parts.algorithm
    if given is None:
        arguments = dict(config.algo_set)
        if "group_size" in inspect.signature(registry.algorithms.spec(config.algo).load()).parameters:
            arguments.setdefault("group_size", run.group_size)
        if config.reduction is not None:
            arguments["reduction"] = config.reduction
        if config.train_on:
            arguments["train_on"] = _trained_roles(config)
        given = registry.algorithms.make(config.algo, **arguments)
    if not isinstance(given, RLAlgorithm):
        hint = f" Call it: algo={given.__name__}(…)." if inspect.isfunction(given) else ""
        raise ConfigError(
            f"algo = {config.algo!r} gives a {type(given).__name__}; it must return an RLAlgorithm, as make_grpo() does.{hint}"
        )
    if uses_gateway(run.config.agent, run.parts):
        given = with_episode_credit(given)  # a session with several threads counts once
    _check_sub_agents(given, run)
    given = given if run.parts.loss is None else replace(given, loss=run.parts.loss)
    return _regularised(_corrected(given, config), config)


def _check_sub_agents(algorithm: RLAlgorithm, run: ResolvedRun) -> None:
    """ConfigError if the rollouts of sub-agents would be compared in groups, which have no fixed size."""
    from ludic.training.credit_assignment import FoldedReturn
    from ludic.training.credit_assignment.grouping import GroupRule

    named, rule = run.config.agent.protocol, algorithm.credit_assigner
    if named is None or run.parts.protocol is not None or not delegates_tasks(registry.protocols.spec(named).load()):
        return
    if isinstance(rule, GroupRule) and not isinstance(rule, FoldedReturn) and not rule.allow_partial:
        raise ConfigError(
            f"protocol = {named!r} adds rollouts of sub-agents, which algo = {run.config.algo.algo!r} would compare in groups of "
            f"{rule.group_size}, but their number differs. Take fold_grpo, which credits them as their parent."
        )


def _trained_roles(settings: AlgoSettings) -> tuple[str, ...]:
    """`train_on` for an algorithm that takes it; commas may stand between roles."""
    if "train_on" not in inspect.signature(registry.algorithms.spec(settings.algo).load()).parameters:
        raise ConfigError(
            f"train_on = {list(settings.train_on)}, but {settings.algo} learns from sampled tokens alone. Take sft or rft, which "
            "imitate texts, or echo, which also predicts the answers to its replies."
        )
    return tuple(role for part in settings.train_on for role in part.split(",") if role)


def _corrected(algorithm: RLAlgorithm, settings: AlgoSettings) -> RLAlgorithm:
    """The algorithm with its loss inside the corrections that the settings name."""
    from ludic.training.losses.corrections import CorrectedLoss, make_correction

    corrections = [make_correction(text) for text in settings.correction]
    again = [c for c, text in zip(corrections, settings.correction, strict=True) if "mask" not in text]
    if again and algorithm.loss.needs.old_logps:
        raise ConfigError(
            f"correction = {', '.join(settings.correction)}: the loss of {algorithm.name} has ratios itself, and a truncation or "
            "rejection would count them twice. Take masks."
        )
    return replace(algorithm, loss=CorrectedLoss(algorithm.loss, corrections)) if corrections else algorithm


def _regularised(algorithm: RLAlgorithm, settings: AlgoSettings) -> RLAlgorithm:
    """The algorithm with an entropy bonus and a KL to the frozen reference, where the settings ask for them."""
    from ludic.training.losses import EntropyBonus, Loss, Regularized, TokenKLLoss

    terms: dict[str, Loss] = {}
    if settings.kl_coeff:
        terms["reference"] = TokenKLLoss(
            coeff=settings.kl_coeff,
            to="reference",
            estimator=settings.kl_estimator,
            reduction="token_mean",
            importance_weighted=settings.kl_weighted,
        )
    if settings.entropy_bonus:
        terms["bonus"] = EntropyBonus(coeff=settings.entropy_bonus)
    return replace(algorithm, loss=Regularized(algorithm.loss, terms)) if terms else algorithm


def eval_requests(run: ResolvedRun, setup: EpisodeSetup) -> list[RolloutRequest]:
    """The tasks of an evaluation, the same at every one."""
    inference, settings = InferenceSpec(sampling=run.eval_sampling, return_=ReturnSpec.for_eval()), run.config.eval
    requests = fixed_requests(setup, settings.eval_episodes, inference, samples=eval_samples(run), seed=run.seed)
    return [replace(request, num_episodes=settings.eval_pass_k) for request in requests]


async def play(run: ResolvedRun, setup: EpisodeSetup) -> list[Rollout]:
    """Play the tasks of an evaluation."""
    engine = setup.engine(seed=run.seed, max_failed_share=run.config.rollouts.max_failed_share)
    concurrency = run.trainer.eval_concurrency or setup.concurrency
    return await engine.generate_rollouts(eval_requests(run, setup), max_steps=run.max_steps, concurrency=concurrency)


class EnvsEvaluator:
    """Evaluates the envs of a run one after the other; metrics are under their names, and the mean over envs."""

    def __init__(self, evaluators: Mapping[str, EngineEvaluator]) -> None:
        self._evaluators = evaluators

    async def eval(self, **settings: Any) -> tuple[list[dict[str, Any]], dict[str, float]]:
        records: list[dict[str, Any]] = []
        found: dict[str, dict[str, float]] = {}
        for name, evaluator in self._evaluators.items():
            more, metrics = await evaluator.eval(**settings)
            records += more
            found[name] = {key.removeprefix("eval/"): value for key, value in metrics.items()}
        named = {f"{name}/{key}": value for name, own in found.items() for key, value in own.items()}
        shared = [key for key in ("mean_reward", "accuracy") if all(own.get(key) is not None for own in found.values())]
        return records, named | {key: fmean(own[key] for own in found.values()) for key in shared}


def make_evaluator(run: ResolvedRun, setup: EpisodeSetup) -> EngineEvaluator:
    samples, requests = eval_samples(run), eval_requests(run, setup)
    env = run.env.make(env_arguments(run.config.env, None if samples is None else samples[0]))
    limit = run.config.rollouts.max_failed_share
    return EngineEvaluator(
        setup.engine(seed=run.seed, max_failed_share=limit, max_unscored_share=limit, purpose="evaluating"),
        requests_fn=lambda: requests,
        max_steps=run.max_steps,
        timeout_s=run.trainer.eval_timeout_s,
        concurrency=run.trainer.eval_concurrency or setup.concurrency,
        grading=Grading(success_reward=env.full_reward),
    )


def _plain_values(run: ResolvedRun) -> dict[str, Any]:
    """The settings as JSON has them."""
    return {
        name: value if isinstance(value, (int, float)) else str(value) for name, value in values_of(run.config).items()
    }


def make_loggers(run: ResolvedRun, status: Callable[[], str] | None = None) -> TeeLogger:
    """metrics.jsonl in any case, and what was asked for; consoles also show the line that `status` returns."""
    made: list[TrainingLogger] = [JSONLLogger(run.folder / METRICS), *run.parts.loggers]
    own = [f"{'!' * k.startswith('!')}{name}/*/{k.removeprefix('!')}" for name in run.trained_names for k in SHOWN]
    keys = own or SHOWN
    for name in run.config.run.logger:
        if name == "rich":
            made.append(RichLiveLogger(keys=keys, total_steps=run.steps, status=status))
        elif name == "print":
            made.append(PrintLogger(keys=keys, status=status))
        elif name == "tensorboard":
            made.append(TensorBoardLogger(run.folder / "events"))
        elif name == "wandb":
            identity = {"id": wandb_id(run.folder), "resume": "allow"}
            made.append(WandbLogger(identity, name=run.folder.name, config=values_of(run.config), dir=run.folder))
        elif name == "trackio":
            made.append(TrackioLogger(name=run.folder.name, config=_plain_values(run)))
    return TeeLogger(*made)
