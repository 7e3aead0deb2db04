"""Checks by `encore selftest` of ResNet in PyTorch; see benchmarks/common/checks/selftest.py."""

from __future__ import annotations

from benchmarks.common.checks import selftest
from benchmarks.common.checks.agreement import Tolerance
from benchmarks.common.checks.selftest import Suite
from benchmarks.resnet.pytorch.config import Config
from benchmarks.resnet.selftest import ANOTHER_BATCH, ROUNDED, real_images

SUITE = Suite(
    module="benchmarks.resnet.pytorch",
    config_class=Config,
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

if __name__ == "__main__":
    raise SystemExit(selftest.main(SUITE))
