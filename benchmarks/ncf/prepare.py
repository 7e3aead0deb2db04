"""Prepare NCF's data set: arrays with a manifest, or check a prepared one.

    $ python -m benchmarks.ncf.prepare -o data/ncf                              # the toy data set
    $ python -m benchmarks.ncf.prepare ml-20m.zip -o /data/ml-20m
    $ python -m benchmarks.ncf.prepare --verify /data/ml-20m

Writes train_users.npy train_items.npy test_items.npy test_negatives.npy and, last, dataset.json. Exit code 0:
done; 2: refused, nothing was changed; 1: failed; 130: interrupted.
"""

from functools import partial
from pathlib import Path
from typing import Any, Dict, List

from benchmarks.common.data import prepare
from benchmarks.common.data.problem import Problem


def check(directory: Path, manifest: Dict[str, Any]) -> List[Problem]:
    """Look at the shape of the largest array."""
    import numpy as np

    counts = manifest["facts"]
    shape = np.load(str(directory / "test_negatives.npy"), mmap_mode="r").shape
    if shape == (counts["users"], counts["negatives"]):
        return []
    return [Problem(f"test_negatives.npy has shape {shape}", str(counts), "prepare the data set again")]


DATA_SET = prepare.DataSet(
    benchmark="ncf",
    source="a MovieLens release (zip, folder, or file of ratings), or the folder of the NCF paper's files",
    files=("train_users.npy", "train_items.npy", "test_items.npy", "test_negatives.npy"),
    add_options=lambda options: None,
    writer="benchmarks.ncf.writer",
    samples="benchmarks.ncf.samples",
    compares=False,
    check=check,
)
main = partial(prepare.main, DATA_SET)


if __name__ == "__main__":
    raise SystemExit(main())
