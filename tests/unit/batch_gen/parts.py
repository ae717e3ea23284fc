"""Small real parts for batch generation: a guessing game, engines on scripted and random clients, simple credit."""

import asyncio
import random

from ludic.batch_gen import RolloutEngine
from ludic.envs import SingleAgentEnv
from ludic.inference import ByteTemplate, ScriptedClient
from ludic.interaction import SingleAgentProtocol
from ludic.types import EnvSpec, InferenceSpec, ProtocolSpec, ReturnSpec, RolloutRequest, SamplingParams, StepOutcome
from tests.fakes import CountingEnv, RandomTokenClient, make_agent

RL = InferenceSpec(return_=ReturnSpec.for_rl())


class SeededEnv(SingleAgentEnv):
    """Shows a number drawn from its seed; the reward is whether the reply is that number's parity."""

    blocking = False  # tests count what runs at the same time
    open_envs = 0

    def __init__(self, fail_on: int | None = None) -> None:
        super().__init__()
        self.fail_on = fail_on
        type(self).open_envs += 1

    def env_reset(self, *, seed: int | None = None):
        self.number = random.Random(seed).randrange(1000)
        return f"number={self.number}", {}

    def env_step(self, action: str) -> StepOutcome:
        if self.fail_on is not None:
            raise RuntimeError(f"broken env {self.fail_on}")
        right = action == ("even", "odd")[self.number % 2]
        return StepOutcome("done", float(right), terminated=True, info={"number": self.number, "reward": 99.0})

    async def async_close(self) -> None:
        type(self).open_envs -= 1


class Threaded(SeededEnv):
    """The same in a thread, as most envs are."""


def coin_client() -> ScriptedClient:
    """Answers by its sampling seed alone, as a sampler would."""
    return ScriptedClient(lambda request: f"<a>{random.Random(request.seed).choice(['even', 'odd'])}</a>")


def make_engine(client=None, *, env_registry=None, **settings) -> RolloutEngine:
    client = client or coin_client()
    return RolloutEngine(
        env_registry={"seeded": SeededEnv, "counting": CountingEnv, **(env_registry or {})},
        protocol_registry={"single": lambda **kwargs: SingleAgentProtocol(make_agent(client), **kwargs)},
        **settings,
    )


def request(kind="seeded", env=None, **fields) -> RolloutRequest:
    return RolloutRequest(env=EnvSpec(kind, env or {}), protocol=ProtocolSpec("single"), **{"inference": RL, **fields})


def random_client() -> RandomTokenClient:
    template = ByteTemplate()
    return RandomTokenClient(
        vocab_size=ByteTemplate.VOCAB_SIZE, end_ids=(ByteTemplate.END,), decode=template.decode_reply
    )


SHORT = InferenceSpec(sampling=SamplingParams(temperature=1.0, max_tokens=12), return_=ReturnSpec.for_rl())


class TotalReward:
    """Credit: every step weighs its rollout's total reward."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def compute(self, rollouts):
        self.seen.append(len(rollouts))
        return {(r.id, s.index): r.total_reward for r in rollouts for s in r.steps}


class StepIndex:
    """Credit: every step weighs its own index, so that turns differ."""

    def compute(self, rollouts):
        return {(r.id, s.index): float(s.index) for r in rollouts for s in r.steps}


def other_tasks() -> set[asyncio.Task]:
    return asyncio.all_tasks() - {asyncio.current_task()}


def summary(rollouts) -> list:
    """What of rollouts must repeat from run to run: everything but ids and times."""
    return [
        (
            r.meta["episode_idx"],
            r.meta["env_seed"],
            r.meta["sampling_seed"],
            r.total_reward,
            [s.action for s in r.steps],
            [s.trace.prompt_token_ids.tolist() for s in r.agent_steps],
        )
        for r in rollouts
    ]
