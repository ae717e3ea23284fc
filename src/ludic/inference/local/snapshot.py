"""`EngineSnapshot`: a second engine on copied weights, to evaluate one version of a policy while the next is trained.
`League`: snapshots of past versions, as opponents, training partners or to be rated.

`LocalEngine` serves the trainer's own parameters, which change during an evaluation that runs beside training. A snapshot
copies the trained parameters (frozen ones, such as the base model under an adapter, are shared) at each `take_snapshot`, so
in between it serves exactly one version.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from ludic.inference.local.engine import LocalEngine
from ludic.models.weights import forward_hooks, without_own_hooks
from ludic.types import ChatResponse, ConfigError, Info, TokenCompletionRequest

_KV_FRACTION_ON_GPU = 0.2


class EngineSnapshot:
    """A ChatClient that serves the weights of the last `take_snapshot`; give it to the agents of an evaluation."""

    def __init__(self, live: LocalEngine, **settings: Any) -> None:
        """`settings` of LocalEngine; defaults: the tokenizer and lengths of `live`, and a smaller cache."""
        self._source = live.model
        self._copy = _copied(live.model)
        on_gpu = next(live.model.parameters()).is_cuda
        usual: dict[str, Any] = {"max_model_len": live.max_model_len, "version": live.version}
        if on_gpu and "kv_tokens" not in settings:
            usual["kv_memory_fraction"] = _KV_FRACTION_ON_GPU  # the live engine and the trainer need most of the memory
        self.engine = LocalEngine(self._copy, live.tokenizer, **{**usual, **settings})

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def max_sequences(self) -> int:
        return self.engine.max_sequences

    @torch.no_grad()
    def take_snapshot(self, version: int) -> None:
        """Copy the current live weights. Call it between two updates, not during one."""
        now = _own_tensors(self._source)
        held = _own_tensors(self._copy)
        if now.keys() != held.keys():
            raise ConfigError(
                "The model has other parameters than when its EngineSnapshot was made (an adapter was added?). Make the "
                "snapshot after the model is complete."
            )
        with self.engine.updating(version):
            for name, tensor in held.items():
                if tensor is not now[name]:
                    tensor.copy_(now[name])

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        return await self.engine.complete_tokens(request)

    async def get_policy_version(self) -> int:
        return self.version

    def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float = 600.0, version: str | int | None = None
    ) -> str:
        raise ConfigError("A snapshot takes its weights from the live engine; use take_snapshot(version).")

    def close(self) -> None:
        self.engine.close()


def _copied(model: Any) -> Any:
    """Copy modules and trained parameters; share frozen parameters, which never change."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters() if not p.requires_grad}
    for module in model.modules():  # hooks are shared, not copied
        memo |= {id(hook): hook for hook in forward_hooks(module)}
    return without_own_hooks(copy.deepcopy(model, memo).eval())


def _own_tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class League:
    """Adds a snapshot of `live` as a member at every `every`-th version; the oldest leaves when there are more than `max_size`.

    Pass it to the policy's batch source (`followers`), which reports new versions. Its members are part of the checkpoint.
    """

    def __init__(self, live: LocalEngine, *, every: int, max_size: int = 8, **settings: Any) -> None:
        """`settings`: LocalEngine settings of each member; on a GPU give `kv_tokens`, since every member has a cache."""
        if every < 1 or max_size < 1:
            raise ConfigError(f"League(every={every}, max_size={max_size}); both must be at least 1.")
        self._live, self._settings = live, settings
        self._every, self._max_size = every, max_size
        self._members: dict[int, EngineSnapshot] = {}
        self._retired: dict[int, EngineSnapshot] = {}
        """The last member to leave: running episodes with it finish."""

    @property
    def versions(self) -> list[int]:
        """Versions of the members, oldest first."""
        return list(self._members)

    def client(self, version: int) -> EngineSnapshot:
        found = self._members.get(version) or self._retired.get(version)
        if found is None:
            raise ConfigError(f"The league has no member of version {version}; it has {self.versions}.")
        return found

    def notify_version(self, version: int) -> None:
        """The live policy is at this version; its weights must not change during the call."""
        if version % self._every == 0 and version not in self._members:
            self.add(version)

    def add(self, version: int) -> None:
        """Copy the current live weights into a new member."""
        if version in self._members:
            raise ConfigError(f"The league already has a member of version {version}, and a member never changes.")
        member = EngineSnapshot(self._live, **self._settings)
        member.take_snapshot(version)
        self._admit(version, member)

    def close(self) -> None:
        for member in (*self._members.values(), *self._retired.values()):
            member.close()
        self._members, self._retired = {}, {}

    def _admit(self, version: int, member: EngineSnapshot) -> None:
        self._members[version] = member
        if len(self._members) > self._max_size:
            oldest = next(iter(self._members))
            for gone in self._retired.values():
                gone.close()
            self._retired = {oldest: self._members.pop(oldest)}

    # --- resume ---

    def state_dict(self) -> dict[str, Any]:
        """The weights that members do not share with the live policy; not copied, since they never change."""
        members = []
        for version, member in self._members.items():
            trained = {name: w.detach() for name, w in member.engine.model.named_parameters() if w.requires_grad}
            members.append({"version": version, "weights": trained})
        return {"members": members}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        for saved in state["members"]:
            member = EngineSnapshot(self._live, **self._settings)
            member.engine.sync_weights(saved["weights"], version=saved["version"])
            self._admit(saved["version"], member)
