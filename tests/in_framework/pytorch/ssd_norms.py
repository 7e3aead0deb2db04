"""SSD's batch norms over groups of ranks: against one rank with both batches, and stand-ins for apex's layers."""

import dataclasses
import io
import re
from contextlib import redirect_stderr
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common.run.ranks import Ranks
from benchmarks.ssd.pytorch import norms
from benchmarks.ssd.pytorch.config import Config
from benchmarks.ssd.pytorch.data import Batch, synthetic_batch
from benchmarks.ssd.pytorch.train import build, evaluate, train_step

LONG = True
RANKS = (2,)
CPU = torch.device("cpu")
CLASSES = 6
CONFIG = Config(device="cpu", precision="fp32", layout="NCHW", pad_channels=False, image_size=64, width=8,
               blocks=(1, 2, 1), batch_size=4, optimizer_kernel="fused", warm_up_steps=0)  # fmt: skip


def test_two_ranks_with_a_batch_norm_over_both_train_as_one(ranks):
    global_batch = dataclasses.replace(CONFIG, batch_size=8)
    torch.manual_seed(1)
    batch = synthetic_batch(global_batch, CLASSES, CPU)
    part = Batch(*(tensor.chunk(2)[ranks.rank].contiguous() for tensor in batch))
    group = build(dataclasses.replace(CONFIG, bn_group=2), CLASSES, ranks, {})
    single = build(global_batch, CLASSES, Ranks(0, 1, 0, 1, CPU), {})
    for _ in range(3):
        loss = train_step(group, part, 0.01)
        dist.all_reduce(loss)
        assert float(loss) / 2 == pytest.approx(float(train_step(single, batch, 0.01)), abs=1e-3)
    torch.testing.assert_close(list(group.network.buffers()), list(single.network.buffers()), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("average", "value"), [(True, 0.5), (False, None)])
def test_statistics_are_averaged_before_an_evaluation(ranks, average, value):
    training = build(dataclasses.replace(CONFIG, average_statistics=average), CLASSES, ranks, {})
    for buffer in training.network.buffers():
        buffer.fill_(ranks.rank)
    nothing = SimpleNamespace(one_pass=lambda: iter(()), part=None)
    evaluate(training, nothing, SimpleNamespace(interruptible=iter, interrupted=False, ranks=ranks))
    values = {float(number) for buffer in training.network.buffers() for number in buffer}
    assert values == {ranks.rank if value is None else value}


class Groupbn(nn.Module):
    # apex's layer as its callers see it: (N, h, w, C), groups of neighbours by their size alone; computed by ours
    def __init__(self, num_features, bn_group):
        super().__init__()
        group = norms.group_of(bn_group, Ranks(dist.get_rank(), dist.get_world_size(), 0, 1, CPU))
        self.ours = norms.GroupBatchNorm(num_features, group)
        self.weight = self.bias = self.running_mean = self.running_var = None

    def forward(self, x):
        assert x.is_contiguous()
        for name in ("weight", "bias", "running_mean", "running_var"):
            setattr(self.ours, name, getattr(self, name))
        return self.ours(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).contiguous()


class WrongNorm(Groupbn):
    # The other one takes channels_last
    def __init__(self, num_features, group_size):
        super().__init__(num_features, group_size)

    def forward(self, x):
        return 1.1 * super().forward(x.permute(0, 2, 3, 1).contiguous()).permute(0, 3, 1, 2)


MODULES = {
    "apex.contrib.groupbn.batch_norm": SimpleNamespace(BatchNorm2d_NHWC=Groupbn),
    "apex.contrib.cudnn_gbn": SimpleNamespace(GroupBatchNorm2d=WrongNorm),
}


def test_the_fastest_right_norm_of_apex_is_chosen(ranks):
    others = norms.find_apex(2, MODULES.__getitem__)
    assert (sorted(others), norms.find_apex(2)) == (["cudnn_gbn", "groupbn"], {})
    printed = io.StringIO()
    with redirect_stderr(printed):
        chosen = norms.fastest(norms.norm_of(norms.group_of(2, ranks), CPU), others, ranks, torch.float32, (2, 8, 6, 6))
    assert chosen in ("plain", "groupbn")
    measured = r"cudnn_gbn ArithmeticError: wrong by 0\.1 of the largest value, groupbn [0-9.]+ ms, plain [0-9.]+"
    assert bool(re.search(measured, printed.getvalue())) == (ranks.rank == 0)


def test_apexs_norm_trains_detects_and_is_saved_as_the_plain_one(ranks, monkeypatch):
    config = dataclasses.replace(CONFIG, bn_group=2)
    batch = synthetic_batch(config, CLASSES, CPU)
    results = []
    for norm in (norms.norm_of(norms.group_of(2, ranks), CPU), norms.find_apex(2, MODULES.__getitem__)["groupbn"]):
        monkeypatch.setattr(norms, "choose", lambda config, ranks, saved, norm=norm: ("name", norm))
        training = build(config, CLASSES, ranks, {})
        losses = [float(train_step(training, batch, 0.01)) for _ in range(3)]
        total = float(training.network.eval()(batch.images).detach().double().abs().sum())
        results.append((list(training.network.state_dict()), losses, total))
    names, losses, total = results[0]
    assert results[1] == (names, pytest.approx(losses, rel=1e-3), pytest.approx(total, rel=0.02))


def test_a_checkpoints_norm_that_is_missing_is_named(ranks):
    with pytest.raises(ValueError, match="apex's groupbn, is not available: resume in the image of the run"):
        norms.choose(CONFIG, ranks, "groupbn")
