"""Break runs in every way that a machine and its user can, and compare what is left with an uninterrupted run.

    $ .venv/bin/python -m tools.faults ncf --faults sigkill-rank,flipped-shared
    $ .venv/bin/python -m tools.faults all --seed 3 --work /var/tmp/faults --json faults.json

Each fault happens at a random moment, or place in a file, of a training on the toy data set; the run is resumed as the
printed hint says. The verdict is "as uninterrupted" (losses, evaluations and log events are those of the uninterrupted
run), "refused" (with what to do, and nothing is changed), or FAULT. Exit code 1 where there is one.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from encore import catalogue
from tools.faults.kinds import FAULTS, SHORT
from tools.faults.trial import Bench, Trial, Verdict

Verdicts = dict[tuple[str, str], Verdict]  # By fault and benchmark
LISTS = {"all": (*FAULTS,), "short": SHORT}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    # The options
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="+", choices=["all", *catalogue.choices()], metavar="BENCHMARK")
    parser.add_argument("--faults", default="all", help="names by commas, or short; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of moments and places")
    parser.add_argument("--work", type=Path, help="keeps what was made, and uses what is there")
    parser.add_argument("--json", type=Path, help="file for the verdicts")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no fault after that")
    parser.add_argument("--list", action="store_true", help="print the faults' names and end")
    options = parser.parse_args(argv)
    options.faults = LISTS.get(options.faults) or options.faults.split(",")
    unknown = set(options.faults) - set(FAULTS)
    if unknown:
        parser.error(f"no fault {', '.join(sorted(unknown))}; see --list")
    return options


def attempt(bench: Bench, fault: str, seed: int) -> Verdict:
    # Try one fault; a fault of the runner's own counts as one
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


def table(verdicts: Verdicts) -> str:
    # Faults by benchmarks
    names = list(dict.fromkeys(name for _, name in verdicts))
    faults = list(dict.fromkeys(fault for fault, _ in verdicts))
    width = max(map(len, faults))
    lines = [" ".join([" " * width, *(f"{name:<18}" for name in names)])]
    for fault in faults:
        cells = [verdicts[fault, name].kind if (fault, name) in verdicts else "" for name in names]
        lines.append(" ".join([f"{fault:<{width}}", *(f"{cell:<18}" for cell in cells)]).rstrip())
    counts = Counter(verdict.kind for verdict in verdicts.values())
    return "\n".join([*lines, ", ".join(f"{count} {kind}" for kind, count in counts.items())])


def try_all(names: Sequence[str], faults: Sequence[str], seed: int, work: Path, seconds: float) -> Verdicts:
    # Try every fault on every benchmark while there is time; print each verdict
    verdicts: Verdicts = {}
    for name in names:
        bench = Bench(name, work / name, seed)
        # Made with its data set, before any fault.
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


def main(argv: Sequence[str] | None = None) -> int:
    # Try what the command line asks for
    options = parse(argv)
    if options.list:
        print("\n".join(FAULTS))
        return 0
    names = list(catalogue.choices()) if "all" in options.benchmarks else options.benchmarks
    with tempfile.TemporaryDirectory() as folder:
        work = (options.work or Path(folder)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        cluster = work / "cluster.toml"
        cluster.write_text('runtime = "host"\n', encoding="utf-8")
        os.environ["ENCORE_CLUSTER"] = str(cluster)
        verdicts = try_all(names, options.faults, options.seed, work, options.minutes * 60)
    if options.json:
        found = [
            {"fault": fault, "benchmark": name, "verdict": verdict.kind, "text": verdict.text}
            for (fault, name), verdict in verdicts.items()
        ]
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(table(verdicts))
    return 1 if any(verdict.kind == "FAULT" for verdict in verdicts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
