"""Configuration of `encore selftest` for SSD in PyTorch; see benchmarks/common/checks/selftest.py."""

from benchmarks.common.checks.agreement import Tolerance
from benchmarks.common.checks.selftest import Suite
from benchmarks.detection.selftest import real_images

ROUNDED = Tolerance(0.02, 0.05)
ANOTHER_BATCH = Tolerance(0.1, 0.1)  # batch-norm sees other images
ANOTHER_DRAW = Tolerance(0.25, 0.1)  # the wider first layer has different initial weights
SUITE = Suite(
    module="benchmarks.ssd.pytorch",
    real_images=real_images,
    device=ROUNDED,
    two_ranks=ANOTHER_BATCH,
    resume=Tolerance(1e-3, 0.01),  # a GPU adds in any order; 0.2 % on an H200
    # All evaluations count, and none stops the training.
    settings={"compile": "none", "cuda_graph": False, "quality_target": 1.0, "concurrent_evaluation": False},
    varied={
        "precision": ROUNDED,
        "layout": ROUNDED,
        "pad_channels": ANOTHER_DRAW,
        "optimizer_kernel": ROUNDED,
        "decoder": ROUNDED,
        "cuda_graph": ROUNDED,
        "compile": ROUNDED,
    },
    left_out=("optimizer_kernel=apex", "compile=max-autotune-no-cudagraphs"),
    programs={"optimizers": "benchmarks.common.checks.compare_optimizers"},
)
