"""Evaluate expressions of submitted.toml, which compute a key from options: no attributes, only listed functions.

The expressions are part of this project; the option values are strings from published files.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

Operator = Callable[[Any, Any], Any]
OPERATORS: dict[type, Operator] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_LONGEST = 4096


class NoValueError(Exception):
    """Expression without a value for these options; the message is the reason."""


def _split(text: str) -> tuple[str, ...]:
    return tuple(part for part in re.split(r"[\s,()\[\]]+", text) if part)


def _table(text: str) -> dict[str, str]:
    # ``{'a': 1, 'b': x}`` as a dictionary of texts
    pairs = (pair.partition(":") for pair in text.strip().strip("{}").split(",") if pair.strip())
    return {name.strip(" '\""): value.strip(" '\"") for name, _, value in pairs}


def _integer(value: str | float) -> int:
    # Whole number in any notation: ``"287"``, ``"0.0"``
    number = float(value)
    if not number.is_integer():
        raise ValueError(f"{value} is not a whole number")
    return int(number)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int": _integer, "float": float, "bool": bool, "min": min, "max": max, "ceil": math.ceil, "str": str,
    "ints": lambda text: tuple(int(part) for part in _split(text)),
    "floats": lambda text: tuple(float(part) for part in _split(text)),
    "shares": lambda numbers: tuple(round(number / max(numbers), 9) for number in numbers),
    "table": _table,
}  # fmt: skip


def evaluate(
    text: str,
    names: Callable[[str], Any],
    functions: Mapping[str, Callable[..., Any]],
    operators: Mapping[type, Operator] = OPERATORS,
) -> Any:
    """Return the expression's value; ``names`` resolves names.

    Raises NoValueError with the reason if it cannot be evaluated.
    """

    def evaluate_node(part: ast.expr) -> Any:
        return _value(part, evaluate_node, names, {**FUNCTIONS, **functions}, operators)

    try:
        return evaluate_node(ast.parse(text.strip(), mode="eval").body)
    except (KeyError, IndexError) as error:
        raise NoValueError(f"unknown name or index: {error}") from error
    except (ValueError, TypeError, ArithmeticError, SyntaxError, RecursionError) as error:
        raise NoValueError(str(error)) from error


def _value(
    node: ast.expr,
    evaluate_node: Callable[[ast.expr], Any],
    names: Callable[[str], Any],
    functions: Mapping[str, Callable[..., Any]],
    operators: Mapping[type, Operator],
) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return names(node.id)
        case ast.Tuple() | ast.List():
            return tuple(evaluate_node(operand) for operand in node.elts)
        case ast.UnaryOp(op=ast.Not()):
            return not evaluate_node(node.operand)
        case ast.UnaryOp():
            return -evaluate_node(node.operand)
        case ast.BinOp():
            return _limited(operators[type(node.op)](evaluate_node(node.left), evaluate_node(node.right)))
        case ast.BoolOp(values=[*first, last]):
            # Short-circuit: operands after the deciding one are not evaluated.
            for operand in first:
                value = evaluate_node(operand)
                if bool(value) is isinstance(node.op, ast.Or):
                    return value
            return evaluate_node(last)
        case ast.Compare():
            return operators[type(node.ops[0])](evaluate_node(node.left), evaluate_node(node.comparators[0]))
        case ast.IfExp():
            return evaluate_node(node.body) if evaluate_node(node.test) else evaluate_node(node.orelse)
        case ast.Subscript():
            return evaluate_node(node.value)[evaluate_node(node.slice)]
        case ast.Call(func=ast.Name(id=name)):
            return functions[name](*(evaluate_node(operand) for operand in node.args))
    raise ValueError(f"{ast.dump(node)[:40]} is not supported in an expression")


def _limited(value: Any) -> Any:
    # Limit the growth of results computed from long option values.
    if isinstance(value, (str, tuple)) and len(value) > _LONGEST:
        raise ValueError("the value is too long")
    return value
