"""BERT's rows of certain lengths: filled rows next to those without padding, the step as held graphs, FP8 by a fake.

Prints what it found as JSON.
"""

import contextlib
import dataclasses
import json
import sys
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from benchmarks.bert import noise
from benchmarks.bert.pytorch import data
from benchmarks.bert.pytorch.config import Config
from benchmarks.bert.pytorch.data import filled, part_of, shares, weighted
from benchmarks.bert.pytorch.optimizer import updates_of
from benchmarks.bert.pytorch.train import Training, train_part, train_step
from benchmarks.common.data.problem import Problem
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.language import arrays
from benchmarks.language.pytorch import fp8
from benchmarks.language.pytorch.graphs import captured
from tests.in_framework.held import Held

CPU = Ranks(0, 1, 0, 1, torch.device("cpu"))
ENTRIES, LONGEST, SAMPLES = 61, 20, 64
CONFIG = Config(
    device="cpu", precision="fp32", layers=2, width=64, heads=4, inner_width=48, positions=LONGEST, dropout=0.0,
    attention_dropout=0.0, gradient_clip=0.0, optimizer_kernel="fused", batch_size=8, accumulation=2, seed=5,
    token_bucket=16,
)  # fmt: skip


def samples():
    found = noise.sample_arrays(SAMPLES, LONGEST, 3, ENTRIES)
    return arrays.Samples(*(found[name].astype(dtype) for name, dtype in arrays.ARRAYS.items()))


def part(number=0):
    chosen = part_of(samples(), np.arange(4 * number, 4 * number + 4))
    return weighted(chosen, CONFIG, CPU, len(chosen.labels))


def gradients(training, given, step=None):
    """Loss and gradients of one part."""
    training.updates.gradients.zero_()
    loss = (step or training.run_part)(given)
    return [loss.clone(), training.updates.gradients.clone()]


def distance(ours, theirs):
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs))


def filled_rows(attention):
    """The largest distance between filled rows and the same without padding; judged alike, too."""
    training = Training(dataclasses.replace(CONFIG, attention=attention), ENTRIES, CPU)
    parts = [part(number) for number in range(16)]
    full = [filled(each, CONFIG) for each in parts]
    pairs = zip(parts, full)
    found = [
        (distance(gradients(training, b), gradients(training, a)), training.judge(a), training.judge(b))
        for a, b in pairs
    ]
    return {
        "distance": max(each[0] for each in found),
        "judged": max(float((b - a).abs().max() / a.abs().max()) for _, a, b in found),
        "lengths": sorted({len(each.rows.tokens) for each in full}),
        "most added": max(len(b.rows.tokens) - len(a.rows.tokens) for a, b in zip(parts, full)),
        "exact": sum(len(b.rows.tokens) == len(a.rows.tokens) for a, b in zip(parts, full)),
        "nothing missing": distance(
            gradients(training, data.filled_to(parts[0], len(parts[0].rows.tokens), CONFIG)),
            gradients(training, parts[0]),
        ),
    }


def graphs():
    """Steps of parts by graphs, for each length of row, next to the plain ones."""
    config = SimpleNamespace(**{**dataclasses.asdict(CONFIG), "fills_rows": True, "warm_up_steps": 1})
    training = Training(CONFIG, ENTRIES, CPU)
    eager = []

    def plain(given):
        eager.append(len(given.rows.tokens))
        return train_part(training, given)

    longest = CONFIG.batch_size // CONFIG.accumulation * LONGEST
    step = captured(plain, lambda tokens: data.noise(config, ENTRIES, CPU, tokens)[0], longest, 16, 1, Held)
    warmed = len(eager)
    parts = [filled(part(number), CONFIG) for number in range(16)]
    worst = max(distance(gradients(training, each, step), gradients(training, each)) for each in parts)
    replays = sum(graph.replays for graph in Held.made)
    called = len(eager) - warmed
    crowded = part()._replace(masked=torch.zeros(40, dtype=torch.int64), labels=torch.ones(40, dtype=torch.int64))
    gradients(training, filled(crowded, CONFIG), step)
    return {
        "distance": worst,
        "lengths": [len(graph.held[0]) for graph in Held.made],
        "beside the first": [graph.beside is Held.made[0] for graph in Held.made],
        "replays": replays,
        "short rows": sum(len(each.rows.tokens) <= 20 for each in parts),
        "called": called,
        "crowded": sum(graph.replays for graph in Held.made) - replays,
    }


