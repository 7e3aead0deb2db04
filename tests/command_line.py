"""The command line, run in this process."""

from click.testing import Result
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError, ExitCode


def run_encore(*words: object, width: int = 160, **options: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": str(width)}, **options)


def output_of(*words: object, width: int = 160) -> str:
    # Standard output of a command that succeeds
    result = run_encore(*words, width=width)
    assert result.exit_code == 0, f"{result.output}{result.exception}"
    return result.stdout


def error_of(*words: object, code: ExitCode = ExitCode.REFUSED) -> EncoreError:
    error = run_encore(*words).exception
    assert isinstance(error, EncoreError) and error.exit_code is code, repr(error)
    return error
