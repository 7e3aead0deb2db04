"""Times Encore's scoring against mlperf-logging's result_summarizer on the same logs, in one run.

    python -m tools.score_speed training_results_v4.1/NVIDIA --all .   # --all: a folder with checkouts of rounds

FOLDER is a submitter's: results/ or the systems themselves, and systems/. Each program starts an interpreter of its own
and gets one run unmeasured before; then they take turns, and the median of the turns' ratios is printed. The
summarizer checks and scores: "score and check" does what it does, "score" what is asked most.
"""

import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from tools import run

PROJECT = Path(__file__).resolve().parents[1]
SCORE = "from encore.results.scores.score import score_folder as work"
SCORE_AND_CHECK = "from encore.results.compliance.compliance import score_and_check as work"


def submission_tree(folder: Path, root: Path) -> Path:
    # The folder as result_summarizer wants it: results/ and systems/ below the submitter
    if (folder / "results").is_dir():
        return folder
    submitter = root / folder.name
    (submitter / "results").mkdir(parents=True)
    for system in folder.iterdir():
        target = submitter if system.name == "systems" else submitter / "results"
        (target / system.name).symlink_to(system.resolve(), target_is_directory=True)
    return submitter


def encore(what: str, folder: Path) -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(PROJECT)!r}); {what}; work({str(folder)!r})"]


def seconds(command: list[str], cwd: Path) -> float:
    start = time.perf_counter()
    subprocess.run(command, cwd=cwd, check=True, capture_output=True)
    return time.perf_counter() - start


def compare(folder: Path, ruleset: str, pairs: int, cwd: Path) -> None:
    tree = submission_tree(folder, cwd)
    logs = [file for file in folder.rglob("result_*.txt*") if file.is_file()]
    megabytes = sum(file.stat().st_size for file in logs) / 1e6
    programs = {
        "score": encore(SCORE, tree / "results"),
        "score and check": encore(SCORE_AND_CHECK, tree / "results"),
        "result_summarizer": [sys.executable, "-m", "mlperf_logging.result_summarizer", str(tree), "training", ruleset],
    }
    for command in programs.values():
        seconds(command, cwd)
    turns = [{name: seconds(command, cwd) for name, command in programs.items()} for _ in range(pairs)]
    print(f"{folder}: {len(logs)} logs, {megabytes:.0f} MB, ruleset {ruleset}, median of {pairs}")
    for name in programs:
        taken = statistics.median(turn[name] for turn in turns)
        ratio = statistics.median(turn["result_summarizer"] / turn[name] for turn in turns)
        print(f"  {name:<18}{taken:8.2f} s  {ratio:6.1f} times as fast as result_summarizer")


def main(
    folders: Annotated[list[Path], typer.Argument()] = (),
    ruleset: Annotated[str, typer.Option(help="default: that of the folder's training_results_vX.Y, else 0.7.0")] = "",
    pairs: int = 3,
    every: Annotated[Path | None, typer.Option("--all", help="also score all logs below, and score and check")] = None,
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        for folder in folders:
            round_ = re.search(r"training_results_v(\d\.\d)", str(folder.resolve()))
            own = f"{round_[1]}.0" if round_ else "0.7.0"
            compare(folder.resolve(), ruleset or own, pairs, Path(temporary))
        if every:
            for name, what in (("score", SCORE), ("score and check", SCORE_AND_CHECK)):
                print(f"{every}: {name} {seconds(encore(what, every.resolve()), Path(temporary)):.1f} s")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"largest memory of any of the processes: {peak:.0f} MiB")


if __name__ == "__main__":
    run(main, __doc__)
