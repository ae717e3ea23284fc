"""`TinkerPolicy`: a LoRA adapter that is trained and served at Tinker.

It replaces a local model: `TinkerTrainer(model=TinkerPolicy(config))` trains it, and agents sample from `policy.client`. Every
call blocks until the service has answered; trainers call it from a thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from ludic.http.client import EndpointError
from ludic.types import FloatArray, LogprobArray, TokenArray, float_array
from ludic_tinker.client import TinkerChatClient, TinkerConfig, context_length, opening, sdk, tinker_errors

CustomLoss: TypeAlias = Callable[[list[torch.Tensor]], torch.Tensor]
"""A function from the differentiable log-probs of each row's targets to a scalar."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainRow:
    """One sample in Tinker's form: position i of the tokens predicts the i-th target."""

    tokens: TokenArray
    targets: TokenArray
    loss_inputs: Mapping[str, FloatArray] = field(default_factory=dict)
    """Inputs of the built-in loss besides the targets, one number per target."""


@dataclass(frozen=True, slots=True)
class BuiltInLoss:
    """A loss that the service computes itself: a plain sum over tokens."""

    name: Literal["cross_entropy", "importance_sampling", "ppo", "cispo"]
    settings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of one step."""

    logprobs: list[LogprobArray]
    """Log-probs of each row's targets, before the step."""
    metrics: dict[str, float]
    """The service's metrics, under its names."""


class TinkerPolicy:
    """One training run at the service, and the client that samples from its newest published weights."""

    def __init__(self, config: TinkerConfig, *, tokenizer: Any = None) -> None:
        """Creates the training run and publishes its first weights as version 0. Without a `tokenizer`, the one that the service
        names is loaded from the hub."""
        self.config = config
        with opening(config) as self._service:
            self._begin(tokenizer)

    def _begin(self, tokenizer: Any) -> None:
        config = self.config
        max_context = context_length(self._service, config)
        with tinker_errors("create a training run", config):
            self._run = self._service.create_lora_training_client(
                base_model=config.base_model,
                rank=config.lora_rank,
                seed=config.lora_seed,
                train_mlp=config.train_mlp,
                train_attn=config.train_attn,
                train_unembed=config.train_unembed,
            ).result()
            self.tokenizer = tokenizer if tokenizer is not None else self._run.get_tokenizer()
        self.client = TinkerChatClient(self._new_sampler(), self.tokenizer, version=0, max_context=max_context)

    # --- training ---

    def train(self, rows: Sequence[TrainRow], loss: BuiltInLoss | CustomLoss, adam: Mapping[str, float]) -> Trained:
        """The gradient of one batch, and one step of AdamW with these settings (those of `tinker.AdamParams`).

        A custom loss is computed here, from log-probs that the service gives in a separate forward pass.
        """
        data = [_datum(row) for row in rows]
        step = sdk().AdamParams(**adam)
        with tinker_errors("train"):
            if isinstance(loss, BuiltInLoss):
                gradient = self._run.forward_backward(data, loss.name, dict(loss.settings) or None)
            else:
                gradient = self._run.forward_backward_custom(data, lambda _, logprobs: (loss(logprobs), {}))
            # Both are sent before either is awaited: the service works in turns, and a turn takes seconds.
            stepped = self._run.optim_step(step)
            computed, done = gradient.result(), stepped.result()
        logprobs = [_logprobs_of(output, row) for output, row in zip(computed.loss_fn_outputs, rows, strict=True)]
        return Trained(logprobs, {**computed.metrics, **(done.metrics or {})})

    # --- publishing, saving ---

    def publish(self, version: int) -> None:
        """The client samples from the current weights, under this version."""
        self.client.use(self._new_sampler(), version)

    def _new_sampler(self) -> Any:
        with tinker_errors("serve the newest weights"):
            return self._run.save_weights_and_get_sampling_client().result()

    def save_state(self, name: str) -> str:
        """Save weights and optimizer at the service; returns their tinker:// path. The same name replaces."""
        with tinker_errors(f"save the state as {name!r}"):
            saved = self._run.save_state(name, ttl_seconds=self.config.checkpoint_ttl_s, overwrite=True).result()
        return saved.path

    def load_state(self, path: str) -> None:
        """Continue from a saved state in a new training run; `publish` before sampling."""
        with tinker_errors(f"load {path}", self.config):
            self._run = self._service.create_training_client_from_state_with_optimizer(path).result()

    def save_for_sampling(self, name: str) -> str:
        """Save weights alone, for `TinkerChatClient.connect(model_path=…)`."""
        with tinker_errors(f"save weights as {name!r}"):
            saved = self._run.save_weights_for_sampler(name, ttl_seconds=self.config.checkpoint_ttl_s).result()
        return saved.path

    def close(self, status: Literal["success", "errored", "interrupted"] = "success") -> None:
        """End the session; saved states stay."""
        with tinker_errors("end the session"):
            self._service.close(status).result()


def _datum(row: TrainRow) -> Any:
    tinker = sdk()
    inputs = {name: values.astype(np.float32) for name, values in row.loss_inputs.items()}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(row.tokens.tolist()),
        loss_fn_inputs={"target_tokens": row.targets.astype(np.int64), **inputs},
    )


def _logprobs_of(output: Mapping[str, Any], row: TrainRow) -> LogprobArray:
    found = output.get("logprobs")
    if found is None or len(found.data) != len(row.targets):
        given = "none" if found is None else str(len(found.data))
        raise EndpointError(f"Tinker trained on {len(row.targets)} tokens and gave {given} log-probs for them.")
    return float_array(np.asarray(found.data, dtype=np.float32), "logprobs")
