"""Judges `assert f(1, 2) == 3` without running the test's code: a small evaluator of expressions over plain data.

The calls of the functions under test are not made here. They are looked up among the answers that the candidate gave in
its sandbox, or reported as missing. The rest (literals, arithmetic, comparisons, a few builtins) is computed on the
answers here, outside, where the right answer is. What this evaluator does not know is left to `check_program`.

`judge_told` reads the answers first. On a long one that may take seconds (numbers with equal hashes make a set quadratic), so
`assert_runner` has those judged by this module in a worker process.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ludic.envs import worker
from ludic.envs.code_exec.plain_data import decode, dumps, shown


@dataclass(frozen=True, slots=True)
class Call:
    """A call that a test makes of the candidate."""

    function: str
    arguments: str
    """Positional and keyword arguments as plain data: `dumps((args, kwargs))`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the candidate made of a call."""

    value: Any = None
    error: str | None = None
    """`ValueError: …` when it raised; `value` means nothing then."""
    error_type: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is known about a test, given some answers."""

    passed: bool = False
    details: str | None = None
    needs: tuple[Call, ...] = ()
    """Calls whose answers are missing; the rest means nothing until they are there."""


Answers = Sequence[tuple[Call, Answer]]
"""The calls of one test so far, in the order in which it makes them."""


def judge(assertion: str, functions: frozenset[str], answers: Answers) -> Judgement:
    """Evaluate `assert …`, of which `is_plain` is true."""
    book = _Book(functions, answers)
    try:
        passed = bool(_evaluate(_parsed(assertion), book))
    except _Missing as missing:
        return Judgement(needs=(missing.call,))
    except _CandidateRaised as raised:
        return Judgement(details=f"{book.last} raised {raised.error}")
    except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        return Judgement(details=f"{book.told}; {type(error).__name__}: {error}")
    return Judgement(passed=passed, details=None if passed else book.told)


Told = Sequence[tuple[Call, Mapping[str, Any]]]
"""The same with each answer as the candidate sent it: {value: plain data} or {error, type}."""


def judge_told(assertion: str, functions: frozenset[str], told: Told) -> Judgement:
    """`judge` over answers that have not been read yet."""
    try:
        answers = [(call, _read(answer)) for call, answer in told]
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        return Judgement(details=f"Its answer cannot be read: {type(error).__name__}: {error}")
    return judge(assertion, functions, answers)


def _read(told: Mapping[str, Any]) -> Answer:
    if "error" in told:
        return Answer(error=str(told["error"]), error_type=str(told["type"]))
    return Answer(value=decode(told["value"]))


def is_plain(assertion: str, functions: frozenset[str]) -> bool:
    """It is one assert statement, and made of what this evaluator knows."""
    try:
        return _is_known(_parsed(assertion), functions)
    except (SyntaxError, ValueError):
        return False


def calls_in(assertion: str, functions: frozenset[str]) -> list[str]:
    """The calls of the functions under test, as source."""
    return [ast.unparse(node) for node in ast.walk(_parsed(assertion)) if _callee(node) in functions]


@lru_cache(maxsize=4096)
def _parsed(assertion: str) -> ast.expr:
    body = ast.parse(assertion.strip()).body
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise ValueError(f"{assertion[:80]!r} is not one assert statement.")
    return body[0].test


# --- what it knows ------------------------------------------------------------------------------------------

_MAX_BITS = 100_000
_MAX_ITEMS = 10_000_000

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (abs, all, any, bool, dict, float, int, len, list, max, min, round, set)},
    **{f.__name__: f for f in (sorted, str, sum, tuple, frozenset)},
    **{f"math.{name}": getattr(math, name) for name in ("isclose", "fabs", "sqrt", "floor", "ceil", "isnan", "isinf")},
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    # `is` with a constant, which all that asserts use it for: None, True and False are one object each here too.
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}


def _is_known(node: ast.expr, functions: frozenset[str]) -> bool:
    match node:
        case ast.Constant():
            return True
        case ast.UnaryOp(op=op):
            known = type(op) in _UNARY
        case ast.BinOp(op=op):
            known = type(op) in _BINARY
        case ast.Compare(ops=ops):
            known = all(type(op) in _COMPARE for op in ops)
        case ast.Call():
            parts = [*node.args, *(keyword.value for keyword in node.keywords)]
            known = _callee(node) in functions | _FUNCTIONS.keys() and all(k.arg is not None for k in node.keywords)
            return known and all(_is_known(part, functions) for part in parts)
        case ast.Dict(keys=keys):
            known = None not in keys  # {**other}
        case ast.List() | ast.Tuple() | ast.Set() | ast.BoolOp() | ast.Subscript():
            known = True
        case _:
            return False
    children = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
    return known and all(_is_known(child, functions) for child in children)


def _callee(node: ast.AST) -> str:
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name
        case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)):
            return f"{module}.{name}"
    return ""


