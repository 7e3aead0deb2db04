"""SSD's batch norms over groups of ranks, against one rank with both batches."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from benchmarks.ssd.pytorch import data, norms, train
from tests.in_framework.pytorch.ssd import CLASSES, SMALL
from tests.in_framework.torch_checks import CPU

LONG = True
RANKS = (2,)
GROUP = dataclasses.replace(SMALL, bn_group=2)


def test_two_ranks_with_a_batch_norm_over_both_train_as_one(ranks):
    global_batch = dataclasses.replace(SMALL, batch_size=8)
    torch.manual_seed(1)
    batch = data.synthetic_batch(global_batch, CLASSES, CPU.context)
    part = data.Batch(*(tensor.chunk(2)[ranks.rank].contiguous() for tensor in batch))
    group, single = train.build(GROUP, CLASSES, ranks, {}), train.build(global_batch, CLASSES, CPU, {})
    for _ in range(3):
        loss = train.train_step(group, part, 0.01)
        dist.all_reduce(loss)
        assert float(loss) / 2 == pytest.approx(float(train.train_step(single, batch, 0.01)), abs=1e-3)
    torch.testing.assert_close(list(group.network.buffers()), list(single.network.buffers()), atol=1e-4, rtol=0)


@pytest.mark.parametrize("average", [True, False])
def test_statistics_are_averaged_before_an_evaluation(ranks, average):
    training = train.build(dataclasses.replace(SMALL, average_statistics=average), CLASSES, ranks, {})
    for buffer in training.network.buffers():
        buffer.fill_(ranks.rank)
    nothing = SimpleNamespace(one_pass=lambda: iter(()), part=None)
    train.evaluate(training, nothing, SimpleNamespace(interruptible=iter, interrupted=False, ranks=ranks))
    values = {float(number) for buffer in training.network.buffers() for number in buffer}
    assert values == {0.5 if average else ranks.rank}


def test_apexs_norm_is_missing(ranks):
    with pytest.raises(ValueError, match="apex's groupbn, is not available: resume in the image of the run"):
        norms.choose(SMALL, ranks, "groupbn")
