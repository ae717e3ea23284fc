"""A calculator for models: arithmetic in, one number out, nothing else reachable.

The expression is parsed to a syntax tree and walked; nothing is ever evaluated as Python. Numbers are exact
fractions for as long as they fit (so 0.1 + 0.2 - 0.3 is 0), and floats after a root, a logarithm or the like.
Size limits are checked before the work is done, so that no expression can hang the process or fill its memory.
"""

import ast
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction

Number = Fraction | float

MAX_CHARS = 2000
MAX_DEPTH = 50
"""Functions, signs, powers and bracketed sums inside each other; a long sum is not deep."""
MAX_BITS = 4096
"""Largest exact numerator or denominator (about 1200 digits); beyond it a value becomes a float."""

_SPELLINGS = str.maketrans({"×": "*", "÷": "/", "−": "-", "^": "**"})
_FOREIGN = re.compile(r"[^\w\s+\-*/%().,]|[^\x00-\x7f]")
_COMMAS = re.compile(
    r"(?P<call>\b(?:min|max|round|log)\s*\()|(?P<open>\()|(?P<close>\))|(?<![\w.,])(?P<number>\d{1,3}(?:,\d{3})+)(?!\d|,\d)"
)


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
        raise ValueError(
            f"The expression has {len(expression)} characters, the limit is {MAX_CHARS}. Split it into parts."
        )
    text = " ".join(expression.translate(_SPELLINGS).lower().split())
    if not text:
        raise ValueError("The expression is empty. " + _hint())
    if foreign := _FOREIGN.search(text):
        raise ValueError(f"Cannot read {foreign[0]!r}. {_hint()}")
    text = _without_thousands_commas(text)
    # Python would read max(1,000,2) as the largest of 1, 0 and 2.
    if zeros := re.search(r"(?<![\w.])(?<!e[+-])0\d+", text):
        raise ValueError(f"Cannot read {zeros[0]!r}. Write numbers without commas and leading zeros: 1234567.89.")
    if glued := re.search(r"(?<!\w)(\d[\d_.]*)(?!e[+-]?\d)([a-z]\w*)", text):
        raise ValueError(f"Cannot read {glued[0]!r}. Write * between a number and a name: {glued[1]}*{glued[2]}.")
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"Cannot read the expression: {error.msg}. {_hint()}") from None
    except (RecursionError, MemoryError):  # how Python's parser reports that it gave up
        raise ValueError("The expression is nested too deeply. Split it into parts.") from None


def _without_thousands_commas(text: str) -> str:
    """1,000 becomes 1000, except among the arguments of a function that takes several: there a comma separates."""
    separates = [False]

    def replace(found: re.Match[str]) -> str:
        if found["number"] is None:
            if found["close"] is None:
                separates.append(found["call"] is not None)
            elif len(separates) > 1:
                separates.pop()
        elif not separates[-1]:
            return found[0].replace(",", "")
        elif ", " in text:  # max(1,234, 5,678): read as four arguments, it would be silently wrong
            raise ValueError(
                f"In a function with several arguments {found[0]!r} is ambiguous. Write {found[0].replace(',', '')} "
                f"if it is one number, or {found[0].replace(',', ', ')} if not."
            )
        return found[0]

    return _COMMAS.sub(replace, text)


