"""A calculator for models: arithmetic in, one number out, nothing else reachable.

The expression is parsed to a syntax tree and walked; nothing is evaluated as Python. Numbers are exact fractions as long as they
fit (0.1 + 0.2 - 0.3 is 0), and floats after a root, a logarithm or the like. Sizes are checked before the work is done, so that no
expression can hang the process or fill its memory.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_HARMLESS = (
    ast.BinOp,
    ast.UnaryOp,
    ast.Name,
    ast.Load,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.Pow,
    ast.USub,
    ast.UAdd,
)
_SHAPE_FUNCTIONS = frozenset("sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt".split())  # noqa: SIM905


def parse(text: str) -> ast.expr:
    """The syntax tree of one expression. SyntaxError or ValueError if Python cannot read it."""
    try:
        return ast.parse(text, mode="eval").body
    except (RecursionError, MemoryError):  # how Python's parser reports that it gave up
        raise ValueError("The expression is nested too deeply. Split it into parts.") from None


def is_small_power(base: int, exponent: int, max_bits: int) -> bool:
    """True if `base ** exponent` has about `max_bits` bits or fewer, so that it is computed at once."""
    return (abs(base).bit_length() - 1) * abs(exponent) <= max_bits


def is_python(text: str) -> bool:
    """True if `eval` would run the text."""
    try:
        parse(text.strip())
    except (SyntaxError, ValueError):
        return False
    return True


def is_harmless(text: str) -> bool:
    """A literal (numbers, strings, lists of them), or arithmetic over numbers, names and well-known functions."""
    try:
        tree = parse(text.strip())
    except (SyntaxError, ValueError):
        return False
    try:
        ast.literal_eval(tree)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return all(_is_arithmetic(node) for node in ast.walk(tree))
    return True


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _SHAPE_FUNCTIONS and not node.keywords
    return isinstance(node, _HARMLESS)


Number = Fraction | float

MAX_CHARS = 2000
MAX_DEPTH = 50
"""Functions, signs, powers and bracketed sums inside each other; a long sum is not deep."""
MAX_BITS = 4096
"""Largest exact numerator or denominator (about 1200 digits); beyond it a value becomes a float."""

_SPELLINGS = str.maketrans({"×": "*", "÷": "/", "−": "-", "^": "**"})
_FOREIGN = re.compile(r"[^\w\s+\-*/%().,]|[^\x00-\x7f]")


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression and return the number.

    Args:
        expression: For example "(3 + 4) * 2 ** 5 / sqrt(2)". Knows + - * / // % **, abs, round, min, max, sqrt,
            floor, ceil, exp, log (natural, or log(x, base)), sin, cos, tan (radians), pi, e and tau.
    """
    try:
        return _format(_evaluate(_parse(expression), depth=0))
    except ZeroDivisionError:
        raise ValueError("Division by zero.") from None
    except OverflowError:
        raise ValueError("The result is too large.") from None


def _parse(expression: str) -> ast.expr:
    if len(expression) > MAX_CHARS:
        raise ValueError(f"{len(expression)} characters are more than {MAX_CHARS}. Split the expression into parts.")
    text = " ".join(expression.translate(_SPELLINGS).lower().split())
    if foreign := _FOREIGN.search(text):
        raise ValueError(f"Cannot read {foreign[0]!r}. {_hint()}")
    if comma := re.search(r"\d+(,\d{3})+(?!\d)", text):  # max(1,000,2) would be the largest of 1, 0 and 2
        plain, spaced = comma[0].replace(",", ""), comma[0].replace(",", ", ")
        raise ValueError(f"Write {plain}, without commas, for one number, and {spaced} for several. Got {comma[0]!r}.")
    if glued := re.search(r"(?<!\w)(\d[\d_.]*)(?!e[+-]?\d)([a-z]\w*)", text):
        raise ValueError(f"Cannot read {glued[0]!r}. Write * between a number and a name: {glued[1]}*{glued[2]}.")
    try:
        return parse(text)
    except SyntaxError as error:
        raise ValueError(f"Cannot read the expression {text!r:.80}: {error.msg}. {_hint()}") from None


