"""Judges `assert f(1, 2) == 3` without running the test's code: an evaluator of expressions over plain data.

The functions under test are not called here. Their results are looked up among the answers that the candidate gave in its
sandbox, or reported as missing. The rest (literals, arithmetic, comparisons, a few builtins) is computed outside the sandbox, where
the right answer is. A test that this evaluator does not know runs in `inside/check_program.py`.

Judging a long answer may take seconds (numbers with equal hashes make a set quadratic), so `assert_runner` has long ones judged by
this module in a worker process.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ludic.tools.calculator import BINARY, UNARY, is_small_power
from ludic.util import worker
from ludic_sandbox.code_exec.plain_data import decode, dumps, shown


@dataclass(frozen=True, slots=True)
class Call:
    """A call that a test makes of the candidate."""

    function: str
    arguments: str
    """Positional and keyword arguments as plain data: `dumps((args, kwargs))`."""


Answers = Sequence[tuple[Call, Mapping[str, Any]]]
"""The calls of one test so far, in order, each with the candidate's answer: {value: plain data} or {error, type}."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on a test, given some answers."""

    passed: bool = False
    details: str | None = None
    needs: tuple[Call, ...] = ()
    """Calls whose answers are missing; the other fields mean nothing until they are there."""


UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""Errors that `decode` and the evaluator raise over a hostile answer."""


def judge(assertion: str, functions: frozenset[str], answers: Answers) -> Judgement:
    """Evaluate `assert …`, for which `is_plain` is true."""
    try:
        known = _Answers(functions, answers)
    except UNREADABLE as error:
        return Judgement(details=f"Its answer cannot be read: {type(error).__name__}: {error}")
    try:
        passed = bool(_evaluate(_parsed(assertion), known))
    except _Missing as missing:
        return Judgement(needs=(missing.call,))
    except _CandidateRaised as raised:
        return Judgement(details=str(raised))
    except UNREADABLE as error:
        return Judgement(details=f"{known.used}; {type(error).__name__}: {error}")
    return Judgement(passed=passed, details=None if passed else known.used)


def is_plain(assertion: str, functions: frozenset[str]) -> bool:
    """True if the text is one assert statement that this evaluator knows."""
    try:
        nodes = list(ast.walk(_parsed(assertion)))
    except (SyntaxError, ValueError):
        return False
    callees = [part for node in nodes if isinstance(node, ast.Call) for part in ast.walk(node.func)]
    return all(_is_known(node, functions) for node in nodes if node not in callees)


def calls_in(assertion: str, functions: frozenset[str]) -> list[str]:
    """The calls of the functions under test, as source."""
    return [ast.unparse(node) for node in ast.walk(_parsed(assertion)) if _callee(node) in functions]


@lru_cache(maxsize=4096)
def _parsed(assertion: str) -> ast.expr:
    body = ast.parse(assertion.strip()).body
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise ValueError(f"{assertion[:80]!r} is not one assert statement.")
    return body[0].test


# --- what it knows ---

_MAX_BITS = 100_000
_MAX_ITEMS = 10_000_000

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (abs, all, any, bool, dict, float, int, len, list, max, min, round, set)},
    **{f.__name__: f for f in (sorted, str, sum, tuple, frozenset)},
    **{f"math.{name}": getattr(math, name) for name in ("isclose", "fabs", "sqrt", "floor", "ceil", "isnan", "isinf")},
}
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    # Asserts use `is` with None, True and False, which are one object each here too.
    ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda item, container: item in container, ast.NotIn: lambda item, container: item not in container,
}  # fmt: skip
_KNOWN = (
    ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Subscript, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare,
    ast.boolop, ast.expr_context, ast.keyword, *UNARY, *BINARY, *_COMPARE,
)  # fmt: skip


def _is_known(node: ast.AST, functions: frozenset[str]) -> bool:
    match node:
        case ast.Call(keywords=keywords):
            return _callee(node) in functions | _FUNCTIONS.keys() and all(k.arg is not None for k in keywords)
        case ast.Dict(keys=keys):
            return None not in keys  # {**other}
        case _:
            return isinstance(node, _KNOWN)


def _callee(node: ast.AST) -> str:
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name
        case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)):
            return f"{module}.{name}"
    return ""


# --- evaluating ---


class _Missing(Exception):
    def __init__(self, call: Call) -> None:
        self.call = call


class _CandidateRaised(Exception):
    pass


class _Answers:
    """The decoded answers, read in the order of the calls."""

    def __init__(self, functions: frozenset[str], answers: Answers) -> None:
        self.functions = functions
        self._unread = [
            (call, str(a["error"]), None) if "error" in a else (call, None, decode(a["value"]))
            for call, a in reversed(answers)
        ]
        self._used: list[str] = []

    @property
    def used(self) -> str:
        """The answers read so far, for people."""
        return "; ".join(self._used)

    def result_of(self, function: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        call = Call(function, dumps((tuple(args), kwargs)))
        if not self._unread:
            raise _Missing(call)
        asked, error, value = self._unread.pop()
        assert asked == call, "an expression over the same answers makes the same calls"
        words = [*map(shown, args), *(f"{name}={shown(value)}" for name, value in kwargs.items())]
        call_text = f"{function}({', '.join(words)})"
        if error is not None:
            raise _CandidateRaised(f"{call_text} raised {error}")
        self._used.append(f"{call_text} returned {shown(value)}")
        return value


def _evaluate(node: ast.expr, answers: _Answers) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.List(elts=items):
            return [_evaluate(item, answers) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_evaluate(item, answers) for item in items)
        case ast.Set(elts=items):
            return {_evaluate(item, answers) for item in items}
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_evaluate(k, answers): _evaluate(v, answers) for k, v in pairs if k is not None}
        case ast.UnaryOp(op=op, operand=operand):
            return UNARY[type(op)](_evaluate(operand, answers))
        case ast.BinOp(left=left, op=op, right=right):
            return _computed(op, _evaluate(left, answers), _evaluate(right, answers))
        case ast.Subscript(value=value, slice=index):
            return _evaluate(value, answers)[_evaluate(index, answers)]
        case ast.BoolOp(op=op, values=values):
            for part in values:
                value = _evaluate(part, answers)
                if bool(value) is isinstance(op, ast.Or):
                    break
            return value
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            one = _evaluate(left, answers)
            for comparison, part in zip(ops, comparators, strict=True):
                other = _evaluate(part, answers)
                if not _COMPARE[type(comparison)](one, other):
                    return False
                one = other
            return True
        case ast.Call(args=parts, keywords=keywords):
            args = [_evaluate(part, answers) for part in parts]
            kwargs = {str(keyword.arg): _evaluate(keyword.value, answers) for keyword in keywords}
            name = _callee(node)
            return (
                answers.result_of(name, args, kwargs)
                if name in answers.functions
                else _FUNCTIONS[name](*args, **kwargs)
            )
    raise AssertionError(f"is_plain let {type(node).__name__} pass")


def _computed(op: ast.operator, left: Any, right: Any) -> Any:
    """The result of an operator, unless it would take minutes or fill the memory: the candidate chose the operands."""
    if isinstance(op, ast.Mod) and isinstance(left, str | bytes):
        raise ValueError("text is not formatted here")
    if isinstance(op, ast.Mult | ast.Pow):
        for value, other in ((left, right), (right, left)):
            if isinstance(value, int) and value.bit_length() > _MAX_BITS:
                raise ValueError("the numbers are too large")
            is_repeated = isinstance(value, str | bytes | list | tuple) and isinstance(other, int)
            if is_repeated and len(value) * other > _MAX_ITEMS:
                raise ValueError("the sequence is too long")
    is_power = isinstance(op, ast.Pow) and isinstance(left, int) and isinstance(right, int)
    if is_power and not is_small_power(left, right, _MAX_BITS):
        raise ValueError("the power is too large")
    return BINARY[type(op)](left, right)


# --- in a worker process ---


def _answer_to(question: worker.Question) -> dict[str, Any]:
    answers = [(Call(function, arguments), answer) for function, arguments, answer in question["answers"]]
    judgement = judge(question["assertion"], frozenset(question["functions"]), answers)
    needs = [[call.function, call.arguments] for call in judgement.needs]
    return {"passed": judgement.passed, "details": judgement.details, "needs": needs}


if __name__ == "__main__":
    worker.serve(lambda: _answer_to, when_raised=None)
