"""`League`: past versions of a policy, each served by an engine of its own.

A member is an `EngineSnapshot`: a copy of what is trained (of a LoRA policy its adapter alone; the base is shared), fixed at
one version. It can be played against, trained beside, and rated; training never changes it.
"""

from typing import Any

import torch

from ludic.inference.local.engine import LocalEngine
from ludic.inference.local.snapshot import EngineSnapshot
from ludic.types import ConfigError


class League:
    """A new member at every `every`-th version of `live`; the oldest goes when there are more than `max_size`.

    Tell it of versions by giving it to the policy's batch source (`followers`). Its members are part of the checkpoint.
    """

    def __init__(self, live: LocalEngine, *, every: int, max_size: int = 8, **settings: Any) -> None:
        """`settings` are each member's, LocalEngine's; on a GPU give `kv_tokens`, since every member has a cache."""
        if every < 1 or max_size < 1:
            raise ConfigError(f"League(every={every}, max_size={max_size}); both must be at least 1.")
        self._live, self._settings = live, settings
        self._every, self._max_size = every, max_size
        self._members: dict[int, EngineSnapshot] = {}
        self._retired: dict[int, EngineSnapshot] = {}
        """Who went last: an episode that was being played goes on to its end."""

    @property
    def versions(self) -> list[int]:
        """The oldest first."""
        return list(self._members)

    def client(self, version: int) -> EngineSnapshot:
        found = self._members.get(version) or self._retired.get(version)
        if found is None:
            raise ConfigError(f"The league has no member of version {version}; it has {self.versions}.")
        return found

    def notify_version(self, version: int) -> None:
        """The live policy is at this version now, and nobody is changing it meanwhile."""
        if version % self._every == 0 and version not in self._members:
            self.add(version)

    def add(self, version: int) -> None:
        """The live weights as they are become a member."""
        if version in self._members:
            raise ConfigError(f"The league has a member of version {version} already; a member never changes.")
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
        """The members' own weights; nobody changes them, so they are not copied."""
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
    """What a member does not share with the live policy."""
    return {name: weight.detach() for name, weight in member.engine.model.named_parameters() if weight.requires_grad}
