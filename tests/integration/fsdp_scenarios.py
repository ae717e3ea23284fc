"""The same training on one process and on several: what is run, and what is written down of it.

A test runs a scenario in its own process, torchrun runs it on ranks (`python -m tests.integration.fsdp_worker`), and the
two records are compared.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ludic.distributed.fsdp import FSDPSettings, load_sharded, shard_model
from ludic.distributed.ranks import Ranks
from ludic.models.kinds import part
from ludic.models.lora import dense_parameters
from ludic.training import (
    Objective,
    Trainer,
    TrainerConfig,
    make_grpo,
    make_ppo,
    make_reinforce_pp,
    make_sft,
    make_spo,
    mix_objectives,
)
from ludic.training.learner.frozen import Reference
from ludic.training.learner.gradients import accumulate_gradients, batch_facts
from ludic.training.learner.packing import balanced_shares
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import (
    CISPOLoss,
    ClippedSurrogateLoss,
    CompositeLoss,
    EntropyBonus,
    GMPOLoss,
    KLLoss,
    Loss,
    LossTerm,
    MaskedCausalLMCrossEntropyLoss,
    Reduction,
    ReinforceBaselineLoss,
    ReinforceLoss,
    SAPOLoss,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
)
from ludic.training.losses.base import BatchNormalized
from ludic.types import RequestsExhausted, SAWBatch, SAWItem
from tests.tiny_families import family_model
from tests.unit.training.samples import in_three_episodes, random_items, with_prefix

LENGTHS = ([40, 5, 31, 12, 9, 22, 17], [50, 3], [11, 11, 12, 13, 40, 39, 38, 20], [30, 8, 26, 25])
"""Of four batches; the second leaves most of four ranks with nothing."""


def llama(*, tied: bool = False, lora: bool = False, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tied, initializer_range=0.2,
        bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(dtype)
    return with_adapter(model) if lora else model


def with_adapter(model: Any) -> Any:
    import peft

    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # an adapter that begins as nothing gives its other half no gradient
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted


class Given:
    """Batches made by hand, one after the other."""

    def __init__(self, batches: Sequence[Sequence[SAWItem]]) -> None:
        self.position, self.batches = 0, [list(batch) for batch in batches]

    async def next_batch(self) -> SAWBatch:
        if self.position == len(self.batches):
            raise RequestsExhausted("all batches were trained on")
        self.position += 1
        return SAWBatch(items=self.batches[self.position - 1], meta={"made": float(self.position)})

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Recorder:
    """A publisher that keeps what it was given."""

    def __init__(self) -> None:
        self.published: list[tuple[int | None, dict[str, torch.Tensor]]] = []

    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None:
        self.published.append((version, {name: state_dict[name].clone() for name in state_dict}))


def batches(num: int = len(LENGTHS)) -> list[list[SAWItem]]:
    return [random_items(LENGTHS[n % len(LENGTHS)], seed=n) for n in range(num)]


# --- training ---


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way of training."""

    make_algo: Callable[[], Any] = lambda: make_grpo(group_size=4)
    tied: bool = False
    lora: bool = False
    mixture: str = ""
    """The family of a mixture of experts, in place of the Llama."""
    dtype: torch.dtype = torch.float32
    cfg: dict[str, Any] = field(default_factory=dict)
    settings: FSDPSettings = field(default_factory=FSDPSettings)
    meta_init: bool = False
    """Only the first rank ever has the whole model."""
    source_per_rank: bool = False
    steps: int = len(LENGTHS)


def _mixed() -> Any:
    """RL, and imitation of every third sample."""
    parts = {
        "rl": Objective(algorithm=make_grpo(group_size=4)),
        "imitated": Objective(algorithm=make_sft(), weight=0.3),
    }
    return mix_objectives(parts, default="rl")


def _tagged(items: Sequence[SAWItem]) -> list[SAWItem]:
    """Only the mixed run looks at it."""
    return [item.with_origin(objective="imitated") if number % 3 == 2 else item for number, item in enumerate(items)]


