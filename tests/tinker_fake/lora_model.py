"""What the fake service trains and samples: a tiny Llama under a peft LoRA, with plain transformers and torch.

Nothing here is Ludic's way of computing: full logits of right-padded rows, one forward pass per sampled token.
"""

import copy
import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import peft
import torch
from torch import Tensor

from tests.tinker_fake.losses import loss_of

_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_MLP = ["gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """What a training run was created with."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def target_modules(self) -> list[str]:
        return _ATTENTION * self.train_attn + _MLP * self.train_mlp + ["lm_head"] * self.train_unembed


@dataclass(frozen=True, slots=True)
class Row:
    """One datum."""

    tokens: list[int]
    targets: list[int]
    inputs: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sampled sequence."""

    tokens: list[int]
    logprobs: list[float]
    is_stopped: bool


def with_lora(base: Any, settings: LoraSettings) -> Any:
    """A copy of the base with a fresh adapter; the seed decides its weights."""
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed if settings.seed is not None else torch.seed() % 2**31)
        config = peft.LoraConfig(r=settings.rank, lora_alpha=32, target_modules=settings.target_modules())
        return peft.get_peft_model(copy.deepcopy(base), config)


class TrainedLora:
    """One training run: weights, gradients that add up until the next step, AdamW."""

    def __init__(self, base: Any, settings: LoraSettings) -> None:
        self.settings = settings
        self.model = with_lora(base, settings)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.0)
        self.num_steps = 0
        self.last_gradient: dict[str, Tensor] = {}
        """As it was before clipping."""

    def forward_backward(
        self, rows: Sequence[Row], loss_fn: str, config: dict[str, float], *, forward_only: bool
    ) -> tuple[list[Tensor], float]:
        """(log-probs of each row's targets, the summed loss)."""
        with torch.set_grad_enabled(not forward_only):
            logps = target_logps(self.model, rows)
            losses = [loss_of(loss_fn, own, row.inputs, config) for own, row in zip(logps, rows, strict=True)]
            loss = torch.stack(losses).sum()
        if not forward_only:
            loss.backward()
        return [own.detach() for own in logps], float(loss.detach())

    def step(self, params: dict[str, float]) -> float:
        """One step of AdamW with these settings; the norm of the gradient before clipping comes back."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.num_steps += 1
        self.last_gradient = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        limit = params["grad_clip_norm"] or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), limit)
        for group in self.optimizer.param_groups:
            group.update(
                lr=params["learning_rate"],
                betas=(params["beta1"], params["beta2"]),
                eps=params["eps"],
                weight_decay=params["weight_decay"],
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def saved(self) -> bytes:
        file = io.BytesIO()
        torch.save({"weights": self.weights(), "optimizer": self.optimizer.state_dict()}, file)
        return file.getvalue()

    def restore(self, saved: bytes, *, optimizer: bool) -> None:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(state["weights"], strict=False)
        if optimizer:
            self.optimizer.load_state_dict(state["optimizer"])

    def weights(self) -> dict[str, Tensor]:
        """The adapter's own."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}

    def snapshot(self) -> Any:
        """The model of now, for sampling."""
        return copy.deepcopy(self.model).eval()


def target_logps(model: Any, rows: Sequence[Row]) -> list[Tensor]:
    """Padded at the right, which a causal model cannot see."""
    longest = max(len(row.tokens) for row in rows)
    ids = torch.tensor([row.tokens + [0] * (longest - len(row.tokens)) for row in rows])
    logps = torch.log_softmax(model(input_ids=ids, use_cache=False).logits.float(), dim=-1)
    return [logps[index, torch.arange(len(row.targets)), torch.tensor(row.targets)] for index, row in enumerate(rows)]


@functools.lru_cache(maxsize=256)
@torch.no_grad()
def next_logits(model: Any, tokens: tuple[int, ...]) -> Tensor:
    """Of a model that is sampled from, which never changes: a group asks for its prompt eight times."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].float()


def draw(
    model: Any, prompt: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None, stop_ids: set[int]
) -> Drawn:
    """Token by token from the whole vocabulary; the log-probs are those that it drew with."""
    generator = torch.Generator()
    generator.manual_seed(seed) if seed is not None else generator.seed()
    tokens, logprobs = list(prompt), []
    for _ in range(max_tokens):
        logps = torch.log_softmax(next_logits(model, tuple(tokens)) / (temperature or 1.0), dim=-1)
        chosen = (
            int(logps.argmax()) if temperature == 0 else int(torch.multinomial(logps.exp(), 1, generator=generator))
        )
        tokens.append(chosen)
        logprobs.append(float(logps[chosen]))
        if chosen in stop_ids:
            return Drawn(tokens[len(prompt) :], logprobs, True)
    return Drawn(tokens[len(prompt) :], logprobs, False)
