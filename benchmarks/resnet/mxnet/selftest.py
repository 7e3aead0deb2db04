"""Checks by `encore selftest` of ResNet in MXNet; see benchmarks/common/checks/selftest.py."""

from benchmarks.common.checks.selftest import Suite
from benchmarks.resnet.selftest import ANOTHER_BATCH, ROUNDED, real_images

SUITE = Suite(
    module="benchmarks.resnet.mxnet",
    device=ANOTHER_BATCH,
    two_ranks=ANOTHER_BATCH,
    resume=ROUNDED,
    real_images=real_images,
    varied={"precision": ROUNDED, "layout": ROUNDED},
    shares_gpu="NCCL requires one GPU per rank, and Horovod has no other transport for GPU tensors",
)
