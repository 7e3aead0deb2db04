"""ResNet in TensorFlow, compiled by XLA on the CPU; compilation takes longer than all tests without it."""

from benchmarks.common.frameworks import tensorflow
from tests.in_framework.tensorflow.resnet import check_micro_batches, first_losses, relative_difference

LONG = True


def test_losses_and_gradients():
    assert relative_difference(first_losses(xla=True)) < 1e-4
    check_micro_batches(xla=True)
    tensorflow.finish()
