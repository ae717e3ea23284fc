"""Inside a separate sandbox, where no candidate ever runs: a test program that judges a candidate's answers.

For tests that are more than an expression (loops, helper functions, random inputs). The functions under test are replaced by ones
that look up the answers, which are plain data. A call without an answer gives an `Unknown`; its first use breaks off that
assertion, not the program, so one run finds all calls of a loop.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import random
import sys
from collections.abc import Callable
from typing import Any, NoReturn

# `batch` puts the text of that file before this one.
from ludic_sandbox.code_exec.plain_data import decode, dumps, from_literal, shown, to_json


class _NeedsAnswer(BaseException):
    """Not an Exception: a test that catches exceptions must not catch this."""


class _OtherCalls(BaseException):
    pass


class _CandidateError(Exception):
    """In place of an exception that is not a builtin one."""


class Unknown:
    """The value of a call that has no answer yet."""

    __slots__ = ()

    def _used(self, *args: object, **kwargs: object) -> NoReturn:
        raise _NeedsAnswer

    def __getattr__(self, name: str) -> NoReturn:
        raise _NeedsAnswer


_USES = (  # noqa: SIM905 - a list of them would take sixty lines
    "bool eq ne lt le gt ge hash len iter next getitem setitem contains call abs neg pos invert round int float "
    "index complex str repr format bytes add sub mul truediv floordiv mod pow and or xor lshift rshift divmod "
    "matmul radd rsub rmul rtruediv rfloordiv rmod rpow rand ror rxor rlshift rrshift rdivmod enter exit reversed "
    "trunc floor ceil"
).split()
for _name in _USES:
    setattr(Unknown, "__" + _name + "__", Unknown._used)


class _Checker:
    """Replaces the functions under test and watches the assertions."""

    def __init__(self, answers: list[tuple[str, str, dict[str, Any]]]) -> None:
        self.answers = answers
        self.num_calls = 0
        self.needs: list[list[str]] = []
        self.used: list[str] = []
        self.failure: str | None = None
        self.raised: Exception | None = None  # the last one that the candidate raised

    def stand_in(self, function: str) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            arguments = dumps((args, kwargs))
            number = self.num_calls
            self.num_calls += 1
            if number >= len(self.answers):
                self.needs.append([function, arguments])
                return Unknown()
            asked, asked_arguments, answer = self.answers[number]
            if (asked, asked_arguments) != (function, arguments):
                raise _OtherCalls
            words = [shown(arg) for arg in args] + [name + "=" + shown(value) for name, value in kwargs.items()]
            call = function + "(" + ", ".join(words) + ")"
            if "error" in answer:
                self.used.append(call + " raised " + answer["error"])
                self.raised = _as_exception(answer)
                raise self.raised
            value = decode(answer["value"])
            self.used.append(call + " returned " + shown(value))
            return value

        return ask

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        """The end of an assertion. As long as answers are missing, only the calls matter."""
        if kind is None or kind is _NeedsAnswer or (self.needs and issubclass(kind, Exception)):
            self.used.clear()
            return True
        if issubclass(kind, Exception):
            self.fail(error)
        return False

    def fail(self, error: BaseException | None) -> None:
        if self.failure is None:
            is_known = error is self.raised or isinstance(error, AssertionError)
            reason = [] if is_known else [type(error).__name__ + ": " + str(error)]
            self.failure = "; ".join(self.used + reason)


def _as_exception(answer: dict[str, Any]) -> Exception:
    kind = vars(builtins).get(answer["type"])
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # UnicodeDecodeError needs more than a text
            return kind(answer["error"].partition(": ")[2])
    return _CandidateError(answer["error"])


class _InChecker(ast.NodeTransformer):
    """`assert x` becomes `with checker: assert x`."""

    def visit_Assert(self, node: ast.Assert) -> ast.With:
        name = ast.Name("__ludic_checker__", ast.Load())
        return ast.copy_location(ast.With([ast.withitem(name)], [node]), node)


def main() -> None:
    job = from_literal(sys.stdin.read())
    reply, sys.stdout = sys.stdout, sys.stderr  # the test's own output is no verdict
    random.seed(0)  # so that every run makes the same calls
    checker = _Checker(job["answers"])
    names = {"__name__": "check", "__ludic_checker__": checker}
    tree = ast.fix_missing_locations(_InChecker().visit(ast.parse(job["test"])))
    exec(compile(job["setup"], "setup.py", "exec", dont_inherit=True), names)
    for function in job["functions"]:
        names[function] = checker.stand_in(function)
    changed = None
    try:
        exec(compile(tree, "test.py", "exec", dont_inherit=True), names)
    except _NeedsAnswer:
        pass
    except _OtherCalls:
        changed = {"needs": [], "passed": False, "details": "The test made other calls when it was run again."}
    except Exception as error:  # noqa: BLE001 - a test program may raise anything where the answers are wrong
        if not checker.needs:
            checker.fail(error)
    verdict = changed or {"needs": checker.needs, "passed": checker.failure is None, "details": checker.failure}
    reply.write(to_json(verdict))
    reply.flush()


if __name__ == "__main__":
    main()
