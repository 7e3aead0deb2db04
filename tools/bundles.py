"""Pack each public set of results as a signed bundle and verify it: nothing of it may be refused.

    $ python -m tools.bundles training_results_v0.5 ... training_results_v5.1

Each DIR is a checkout of one round. Prints each set that is refused, and at last how many sets there are, how many were
refused, and how long one took.
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
    """Yield the folders of results/SYSTEM/BENCHMARK, or in v0.5 of results/SYSTEM, that hold logs."""
    yield from sorted({score.folder for score in score_folder(checkout)})


def packed_and_verified(key: Path, folder: Path) -> tuple[Path, float, str]:
    """Return how many seconds a set took, and what was found wrong with it."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "bundle.tar.gz"
        signers = key.with_name("signers")
        try:
            bundle.write_bundle(folder, made, key)
            found = bundle.verify(made, signers, "submitter")
            wrong = "" if found.accepted else "; ".join(str(each) for each in found.findings)
        except EncoreError as error:
            wrong = str(error)
    return folder, time.monotonic() - begun, wrong


def signing_key(folder: Path) -> Path:
    key = folder / "key"
    subprocess.run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "submitter", "-f", str(key)), check=True)
    (folder / "signers").write_text(f"submitter {key.with_suffix('.pub').read_text('utf-8')}", "utf-8")
    return key


def main(checkouts: Folders) -> None:
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(os.cpu_count()) as pool:
        check = partial(packed_and_verified, signing_key(Path(folder)))
        taken: list[float] = []
        refused = 0
        for found in pool.map(_all_sets, checkouts):
            for path, seconds, wrong in pool.map(check, found, chunksize=4):
                taken.append(seconds)
                refused += bool(wrong)
                if wrong:
                    print(f"{path}: {wrong}", flush=True)
    if taken:
        print(f"{len(taken):,} sets, {refused} refused; {median(taken):.1f} s a set, {max(taken):.1f} s at most")


def _all_sets(checkout: Path) -> Sequence[Path]:
    return list(sets_in(checkout))


if __name__ == "__main__":
    run(main, __doc__)
