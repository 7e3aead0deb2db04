"""Protocol buffers' text format, as config.pbtxt has it."""

from collections.abc import Iterable
from typing import Union

Value = Union[str, int, bool, "Word", "Message"]
Message = list[tuple[str, "Value"]]  # fields in their order; a repeated field is there several times


class Word(str):
    """A value of an enumeration, which is written without quotes."""

    __slots__ = ()


def render(message: Message, depth: int = 0) -> str:
    """Return the text of a message, one field a line."""
    return "".join(_lines(message, depth))


def _lines(message: Message, depth: int) -> Iterable[str]:
    space = "  " * depth
    for name, value in message:
        if isinstance(value, list):
            yield f"{space}{name} {{\n{render(value, depth + 1)}{space}}}\n"
        else:
            yield f"{space}{name}: {_scalar(value)}\n"


def _scalar(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, Word)):
        return str(value)
    return f'"{"".join(map(_escaped, value.encode()))}"'


def _escaped(byte: int) -> str:
    # A byte of a string: as it is, or as three octal digits (Text Format Language Specification, String).
    character = chr(byte)
    if character in '"\\':
        return f"\\{character}"
    return character if 32 <= byte < 127 else f"\\{byte:03o}"
