"""The smallest game of two: both say one character at once; the left one should be ASCII, the right one should not.

Everything is real: one tiny Llama as the base, an adapter and an embedded engine per policy, agents, trainers.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peft import LoraConfig

from ludic.agents import Agent
from ludic.batch_gen import AssignedRequests, RolloutEngine, SharedRollouts, make_dataset_sequence_requests_fn
from ludic.context import FullDialog
from ludic.distributed import SharedWeightsPublisher
from ludic.envs import LudicEnv
from ludic.inference import ByteTemplate
from ludic.inference.local import LocalEngine
from ludic.inference.local.snapshot import League
from ludic.interaction import Policies
from ludic.models.lora import adapters_on
from ludic.training import CheckpointConfig, Trainer, TrainerConfig, make_grpo
from ludic.types import InferenceSpec, ReturnSpec, SamplingParams, Snapshot, StepOutcome
from tests.unit.training.bandit import ByteTokenizer, tiny_llama, whatever

GROUP = 4
SIZE = {"max_model_len": 64, "kv_tokens": 2048}
SEATS = ("left", "right")
SWAPPED = ({"left": "ann", "right": "bob"}, {"left": "bob", "right": "ann"})


class Shout(LudicEnv[str, str, str]):
    """One step. What is shown says which seat it is."""

    blocking = False
    agent_ids = list(SEATS)

    def __init__(self) -> None:
        self._over = True

    @property
    def active_agents(self) -> list[str]:
        return [] if self._over else list(SEATS)

    @property
    def suggested_sysprompt(self) -> None:
        return None

    def reset(self, *, seed: int | None = None) -> dict[str, tuple[str, dict[str, Any]]]:
        self._over = False
        return {"left": ("x", {}), "right": ("y", {})}

    def step(self, actions: Mapping[str, str]) -> dict[str, StepOutcome]:
        self._over = True
        is_ascii = {seat: actions.get(seat, "").isascii() for seat in SEATS}
        rewards = {"left": float(is_ascii["left"]), "right": float(not is_ascii["right"])}
        return {seat: StepOutcome("", rewards[seat], terminated=True) for seat in SEATS}

    def current_obs(self) -> dict[str, str]:
        return {"left": "x", "right": "y"}

    def snapshot(self) -> Snapshot:
        raise NotImplementedError

    def restore(self, snapshot: Snapshot) -> None:
        raise NotImplementedError


def make_agent(client: Any, name: str) -> Agent:
    return Agent(
        client=client,
        model=name,
        ctx=FullDialog(),
        parser=whatever,
        chat_template=ByteTemplate(),
        reject_incomplete_completions=False,
    )


@dataclass
class Players:
    """Two policies on one base, a league of the second's past, and what they play."""

    # The head is frozen: with weights as small as usual no adapter could make any character likely.
    base: Any = field(default_factory=lambda: tiny_llama(initializer_range=0.5))
    seatings: Sequence[Mapping[str, str]] = SWAPPED
    groups: int = 4
    folder: Path | None = None
    every_n_steps: int = 0
    lr: float = 1e-2
    league_every: int = 2
    league_size: int = 3
    resume_from: int | None = None

    def __post_init__(self) -> None:
        lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
        self.models = adapters_on(self.base, ("ann", "bob"), lora)
        self.servers = {name: LocalEngine(model, ByteTokenizer(), **SIZE) for name, model in self.models.items()}
        self.league = League(self.servers["bob"], every=self.league_every, max_size=self.league_size, **SIZE)
        self.policies = Policies({**self.servers, "past": self.league}, make_agent)
        self.engine = RolloutEngine(
            env_registry={"shout": Shout}, protocol_registry={"duel": self.policies.protocol}, seed=0
        )
        requests_fn = make_dataset_sequence_requests_fn(
            range(10_000),
            batch_size=self.groups,
            group_size=GROUP,
            env_kind="shout",
            env_kwargs_fn=lambda _: {},
            protocol_kind="duel",
            inference=InferenceSpec(
                sampling=SamplingParams(temperature=1.0, max_tokens=1), return_=ReturnSpec.for_rl()
            ),
        )
        self.shared = SharedRollouts(
            self.engine,
            requests_fn=AssignedRequests(requests_fn, self.seatings, self.policies),
            max_steps=1,
            concurrency=32,
        )
        self.trainers = {name: self._trainer(name) for name in self.models}

    def _trainer(self, name: str) -> Trainer:
        algo = make_grpo(group_size=GROUP)
        followers = [self.league] if name == "bob" else []
        return Trainer(
            model=self.models[name],
            algo=algo,
            batch_source=self.shared.batches_for(name, algorithm=algo, followers=followers),
            cfg=TrainerConfig(lr=self.lr, weight_decay=0.0, max_seq_len=64),
            publisher=SharedWeightsPublisher(self.servers[name]),
            checkpoint_config=self.checkpoints(name),
            resume_from=self.resume_from,
        )

    def checkpoints(self, name: str) -> CheckpointConfig | None:
        return None if self.folder is None else CheckpointConfig(self.folder / name, every_n_steps=self.every_n_steps)

    def close(self) -> None:
        for part in (self.league, *self.servers.values()):
            part.close()


@contextlib.contextmanager
def players(**settings: Any) -> Iterator[Players]:
    made = Players(**settings)
    try:
        yield made
    finally:
        made.close()


def trained_weights(model: Any) -> dict[str, Any]:
    """A copy of what is trained."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
