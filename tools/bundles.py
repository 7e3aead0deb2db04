"""Pack and verify all public result sets as signed bundles; none may be rejected.

    $ python -m tools.bundles training_results_v0.5 ... training_results_v5.1

Each DIR is a checkout of one round. Prints the rejected sets, then the numbers of sets and rejections, and the time
per set.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

from encore.errors import EncoreError
from encore.lab.submissions import bundle
from encore.results.scores.score import score_folder
from tools import Folders, run


def sets_in(checkout: Path) -> Iterator[Path]:
    """Yield the folders results/SYSTEM/BENCHMARK, or results/SYSTEM in v0.5, that contain logs."""
    yield from sorted({score.folder for score in score_folder(checkout)})


def packed_and_verified(key: Path, folder: Path) -> tuple[Path, float, str]:
    """Return a set's duration in seconds and problems."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch) / "bundle.tar.gz"
        signers = key.with_name("signers")
        try:
            bundle.write_bundle(folder, archive, key)
            verification = bundle.verify(archive, signers, "submitter")
            wrong = "" if verification.accepted else "; ".join(str(finding) for finding in verification.findings)
        except EncoreError as error:
            wrong = str(error)
    return folder, time.monotonic() - started, wrong


def signing_key(folder: Path) -> Path:
    key = folder / "key"
    subprocess.run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "submitter", "-f", str(key)), check=True)
    (folder / "signers").write_text(f"submitter {key.with_suffix('.pub').read_text('utf-8')}", "utf-8")
    return key


def main(checkouts: Folders) -> None:
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(os.cpu_count()) as pool:
        check = partial(packed_and_verified, signing_key(Path(folder)))
        durations: list[float] = []
        refused = 0
        for results in pool.map(_all_sets, checkouts):
            for path, seconds, wrong in pool.map(check, results, chunksize=4):
                durations.append(seconds)
                refused += bool(wrong)
                if wrong:
                    print(f"{path}: {wrong}", flush=True)
    if durations:
        print(
            f"{len(durations)} sets, {refused} rejected; {median(durations):.1f} s per set, max {max(durations):.1f} s"
        )


def _all_sets(checkout: Path) -> Sequence[Path]:
    return list(sets_in(checkout))


if __name__ == "__main__":
    run(main, __doc__)
