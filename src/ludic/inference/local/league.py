"""`League`: past versions of a policy, each served by its own engine.

A member is an `EngineSnapshot`: a copy of the trained weights (of a LoRA policy the adapter alone; the base is shared), fixed
at one version. It can be an opponent, a training partner or rated; training never changes it.
"""

from typing import Any

import torch

from ludic.inference.local.engine import LocalEngine
from ludic.inference.local.snapshot import EngineSnapshot
from ludic.types import ConfigError


class League:
    """Adds a member at every `every`-th version of `live`; the oldest leaves when there are more than `max_size`.

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
        member = self._new_member()
        member.take_snapshot(version)
        self._admit(version, member)

    def close(self) -> None:
        for member in (*self._members.values(), *self._retired.values()):
            member.close()
        self._members, self._retired = {}, {}

    def _new_member(self) -> EngineSnapshot:
        return EngineSnapshot(self._live, **self._settings)

    def _admit(self, version: int, member: EngineSnapshot) -> None:
        self._members[version] = member
        if len(self._members) > self._max_size:
            oldest = next(iter(self._members))
            for gone in self._retired.values():
                gone.close()
            self._retired = {oldest: self._members.pop(oldest)}

    # --- resume ---

    def state_dict(self) -> dict[str, Any]:
        """The members' own weights, not copied, since they never change."""
        return {
            "members": [
                {"version": version, "weights": _own_weights(member)} for version, member in self._members.items()
            ]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        for saved in state["members"]:
            member = self._new_member()
            member.engine.sync_weights(saved["weights"], version=saved["version"])
            self._admit(saved["version"], member)


def _own_weights(member: EngineSnapshot) -> dict[str, torch.Tensor]:
    """The weights that a member does not share with the live policy."""
    return {name: weight.detach() for name, weight in member.engine.model.named_parameters() if weight.requires_grad}
