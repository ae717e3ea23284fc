"""`SeveralPolicies`: the session of a run in which several policies learn. Models and engines, and the episodes that they share.

Policies with adapters on the same base share its weights; each policy that trains all weights has a separate model.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from ludic.agents import Agent
from ludic.batch_gen import SharedRollouts
from ludic.eval import SnapshotEvaluator
from ludic.inference.local import LocalEngine
from ludic.inference.local.snapshot import EngineSnapshot, League
from ludic.interaction import Policies
from ludic.models.loading import LoadedModel
from ludic.models.weights import shared_view
from ludic.run.config.model import ModelSettings
from ludic.run.features.league import make_league
from ludic.run.folder import ResumePoint, rollouts_file
from ludic.run.model import (
    ServedPolicy,
    forked_checkpoint,
    is_adapter,
    load_policy,
    make_template,
    serve_locally,
)
from ludic.run.parts.algorithm import make_algorithm
from ludic.run.parts.episodes import EpisodeSetup, make_episode_setup
from ludic.run.parts.requests import make_evaluator, request_strategy, seated_requests
from ludic.run.parts.source import check_source, make_filter
from ludic.run.policies import league_seatings, past
from ludic.run.protocols.agents import agent_factory
from ludic.run.resolve import NamedPolicy, ResolvedRun
from ludic.run.session import Session, TrainedPolicy
from ludic.training.checkpoint.model_files import read_weights
from ludic.types import ChatClient, Evaluator, TakesSnapshots, derive_seed


class SeveralPolicies(Session):
    """The policies of one run."""

    @staticmethod
    def check(run: ResolvedRun) -> None:
        for policy in run.policies:
            if not policy.is_frozen:
                check_source(policy.run)

    def __init__(self, run: ResolvedRun, start: ResumePoint) -> None:
        super().__init__(run, start)
        self._models = _load_models(run, start)
        self._served = {policy.name: self._serve(number, policy) for number, policy in enumerate(run.policies)}
        self._leagues = {policy.name: self._league(policy) for policy in run.policies if self._has_league(policy)}
        self._setup = self._make_setup()
        rollouts = run.config.rollouts
        path = rollouts_file(run.folder, start) if rollouts.save_rollouts else None
        self._shared = SharedRollouts(
            self._setup.engine(jsonl_path=path, seed=run.seed, max_failed_share=rollouts.max_failed_share),
            requests_fn=seated_requests(run, self._setup, league_seatings(run) if self._leagues else run.seatings),
            strategy=request_strategy(run, run.seed),
            max_steps=run.max_steps,
            concurrency=rollouts.concurrency or self._setup.concurrency,
        )

    @cached_property
    def trained(self) -> tuple[TrainedPolicy, ...]:
        return tuple(self._trained(policy) for policy in self._run.policies if not policy.is_frozen)

    def _trained(self, policy: NamedPolicy) -> TrainedPolicy:
        name, algorithm = policy.name, make_algorithm(policy.run)
        return TrainedPolicy(
            name=name,
            run=policy.run,
            loaded=self._models[name],
            algorithm=algorithm,
            source=self._shared.batches_for(
                name,
                algorithm=algorithm,
                sample_filter=make_filter(policy.run),
                followers=[self._leagues[name]] if name in self._leagues else [],
            ),
            publisher=self._served[name].publisher,
            resume_from=self._start.first_step or None,
        )

    def evaluator(self) -> Evaluator:
        """Plays the tasks of an evaluation with the current policies, or with copies of them in the background."""
        run = self._run
        setup, snapshots = self._setup, Snapshots()
        if run.trainer.eval_in_background:
            copies = {policy.name: self._snapshot(policy.name) for policy in run.policies if not policy.is_frozen}
            setup, snapshots = replace(setup, policies=self._seated_policies(copies)), Snapshots(*copies.values())
        evaluator = make_evaluator(run, setup)
        return SnapshotEvaluator(evaluator, snapshots) if run.trainer.eval_in_background else evaluator

    def _snapshot(self, name: str) -> EngineSnapshot:
        make = self._served[name].snapshot
        assert make is not None, "the engine in this process has copies"
        snapshot = make()
        self._closing.callback(snapshot.close)
        return snapshot

    def _serve(self, number: int, policy: NamedPolicy) -> ServedPolicy:
        run, loaded = policy.run, self._models[policy.name]
        on_gpu = next(loaded.model.parameters()).is_cuda
        served = serve_locally(
            loaded,
            max_length=run.trainer.max_seq_len,
            kv_memory_fraction=cache_fraction(number, len(self._run.policies)) if on_gpu else None,
            concurrency=run.config.rollouts.concurrency,
            record_experts=run.trainer.replay_experts,
        )
        self._closing.callback(served.close)
        return served

    def _make_setup(self) -> EpisodeSetup:
        """Episodes of the run's env; each request says which policy plays which role."""
        first = self._run.policies[0]
        config, served = first.run.config, self._served[first.name]
        setup = make_episode_setup(
            config.env,
            config.agent,
            self._run.env,
            served.client,
            self._template(first),
            served.model,
            self._run.parts,
            reward=config.reward,
        )
        self._closing.callback(setup.close)
        return replace(setup, policies=self._seated_policies({}))

    def _seated_policies(self, clients: Mapping[str, ChatClient]) -> Policies:
        """The policies and their leagues by name, each with its agent; those in `clients` are answered by that client."""
        playing = {policy.name: policy for policy in self._run.policies}
        playing |= {past(name): playing[name] for name in self._leagues}
        templates = {policy.name: self._template(policy) for policy in self._run.policies}

        @lru_cache  # of a limited size: a league has ever new members
        def factory(name: str) -> Callable[[ChatClient], Agent]:
            policy = playing[name.partition("@")[0]]
            return agent_factory(policy.run.config.agent, templates[policy.name], name, self._run.parts)

        def make_agent(client: ChatClient, name: str) -> Agent:
            return factory(name)(client)

        answering = {name: clients.get(name, served.client) for name, served in self._served.items()}
        for name, client in answering.items():
            make_agent(client, name)  # a wrong name or argument is found now, not in the first episode
        return Policies(answering | {past(name): league for name, league in self._leagues.items()}, make_agent)

    def _has_league(self, policy: NamedPolicy) -> bool:
        return bool(self._run.config.league.league_every) and not policy.is_frozen

    def _league(self, policy: NamedPolicy) -> League:
        """Snapshots of the policy's weights."""
        engine = self._served[policy.name].client
        assert isinstance(engine, LocalEngine), "several policies are served in this process"
        league = make_league(policy.run, engine)
        assert league is not None, "the settings ask for one"
        self._closing.callback(league.close)
        return league

    def _template(self, policy: NamedPolicy) -> Any:
        agent = policy.run.config.agent
        with_tools = agent.may_call_tools or bool(self._run.parts.tools)
        return make_template(self._models[policy.name].tokenizer, with_tools=with_tools, renderer=agent.renderer)

    def activity(self) -> str:
        return self._setup.activity()


