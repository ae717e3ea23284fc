"""A tiny model learns one task through each adapter: Gymnasium, PettingZoo, reasoning-gym, TextArena, verifiers, MCP, OpenEnv.

The model is a Llama with random weights over bytes, on one CPU thread. A reply is one byte, which a parser reads as one of the
task's actions, so that what is learned is the task and not its format. A row is the mean reward of 256 episodes with new seeds,
before and after GRPO, beside the best possible one. PettingZoo's and TextArena's games are played against a scripted opponent.
MCP is a server in another process, whose answer the model must fetch and read; OpenEnv is a server in this process, reached over
its WebSocket. A task that misses its stated reward fails the program.

    OMP_NUM_THREADS=1 PYTHONPATH=.:src .venv/bin/python research/experiments/learn_adapters.py [NAME ...]
"""

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ludic.agents import Agent, ToolAgent
from ludic.batch_gen import GRPORequestStrategy, RolloutBatchSource, RolloutEngine
from ludic.context import FullDialog
from ludic.distributed import SharedWeightsPublisher
from ludic.envs import SingleAgentEnv
from ludic.eval import evaluate
from ludic.inference import ByteTemplate
from ludic.inference.local import LocalEngine
from ludic.inference.templates.chat import ToolParseResult, make_tool_call
from ludic.interaction import SingleAgentProtocol
from ludic.interaction.base import AnyEnv
from ludic.parsers import ParseResult
from ludic.tools import Tool
from ludic.training import Trainer, TrainerConfig, make_grpo
from ludic.types import (
    EnvSpec,
    InferenceSpec,
    Info,
    Observation,
    ProtocolSpec,
    ReturnSpec,
    RolloutRequest,
    SamplingParams,
    StepOutcome,
)
from ludic_envs.adapters.gymnasium import GymnasiumEnv
from ludic_envs.adapters.openenv import OpenEnvEnv
from ludic_envs.adapters.pettingzoo import PettingZooEnv
from ludic_envs.adapters.reasoning_gym import ReasoningGymEnv
from ludic_envs.adapters.textarena import TextArenaEnv
from ludic_envs.adapters.verifiers import VerifiersEnv
from ludic_envs.mcp_tools import mcp_tools
from tests.openenv_server import OpenEnvServer
from tests.unit.training.bandit import AsciiBandit, ByteTokenizer, tiny_llama

GROUP_SIZE, NUM_NEW_EPISODES, NEW_SEEDS = 8, 256, 1_000_000
INFERENCE = InferenceSpec(sampling=SamplingParams(temperature=1.0, max_tokens=1), return_=ReturnSpec.for_rl())
MakeAgent = Callable[[Any], Agent]


# --- replies ---


class Latin(ByteTokenizer):
    """Every byte is one character, so that all bytes can be told apart."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode("latin-1")


def one_of(actions: Sequence[str]) -> Callable[[str], ParseResult]:
    """Reads any byte as one of the actions, each by as many bytes as the others."""

    def parse(text: str) -> ParseResult:
        return ParseResult(action=actions[ord(text[:1] or "\0") % len(actions)], reward=0.0, obs=None)

    return parse


def player(actions: Sequence[str]) -> MakeAgent:
    """Agents that reply with one of the actions; the task's own system prompt is left out, which the model cannot read."""
    return lambda client: Agent(
        client=client,
        model="tiny",
        ctx=FullDialog(system_prompt=""),
        parser=one_of(actions),
        chat_template=ByteTemplate(),
        reject_incomplete_completions=False,
    )


# --- envs around the adapters ---


class Against(SingleAgentEnv):
    """A game of several players as a game of the first one; a script plays the others."""

    def __init__(self, game: AnyEnv, script: Callable[[AnyEnv, str, random.Random], str]) -> None:
        super().__init__()
        self._game, self._script = game, script
        self._me = game.agent_ids[0]

    @property
    def suggested_sysprompt(self) -> str | None:
        return self._game.suggested_sysprompt

    def env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        self._rng = random.Random(seed)
        return self._game.reset(seed=seed)[self._me]

    def env_step(self, action: str) -> StepOutcome:
        said, reward = {self._me: action}, 0.0
        while True:
            others = [role for role in self._game.active_agents if role != self._me]
            outcomes = self._game.step({role: self._script(self._game, role, self._rng) for role in others} | said)
            mine = outcomes.get(self._me)
            reward += 0.0 if mine is None else mine.reward
            if not self._game.active_agents or self._me in self._game.active_agents:
                break
            said = {}
        obs = "" if mine is None else mine.obs
        return StepOutcome(obs, reward, terminated=not self._game.active_agents)


