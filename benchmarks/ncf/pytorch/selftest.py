"""The checks of `encore selftest` for NCF in PyTorch; see benchmarks/common/checks/selftest.py."""

from pathlib import Path

import numpy as np

from benchmarks.common.checks.agreement import Tolerance
from benchmarks.common.checks.selftest import Suite, write_manifest

ML_20M = (138493, 26744, 19861770)  # users, items and training pairs


def real_sizes(folder: Path, users: int = ML_20M[0], items: int = ML_20M[1], pairs: int = ML_20M[2]) -> None:
    """Write synthetic data with the sizes of ml-20m, without negatives for an evaluation."""
    keys = np.unique(np.random.RandomState(0).randint(users * items, size=pairs, dtype=np.int64))
    arrays = {
        "train_users": keys // items,
        "train_items": keys % items,
        "test_items": np.zeros(users),
        "test_negatives": np.zeros((users, 1)),
    }
    for name, array in arrays.items():
        np.save(str(folder / f"{name}.npy"), array.astype(np.int32))
    counts = {"train": len(keys), "test": users}
    write_manifest(folder, "ncf", counts, {"users": users, "items": items, "negatives": 1})


# Different negatives and order. Seeds on a CPU differ by 8 % in the first steps and 0.3 % in epochs.
ANOTHER_DRAW = Tolerance(0.15, 0.02)
ROUNDED = Tolerance(0.005, 0.005)
SUITE = Suite(
    module="benchmarks.ncf.pytorch",
    device=ANOTHER_DRAW,  # the device's generator is used
    two_ranks=ROUNDED,
    resume=Tolerance(1e-3, 1e-3),  # a GPU adds in any order
    varied={
        "precision": Tolerance(0.01, 0.01),
        "cuda_graph": ANOTHER_DRAW,
        "first_layer": ROUNDED,
        "optimizer_kernel": ROUNDED,
    },
    left_out=("optimizer_kernel=apex",),
    settings={"stop_at_target": False},
    real_sizes=real_sizes,
    no_cpu_evaluation="",
    programs={"optimizers": "benchmarks.common.checks.compare_optimizers"},
)
