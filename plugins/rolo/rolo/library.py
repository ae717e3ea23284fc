"""What the two back ends take from Ludic: chat templates as a `Renderer`, clients as a `Policy`, batches for its trainers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import tyro

from ludic.batch_gen.external_rollouts import ExternalCall, rollout_of_calls, weighted_batch
from ludic.inference.templates.chat import ChatTemplate
from ludic.inference.templates.conversation import ChatDialogue
from ludic.types import (
    ChatClient,
    ConfigError,
    LudicError,
    MissingExtra,
    ReturnSpec,
    SamplingParams,
    SAWBatch,
    TokenCompletionRequest,
    TokenIds,
    TokenTrace,
    token_array,
    untrainable_settings,
)
from rolo.message import Message
from rolo.model import TrainingBatch
from rolo.rendering import CompletionOutput, RenderedPrompt, ToolSpec

if TYPE_CHECKING:
    from rolo.local_backend import LocalModel
    from rolo.tinker_backend import TinkerModel


class ChatRenderer:
    """Renders with a chat template of Ludic. Sampled tokens are kept and never tokenised again."""

    def __init__(self, template: ChatTemplate, decode: Callable[[TokenIds], str]) -> None:
        """`decode` gives the text of sampled tokens, without special tokens."""
        self.template, self.decode = template, decode

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, after: CompletionOutput | None = None
    ) -> RenderedPrompt:
        dialogue = after.prompt.conversation if after else ChatDialogue(self.template, self.decode)
        prompt = dialogue.prompt([message.as_dict() for message in messages], list(map(dict, tools)))
        return RenderedPrompt(prompt.token_ids.tolist(), dialogue)

    def parse(self, completion: CompletionOutput) -> Message:
        dialogue: ChatDialogue = completion.prompt.conversation
        return Message.from_dict(dialogue.reply(as_trace(completion)))


class ClientPolicy:
    """Samples from any `ChatClient` of Ludic: the embedded engine, a server, a remote service."""

    def __init__(self, client: ChatClient, sampling: SamplingParams) -> None:
        if (found := untrainable_settings(sampling)) is not None:
            raise ConfigError(f"With {found} a trainer cannot reproduce the log-probs of samples. Leave it out.")
        self.client, self.sampling = client, sampling

    async def sample(self, prompt: RenderedPrompt, *, seed: int | None = None) -> CompletionOutput:
        request = TokenCompletionRequest(
            model="policy",
            prompt_token_ids=token_array(prompt.token_ids),
            sampling=self.sampling,
            return_=ReturnSpec.for_rl(),
            seed=seed,
        )
        response, _ = await self.client.complete_tokens(request)
        trace = response.to_trace()
        assert trace.completion_logprobs is not None, "they were asked for"
        ids, logprobs = trace.completion_token_ids.tolist(), trace.completion_logprobs.tolist()
        return CompletionOutput(prompt, ids, logprobs, str(trace.finish_reason))


def as_trace(completion: CompletionOutput, temperature: float | None = None) -> TokenTrace:
    ids, logprobs = completion.token_ids, completion.logprobs
    return TokenTrace(completion.prompt.token_ids, ids, logprobs, completion.finish_reason, temperature=temperature)


def saw_batch(batch: TrainingBatch, temperature: float) -> SAWBatch:
    """The batch as Ludic's trainers take it. Turns whose prompts continue token for token become one sample."""
    rollouts = []
    for number, trajectory in enumerate(batch.trajectories):
        calls = []
        for step in trajectory.steps:
            messages = [message.as_dict() for message in step.state.messages]
            calls.append(ExternalCall(messages, step.action.text, as_trace(step.completion, temperature)))
        rollouts.append(rollout_of_calls(calls, reward=0.0, is_finished=trajectory.is_finished, group_id=str(number)))
    return weighted_batch(rollouts, batch.advantages)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What both back ends ask for."""

    model_name: str
    """A folder, a hub id, a GGUF file, smollm2-135m, or tiny (random weights, to try things out); or Tinker's name of the model."""
    learning_rate: float = 1e-5
    lora_rank: int | None = None
    """Rank of an adapter on all linear layers. None: all weights are trained in this process, 32 is Tinker's."""
    temperature: float = 1.0
    max_tokens: int = 512
    """Tokens of one reply."""
    max_seq_len: int = 2048
    """Tokens of one conversation; an episode that would grow longer ends."""
    seed: int = 0


def make_model(backend: str, settings: Mapping[str, Any]) -> LocalModel | TinkerModel:
    """The model of a back end, local or tinker. Imports only that one: the first loads torch, the second the Tinker SDK."""
    names = {field.name for field in fields(ModelConfig)}
    given: dict[str, Any] = {key: value for key, value in settings.items() if key in names and value is not None}
    if backend == "tinker":
        from rolo.tinker_backend import TinkerModel, TinkerModelConfig

        return TinkerModel(TinkerModelConfig(**given))
    try:
        from rolo.local_backend import LocalModel, LocalModelConfig
    except ImportError as error:
        raise MissingExtra("train", f"--backend local ({error})") from error
    return LocalModel(LocalModelConfig(**given))


def run_program(main: Callable[[Any], None], settings: type, description: str | None, name: str) -> None:
    """Run `main` with the settings of the command line. A mistake of the user ends it with one line."""
    try:
        main(tyro.cli(settings, description=description))
    except LudicError as mistake:
        sys.exit(f"{name}: {mistake}")
    except KeyboardInterrupt:
        sys.exit(f"{name}: interrupted; what was logged, and the best checkpoint if it was asked for, are in --run-dir")
