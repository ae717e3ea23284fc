"""A task for experiments on a CPU: write a line of 32 characters of which half are letters.

A line with a share s of letters earns 1 − |2s − 1|; by chance s is a fifth and the reward 0.4. Both too few and too many are wrong,
so a policy trained on old samples overshoots: they still say "more letters" when there are already too many. Credit is for the
whole line, so learning is spread over 32 tokens, long enough for ratios to multiply. Everything is real (engine, agent,
rollouts, trainer) and a run takes seconds.
"""

from itertools import count
from typing import Any

import transformers

from ludic.agents import Agent
from ludic.batch_gen import GRPORequestStrategy, RolloutBatchSource, RolloutEngine
from ludic.context import FullDialog
from ludic.envs import SingleAgentEnv
from ludic.inference import ByteTemplate
from ludic.inference.local import LocalEngine
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import ParseResult
from ludic.training import RLAlgorithm
from ludic.types import (
    EnvSpec,
    InferenceSpec,
    Info,
    ProtocolSpec,
    ReturnSpec,
    RolloutRequest,
    SamplingParams,
    StepOutcome,
)

LENGTH = 32


class LetterLine(SingleAgentEnv):
    """One turn."""

    @property
    def suggested_sysprompt(self) -> None:
        return None

    def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        return "abcd"[(seed or 0) % 4], {}

    def env_step(self, action: str) -> StepOutcome:
        share = sum(c.isascii() and c.isalpha() for c in action) / LENGTH
        return StepOutcome("", 1 - abs(2 * share - 1), terminated=True)


class Bytes:
    """The engine's tokenizer interface over ByteTemplate's ids."""

    eos_token_id = None

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return ByteTemplate().decode([i for i in ids if i < 256])


def tiny_model(seed: int) -> Any:
    transformers.set_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, eos_token_id=None, bos_token_id=None,
        )
    )  # fmt: skip


def engine_of(model: Any) -> LocalEngine:
    return LocalEngine(model, Bytes(), max_model_len=64, kv_tokens=8192)


def lines(
    engine: LocalEngine,
    algorithm: RLAlgorithm,
    *,
    seed: int,
    num_prompts: int = 2,
    group_size: int = 8,
    env: type[LetterLine] = LetterLine,
    **settings: Any,
) -> RolloutBatchSource:
    """Batches of `num_prompts` × `group_size` lines. `settings`: of the source."""
    numbers = count(1000 * seed)
    inference = InferenceSpec(
        sampling=SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True), return_=ReturnSpec.for_rl()
    )

    def requests() -> list[RolloutRequest]:
        return [
            RolloutRequest(
                env=EnvSpec("line"), protocol=ProtocolSpec("single"), env_seed=next(numbers), inference=inference
            )
            for _ in range(num_prompts)
        ]

    rollouts = RolloutEngine(
        env_registry={"line": env}, protocol_registry={"single": lambda: SingleAgentProtocol(_writer(engine))}
    )
    return RolloutBatchSource(
        rollouts,
        requests_fn=requests,
        algorithm=algorithm,
        strategy=GRPORequestStrategy(group_size),
        max_steps=1,
        concurrency=num_prompts * group_size,
        **settings,
    )


def _writer(engine: LocalEngine) -> Agent:
    return Agent(
        client=engine,
        model="tiny",
        ctx=FullDialog(),
        parser=lambda text: ParseResult(action=text or "\ufffd", reward=0.0, obs=None),
        chat_template=ByteTemplate(),
        reject_incomplete_completions=False,
    )
