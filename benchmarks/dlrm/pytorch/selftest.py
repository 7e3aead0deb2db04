"""The checks of `encore selftest` for DLRM in PyTorch; see benchmarks/common/checks/selftest.py."""

from pathlib import Path

import numpy as np

from benchmarks.common.checks.agreement import Tolerance
from benchmarks.common.checks.selftest import Suite, write_manifest
from benchmarks.dlrm import blocks
from benchmarks.dlrm.blocks import BLOCK_ROWS, COLUMNS, FIRST_TABLE, NUMBERS, TABLES

ROWS = 1 << 20
TABLE_ROWS = 500000  # per table; 6.7 GB of tables in fp32, which fit into any GPU but not into caches


def real_sizes(folder: Path, rows: int = ROWS, table_rows: int = TABLE_ROWS) -> None:
    """Write synthetic data with tables that are larger than a GPU's caches."""
    random = np.random.RandomState(0)
    for split, count in (("train", rows), ("val", BLOCK_ROWS)):
        blocks.create(folder / f"{split}.bin", count)
        opened = blocks.open_blocks(folder / f"{split}.bin", count, writable=True)
        opened[:, 0] = random.randint(2, size=(len(opened), BLOCK_ROWS))
        numbers = random.rand(len(opened), NUMBERS, BLOCK_ROWS).astype(np.float32)
        opened[:, 1 : 1 + NUMBERS] = numbers.view(np.int32)
        opened[:, FIRST_TABLE:] = random.randint(table_rows, size=(len(opened), COLUMNS - FIRST_TABLE, BLOCK_ROWS))
        opened.flush()
    facts = {"block_rows": BLOCK_ROWS, "table_sizes": [table_rows] * TABLES}
    write_manifest(folder, "dlrm", {"train": rows, "val": BLOCK_ROWS}, facts)


ROUNDED = Tolerance(0.005, 0.02)
SUITE = Suite(
    module="benchmarks.dlrm.pytorch",
    # The device's generator initializes the tables.
    device=Tolerance(0.2, 0.1),
    settings={"batch_size": 4096, "eval_interval": 32, "warmup_steps": 4, "learning_rate": 0.5, "kernels": "plain"},
    two_ranks=ROUNDED,
    resume=Tolerance(1e-3, 0.01),  # a GPU adds in any order; 0.2 % on an H200
    varied={
        "precision": ROUNDED,
        "cuda_graph": ROUNDED,
        "fused_relu": ROUNDED,
        "kernels": ROUNDED,
        "shuffle": Tolerance(0.2, 0.05),
    },
    programs={"kernels": "benchmarks.common.checks.compare_kernels"},  # of all benchmarks
    real_sizes=real_sizes,
    no_cpu_evaluation="the tables take 6.7 GB of memory",
    shares_gpu="Gloo has no all-to-all of GPU tensors, and NCCL requires one GPU per rank",
)