# --- evaluating ---------------------------------------------------------------------------------------------


class _Missing(Exception):
    def __init__(self, call: Call) -> None:
        self.call = call


class _CandidateRaised(Exception):
    def __init__(self, error: str) -> None:
        self.error = error


class _Book:
    """The answers so far, read in the order of the calls."""

    def __init__(self, functions: frozenset[str], answers: Answers) -> None:
        self.functions = functions
        self._answers = answers
        self._num_read = 0
        self._told: list[str] = []
        self.last = ""

    @property
    def told(self) -> str:
        """What the candidate answered, for people."""
        return "; ".join(self._told)

    def ask(self, function: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        call = Call(function, dumps((tuple(args), kwargs)))
        if self._num_read == len(self._answers):
            raise _Missing(call)
        asked, answer = self._answers[self._num_read]
        assert asked == call, "an expression over the same answers makes the same calls"
        self._num_read += 1
        words = [*map(shown, args), *(f"{name}={shown(value)}" for name, value in kwargs.items())]
        self.last = f"{function}({', '.join(words)})"
        if answer.error is not None:
            raise _CandidateRaised(answer.error)
        self._told.append(f"{self.last} returned {shown(answer.value)}")
        return answer.value


def _evaluate(node: ast.expr, book: _Book) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.List(elts=items):
            return [_evaluate(item, book) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_evaluate(item, book) for item in items)
        case ast.Set(elts=items):
            return {_evaluate(item, book) for item in items}
        case ast.Dict(keys=keys, values=values):
            return {_evaluate(k, book): _evaluate(v, book) for k, v in zip(keys, values, strict=True) if k is not None}
        case ast.UnaryOp(op=op, operand=operand):
            return _UNARY[type(op)](_evaluate(operand, book))
        case ast.BinOp(left=left, op=op, right=right):
            return _bounded(op, _evaluate(left, book), _evaluate(right, book))
        case ast.Subscript(value=value, slice=index):
            return _evaluate(value, book)[_evaluate(index, book)]
        case ast.BoolOp(op=ast.And(), values=values):
            return _first_decisive(values, book, deciding=False)
        case ast.BoolOp(values=values):
            return _first_decisive(values, book, deciding=True)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            return _compare(left, ops, comparators, book)
        case ast.Call():
            return _call(node, book)
    raise AssertionError(f"is_plain let {type(node).__name__} pass")


def _first_decisive(nodes: list[ast.expr], book: _Book, *, deciding: bool) -> Any:
    for node in nodes:
        value = _evaluate(node, book)
        if bool(value) is deciding:
            break
    return value


def _compare(left: ast.expr, ops: list[ast.cmpop], others: list[ast.expr], book: _Book) -> bool:
    one = _evaluate(left, book)
    for op, node in zip(ops, others, strict=True):
        other = _evaluate(node, book)
        if not _COMPARE[type(op)](one, other):
            return False
        one = other
    return True


def _call(node: ast.Call, book: _Book) -> Any:
    args = [_evaluate(arg, book) for arg in node.args]
    kwargs = {keyword.arg: _evaluate(keyword.value, book) for keyword in node.keywords if keyword.arg is not None}
    callee = _callee(node)
    return book.ask(callee, args, kwargs) if callee in book.functions else _FUNCTIONS[callee](*args, **kwargs)


def _bounded(op: ast.operator, left: Any, right: Any) -> Any:
    """Arithmetic that cannot take minutes or fill the memory, whatever the candidate answered."""
    if isinstance(op, ast.Mod) and isinstance(left, str | bytes):
        raise ValueError("text is not formatted here")
    if isinstance(op, ast.Mult | ast.Pow):
        for value, other in ((left, right), (right, left)):
            if isinstance(value, int) and value.bit_length() > _MAX_BITS:
                raise ValueError("the numbers are too large")
            if (
                isinstance(value, str | bytes | list | tuple)
                and isinstance(other, int)
                and len(value) * other > _MAX_ITEMS
            ):
                raise ValueError("the sequence is too long")
    if (
        isinstance(op, ast.Pow)
        and isinstance(left, int)
        and isinstance(right, int)
        and right * left.bit_length() > _MAX_BITS
    ):
        raise ValueError("the power is too large")
    return _BINARY[type(op)](left, right)


# --- in a worker process ------------------------------------------------------------------------------------


def _answer_to(question: worker.Question) -> dict[str, Any]:
    told = [(Call(function, arguments), answer) for function, arguments, answer in question["told"]]
    judgement = judge_told(question["assertion"], frozenset(question["functions"]), told)
    needs = [[call.function, call.arguments] for call in judgement.needs]
    return {"passed": judgement.passed, "details": judgement.details, "needs": needs}


if __name__ == "__main__":
    worker.serve(lambda: _answer_to, when_raised=None)