class Factors(ReasoningGymEnv):
    """prime_factorization, of whose question only the number is shown: the tiny model has not learned to read the rest."""

    def env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        question, info = super().env_reset(seed=seed)
        return question.partition(". ")[0].rpartition(" ")[2], info


class Parcel(SingleAgentEnv):
    """A parcel with 0 or 1 inside, which only a tool can see; the right number earns 1 if the tool was asked, else nothing."""

    def __init__(self, look: Tool) -> None:
        super().__init__()
        self._look = look

    def env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        self._number, self._is_seen = random.Random(seed).randrange(2), False
        return "?", {}

    def episode_tools(self, agent_id: str) -> list[Callable[..., Any]]:
        async def look() -> str:
            """Look into the parcel."""
            self._is_seen = True
            return (await self._look.call({"a": self._number, "b": 0})).content

        return [look]

    def env_step(self, action: str) -> StepOutcome:
        return StepOutcome("", float(self._is_seen and action == str(self._number)), terminated=True)


class ByteCalls:
    """Every other byte calls the tool."""

    def parse(self, text: str) -> ToolParseResult:
        if ord(text[:1] or "\0") % 2:
            return ToolParseResult(content=text)
        return ToolParseResult(content="", tool_calls=[make_tool_call("look", {}, 0)])


# --- tasks ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One adapter's task: how its envs are made, what a reply means, and how long it is trained."""

    what: str
    package: str
    """Whose version is printed."""
    open: Callable[[AsyncExitStack], Any]
    """Returns what makes an env; servers are closed by the stack."""
    agent: MakeAgent
    stated: float
    """The reward that it must reach."""
    best: float = 1.0
    updates: int = 60
    num_groups: int = 8
    lr: float = 5e-3
    max_steps: int = 1
    max_len: int = 512
    trainer: dict[str, Any] = field(default_factory=dict)


def made(make: Callable[[], AnyEnv]) -> Callable[[AsyncExitStack], Any]:
    async def open_(stack: AsyncExitStack) -> Callable[[], AnyEnv]:
        return make

    return open_


async def open_mcp(stack: AsyncExitStack) -> Callable[[], AnyEnv]:
    server = Path(__file__).parents[2] / "tests" / "unit" / "tools" / "mcp_server.py"
    tools = await stack.enter_async_context(mcp_tools([sys.executable, str(server)]))
    add = next(tool for tool in tools if tool.name == "add")
    return lambda: Parcel(add)


async def open_openenv(stack: AsyncExitStack) -> Callable[[], AnyEnv]:
    server = await stack.enter_async_context(OpenEnvServer(AsciiBandit))
    return lambda: OpenEnvEnv(server.url)


LAKE: dict[str, Any] = {"env_args": {"desc": ["SFFG", "FFFF"], "is_slippery": False, "max_episode_steps": 8}}
RPS = "IteratedRockPaperScissors-v0"
WAYS = ("left", "down", "right", "up")
FACTORS = ("2", "3", "2 × 2", "5")
TASKS = {
    "gymnasium": Task(
        what="FrozenLake-v1, 2 × 4 without holes",
        package="gymnasium",
        open=made(lambda: GymnasiumEnv("FrozenLake-v1", **LAKE)),
        agent=player(WAYS),
        stated=0.9,
        max_steps=8,
    ),
    "pettingzoo": Task(
        what="rps-v2, 3 rounds, against rock",
        package="pettingzoo",
        open=made(lambda: Against(PettingZooEnv("classic/rps-v2", game_args={"max_cycles": 3}), lambda *_: "0")),
        agent=player(["0", "1", "2"]),
        stated=2.5,
        best=3.0,
        updates=30,
        max_steps=3,
    ),
    "reasoning_gym": Task(
        what="prime_factorization of 2 to 5",
        package="reasoning-gym",
        open=made(lambda: Factors("prime_factorization", min_value=2, max_value=5)),
        agent=player(FACTORS),
        stated=0.9,
        updates=60,
    ),
    "textarena": Task(
        what="rock-paper-scissors, 3 rounds, against rock",
        package="textarena",
        open=made(lambda: Against(TextArenaEnv(RPS, num_players=2, game_args={"num_rounds": 3}), lambda *_: "[rock]")),
        agent=player(["[rock]", "[paper]", "[scissors]"]),
        stated=0.9,
        updates=30,
        max_steps=3,
    ),
    "verifiers": Task(
        what="sums of numbers from 0 to 1",
        package="verifiers",
        open=made(lambda: VerifiersEnv("ludic_envs.adapters.sums_taskset", taskset_args={"largest": 1})),
        agent=player([str(number) for number in range(3)]),
        stated=1.0,
        best=1.1,
        updates=60,
        num_groups=16,
    ),
    "mcp": Task(
        what="fetch a number by a tool and say it",
        package="mcp",
        open=open_mcp,
        agent=lambda client: ToolAgent(
            client=client,
            model="tiny",
            ctx=FullDialog(system_prompt=""),
            parser=one_of(["", "0", "", "1"]),
            chat_template=ByteTemplate(tool_parser=ByteCalls()),
            tools_in_prompt=False,
            max_model_calls=2,
            reject_incomplete_completions=False,
        ),
        stated=0.9,
        updates=60,
    ),
    "openenv": Task(
        what="x or y, over the WebSocket",
        package="",
        open=open_openenv,
        agent=player([chr(number) for number in range(256)]),
        stated=0.9,
        updates=25,
        lr=1e-2,
    ),
}


