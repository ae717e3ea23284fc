"""What the scripts of this folder share: the questions, and who is asked them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ludic import registry
from ludic.agents import Agent
from ludic.batch_gen import RolloutEngine
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
    samples = _from_hub(split) if data is None else _from_file(data)
    if not samples:
        raise ConfigError(f"{data} has no questions in it.")
    return samples[:limit]


def _from_file(data: Path) -> list[Sample]:
    if not data.exists():
        raise ConfigError(f"There is no file {data}. Give a JSONL file with a question and an answer on each line.")
    samples = []
    for number, line in enumerate(data.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            sample = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"Line {number} of {data} is not JSON: {error}.") from error
        if not isinstance(sample, dict) or not {"question", "answer"} <= sample.keys():
            raise ConfigError(f'Line {number} of {data} is not of the form {{"question": …, "answer": "… #### 42"}}.')
        samples.append({"id": f"{data.stem}:{number}", **sample})
    return samples


def _from_hub(split: str) -> list[Sample]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(
            "GSM8K is fetched with `datasets`, which is not installed. Install it (pip install datasets), or give the "
            "questions as JSONL files (--data, and --eval-data for training)."
        ) from error
    try:
        rows = load_dataset("openai/gsm8k", "main", split=split)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"openai/gsm8k could not be fetched: {str(error).strip().splitlines()[0]} Give the questions as JSONL files "
            "(--data, and --eval-data for training)."
        ) from error
    return [{"id": f"{split}:{number}", **row} for number, row in enumerate(rows)]
