"""``encore play``: a trained model as an opponent, over the Go Text Protocol."""

import sys
from typing import Annotated

import typer

from encore.cli import options
from encore.run import programs


def play(
    benchmark: options.Benchmark,
    model: Annotated[str, typer.Argument(help="Model of a run, or uniform: search without a network.")],
    size: Annotated[int | None, typer.Option(help="Reject models of a different board size.")] = None,
    readouts: Annotated[int, typer.Option(min=0, help="Playouts per move; 0: network only.")] = 400,
    resign: Annotated[
        float | None, typer.Option(help="Resign below this value, such as -0.95; default: never.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    python: options.Python = None,
) -> None:
    """Play against a model: commands of the Go Text Protocol on standard input, answers on standard output.

    Examples:

      encore play minigo results/20260101T120000Z-minigo-tensorflow-cpu/experiment_0/models/000010.npz

      gogui -program "encore play minigo model.npz --readouts 800"

      encore play minigo uniform --size 9
    """
    arguments = ["--readouts", str(readouts), "--seed", str(seed)]
    arguments += ["--size", str(size)] if size is not None else []
    # In one word: the value has a minus sign.
    arguments += [f"--resign={resign}"] if resign is not None else []
    command = programs.player(benchmark, model, arguments, python, lambda step: print(step, file=sys.stderr))
    raise typer.Exit(programs.play(command))
