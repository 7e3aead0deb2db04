"""Times Encore's scoring against mlperf-logging's result_summarizer on the same logs, in one run.

    python -m tools.score_speed FOLDER     # a submitter's: results/ or the systems themselves, and systems/

Both are run as programs of their own, start of the interpreter included; each gets one run unmeasured before.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def submission_tree(folder: Path, root: Path) -> Path:
    """The folder as result_summarizer wants it: results/ and systems/ below the submitter."""
    if (folder / "results").is_dir():
        return folder
    submitter = root / folder.name
    (submitter / "results").mkdir(parents=True)
    for system in folder.iterdir():
        target = submitter if system.name == "systems" else submitter / "results"
        (target / system.name).symlink_to(system.resolve(), target_is_directory=True)
    return submitter


def seconds(command: list[str], cwd: Path) -> float:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True)
    start = time.perf_counter()
    subprocess.run(command, cwd=cwd, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    logs = sum(1 for _ in folder.rglob("result_*.txt*"))
    project = Path(__file__).resolve().parents[1]
    score = f"import sys; sys.path.insert(0, {str(project)!r}); from encore.results.score import score_folder; "
    with tempfile.TemporaryDirectory() as temporary:
        tree = submission_tree(folder, Path(temporary))
        ours = seconds([sys.executable, "-c", score + f"score_folder({str(tree / 'results')!r})"], Path(temporary))
        module = "mlperf_logging.result_summarizer"
        theirs = seconds([sys.executable, "-m", module, str(tree), "training", "0.7.0"], Path(temporary))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"{logs} logs: Encore {ours:.2f} s, result_summarizer {theirs:.2f} s, ratio {theirs / ours:.1f}")
    print(f"largest memory of any of the programs: {peak:.0f} MiB")


if __name__ == "__main__":
    main()