def _rewarded(items: Sequence[SAWItem]) -> list[SAWItem]:
    """For a critic: what each sample earned, two samples to an episode, turns of three tokens."""
    import numpy as np

    done = []
    for number, item in enumerate(items):
        rewards = np.zeros(item.num_action_tokens, dtype=np.float32)
        rewards[-1] = (number % 3) / 2
        origin = replace(item.origin, rollout_id=f"r{number // 2}", segment=number % 2)
        turns = np.arange(item.num_action_tokens) // 3 + 100 * (number % 2)
        attached = replace(item.attachments, token_rewards=rewards, token_turns=turns)
        done.append(replace(item, origin=origin, attachments=attached))
    return done


RUNS: dict[str, Run] = {
    "full": Run(),
    "tied": Run(tied=True),
    "lora": Run(lora=True, cfg={"lr": 1e-2}),
    "lora_tied_from_meta": Run(lora=True, tied=True, meta_init=True),
    "from_meta": Run(tied=True, meta_init=True),
    "checkpointing": Run(cfg={"gradient_checkpointing": True}),
    "checkpointing_lora": Run(lora=True, settings=FSDPSettings(gradient_checkpointing=True)),
    "kept_gathered": Run(settings=FSDPSettings(reshard_after_forward=False, prefetch=0, sync_gradients="every")),
    "padded": Run(cfg={"packed": False}),
    "source_per_rank": Run(source_per_rank=True),
    "baseline": Run(make_algo=lambda: make_reinforce_pp()),
    "critic": Run(make_algo=make_ppo),
    "critic_apart": Run(make_algo=lambda: make_ppo(critic="detached", over="turns"), cfg={"critic_lr": 1e-3}),
    "tracked_values": Run(make_algo=lambda: make_spo()[0]),
    "mixed": Run(make_algo=_mixed),
    "mixture": Run(mixture="qwen3_moe"),
    "mixture_from_meta": Run(mixture="deepseek_v3", meta_init=True),
    # Two steps on the first batch and one on the second, whose samples are one episode.
    "mini_batches": Run(
        make_algo=lambda: make_ppo(behavior_cap=2.0), cfg={"mini_batches": 2, "sync_every_steps": 1}, steps=3
    ),
}
SPECIAL_RUNS: dict[str, Run] = {
    "half_precision": Run(dtype=torch.bfloat16, tied=True),
    "replicas": Run(settings=FSDPSettings(replicas=2)),
    "compiled": Run(cfg={"compile": True}),
    "context": Run(cfg={"context_parallel": 2}),
    "context_checkpointing_lora": Run(
        lora=True, cfg={"context_parallel": 2, "gradient_checkpointing": True, "offload_activations": True}
    ),
}
"""Not equal to one process to the last digits, or not for every number of ranks."""


def trainer_of(run: Run, ranks: Ranks | None, **settings: Any) -> Trainer:
    def load() -> Any:
        if run.mixture:
            return family_model(run.mixture).to(run.dtype)
        return llama(tied=run.tied, lora=run.lora, dtype=run.dtype)

    given = [_rewarded(_tagged(batch)) for batch in batches(run.steps)]
    if ranks is None or "model" in settings:
        model = None if "model" in settings else load()
    elif run.meta_init:
        model = load_sharded(load, ranks, run.settings)
    else:
        model = shard_model(load(), run.settings)
    source: Given | None = Given(given)
    if ranks is not None and run.source_per_rank:
        source = Given([batch[ranks.rank :: ranks.world_size] for batch in given])
    elif ranks is not None and not ranks.is_first:
        source = None
    cfg = {"lr": 3e-3, "eps": 1e-4, "max_seq_len": 64, "micro_token_budget": 64, "sync_every_steps": 2, **run.cfg}
    parts = {
        "model": model, "algo": run.make_algo(), "batch_source": source,
        "publisher": Recorder() if ranks is None or ranks.is_first else None,
    }  # fmt: skip
    return Trainer(**{**parts, **settings}, cfg=TrainerConfig(**cfg), ranks=ranks)