# --- one run ---


class Requests:
    """New seeds in every batch."""

    def __init__(self, count: int, first: int = 0) -> None:
        self._count, self._next = count, first

    def __call__(self) -> list[RolloutRequest]:
        seeds = range(self._next, self._next + self._count)
        self._next = seeds.stop
        return [
            RolloutRequest(
                env=EnvSpec("task"),
                protocol=ProtocolSpec("player"),
                env_seed=seed,
                sampling_seed=seed,
                inference=INFERENCE,
            )
            for seed in seeds
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


@asynccontextmanager
async def running(task: Task) -> AsyncIterator[tuple[Trainer, Callable[[], Any]]]:
    """A trainer of the task, and what measures the policy."""
    model = tiny_llama(hidden_size=64, intermediate_size=128, max_position_embeddings=task.max_len)
    server = LocalEngine(model, Latin(), max_model_len=task.max_len, kv_tokens=64 * task.max_len)
    async with AsyncExitStack() as stack:
        stack.callback(server.close)
        make = await task.open(stack)
        engine = RolloutEngine(
            env_registry={"task": make},
            protocol_registry={"player": lambda: SingleAgentProtocol(task.agent(server))},
        )
        algorithm = make_grpo(group_size=GROUP_SIZE)
        trainer = Trainer(
            model=model,
            algo=algorithm,
            batch_source=RolloutBatchSource(
                engine,
                requests_fn=Requests(task.num_groups),
                algorithm=algorithm,
                strategy=GRPORequestStrategy(GROUP_SIZE),
                max_steps=task.max_steps,
                concurrency=64,
            ),
            cfg=TrainerConfig(lr=task.lr, max_seq_len=task.max_len, weight_decay=0.0, **task.trainer),
            publisher=SharedWeightsPublisher(server),
        )

        async def measure() -> float:
            requests = Requests(NUM_NEW_EPISODES, NEW_SEEDS)()
            report = await evaluate(engine, requests, max_steps=task.max_steps, concurrency=64)
            return float(report.metrics["mean_total_reward"])

        yield trainer, measure


async def main(names: list[str]) -> None:
    print(f"{'adapter':14} {'package':22} {'task':44}{'updates':>8}{'seconds':>8}{'before':>8}{'after':>7}{'best':>6}")
    missed = []
    for name in names:
        task = TASKS[name]
        async with running(task) as (trainer, measure):
            before, began = await measure(), time.perf_counter()
            for _ in range(task.updates):
                await trainer.train_step()
            seconds, after = time.perf_counter() - began, await measure()
        package = f"{task.package} {version(task.package)}" if task.package else "its protocol, 0.10"
        print(
            f"{name:14} {package:22} {task.what:44}{task.updates:8}{seconds:8.0f}{before:8.2f}{after:7.2f}{task.best:6.1f}",
            flush=True,
        )
        if after < task.stated:
            missed.append(name)
    if missed:
        raise SystemExit(f"Missed the stated reward: {', '.join(missed)}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or list(TASKS)))
