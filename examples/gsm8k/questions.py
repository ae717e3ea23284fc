"""What the scripts of this folder share: the questions, and who is asked them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ludic import registry
from ludic.agents import Agent
from ludic.batch_gen import RolloutEngine
from ludic.batch_gen.requests.samples import read_samples
from ludic.context import FullDialog
from ludic.inference import ChatTemplate, HFChatTemplate
from ludic.interaction import SingleAgentProtocol
from ludic.types import ChatClient, ConfigError, EnvSpec, InferenceSpec, ProtocolSpec, RolloutRequest, SamplingParams

Sample = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Asking:
    """Settings that every script has."""

    model: str = "smollm2-135m"
    """A folder, a hub id, or smollm2-135m."""
    parser: Literal["final_number", "boxed"] = "final_number"
    r"""What counts as the answer: the last \boxed{…}, #### line or number; or a \boxed{…} only, which then earns 0.1."""
    max_completion_tokens: int = 512
    """Of one answer; one that is cut off is wrong."""

    @property
    def solver(self) -> ProtocolSpec:
        """Who answers. It is part of a request, so that a file of answers is never taken for another model's."""
        return ProtocolSpec("solver", {"model": self.model, "parser": self.parser})

    def sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature=temperature, max_tokens=self.max_completion_tokens)

    def requests(
        self, samples: Sequence[Sample], inference: InferenceSpec, num_samples: int = 1
    ) -> list[RolloutRequest]:
        """Every question, asked `num_samples` times."""
        return [
            RolloutRequest(
                env=EnvSpec("gsm8k", {"sample": sample}),
                protocol=self.solver,
                env_seed=index,
                sampling_seed=index,
                num_episodes=num_samples,
                inference=inference,
                meta={"sample_index": index},
            )
            for index, sample in enumerate(samples)
        ]


def solver(client: ChatClient, template: ChatTemplate, *, model: str, parser: str) -> SingleAgentProtocol:
    """For one question: an agent remembers one conversation."""
    agent = Agent(
        client=client, model=model, ctx=FullDialog(), parser=registry.parsers.make(parser), chat_template=template
    )
    return SingleAgentProtocol(agent)


def rollout_engine(client: ChatClient, tokenizer: Any, **settings: Any) -> RolloutEngine:
    template = HFChatTemplate(tokenizer)
    return RolloutEngine(protocol_registry={"solver": partial(solver, client, template)}, **settings)


def load_questions(data: Path | None, split: Literal["train", "test"], limit: int | None = None) -> list[Sample]:
    """From a JSONL file of {"question": …, "answer": "… #### 42"}, or without one from the hub through `datasets`."""
    samples = read_samples(f"hub:openai/gsm8k:main:{split}" if data is None else data)
    for number, sample in enumerate(samples, start=1):
        if not {"question", "answer"} <= sample.keys():
            raise ConfigError(f'Line {number} of {data} is not of the form {{"question": …, "answer": "… #### 42"}}.')
    name = split if data is None else data.stem
    return [{"id": f"{name}:{number}", **sample} for number, sample in enumerate(samples)][:limit]
