"""The plain transcript: everything is kept, everything is shown."""

from ludic.context.base import ContextStrategy
from ludic.types import Message


class FullDialog(ContextStrategy):
    """Observations are user messages, replies assistant messages; nothing is dropped."""

    def on_before_act(self) -> list[Message]:
        return list(self._messages)
