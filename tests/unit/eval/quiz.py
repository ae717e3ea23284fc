"""A quiz whose answers are scripted: everything but the model is real."""

from collections.abc import Callable, Sequence
from typing import Any

from ludic.batch_gen import RolloutEngine
from ludic.envs import DatasetQAEnv
from ludic.inference import ByteTemplate
from ludic.interaction import SingleAgentProtocol
from ludic.types import EnvSpec, InferenceSpec, ProtocolSpec, RolloutRequest, SamplingParams, TokenCompletionRequest
from tests.fakes import ScriptedClient, make_agent

Answer = Callable[[str], str]
"""From the question to the whole reply."""


def quiz_engine(answer: Answer, **settings: Any) -> RolloutEngine:
    def reply(request: TokenCompletionRequest) -> str:
        return answer(ByteTemplate().decode(request.prompt_token_ids).splitlines()[0].removeprefix("<user>"))

    return RolloutEngine(
        env_registry={"quiz": DatasetQAEnv},
        protocol_registry={"single": lambda: SingleAgentProtocol(make_agent(ScriptedClient(reply)))},
        **settings,
    )


def questions(asked: Sequence[tuple[str, str]], *, samples: int = 1, max_tokens: int = 64) -> list[RolloutRequest]:
    """`samples` requests for each (question, answer)."""
    inference = InferenceSpec(sampling=SamplingParams(max_tokens=max_tokens))
    return [
        RolloutRequest(
            env=EnvSpec("quiz", {"sample": {"id": str(number), "question": question, "answer": right}}),
            protocol=ProtocolSpec("single"),
            env_seed=number,
            sampling_seed=sample,
            inference=inference,
            meta={"sample_index": number},
        )
        for number, (question, right) in enumerate(asked)
        for sample in range(samples)
    ]


def says(*replies: str) -> Answer:
    """These replies in order, whatever is asked; play with concurrency=1."""
    script = iter(replies)
    return lambda question: next(script)
