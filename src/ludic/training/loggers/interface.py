"""What a logger may offer beside `log`. One that a user wrote needs neither."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Closable(Protocol):
    """Has something to finish when the run ends."""

    def close(self) -> None: ...


@runtime_checkable
class Resumable(Protocol):
    """Keeps what it was told, and can forget what a resumed run will tell again."""

    def resume(self, step: int) -> None:
        """Forget what came after `step`; called once, before the first `log`."""
        ...


@runtime_checkable
class ShowsActivity(Protocol):
    """Can say what goes on between two calls of `log`, such as a batch that is being played."""

    def show_activity(self, text: str) -> None:
        """Called every second or so; empty when nothing is going on that could be told."""
        ...
