"""Critics: the expected return before each action token, from the policy's hidden states or from a second model.

ludic.training.critic.gae turns values into weights; ludic.training.losses.supervised has the critic's loss.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ludic.models.head import decoder_of
from ludic.training.learner.packing import PackedBatch
from ludic.training.learner.policy import TrainedPolicy
from ludic.types import ConfigError, SAWItem


class Critic(Protocol):
    """One number per action token."""

    @property
    def is_apart(self) -> bool:
        """The policy's weights get no gradient from the critic's loss, nor are the two gradients clipped together."""
        ...

    def values(self, batch: PackedBatch, hidden_AD: Tensor | None, policy: TrainedPolicy) -> Tensor:
        """[A] of a micro-batch; `hidden_AD` are the policy's hidden states of it, if already computed."""
        ...

    def parameters(self) -> list[nn.Parameter]:
        """All trained weights that are not the policy's."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class _ValueHead(nn.Module):
    """One number per hidden state; it begins at zero, so that the first advantages are plain returns."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_AD: Tensor) -> Tensor:
        values: Tensor = self.linear(hidden_AD.to(self.linear.weight.dtype))[:, 0]
        return values.float()


class HeadCritic:
    """A head on the policy's hidden states."""

    def __init__(self, policy: TrainedPolicy, *, is_detached: bool) -> None:
        self.head = _ValueHead(policy.head.shape[1]).to(policy.device)
        self.is_apart = is_detached

    def values(self, batch: PackedBatch, hidden_AD: Tensor | None, policy: TrainedPolicy) -> Tensor:
        if hidden_AD is None:
            hidden_AD = policy.action_hidden(batch)
        values: Tensor = self.head(hidden_AD.detach() if self.is_apart else hidden_AD)
        return values

    def parameters(self) -> list[nn.Parameter]:
        return list(self.head.parameters())

    def state_dict(self) -> dict[str, Any]:
        return {"head": dict(self.head.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _require_same("trunk" in state, "separate", has_now="shares the policy's trunk")
        self.head.load_state_dict(state["head"])


class ModelCritic:
    """A head on the decoder of another model; that model's own output layer is not used."""

    is_apart = True

    def __init__(self, trunk: TrainedPolicy) -> None:
        self._trunk = trunk
        self.head = _ValueHead(trunk.head.shape[1]).to(trunk.device)

    def values(self, batch: PackedBatch, hidden_AD: Tensor | None, policy: TrainedPolicy) -> Tensor:
        values: Tensor = self.head(self._trunk.action_hidden(batch))
        return values

    def parameters(self) -> list[nn.Parameter]:
        return [*self._trained().values(), *self.head.parameters()]

    def state_dict(self) -> dict[str, Any]:
        """The trained weights. The frozen base under an adapter is not saved: give `Trainer(critic=…)` the same base again."""
        trunk = {name: parameter.detach() for name, parameter in self._trained().items()}
        return {"head": dict(self.head.state_dict()), "trunk": trunk}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _require_same("trunk" not in state, "on the policy's own trunk", has_now="is a second model")
        own = self._trained()
        if {name: p.shape for name, p in own.items()} != {name: p.shape for name, p in state["trunk"].items()}:
            raise ConfigError(
                f"The checkpoint's critic has {len(state['trunk'])} trained weights, this one {len(own)}, with other names or "
                "sizes. Give Trainer(critic=…) a model made as it was made then."
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(state["trunk"][name])
        self.head.load_state_dict(state["head"])

    def _trained(self) -> dict[str, nn.Parameter]:
        decoder: nn.Module = decoder_of(self._trunk.model)
        return {name: parameter for name, parameter in decoder.named_parameters() if parameter.requires_grad}


def _require_same(is_other: bool, then: str, *, has_now: str) -> None:
    if is_other:
        raise ConfigError(
            f"The critic of this checkpoint is {then}, but the one to resume with {has_now}. Resume with the kind of critic that "
            "it was trained with: make_ppo(critic=…)."
        )


@torch.no_grad()
def expected_values(
    policy: TrainedPolicy, critic: Critic, batches: Sequence[Sequence[SAWItem]], pad_token_id: int = 0
) -> dict[int, np.ndarray]:
    """The critic's values before each action token of every sample, by the sample's `id`."""
    found: dict[int, np.ndarray] = {}
    for members in batches:
        values = critic.values(policy.batch(members, pad_token_id), None, policy).cpu().numpy()
        counts = np.cumsum([item.num_action_tokens for item in members])[:-1]
        for item, own in zip(members, np.split(values, counts), strict=True):
            found[id(item)] = own
    return found
