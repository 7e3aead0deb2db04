"""Commands and groups whose help shows no type after flags: typer prints <bool>."""

from typing import Any

from typer.core import TyperCommand, TyperGroup


def _without_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))