def _evaluate(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise ValueError(f"The expression is nested more than {MAX_DEPTH} levels deep. Split it into parts.")
    match node:
        case ast.Constant(value=int() as value):
            return _checked(Fraction(value))
        case ast.Constant(value=float() as value):
            # repr gives back the decimal digits that were written; the float itself is only close to them
            return Fraction(repr(value)) if math.isfinite(value) else _checked(value)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            inner = _evaluate(operand, depth + 1)
            return -inner if isinstance(sign, ast.USub) else inner
        case ast.BinOp():
            # 1 + 2 - 3, in a loop: the tree of a chain is as deep as the chain is long.
            pending: list[ast.BinOp] = []
            while isinstance(node, ast.BinOp):
                pending.append(node)
                node = node.left
            result = _evaluate(node, depth + 1)
            for step in reversed(pending):
                if type(step.op) not in _OPERATORS:
                    raise ValueError(f"{type(step.op).__name__} is not arithmetic. {_hint()}")
                result = _checked(_OPERATORS[type(step.op)](result, _evaluate(step.right, depth + 1)))
            return result
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Call(func=ast.Name(id=name), args=args) if name in _FUNCTIONS:
            function, most = _FUNCTIONS[name]
            if not 1 <= len(args) <= most:
                accepted = "1 argument" if most == 1 else f"1 to {most} arguments"
                raise ValueError(f"{name} takes {accepted}, got {len(args)}.")
            return _checked(function(*(_evaluate(arg, depth + 1) for arg in args)))
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            raise ValueError(f"Unknown name {name!r}. {_hint()}")
        case ast.Call(func=ast.Constant() | ast.BinOp()):
            raise ValueError("Write * between a number and a parenthesis: 2*(3 + 4), not 2(3 + 4).")
        case _:
            raise ValueError(f"{type(node).__name__} is not arithmetic. {_hint()}")


def _checked(value: Number) -> Number:
    """The value, as a float if it is too long to be kept exactly; an OverflowError if it is too large for that."""
    if isinstance(value, Fraction):
        return value if max(value.numerator.bit_length(), value.denominator.bit_length()) <= MAX_BITS else float(value)
    if not math.isfinite(value):
        raise OverflowError
    return value


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        largest = max(abs(base.numerator), base.denominator)
        if is_small_power(largest, exponent.numerator, MAX_BITS):
            return Fraction(base**exponent.numerator)
    base, exponent = float(base), float(exponent)
    if base < 0 and not exponent.is_integer():
        raise ValueError("A negative number to a fractional power is not a real number.")
    return math.pow(base, exponent) if base else base**exponent  # math.pow(0, -1) has no ZeroDivisionError


def _round(value: Number, digits: Number = Fraction(0)) -> Number:
    if digits != math.floor(digits) or not -100 <= digits <= 100:
        raise ValueError("round(x, digits) needs a whole number of digits between -100 and 100.")
    return round(Fraction(value), int(digits))


def _sqrt(value: Number) -> Number:
    if value < 0:
        raise ValueError("The square root of a negative number is not a real number.")
    if isinstance(value, Fraction):
        root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
        if root * root == value:
            return root
    return math.sqrt(value)


def _log(value: Number, base: Number = math.e) -> Number:
    if value <= 0 or base <= 0 or base == 1:
        raise ValueError("log needs a positive number, and a positive base other than 1.")
    # Whole numbers of any size have a logarithm; fractions only in the range of floats.
    parts = Fraction(value), Fraction(base)
    top, bottom = (math.log(part.numerator) - math.log(part.denominator) for part in parts)
    return top / bottom


_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    **BINARY, ast.FloorDiv: lambda a, b: Fraction(a // b), ast.Pow: _power,
}  # fmt: skip
_FUNCTIONS: dict[str, tuple[Callable[..., Number], int]] = {  # with the most arguments that each takes
    "abs": (abs, 1), "round": (_round, 2), "min": (lambda *values: min(values), MAX_CHARS),
    "max": (lambda *values: max(values), MAX_CHARS), "sqrt": (_sqrt, 1), "floor": (lambda x: Fraction(math.floor(x)), 1),
    "ceil": (lambda x: Fraction(math.ceil(x)), 1), "exp": (math.exp, 1), "log": (_log, 2),
    "sin": (math.sin, 1), "cos": (math.cos, 1), "tan": (math.tan, 1),
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e, "tau": math.tau}


def _hint() -> str:
    known = ", ".join([*_FUNCTIONS, *_CONSTANTS])
    return f"Use numbers, + - * / // % **, parentheses, and {known}; for example: sqrt(2) * (3 + 4)."


def _format(value: Number) -> str:
    """Whole numbers in full, exact decimals as they are, the rest to 12 significant digits (15 from 1e12 on)."""
    if isinstance(value, Fraction):
        if value.denominator == 1:
            return str(value.numerator)
        if Fraction(repr(float(value))) == value:
            return repr(float(value))
    near = float(value)
    near = float(f"{near:.12g}" if abs(near) < 1e12 else f"{near:.15g}")
    return str(int(near)) if near.is_integer() and abs(near) < 1e15 else repr(near)
