"""Arithmetic on expressions that a model or a tested program wrote: a parser and operators that cannot exhaust the process.

`ludic.tools.calculator` evaluates numbers with it, `ludic_sandbox.code_exec.assertions` plain data; `is_harmless` decides what the
reasoning-gym adapter may pass to a scorer that calls `eval`.
"""

import ast
import operator
from collections.abc import Callable, Mapping
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
_FUNCTIONS = frozenset("sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt".split())  # noqa: SIM905


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
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
    return isinstance(node, _HARMLESS)
