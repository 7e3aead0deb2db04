"""Checks by `encore selftest` of ResNet in PyTorch; see benchmarks/common/checks/selftest.py."""

from benchmarks.common.checks.agreement import Tolerance
from benchmarks.common.checks.selftest import Suite
from benchmarks.resnet.selftest import ANOTHER_BATCH, ROUNDED, real_images

SUITE = Suite(
    module="benchmarks.resnet.pytorch",
    device=Tolerance(0.02, ROUNDED.epoch),  # nvJPEG decodes to slightly other pixels
    two_ranks=ANOTHER_BATCH,
    resume=ROUNDED,
    real_images=real_images,
    settings={"compile": "none", "cuda_graph": False, "kernels": "plain"},
    varied={
        "precision": ROUNDED,
        "layout": ROUNDED,
        "cuda_graph": ROUNDED,
        "kernels": ROUNDED,
        "accumulation_steps=2": ANOTHER_BATCH,
        "compile": ROUNDED,
    },
    left_out=("compile=max-autotune-no-cudagraphs",),  # tunes for minutes
)
