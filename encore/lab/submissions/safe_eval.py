"""The small expressions by which submitted.toml makes a key from options: no attributes, no calls but the ones here.

The expressions belong to this project; the options that they are given come from a published folder and are texts.
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
    """An expression that has no value for these options; the text says why."""


def _texts(text: str) -> tuple[str, ...]:
    return tuple(each for each in re.split(r"[\s,()\[\]]+", text) if each)


def _table(text: str) -> dict[str, str]:
    # ``{'a': 1, 'b': x}`` as a dictionary of texts
    pairs = (pair.partition(":") for pair in text.strip().strip("{}").split(",") if pair.strip())
    return {name.strip(" '\""): value.strip(" '\"") for name, _, value in pairs}


def _whole(value: str | float) -> int:
    # A number that is whole, written in any way: ``"287"``, ``"0.0"``
    number = float(value)
    if not number.is_integer():
        raise ValueError(f"{value} is not a whole number")
    return int(number)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int": _whole, "float": float, "bool": bool, "min": min, "max": max, "ceil": math.ceil, "str": str,
    "ints": lambda text: tuple(int(each) for each in _texts(text)),
    "floats": lambda text: tuple(float(each) for each in _texts(text)),
    "shares": lambda numbers: tuple(round(each / max(numbers), 9) for each in numbers),
    "table": _table,
}  # fmt: skip


def evaluate(
    text: str,
    names: Callable[[str], Any],
    functions: Mapping[str, Callable[..., Any]],
    operators: Mapping[type, Operator] = OPERATORS,
) -> Any:
    """Return the value of an expression; ``names`` gives what a name stands for.

    NoValueError says why there is none.
    """

    def inside(part: ast.expr) -> Any:
        return _value(part, inside, names, {**FUNCTIONS, **functions}, operators)

    try:
        return inside(ast.parse(text.strip(), mode="eval").body)
    except (KeyError, IndexError) as error:
        raise NoValueError(f"there is no {error}") from error
    except (ValueError, TypeError, ArithmeticError, SyntaxError, RecursionError) as error:
        raise NoValueError(str(error)) from error


def _value(
    node: ast.expr,
    inside: Callable[[ast.expr], Any],
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
            return tuple(inside(each) for each in node.elts)
        case ast.UnaryOp(op=ast.Not()):
            return not inside(node.operand)
        case ast.UnaryOp():
            return -inside(node.operand)
        case ast.BinOp():
            return _limited(operators[type(node.op)](inside(node.left), inside(node.right)))
        case ast.BoolOp(values=[*first, last]):
            # The first that decides, and no one behind it is asked.
            for each in first:
                value = inside(each)
                if bool(value) is isinstance(node.op, ast.Or):
                    return value
            return inside(last)
        case ast.Compare():
            return operators[type(node.ops[0])](inside(node.left), inside(node.comparators[0]))
        case ast.IfExp():
            return inside(node.body) if inside(node.test) else inside(node.orelse)
        case ast.Subscript():
            return inside(node.value)[inside(node.slice)]
        case ast.Call(func=ast.Name(id=name)):
            return functions[name](*(inside(each) for each in node.args))
    raise ValueError(f"{ast.dump(node)[:40]} is not read in an expression")


def _limited(value: Any) -> Any:
    # Refuse what an option with a very long value could grow into
    if isinstance(value, (str, tuple)) and len(value) > _LONGEST:
        raise ValueError("the value is too long")
    return value