def evenness():
    """Most tokens of a share over the mean, dealt out and as drawn."""
    lengths = noise.sample_arrays(4096, 512, 76, 1000)["offsets"]
    lengths = np.diff(lengths)[:256]
    dealt, drawn = shares(lengths, 8), np.arange(256).reshape(8, -1)
    return {
        "all": sorted(dealt.flatten().tolist()) == list(range(256)),
        "dealt": float(lengths[dealt].sum(1).max() / lengths[dealt].sum(1).mean()),
        "drawn": float(lengths[drawn].sum(1).max() / lengths[drawn].sum(1).mean()),
    }


class FakeLinear(nn.Linear):
    """What transformer_engine.pytorch.Linear is asked for; its products are rounded to FP8."""

    inside = False

    def __init__(self, inputs, outputs, *, bias, params_dtype, device, return_bias):
        super().__init__(inputs, outputs, bias=bias, dtype=params_dtype, device=device)
        self.return_bias = return_bias

    def forward(self, hidden):
        assert FakeLinear.inside, "no FP8 outside of fp8_autocast"
        assert hidden.shape[0] % 16 == 0, "FP8 takes rows of a multiple of 16"
        rounded = [
            (each + (each.to(torch.float8_e4m3fn).to(each.dtype) - each).detach()) for each in (hidden, self.weight)
        ]
        product = nn.functional.linear(*rounded)
        return (product, self.bias) if self.return_bias else product + self.bias


@contextlib.contextmanager
def fp8_autocast(enabled, fp8_recipe):
    FakeLinear.inside = enabled and fp8_recipe["fp8_format"] == "E4M3 and E5M2"
    yield
    FakeLinear.inside = False


def in_fp8():
    """A training with a module of TransformerEngine's names next to one without, and the words where it is missing."""
    recipes = SimpleNamespace(DelayedScaling=dict, Format=SimpleNamespace(HYBRID="E4M3 and E5M2"))
    engine = SimpleNamespace(Linear=FakeLinear, fp8_autocast=fp8_autocast)
    config = SimpleNamespace(**{**dataclasses.asdict(CONFIG), "fp8": True, "fills_rows": True, "token_bucket": 32})
    losses, refused = [], []
    for fp8_too in (False, True):
        training = Training(CONFIG, ENTRIES, CPU)
        if fp8_too:
            training._in_fp8 = fp8.use(training.network.encoder, (engine, recipes))
            named = dict(training.network.named_parameters())
            training.updates = updates_of(training.network, training.config, CPU, "fused")
        batch = [data.ready(part(number), config, CPU, 10) for number in range(2)]
        losses.append([float(train_step(training, batch, 0.01)) for _ in range(10)])
    other = Training(CONFIG, ENTRIES, CPU)
    for name, module in (("nowhere.pytorch", None), ("transformer_engine.pytorch", engine)):
        if module is not None:
            module.fp8 = SimpleNamespace(check_fp8_support=lambda: (False, "compute capability 9.x is needed"))
            sys.modules.update({name: module, "transformer_engine.common.recipe": recipes})
        try:
            fp8.find(name)
        except Problem as problem:
            refused.append(str(problem))
    return {
        "losses": losses,
        "same names": list(named) == [name for name, _ in other.network.named_parameters()],
        "judged": bool(torch.isfinite(training.judge(batch[0])).all()),
        "refused": refused,
    }


def main():
    torch.manual_seed(1)
    pytorch.start(CONFIG)
    found = {
        "filled": {name: filled_rows(name) for name in ("grouped", "padded")},
        "graphs": graphs(),
        "evenness": evenness(),
        "fp8": in_fp8(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
