"""Interfaces of what runs a model for the engine: of backends (one for each model) and runners (one for each cache)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from ludic.inference.local.kv import rope_limit
from ludic.inference.local.sampling import PromptScores, Scoring, sample
from ludic.inference.local.sequence import Chunk, Sampled, Sequence

Read = Callable[[], list[Sampled]]
"""Waits for a launched computation and returns its tokens."""


class Runner(Protocol):
    """The engine's interface to a device."""

    runs_ahead: bool
    """True if a step can be launched before the tokens of the one before are read."""

    def prefill(self, chunks: Seq[Chunk]) -> Read: ...

    def decode(self, sequences: Seq[Sequence], num_rounds: int) -> Read: ...

    def score(self, texts: Seq[Scoring]) -> list[PromptScores]: ...

    def keep(self, sequence: Sequence) -> None: ...

    def leave(self, sequence: Sequence) -> None: ...

    def weights_changed(self) -> None: ...


@runtime_checkable
class RecordsExperts(Protocol):
    """A runner that knows to which experts a mixture has sent the tokens of a sequence."""

    def experts(self, sequence: Sequence) -> np.ndarray[Any, Any] | None:
        """The experts of all its tokens but the last, which has not been computed."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSettings:
    """The engine's settings for a runner."""

    num_blocks: int
    block_size: int
    max_sequences: int
    max_length: int
    compile_layers: bool = True
    pack_weights: bool | None = None
    adapters: bool = False
    """True if sequences may have adapters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineNeeds:
    """Requirements of an engine for the backend of its model."""

    max_length: int
    """Tokens of one sequence."""
    images: Any = None
    """The image processor of a vision-language model."""
    records_experts: bool = False
    has_adapters: bool = False

    def changed_rope(self, model: Any) -> str | None:
        """Why a cache of keys would be wrong for sequences of this length; None if it is right."""
        limit = rope_limit(model.config.get_text_config())
        if limit is None or self.max_length <= limit:
            return None
        return (
            f"its rotary embedding changes when a sequence is longer than {limit} tokens, and max_model_len="
            f"{self.max_length}"
        )


class Backend(ABC):
    """A way to run one model. A subclass is named by an entry point of the group `ludic.backends`."""

    max_length: int
    """Tokens of one sequence."""
    bytes_per_token: int = 0
    """Memory of one token's keys and values."""
    bytes_per_sequence: int = 0
    """Memory of a sequence's recurrent states, whatever its length."""
    shares_prefixes: bool = True
    """True if a sequence can continue from the blocks of another."""
    max_rounds: int = 1
    """Decoding rounds per step."""

    @classmethod
    def is_for(cls, model: Any) -> bool:
        """True if it is meant for models of this kind on this device; others are not asked further."""
        return True

    @abstractmethod
    def suits(self, model: Any, needs: EngineNeeds) -> str | None:
        """Why it cannot run the model, for a sentence about the model; None if it can, and then it is ready to make runners."""

    @abstractmethod
    def runner(self, view: Any, settings: RunnerSettings) -> Runner:
        """A runner over `view`, a module tree for it alone."""


def sampled_from(logits_NV: Tensor, sequences: list[Sequence]) -> Read:
    """One token for each of these sequences, sampled where the logits are."""
    tokens, logprobs = sample(logits_NV, sequences) if sequences else ([], [])
    sampled = [(s, [token], [logprob]) for s, token, logprob in zip(sequences, tokens, logprobs, strict=True)]
    return lambda: sampled
