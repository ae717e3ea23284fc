"""Settings of the sections algo, train and eval: what is learned, in how many updates, and how it is measured meanwhile."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ludic.run.config.entries import Arguments, Section
from ludic.run.config.model import is_served
from ludic.run.settings import may_change
from ludic.util.urls import PUT_LOGIN, refuse_login

KLEstimate: TypeAlias = Literal["k1", "k2", "k3"]
Averaging: TypeAlias = Literal["token_mean", "sample_mean", "episode_mean", "sample_sum"]


@dataclass(frozen=True, kw_only=True)
class AlgoSettings(Section):
    """The algorithm, its regularisers, corrections and teacher."""

    algo: str = "grpo"
    """Registered algorithm (`ludic parts algorithm`), or file.py:function that returns one."""
    algo_set: Arguments = field(default_factory=dict)
    """Argument of the algorithm, such as clip_eps_high=0.28."""
    group_size: int | None = None
    """Rollouts of the same task that are compared. Default: 8, or 1 for a built-in algorithm that compares none. A
    function of yours that makes an algorithm is given it if it has a parameter `group_size`."""
    reduction: Averaging | None = None
    """Divisor of the loss of all action tokens: their number, each sample's number and then samples, each episode's
    number and then episodes, or samples. Default: token_mean, or what the algorithm itself does where it is a mean."""
    entropy_bonus: float = 0.0
    """Above 0, the policy is rewarded for the entropy of its choices, with this factor: it keeps exploring."""
    kl_coeff: float = 0.0
    """Above 0, the policy is held near a frozen reference by so much KL."""
    kl_estimator: KLEstimate = "k3"
    """Estimator of that KL (docs/algorithms/README.md)."""
    kl_weighted: bool = False
    """Count the terms of that KL by the ratio of trained to sampled probability: right for samples of older versions too."""
    correction: tuple[str, ...] = ("auto",)
    """Correction for samples of another policy than the trained one (docs/importance_sampling.md): token_mask,
    negative_sequence_mask, divergence_mask=0.2, …, which may be repeated; none; or auto: negative_sequence_mask=0.05 for cispo,
    scalerl and sapo with max_lag or replay above 0, else none."""
    reference: str | None = None
    """The frozen reference, a model as for --model. Default: the weights that the run begins with; of a LoRA run the model under
    the adapter, which takes no memory."""
    filter: tuple[str, ...] = ()
    """Filter of the samples that are trained on (`ludic parts filter`), or file.py:function, which is called with a sample.
    Several: those that all keep."""
    teacher: str | None = None
    """For algorithms that learn from a teacher (opd, grpo_opd, mopd): a model as for --model, or the URL of a vLLM server."""
    teacher_tokenizer: str | None = None
    """For a teacher behind a URL: its folder or hub id, where the server does not name one that can be read here."""
    train_on: tuple[str, ...] = ()
    """For sft, rft and echo: the roles whose texts are learned, such as assistant tool (docs/renderers.md). Default: what the
    policy sampled; for echo also all that answers it."""

    RANGES = ("group_size in [1, inf)", "entropy_bonus kl_coeff in [0, inf)")

    def problems(self) -> Iterator[str]:
        if self.teacher is not None and self.teacher_is_served:
            refuse_login("teacher", self.teacher, PUT_LOGIN)
        if self.teacher_tokenizer is not None and not self.teacher_is_served:
            yield (
                f"teacher_tokenizer = {self.teacher_tokenizer!r} is for a teacher behind a URL; teacher = {self.teacher!r} has one."
            )

    @property
    def teacher_is_served(self) -> bool:
        return is_served(self.teacher)


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Section):
    """The updates of the weights."""

    steps: int = 30
    """Updates: optimizer steps."""
    max_seq_len: int | None = None
    """Tokens of a sample, prompt and replies; a run ends an episode that gets longer. Default: 1024; for an agent that is a
    function or a command, the model's context, of which 32,768 at most."""
    micro_token_budget: int | None = may_change(None)
    """Tokens in one forward pass; the gradient does not depend on it. Default: 8192, or max_seq_len where that is more."""

    RANGES = ("steps micro_token_budget in [1, inf)", "max_seq_len in [2, inf)")

    @property
    def limits(self) -> dict[str, Any]:
        """`max_seq_len` and `micro_token_budget`, with their defaults filled in."""
        longest = self.max_seq_len or 1024
        return {"max_seq_len": longest, "micro_token_budget": self.micro_token_budget or max(8192, longest)}


@dataclass(frozen=True, kw_only=True)
class EvalSettings(Section):
    """Evaluation while training; none unless asked for."""

    eval_episodes: int = may_change(200)
    """Tasks of one evaluation."""
    eval_pass_k: int = may_change(1)
    """Episodes of each task; above 1, pass@k is measured too."""
    eval_data: Path | None = may_change(None)
    """JSONL file (or hub:…, or file.py:function) of held-out samples, for envs that ask questions."""
    eval_temperature: float = may_change(0.6)
    """Temperature of sampling while evaluating; 0 is greedy."""

    RANGES = ("eval_temperature in [0, inf)", "eval_episodes eval_pass_k in [1, inf)")
