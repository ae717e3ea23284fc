"""Rollout generation: policy and env take turns. All episodes run concurrently, so the policy samples them in one batch."""

from collections.abc import Sequence
from typing import Protocol

from ludic.tasks import all_or_none
from ludic.types import ConfigError, OutOfRoom, derive_seed
from rolo.rendering import CompletionOutput, RenderedPrompt, Renderer
from rolo.rl import Action, EnvBuilder, Example, State, Step, Trajectory


class Policy(Protocol):
    async def sample(self, prompt: RenderedPrompt, *, seed: int | None = None) -> CompletionOutput:
        """Sample one reply. OutOfRoom where the prompt leaves no room for one."""
        ...


class Generator(Protocol):
    async def generate(
        self, examples: Sequence[Example], *, policy: Policy, samples_per_prompt: int, seed: int = 0
    ) -> list[list[Trajectory]]:
        """One group of trajectories per example, in order."""
        ...


class RolloutGenerator:
    """Builds an env per trajectory and runs it for at most `max_turns`."""

    def __init__(self, *, env_builder: EnvBuilder, renderer: Renderer, max_turns: int = 1) -> None:
        if max_turns < 1:
            raise ConfigError(f"RolloutGenerator(max_turns={max_turns}): an episode has at least 1 turn.")
        self.env_builder, self.renderer, self.max_turns = env_builder, renderer, max_turns

    async def generate(
        self, examples: Sequence[Example], *, policy: Policy, samples_per_prompt: int, seed: int = 0
    ) -> list[list[Trajectory]]:
        size = samples_per_prompt
        seeds = [(example, derive_seed(seed, n, i)) for n, example in enumerate(examples) for i in range(size)]
        done = await all_or_none(self._run_episode(example, policy, own) for example, own in seeds)
        return [done[first : first + size] for first in range(0, len(done), size)]

    async def _run_episode(self, example: Example, policy: Policy, seed: int) -> Trajectory:
        env, steps = self.env_builder.build(example), list[Step]()
        state: State | None = env.start()
        while state is not None and len(steps) < self.max_turns:
            last = steps[-1].completion if steps else None
            prompt = self.renderer.render(state.messages, state.tools, after=last)
            try:
                completion = await policy.sample(prompt, seed=derive_seed(seed, len(steps)))
            except OutOfRoom:
                if not steps:
                    raise
                break  # no room for another turn; keep the steps so far
            action = Action(self.renderer.parse(completion), is_cut_off=completion.finish_reason == "length")
            steps.append(Step(state, action, completion))
            state = env.step(action)
        return Trajectory(tuple(steps), is_finished=state is None)
