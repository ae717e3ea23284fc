"""From the bytes of a group to samples that a trainer can train on, and the log of groups that it cannot."""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ludic.types import SampleCheck, SAWItem
from ludic_pipeline.queue.queue import MAX_TRIES, TakenGroup
from ludic_pipeline.queue.wire import UnreadableGroup, WireLimits, decode_group, group_facts

logger = logging.getLogger(__name__)

_NUMBERS = re.compile(r"-?\b\d[\w.,+-]*|\bnan\b|\binf\b")
_MAX_KINDS = 100
"""Maximum number of kinds of bad groups; reasons may hold any text."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadyGroup:
    """A decoded group."""

    id: str
    items: list[SAWItem]
    oldest_version: int | None
    is_alone: bool = False
    """Learners have died while they trained on its batch, so it gets its own batch: a further death costs no other group."""


class GroupReader:
    """Decodes and checks groups. Runs in a thread, one call at a time."""

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self.sample_check: SampleCheck | None = None
        """The trainer's."""

    def read(self, taken: Sequence[TakenGroup]) -> tuple[list[ReadyGroup], dict[str, str]]:
        """The decoded groups, and the reasons why the others cannot be trained on."""
        groups: list[ReadyGroup] = []
        reasons: dict[str, str] = {}
        for group in taken:
            try:
                is_alone = 0 < group.num_tries == MAX_TRIES - 1
                groups.append(ReadyGroup(group.id, self._items_of(group), group.oldest_version, is_alone))
            except Exception as error:  # noqa: BLE001 - the trainer would raise it too, after every restart
                reasons[group.id] = _in_one_line(error)
        return groups, reasons

    def trained_together(self, groups: list[ReadyGroup]) -> list[ReadyGroup]:
        """All groups, or only the first if the trainer can train on each of them but not on all in one batch."""
        if self.sample_check is None or len(groups) == 1:
            return groups
        try:
            self.sample_check([item for group in groups for item in group.items])
        except Exception as error:  # noqa: BLE001 - any error that the trainer would raise
            logger.info("the groups of a batch are trained on one by one: %s", _in_one_line(error))
            return groups[:1]
        return groups

    def _items_of(self, group: TakenGroup) -> list[SAWItem]:
        """Decode and check a group: the wire format checks its form, the trainer's check its content."""
        items = decode_group(group.payload, self._limits)
        facts = group_facts(items)
        if facts != (group.num_items, group.oldest_version):
            said = f"{group.num_items} items from version {group.oldest_version}"
            raise UnreadableGroup(f"The entry says {said}, but the payload has {facts[0]} from {facts[1]}.")
        if self.sample_check is not None:
            self.sample_check(items)
        return items


class DeadLetters:
    """Logs the first, tenth, hundredth … bad group of each kind. Reasons that differ only in numbers are one kind."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, reasons: Mapping[str, int]) -> None:
        """Reason → groups."""
        for reason, num_groups in reasons.items():
            kind = _NUMBERS.sub("#", reason)[:300]
            if kind not in self._counts and len(self._counts) >= _MAX_KINDS:
                kind = "another reason"
            before = self._counts[kind]
            self._counts[kind] += num_groups
            if len(str(self._counts[kind])) > len(str(before)) or not before:
                logger.warning(
                    "%d %s of this kind cannot be trained on and %s among the dead letters, with the reason: %s",
                    self._counts[kind],
                    *(("group", "is") if self._counts[kind] == 1 else ("groups", "are")),
                    reason,
                )

    def summary(self) -> str | None:
        """Counts per kind, most frequent first."""
        if not self._counts:
            return None
        kinds = "; ".join(f"{num} × {kind}" for kind, num in self._counts.most_common(10))
        return f"{self._counts.total()} groups could not be trained on: {kinds}"


def _in_one_line(error: Exception) -> str:
    """The error as printable text: parts of it may come from the actor's data."""
    said = str(error) if isinstance(error, UnreadableGroup) else f"{type(error).__name__}: {error}"
    return "".join(letter if letter.isprintable() else " " for letter in said[:500])
