"""ResNet in TensorFlow, compiled by XLA on the CPU; compilation takes longer than all tests without it."""

from benchmarks.common.frameworks import tensorflow
from tests.in_framework.tensorflow.resnet import (
    baseline_losses,
    check_equal_gradients,
    first_losses,
    loss_and_gradients,
    relative_difference,
)

LONG = True


def test_losses():
    assert relative_difference(first_losses(xla=True), baseline_losses()) < 1e-4


def test_micro_batches_have_the_gradients_of_the_batch():
    check_equal_gradients(loss_and_gradients(accumulation_steps=4, xla=True), loss_and_gradients())


def test_end():
    tensorflow.finish()
