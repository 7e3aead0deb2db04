"""Configuration of `encore selftest` for Mask R-CNN in PyTorch; see benchmarks/common/checks/selftest.py."""

from benchmarks.common.checks.agreement import Tolerance
from benchmarks.common.checks.selftest import Suite
from benchmarks.detection.selftest import real_images

ROUNDED = Tolerance(0.01, 0.05)
SUITE = Suite(
    module="benchmarks.maskrcnn.pytorch",
    real_images=real_images,
    # Proposals depend on the last bits of the scores.
    device=Tolerance(0.1, 0.1),
    # Three padded shapes instead of six: an H200 compiled fewer than four in 90 s.
    settings={"epochs": 1, "compile": "none", "cuda_graph": False, "bucket_step": 160},
    # Every rank groups a different shard of the images: on a CPU the first steps differed by up to 10 %, the epoch by 6
    # %.
    two_ranks=Tolerance(0.2, 0.15),
    resume=Tolerance(1e-3, 1e-3),  # a GPU adds in any order
    varied={
        "precision": Tolerance(0.1, 0.1),
        "kernels": ROUNDED,
        "compile": ROUNDED,
        "cuda_graph": ROUNDED,
        "optimizer_kernel": ROUNDED,
    },
    left_out=("kernels=torchvision", "compile=max-autotune-no-cudagraphs"),  # the second tunes for minutes
    slow_on_cpu=("precision=fp16", "compile=default"),
    programs={"kernels": "benchmarks.common.checks.compare_kernels"},
)
