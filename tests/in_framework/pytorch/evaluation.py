"""ResNet's evaluation in PyTorch counts every image, on two ranks with averaged batch-norm statistics."""

import pytest
import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.torch import networks
from benchmarks.resnet.inputs import EvaluationInput
from benchmarks.resnet.pytorch import data, model, train
from benchmarks.resnet.pytorch.config import Config
from tests.in_framework import resnet
from tests.in_framework.torch_checks import CPU

LONG = True
RANKS = (2,)


def test_every_image_counts_once_with_averaged_statistics(digits, together):
    """One rank has 149 images, a batch more than the 148 of the other."""
    config = resnet.config_of(Config, "NHWC", batch_size=37)
    run = resnet.run_of(config, pytorch, digits, together)
    training = train.build(config, run.ranks, {})
    network, initial = training.network, networks.statistics(model.build(config))
    # Different statistics on both ranks: their mean equals the initial statistics.
    for buffer in networks.statistics(network):
        buffer += run.ranks.rank - 0.5
    accuracies = [
        train.evaluate(training, EvaluationInput(data, config, digits, run.ranks), run)["accuracy"] for _ in range(2)
    ]
    torch.testing.assert_close(list(networks.statistics(network)), list(initial), atol=1e-6, rtol=0)
    correct, images_of_all = 0, EvaluationInput(data, config, digits, CPU)
    for images, labels, valid in images_of_all.one_pass():
        correct += int((network.eval()(images).argmax(1) == labels)[:valid].sum())
    run.finish()
    assert images_of_all.total == 297
    assert accuracies[0] == accuracies[1] == pytest.approx(correct / 297, abs=1 / 297)
