"""The two errors that everything else of `ludic.types.errors` is made of. They are below `ludic.types`, as the helpers here are."""


class LudicError(Exception):
    """Base of every error that Ludic raises on purpose."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return Exception.__str__(self)


class ConfigError(LudicError, ValueError):
    """A setting that cannot work."""
