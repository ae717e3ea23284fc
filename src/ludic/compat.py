"""Second spellings of arguments, which the seeds have, rewritten at the border: inside there is one.

`@second_spelling(old, apply)` on a function or a constructor: the caller may give `old`, and `apply(arguments, value)` changes
the other arguments accordingly. The old name stays in the signature.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def second_spelling(old: str, apply: Callable[[dict[str, Any], Any], None], *, default: Any = None) -> Callable[[F], F]:
    """Take the keyword `old`; `apply` is called with the keyword arguments and its value if that is not the default."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def called(*args: Any, **given: Any) -> Any:
            value = given.pop(old, default)
            if value != default:
                apply(given, value)
            return function(*args, **given)

        signature = inspect.signature(function)
        extra = inspect.Parameter(old, inspect.Parameter.KEYWORD_ONLY, default=default)
        known = [*signature.parameters.values()]
        last = len(known) - bool(known and known[-1].kind is inspect.Parameter.VAR_KEYWORD)
        called.__signature__ = signature.replace(parameters=[*known[:last], extra, *known[last:]])  # type: ignore[attr-defined]
        return called  # type: ignore[return-value] # the same signature and one more keyword

    return decorate
