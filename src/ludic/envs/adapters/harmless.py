"""Decides whether a text may be passed to code that evaluates it as Python: only literals and plain arithmetic may."""

import ast

_ARITHMETIC = (
    ast.Expression, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.UnaryOp, ast.USub, ast.UAdd, ast.Constant,
    ast.Name, ast.Load, ast.Call,
)  # fmt: skip
_FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt"}
)  # fmt: skip


def is_python(text: str) -> bool:
    """Would `eval` get as far as running it?"""
    return _parsed(text) is not None


def is_harmless(text: str) -> bool:
    """A literal (numbers, strings, lists of them), or arithmetic over numbers, names and well-known functions."""
    tree = _parsed(text)
    if tree is None:
        return False
    try:
        ast.literal_eval(tree)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return all(_is_arithmetic(node) for node in ast.walk(tree))
    return True


def _parsed(text: str) -> ast.Expression | None:
    try:
        return ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
    return isinstance(node, _ARITHMETIC)
