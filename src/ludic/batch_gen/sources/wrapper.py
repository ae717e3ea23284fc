"""What batch sources around other sources share: passing on versions and state, and samples in a checkpoint."""

import base64
from typing import Any

from ludic.types import AccountsForItems, BatchSource, ConfigError, FollowsVersions, SAWItem, Stateful


class StoredItem:
    """A sample, and the text that a checkpoint keeps of it.

    A trainer asks for the state at every step: each sample is written once, and not once a step.
    """

    def __init__(self, item: SAWItem, text: str | None = None) -> None:
        self.item = item
        self._text = text

    @classmethod
    def read(cls, text: str) -> "StoredItem":
        from ludic.batch_gen.pipeline.wire import decode_group  # only who saves samples needs the extra 'pipeline'

        (item,) = decode_group(base64.b64decode(text))
        return cls(item, text)

    @property
    def text(self) -> str:
        if self._text is None:
            from ludic.batch_gen.pipeline.wire import encode_group

            self._text = base64.b64encode(encode_group([self.item])).decode("ascii")
        return self._text


def refuse_accounts(who: str, source: BatchSource) -> None:
    """A source that keeps accounts has to hear which of its samples were trained on; a mixture cannot tell it."""
    if isinstance(source, AccountsForItems):
        raise ConfigError(
            f"{who} was given a {type(source).__name__}, which has to know what became of every sample; samples that are "
            "mixed, held back or used again cannot be told apart. Give that source to the Trainer itself."
        )


def tell_version(source: BatchSource, version: int) -> None:
    if isinstance(source, FollowsVersions):
        source.notify_version(version)


def state_of(source: BatchSource) -> dict[str, Any]:
    return source.state_dict() if isinstance(source, Stateful) else {}


def load_into(source: BatchSource, state: dict[str, Any]) -> None:
    if isinstance(source, Stateful):
        source.load_state_dict(state)