def train(run: Run, ranks: Ranks | None, **parts: Any) -> dict[str, Any]:
    """History, published weights and final weights of a whole run."""
    trainer = trainer_of(run, ranks, **parts)
    base = {name: whole(p).clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    history = [trainer.train_step_sync() for _ in range(run.steps)]
    drift = {name: p for name, p in trainer.model.named_parameters() if name in base}
    return {
        "history": history,
        "published": trainer.publisher.published if isinstance(trainer.publisher, Recorder) else [],
        "weights": {name: w.clone() for name, w in dense_parameters(trainer.model)},
        "base_stays": all(torch.equal(whole(p), base[name]) for name, p in drift.items()),
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# --- gradients ---


def _with_kl(loss: Loss) -> Loss:
    terms = [
        LossTerm(name="policy", loss=loss),
        LossTerm(name="entropy", loss=EntropyBonus(coeff=0.1)),
        LossTerm(name="kl", loss=TokenKLLoss(coeff=0.3, to="reference")),
    ]
    return CompositeLoss(terms)


LOSSES: dict[str, Loss] = {
    "token_clipped": TokenClippedSurrogateLoss(),
    "token_mean": TokenClippedSurrogateLoss(reduction="token_mean"),
    "episode_mean": TokenClippedSurrogateLoss(reduction="episode_mean"),
    "constant": TokenClippedSurrogateLoss(reduction=Reduction("constant", 64)),
    "clipped": ClippedSurrogateLoss(clip_eps_low=0.2, clip_eps_high=0.3, length_normalize=True),
    "gmpo": GMPOLoss(),
    "sapo": SAPOLoss(),
    "reinforce": ReinforceLoss(),
    "reinforce_baseline": ReinforceBaselineLoss(normalize=True, length_normalize=True),
    "batch_normalized": BatchNormalized(CISPOLoss()),
    "kl": KLLoss(coeff=0.5),
    "supervised": MaskedCausalLMCrossEntropyLoss(),
    "with_entropy_and_kl": _with_kl(CISPOLoss()),
}


@functools.cache
def _policy_and_reference(
    ranks: Ranks | None, *, lora: bool, context: Any, share_prefixes: bool
) -> tuple[TrainedPolicy, Reference]:
    """They are made once, for all losses."""
    model, other = llama(tied=True, lora=lora), llama(seed=1).requires_grad_(False)
    if ranks is not None:
        model, other = shard_model(model), shard_model(other)
    policy = TrainedPolicy(model, context=context, share_prefixes=share_prefixes)
    return policy, Reference(policy, adapter_off=True) if lora else Reference(TrainedPolicy(other))


@functools.cache
def _sharing_rows(ranks: Ranks) -> Any:
    return part("sliced").ContextParallel(ranks.world_size, ranks)


def gradients(
    loss: Loss,
    ranks: Ranks | None,
    *,
    reference: str = "frozen",
    budget: int = 64,
    shares_rows: bool = False,
    has_prefixes: bool = False,
    share_prefixes: bool = False,
) -> dict[str, Any]:
    """Whole gradients of one batch that is dealt out unevenly; or whose rows all ranks share (context parallel).

    `has_prefixes`: three groups of three samples behind a prompt each, dealt out in whole groups if they are shared."""
    items = in_three_episodes(random_items([40, 5, 31, 12, 9, 22, 17, 60, 3], seed=3))
    if has_prefixes:
        prompts = np.random.default_rng(0).integers(3, 60, size=(3, 30)).astype(np.int32)
        items = [with_prefix(item, prompts[number // 3]) for number, item in enumerate(items)]
    context = _sharing_rows(ranks) if shares_rows and ranks is not None else None
    policy, anchor = _policy_and_reference(
        ranks, lora=reference == "adapter_off", context=context, share_prefixes=share_prefixes
    )
    policy.model.zero_grad()
    share = items if ranks is None else balanced_shares(items[4:], ranks.world_size)[ranks.rank]
    if context is not None:
        share = items
    elif ranks is not None and has_prefixes:
        share = balanced_shares(items, ranks.world_size, share_prefixes=share_prefixes)[ranks.rank]
    elif ranks is not None and ranks.is_first:
        share = share + items[:4]  # not balanced: some ranks have fewer micro-batches
    sums = accumulate_gradients(
        policy, loss, share, micro_token_budget=budget, reference=anchor, watch_entropy=True,
        facts=batch_facts(items), ranks=ranks,
    )  # fmt: skip
    return {
        "loss": sums.totals().sums.get("loss", (0.0, 0.0))[0],
        "micro_batches": sums.totals().sums["num_micro_batches"][0],
        "computed": sums.totals().sums["perf/prefix_sharing"],
        "grads": {name: whole(p.grad) for name, p in policy.model.named_parameters() if p.grad is not None},
    }
