"""ResNet's evaluation in PyTorch counts each image once on any number of ranks, all with the mean statistics."""

import pytest
import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import networks
from benchmarks.resnet.inputs import EvaluationInput
from benchmarks.resnet.pytorch import data, model, train
from benchmarks.resnet.pytorch.config import Config
from tests.in_framework import resnet

RANKS = (1, 2)


def test_all_images_are_evaluated_with_the_mean_statistics(digits, together):
    # One of two ranks has 149 images, which are a batch more than the other's 148.
    config = resnet.config_of(Config, "NHWC", batch_size=37)
    run = resnet.run_of(config, pytorch, digits, together)
    training = train.build(config, run.ranks, {})
    network = training.network
    # Ranks that saw other images have other statistics, whose mean is a fresh network's here.
    for buffer in networks.statistics(network):
        buffer += 0.5 * (2 * run.ranks.rank - run.ranks.size + 1)
    first, second = (
        train.evaluate(training, EvaluationInput(data, config, digits, run.ranks), run)["accuracy"] for _ in range(2)
    )
    for mine, new in zip(networks.statistics(network), networks.statistics(model.build(config))):
        torch.testing.assert_close(mine, new, atol=1e-6, rtol=0)
    hits, whole = 0, EvaluationInput(data, config, digits, Ranks(0, 1, 0, 1, torch.device("cpu")))
    with torch.no_grad():
        for images, labels, valid in whole.one_pass():
            hits += int((network.eval()(images).argmax(1) == labels)[:valid].sum())
    run.finish()
    assert whole.total == 297
    assert first == second == pytest.approx(hits / 297, abs=1 / 297)
