"""Rollout generation: policy and env take turns. A renderer translates between messages (envs) and tokens (training).

All episodes run concurrently, so the policy samples them in one batch.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from ludic.inference.templates.chat import ChatTemplate
from ludic.inference.templates.conversation import ChatDialogue, Prompt
from ludic.minimal.rl import Action, EnvBuilder, Example, State, Step, ToolSpec, Trajectory
from ludic.tasks import all_or_none
from ludic.types import ConfigError, Message, OutOfRoom, TokenIds, TokenTrace, derive_seed

RenderedPrompt: TypeAlias = Prompt
"""`token_ids` is the policy's input; its reply follows them."""
CompletionOutput: TypeAlias = TokenTrace
"""The prompt's token ids, the sampled ones and their log-probs, why sampling ended, at which temperature and by which version."""


class Dialogue(Protocol):
    """One conversation: a prompt, the reply to it, the next prompt, …"""

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> RenderedPrompt:
        """`messages` is the whole conversation so far."""
        ...

    def reply(self, completion: TokenTrace) -> Message:
        """The sampled reply as an assistant message; an env appends it unchanged to the prompt's messages."""
        ...


class Renderer(Protocol):
    """Messages ↔ tokens, for any number of concurrent conversations."""

    def begin(self) -> Dialogue: ...


class ChatRenderer:
    """Renders with any chat template of the library; sampled tokens are kept and never tokenised again."""

    def __init__(self, template: ChatTemplate, decode: Callable[[TokenIds], str]) -> None:
        self.template, self.decode = template, decode

    def begin(self) -> ChatDialogue:
        return ChatDialogue(self.template, self.decode)


class Policy(Protocol):
    async def sample(self, prompt: RenderedPrompt, *, seed: int | None = None) -> CompletionOutput:
        """Sample one reply; reproducible by seed as far as the client is. `ClientPolicy` wraps any client."""
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
        env, dialogue, steps = self.env_builder.build(example), self.renderer.begin(), list[Step]()
        state: State | None = env.start()
        while state is not None and len(steps) < self.max_turns:
            prompt = dialogue.prompt(state.messages, state.tools)
            try:
                completion = await policy.sample(prompt, seed=derive_seed(seed, len(steps)))
            except OutOfRoom:
                if not steps:
                    raise
                break  # no room for another turn; keep the steps so far
            action = Action(dialogue.reply(completion), is_cut_off=completion.finish_reason == "length")
            steps.append(Step(state, action, completion))
            state = env.step(action)
        return Trajectory(tuple(steps), is_finished=state is None)
