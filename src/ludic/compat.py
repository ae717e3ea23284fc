"""Second spellings of the arguments of public classes, read at the border so that the classes know one spelling each."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ludic.types import ConfigError

Class = TypeVar("Class", bound=type)


def also_accepts(spellings: Any) -> Callable[[Class], Class]:
    """Show the keywords of a TypedDict, which the class takes as `**also: Unpack[spellings]`, in the signature of the class."""

    def shown(cls: Class) -> Class:
        own = inspect.signature(cls)
        plain = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        names = spellings.__annotations__
        also = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
        vars_of: Any = cls
        vars_of.__signature__ = own.replace(parameters=[*plain, *also])
        return cls

    return shown


def only_known(who: str, also: Mapping[str, Any], spellings: Any) -> None:
    """TypeError for a keyword that is not a second spelling, as Python raises it."""
    for name in also.keys() - spellings.__annotations__.keys():
        raise TypeError(f"{who}() got an unexpected keyword argument {name!r}")


def one_of(who: str, **spellings: Any) -> Any:
    """The argument that was passed under one of several names; ConfigError unless it is exactly one."""
    given = [name for name, value in spellings.items() if value is not None]
    if len(given) != 1:
        raise ConfigError(
            f"{who} needs exactly one of {', '.join(f'{name}=…' for name in spellings)}; "
            f"it was given {' and '.join(given) or 'none of them'}."
        )
    return spellings[given[0]]
