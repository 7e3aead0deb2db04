"""SSD's batch norms over groups of ranks: against one rank with both batches, and stand-ins for apex's layers."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from benchmarks.common.run.ranks import Ranks
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


class Groupbn(torch.nn.Module):
    # apex's layer as its callers see it: (N, h, w, C), groups of neighbours by their size alone; computed by ours
    def __init__(self, num_features, bn_group):
        super().__init__()
        group = norms.group_of(bn_group, Ranks(dist.get_rank(), dist.get_world_size(), 0, 1, CPU.context))
        self.ours = norms.GroupBatchNorm(num_features, group)
        self.weight = self.bias = self.running_mean = self.running_var = None

    def forward(self, x):
        assert x.is_contiguous()
        for name in ("weight", "bias", "running_mean", "running_var"):
            setattr(self.ours, name, getattr(self, name))
        return self.ours(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).contiguous()


def test_apexs_norm_trains_detects_and_is_saved_as_the_plain_one(ranks, monkeypatch):
    batch, results = data.synthetic_batch(GROUP, CLASSES, CPU.context), []
    modules = {"apex.contrib.groupbn.batch_norm": SimpleNamespace(BatchNorm2d_NHWC=Groupbn)}
    plain, others = norms.norm_of(norms.group_of(2, ranks), CPU.context), norms.find_apex(2, modules.__getitem__)
    assert norms.fastest(plain, others, ranks, torch.float32, (2, 8, 6, 6)) in ("plain", "groupbn")
    for norm in (plain, others["groupbn"]):
        monkeypatch.setattr(norms, "choose", lambda config, ranks, saved, norm=norm: ("name", norm))
        training = train.build(GROUP, CLASSES, ranks, {})
        losses = [float(train.train_step(training, batch, 0.01)) for _ in range(3)]
        total = float(training.network.eval()(batch.images).detach().double().abs().sum())
        results.append((list(training.network.state_dict()), losses, total))
    names, losses, total = results[0]
    assert results[1] == (names, pytest.approx(losses, rel=1e-3), pytest.approx(total, rel=0.02))