def _evaluate(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise ValueError(f"The expression is nested more than {MAX_DEPTH} levels deep. Split it into parts.")
    match node:
        case ast.Constant(value=int() as value):
            return _checked(Fraction(value))
        case ast.Constant(value=float() as value):
            # repr gives back the decimal digits that were written; the float itself is only close to them
            return Fraction(repr(value)) if math.isfinite(value) else _checked(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand, depth + 1)
        case ast.BinOp():
            return _chain(node, depth)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Name(id=name):
            raise ValueError(f"Unknown name {name!r}. {_hint()}")
        case ast.Call(func=ast.Name(id=name), args=args):
            return _call(name, [_evaluate(arg, depth + 1) for arg in args])
        case ast.Call(func=ast.Constant() | ast.BinOp()):
            raise ValueError("Write * between a number and a parenthesis: 2*(3 + 4), not 2(3 + 4).")
        case ast.Tuple():
            raise ValueError("Unexpected comma. Write numbers without commas: 1234567.89.")
        case _:
            raise ValueError(f"{type(node).__name__} is not arithmetic. {_hint()}")


def _chain(node: ast.expr, depth: int) -> Number:
    """A left-to-right chain such as 1 + 2 - 3, in a loop: its tree is as deep as the chain is long."""
    pending: list[ast.BinOp] = []
    while isinstance(node, ast.BinOp):
        pending.append(node)
        node = node.left
    value = _evaluate(node, depth + 1)
    for step in reversed(pending):
        operation = _OPERATORS.get(type(step.op))
        if operation is None:
            raise ValueError(f"{type(step.op).__name__} is not arithmetic. {_hint()}")
        value = _checked(operation(value, _evaluate(step.right, depth + 1)))
    return value


def _call(name: str, args: list[Number]) -> Number:
    if name not in _FUNCTIONS:
        raise ValueError(f"Unknown function {name!r}. {_hint()}")
    function, fewest, most = _FUNCTIONS[name]
    if not fewest <= len(args) <= most:
        takes = "at least 1 argument" if most > 2 else "1 argument" if most == 1 else "1 or 2 arguments"
        raise ValueError(f"{name} takes {takes}, got {len(args)}. Write numbers without commas: 1234567.89.")
    return _checked(function(*args))


def _checked(value: Number) -> Number:
    """The value, as a float if it is too long to be kept exactly; an OverflowError if it is too large for that."""
    if isinstance(value, Fraction):
        return value if max(value.numerator.bit_length(), value.denominator.bit_length()) <= MAX_BITS else float(value)
    if not math.isfinite(value):
        raise OverflowError
    return value


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(abs(base.numerator), base.denominator).bit_length() - 1
        if bits * abs(exponent.numerator) <= MAX_BITS:
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


def _log(value: Number, base: Number | None = None) -> Number:
    if value <= 0 or (base is not None and (base <= 0 or base == 1)):
        raise ValueError("log needs a positive number, and a positive base other than 1.")
    if base is None:
        return _natural_log(value)
    result = _natural_log(value) / _natural_log(base)
    # floats say log(1000, 10) = 2.9999999999999996
    whole = Fraction(round(result))
    return whole if math.isclose(whole, result, rel_tol=1e-9) and _power(base, whole) == value else result


def _natural_log(value: Number) -> float:
    if isinstance(value, Fraction):  # math.log takes whole numbers of any size, fractions only in float range
        return math.log(value.numerator) - math.log(value.denominator)
    return math.log(value)


def _wave(function: Callable[[float], float]) -> Callable[[Number], Number]:
    """Zeros come out as zeros: a result below the rounding error of its argument, like sin(pi), is noise."""

    def wave(value: Number) -> Number:
        result = function(float(value))
        return 0.0 if abs(result) < min(abs(float(value)) * 2**-52, 1e-9) else result

    return wave


_sin, _cos, _tan_in_range = _wave(math.sin), _wave(math.cos), _wave(math.tan)


def _tan(value: Number) -> Number:
    if _cos(value) == 0:
        raise ValueError("tan is not defined at pi/2 + n*pi.")
    return _tan_in_range(value)


_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, tuple[Callable[..., Number], int, float]] = {  # name -> function, fewest and most arguments
    "abs": (abs, 1, 1),
    "round": (_round, 1, 2),
    "min": (lambda *values: min(values), 1, math.inf),
    "max": (lambda *values: max(values), 1, math.inf),
    "sqrt": (_sqrt, 1, 1),
    "floor": (lambda value: Fraction(math.floor(value)), 1, 1),
    "ceil": (lambda value: Fraction(math.ceil(value)), 1, 1),
    "exp": (math.exp, 1, 1),
    "log": (_log, 1, 2),
    "sin": (_sin, 1, 1),
    "cos": (_cos, 1, 1),
    "tan": (_tan, 1, 1),
}
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
