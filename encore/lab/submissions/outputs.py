"""What a published configuration becomes here: the command that runs it, and a system file of its own."""

import json
from pathlib import Path

from encore.catalogue import System
from encore.errors import EncoreError
from encore.lab.submissions.reproduction import Difference, Reproduction

_PLACE = ("nodes", "gpus_per_node")
_HEAD = (
    "kind", "round", "system", "submitter", "submission", "framework", "source", "nodes", "gpus_per_node", "accelerator"
)  # fmt: skip


def command(made: Reproduction, data: Path | None = None) -> list[str]:
    """Return the words behind ``encore``; empty where there is no command.

    The system here with the fewest differences, and ``--set`` and ``--env`` for each: so that a configuration that
    has no system file runs as it was published. A variable that the published one lacks is set to nothing.
    """
    choice, nearest = made.choice, made.nearest
    if choice is None or made.system is None or nearest is None:
        return []
    nodes, gpus = made.system.nodes, made.system.gpus_per_node
    folder = data or Path("data") / choice.benchmark.full_data.name
    runs = choice.benchmark.rounds[made.system.round].runs
    if nodes > 1:
        words = ["submit", choice.name, "--nodes", str(nodes), "--gpus-per-node", str(gpus)]
    else:
        words = ["run", choice.name, str(gpus)]
    words += ["--system", nearest.system, "--round", made.system.round, "--data", str(folder), "--runs", str(runs)]
    for each in made.differences:
        words += _change(each)
    # With another number of GPUs the rules would change the rate and the batch: what was published counts.
    if any(each.name in _PLACE for each in made.differences):
        kept = ("batch_size", *choice.benchmark.rates)
        given = {each.name for each in made.differences}
        for name in kept:
            if name in made.system.config and name not in given:
                words += ["--set", f"{name}={json.dumps(made.system.config[name])}"]
    return words


def _change(each: Difference) -> list[str]:
    if each.name in (*_PLACE, "round"):
        return []
    if each.name.startswith("$"):
        return ["--env", f"{each.name[1:]}={each.published or ''}"]
    return ["--set", f"{each.name}={json.dumps(each.published)}"]


def _value(value: object) -> str:
    # A value as TOML has it: lists, texts, numbers and truth values are as JSON's
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def as_toml(made: Reproduction, system: System) -> str:
    """Return the text of a system file."""
    title = made.implementation.title if made.implementation else made.benchmark
    ranks = f"{system.nodes} x {system.gpus_per_node} GPUs"
    lines = [f"# {title}, configuration {made.name} of {system.submitter or 'a folder'}: {ranks}.".replace("\n", " ")]
    lines += [f"{name} = {_value(getattr(system, name))}" for name in _HEAD]
    lines += ["keep_global_batch = true"] if system.keep_global_batch else []
    lines += ["", "[config]", *(f"{name} = {_value(value)}" for name, value in system.config.items())]
    for implementation, values in system.implementations.items():
        lines += ["", f"[implementations.{implementation}]"]
        lines += [f"{name} = {_value(value)}" for name, value in values.items()]
    for file, variables in system.environment.items():
        lines += ["", f"[environment.{_value(file)}]"]
        lines += [f"{name} = {_value(value)}" for name, value in variables.items()]
    return "\n".join(lines) + "\n"


def write(made: Reproduction, path: Path) -> None:
    """Write the system file; EncoreError where there is none to write, or a file is there already."""
    if made.system is None:
        raise EncoreError(f"there is no system to write: {made.refused}", expected="a configuration that maps")
    if path.exists():
        raise EncoreError(f"{path} is there already", hint="name a new file with -o")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_toml(made, made.system), encoding="utf-8")
    except OSError as error:
        raise EncoreError(f"{path} cannot be written: {error}", hint="name another file with -o") from error
