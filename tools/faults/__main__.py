"""Fault injection: break runs, resume them, and compare the result with an uninterrupted run.

    $ .venv/bin/python -m tools.faults ncf --faults sigkill-rank,flipped-shared
    $ .venv/bin/python -m tools.faults all --seed 3 --work /var/tmp/faults --json faults.json

Each fault occurs at a random time, or file offset, of a training on the toy data set; the run is resumed with the
printed hint. The verdict is "as uninterrupted" (same losses, evaluations and log events), "refused" (with a hint,
and without changes), or FAULT. Exit code 1: at least one FAULT.
"""

import json
import os
import random
import shutil
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from encore import catalogue
from encore.results.table import Table
from tools import run
from tools.faults.kinds import FAULTS, SHORT
from tools.faults.trial import Bench, Trial, Verdict

Verdicts = dict[tuple[str, str], Verdict]  # By fault and benchmark
LISTS = {"all": (*FAULTS,), "short": SHORT}


def attempt(bench: Bench, fault: str, seed: int) -> Verdict:
    # Try one fault; an exception of the fault runner counts as FAULT
    moment = random.Random(f"{seed} {bench.name} {fault}")
    trial = Trial(bench, bench.work / f"{fault}-{seed}", moment)
    shutil.rmtree(trial.folder, ignore_errors=True)
    trial.folder.mkdir(parents=True)
    try:
        verdict = FAULTS[fault](trial)
    except Exception as error:
        verdict = Verdict("FAULT", f"{type(error).__name__}: {error}")
    for process in trial.processes():
        process.kill()
    if verdict.kind != "FAULT":
        shutil.rmtree(trial.folder)
    return verdict


def table(verdicts: Verdicts) -> Table:
    # Faults by benchmarks
    kinds = {key: verdict.kind for key, verdict in verdicts.items()}
    names = tuple(dict.fromkeys(name for _, name in verdicts))
    faults = dict.fromkeys(fault for fault, _ in verdicts)
    rows = tuple((fault, *(kinds.get((fault, name)) for name in names)) for fault in faults)
    return Table(title="", columns=("fault", *names), rows=rows)


def try_all(names: Sequence[str], faults: Sequence[str], seed: int, work: Path, seconds: float) -> Verdicts:
    # Try all faults on all benchmarks until the time is up; print the verdicts
    verdicts: Verdicts = {}
    for name in names:
        bench = Bench(name, work / name, seed)
        # Created before any fault, with the data set.
        print(f"{name}: the uninterrupted run is {bench.uninterrupted}", flush=True)
        for fault in faults:
            started = time.monotonic()
            if seconds < 0:
                break
            verdict = verdicts[fault, name] = attempt(bench, fault, seed)
            seconds -= time.monotonic() - started
            text = verdict.text.strip().replace("\n", "\n    ")
            print(f"{name} {fault}: {verdict.kind} ({time.monotonic() - started:.0f} s) {text}", flush=True)
    return verdicts


def parse_faults(text: str) -> tuple[str, ...]:
    # Fault names from a list or separated by commas
    names = LISTS.get(text) or tuple(text.split(","))
    unknown = set(names) - set(FAULTS)
    if unknown:
        raise typer.BadParameter(f"no fault {', '.join(sorted(unknown))}; see --help")
    return names


def main(
    benchmarks: Annotated[list[str], typer.Argument(metavar="BENCHMARK...", help="names from encore list, or all")],
    faults: Annotated[str, typer.Option(help="names by commas, short, or all")] = "all",
    seed: Annotated[int, typer.Option(help="seed of times and offsets")] = 0,
    work: Annotated[Path | None, typer.Option(help="folder that keeps and reuses intermediate results")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="file for the verdicts")] = None,
    minutes: Annotated[float, typer.Option(help="start no further fault after this time")] = 1e9,
) -> None:
    fault_names = parse_faults(faults)
    names = (
        list(catalogue.choices())
        if "all" in benchmarks
        else [catalogue.choose(benchmark).name for benchmark in benchmarks]
    )
    with tempfile.TemporaryDirectory() as folder:
        work_folder = (work or Path(folder)).absolute()
        work_folder.mkdir(parents=True, exist_ok=True)
        cluster = work_folder / "cluster.toml"
        cluster.write_text('runtime = "host"\n', encoding="utf-8")
        os.environ["ENCORE_CLUSTER"] = str(cluster)
        verdicts = try_all(names, fault_names, seed, work_folder, minutes * 60)
    if output:
        verdict_list = [
            {"fault": fault, "benchmark": name, "verdict": verdict.kind, "text": verdict.text}
            for (fault, name), verdict in verdicts.items()
        ]
        output.write_text(json.dumps(verdict_list, indent=1), encoding="utf-8")
    counts = Counter(verdict.kind for verdict in verdicts.values())
    print(table(verdicts).as_markdown(), ", ".join(f"{count} {kind}" for kind, count in counts.items()), sep="\n\n")
    raise typer.Exit(1 if counts["FAULT"] else 0)


if __name__ == "__main__":
    run(main, f"{__doc__}\nThe faults are:\n\n{textwrap.fill(', '.join(FAULTS), 76, break_on_hyphens=False)}")
