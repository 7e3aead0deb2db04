"""The command that runs a published configuration here."""

from __future__ import annotations

import json
from pathlib import Path

from encore.lab.submissions.reproduction import Difference, Reproduction

_PLACE = ("nodes", "gpus_per_node")


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
