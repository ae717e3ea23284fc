"""Helpers of batch sources that wrap other sources: forward versions and state, store samples in a checkpoint."""

import base64
from typing import Any

from ludic.types import AccountsForItems, BatchSource, ConfigError, FollowsVersions, SAWItem, Stateful


class StoredItem:
    """A sample and its encoded text in a checkpoint.

    The trainer asks for the state at every step, so each sample is encoded once and cached.
    """

    def __init__(self, item: SAWItem, text: str | None = None) -> None:
        self.item = item
        self._text = text

    @classmethod
    def read(cls, text: str) -> "StoredItem":
        from ludic.batch_gen.pipeline.wire import decode_group  # only saved samples need the extra 'pipeline'

        (item,) = decode_group(base64.b64decode(text))
        return cls(item, text)

    @property
    def text(self) -> str:
        if self._text is None:
            from ludic.batch_gen.pipeline.wire import encode_group

            self._text = base64.b64encode(encode_group([self.item])).decode("ascii")
        return self._text


def refuse_accounts(who: str, source: BatchSource) -> None:
    """Raise ConfigError if `source` needs to know which of its samples were trained on; a wrapper cannot report that."""
    if isinstance(source, AccountsForItems):
        raise ConfigError(
            f"{who} was given a {type(source).__name__}, which must know which of its samples were trained on; {who} mixes, "
            "delays or repeats samples and cannot report that. Give the source to the Trainer directly."
        )


def tell_version(source: BatchSource, version: int) -> None:
    if isinstance(source, FollowsVersions):
        source.notify_version(version)


def state_of(source: BatchSource) -> dict[str, Any]:
    return source.state_dict() if isinstance(source, Stateful) else {}


def load_into(source: BatchSource, state: dict[str, Any]) -> None:
    if isinstance(source, Stateful):
        source.load_state_dict(state)
