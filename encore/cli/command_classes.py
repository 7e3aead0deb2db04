"""Commands and groups with click's plain help, which never truncates a name of an option, unlike typer's tables."""

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

_MAX_HELP = 200  # Characters of a command's description in the list of commands, which is wrapped


class Command(TyperCommand):
    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        # The lines of examples must not be joined.
        if self.epilog:
            formatter.write(f"\n{self.epilog}\n")


class Group(TyperGroup):
    def sections(self, ctx: Any) -> dict[str, Sequence[str]]:
        """Command names by section title of the help."""
        return {"Commands": self.list_commands(ctx)}

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, command_names in self.sections(ctx).items():
            commands: list[Any] = [self.get_command(ctx, name) for name in command_names]
            with formatter.section(title):
                formatter.write_dl([(command.name, command.get_short_help_str(_MAX_HELP)) for command in commands])
