"""How large a group may be on the wire, and the two errors of its format."""

from dataclasses import dataclass, fields

from ludic.types import ConfigError, LudicError


class UnreadableGroup(LudicError, ValueError):
    """Bytes that are not a group which this learner can read. Whoever popped them buries them and goes on."""


class UnwritableGroup(LudicError, ValueError):
    """Items that cannot be written so that a learner gets the same items back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WireLimits:
    """What is refused before anything is allocated for it."""

    max_bytes: int = 64 << 20
    """Of one group, and of what a compressed one unpacks to."""
    max_items: int = 4096
    max_tokens: int = 1_048_576
    """Of one item."""
    max_meta_bytes: int = 4 << 20
    """Of the meta of all items of a group. Small values take a byte on the wire and seventy in memory."""
    max_version_runs: int = 262_144
    """Of all items of a group; each becomes a Python object."""
    vocab_size: int | None = None
    """Ids from here on are refused: an embedding that is asked for them ends the process. None leaves that to the reader."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"WireLimits.{field.name}={value}, but a limit below 1 refuses every group. Raise it."
                )

    @property
    def end_of_ids(self) -> int:
        """The first id that is too large."""
        return 1 << 31 if self.vocab_size is None else self.vocab_size