class Snapshots:
    """Copies of several policies' weights, taken together."""

    def __init__(self, *snapshots: TakesSnapshots) -> None:
        self._snapshots = snapshots

    def take_snapshot(self, version: int) -> None:
        for snapshot in self._snapshots:
            snapshot.take_snapshot(version)


_CACHES = 0.6
"""Share of a GPU's free memory for the caches of all engines together: what a single engine takes."""


def cache_fraction(number: int, num_engines: int) -> float:
    """The share that the n-th engine (from 0) takes of the memory that the ones before have left: the same amount as each of
    them."""
    each = _CACHES / num_engines
    return each / (1 - number * each)


# --- models ----------------------------------------------------------------------------------------------------


def _load_models(run: ResolvedRun, start: ResumePoint) -> Mapping[str, LoadedModel]:
    """The model of each policy. Adapters and frozen policies on the same base share its tensors."""
    bases: dict[ModelSettings, LoadedModel] = {}
    found = {}
    for number, policy in enumerate(run.policies):
        settings = policy.run.config.model
        trains_all = not settings.lora_rank and not policy.is_frozen
        if trains_all:
            # On a resume the checkpoint holds all weights; the fork may be gone.
            own = replace(settings, fork_from=None) if start.first_step else settings
            found[policy.name] = load_policy(own, seed=run.seed)
            continue
        fork = None if settings.fork_from is None else forked_checkpoint(settings.fork_from)
        forks_adapter = fork is not None and is_adapter(fork)
        key = replace(
            settings,
            lora_rank=0,
            lora_experts=False,
            lora_dropout=0.0,
            lora_alpha_mult=ModelSettings().lora_alpha_mult,
            fork_from=None if forks_adapter else fork,
        )
        if key not in bases:
            bases[key] = load_policy(key, seed=run.seed)
            bases[key].model.requires_grad_(False)
        view = replace(bases[key], model=shared_view(bases[key].model))
        found[policy.name] = load_policy(settings, seed=derive_seed(run.seed, number), given=view)
        if fork is not None and forks_adapter:
            read_weights(found[policy.name].model, fork)
    return found
