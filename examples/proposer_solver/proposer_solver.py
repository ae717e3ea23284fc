"""Self-play with generated tasks: a proposer invents tasks, four solvers attempt each; tasks grow harder as solvers get better.

Shows: two policies in one env, each with its trainer; the proposer's reward (`learnability`) and make_proposer_solver.
Needs: nothing.
Takes: see README.md.

    python examples/proposer_solver/proposer_solver.py

One policy in both roles: `ludic train examples/proposer_solver/proposer_solver.py:Letters --model tiny --algo proposer_solver
--max-tokens 12 --cut-off read`.
"""
# ruff: noqa: T201 - a script prints

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import tyro

from ludic.agents import Agent
from ludic.batch_gen import RolloutEngine, SharedRollouts, assign_roles
from ludic.cli.script import run_script
from ludic.context import FullDialog
from ludic.distributed import SharedWeightsPublisher
from ludic.envs import LudicEnv
from ludic.inference import HFChatTemplate
from ludic.inference.local import LocalEngine
from ludic.interaction import Policies
from ludic.models.loading import load_model
from ludic.parsers import ParseResult
from ludic.training import (
    CompositeLoss,
    EntropyBonus,
    LossTerm,
    Trainer,
    TrainerConfig,
    learnability,
    make_proposer_solver,
    train_policies,
)
from ludic.types import (
    ChatClient,
    EnvSpec,
    InferenceSpec,
    ProtocolSpec,
    Reducer,
    ReturnSpec,
    RolloutRequest,
    SamplingParams,
    StepOutcome,
)

NUM_SOLVERS, LONGEST = 4, 12


class Letters(LudicEnv[str, str, str]):
    """The proposer writes a character, which stands for a length from 1 to 12. Each solver writes so many small letters.

    A solver that gets each character right with p solves length n with p^n: how hard a task is can be read off its length, and
    half of the attempts solve n = ln ½ / ln p.
    """

    blocking = False
    agent_ids: ClassVar[list[str]] = ["proposer", *(f"solver_{number}" for number in range(NUM_SOLVERS))]

    def __init__(self) -> None:
        self._length: int | None = None
        self._over = True

    @property
    def active_agents(self) -> list[str]:
        if self._over:
            return []
        return self.agent_ids[:1] if self._length is None else self.agent_ids[1:]

    def reset(self, *, seed: int | None = None) -> dict[str, tuple[str, dict[str, Any]]]:
        self._length, self._over = None, False
        return {"proposer": ("length?", {})}

    def step(self, actions: Mapping[str, str]) -> dict[str, StepOutcome]:
        if self._length is None:
            self._length = 1 + ord(actions.get("proposer", "")[:1] or " ") % LONGEST
            task = {solver: StepOutcome(f"{self._length}:", 0.0) for solver in self.agent_ids[1:]}
            return {"proposer": StepOutcome("", 0.0), **task}
        self._over = True
        solved = {solver: float(fits(actions.get(solver, ""), self._length)) for solver in self.agent_ids[1:]}
        rate = sum(solved.values()) / NUM_SOLVERS
        facts = {"length": self._length, "solved": rate}
        outcomes = {solver: StepOutcome("", reward, terminated=True, info=facts) for solver, reward in solved.items()}
        return {"proposer": StepOutcome("", learnability(rate), terminated=True, info=facts), **outcomes}


def fits(answer: str, length: int) -> bool:
    return len(answer) >= length and all("a" <= character <= "z" for character in answer[:length])


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The budget of the run."""

    out: Path = Path("runs/proposer_solver")
    updates: int = 100
    """Updates of each policy."""
    episodes: int = 48
    """Proposals of one update, with four attempts at each."""
    lr: float = 1e-3
    entropy: float = 0.05
    """Weight of the proposer's entropy bonus."""
    seed: int = 0


def whatever(text: str) -> ParseResult:
    return ParseResult(action=text or " ", reward=0.0, obs=None)


def main(args: list[str]) -> int:
    settings = tyro.cli(Settings, args=args, description=__doc__)
    settings.out.mkdir(parents=True, exist_ok=True)
    models = {
        name: load_model("tiny", device="cpu", seed=settings.seed + n) for n, name in enumerate(("proposer", "solver"))
    }
    servers = {
        name: LocalEngine(m.model, m.tokenizer, max_model_len=64, kv_tokens=1 << 15) for name, m in models.items()
    }
    template = HFChatTemplate(models["solver"].tokenizer)

    def make_agent(client: ChatClient, name: str) -> Agent:
        return Agent(
            client=client, model=name, ctx=FullDialog(), parser=whatever, chat_template=template,
            reject_incomplete_completions=False,
        )  # fmt: skip

    policies = Policies(servers, make_agent)
    roles = {role: "proposer" if role == "proposer" else "solver" for role in Letters.agent_ids}
    sampling = SamplingParams(temperature=1.0, max_tokens=LONGEST)
    request = RolloutRequest(
        env=EnvSpec("letters"), protocol=ProtocolSpec("play"), num_episodes=settings.episodes,
        inference=InferenceSpec(sampling=sampling, return_=ReturnSpec.for_rl()),
    )  # fmt: skip
    shared = SharedRollouts(
        RolloutEngine(
            env_registry={"letters": Letters}, protocol_registry={"play": policies.protocol}, seed=settings.seed
        ),
        requests_fn=lambda: [assign_roles(request, roles)],
        max_steps=2,
        concurrency=settings.episodes,
    )
    trainers = {name: make_trainer(name, models[name], servers[name], shared, settings) for name in models}
    log = Curve(settings.out / "curve.jsonl")
    try:
        asyncio.run(train_policies(trainers, settings.updates, train_logger=log))
    finally:
        for server in servers.values():
            server.close()
    return 0


def make_trainer(name: str, model: Any, server: LocalEngine, shared: SharedRollouts, settings: Settings) -> Trainer:
    algo = make_proposer_solver(reduction="token_mean")
    if name == "proposer":  # it must go on trying lengths that do not pay yet
        terms = [
            LossTerm(name="policy", loss=algo.loss),
            LossTerm(name="entropy", loss=EntropyBonus(coeff=settings.entropy)),
        ]
        algo = replace(algo, loss=CompositeLoss(terms))
    return Trainer(
        model=model.model,
        algo=algo,
        batch_source=shared.batches_for(name, algorithm=algo),
        cfg=TrainerConfig(lr=settings.lr, weight_decay=0.0, max_seq_len=64, seed=settings.seed),
        publisher=SharedWeightsPublisher(server),
        reducers={name: Reducer("mean", name) for name in ("length", "solved")},
    )


class Curve:
    """A line of curve.jsonl per update: the mean length proposed and how often it was solved."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.unlink(missing_ok=True)

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        row = {"step": step, **{name: stats[f"proposer/train/{name}"] for name in ("length", "solved")}}
        row |= {"reward": stats["proposer/train/avg_total_reward"]}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if step % 10 == 0 or step == 1:
            shown = " ".join(f"{name} {value:5.2f}" for name, value in row.items() if name != "step")
            print(f"update {step:3d}  {shown}", flush=True)


if __name__ == "__main__":
    run_script(main)
