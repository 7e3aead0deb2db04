"""Sums, gradients, checkpoints and the choice of an optimizer in PyTorch; run on any number of ranks.

The only argument is an empty folder. Rank 0 prints what it found as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.common import torch_optimizers
from benchmarks.common.checkpoints import Checkpoints
from benchmarks.common.frameworks import pytorch


def apex_stand_in() -> object:
    class Apex:
        """Has the two optimizers that are asked for, as apex has."""

        @staticmethod
        def FusedAdam(parameters, adam_w_mode, weight_decay, **options):
            return torch.optim.Adam(parameters, **options)

    return Apex


def main() -> None:
    ranks = pytorch.start(SimpleNamespace(device="cpu", precision="fp32"))
    found = {"size": ranks.size, "local size": ranks.local_size}
    sums = pytorch.LaggedSums(ranks, "step")
    received = [sums.send(torch.tensor(float(step)), step == 2 and ranks.rank == 0) for step in range(4)]
    found["lagged sums"] = [*received, *sums.drain()]
    found["total"] = pytorch.total(torch.tensor([1.0 + ranks.rank]))
    torch.manual_seed(ranks.rank)
    layer = torch.nn.Linear(3, 2)
    pytorch.broadcast(layer.parameters())
    mine = layer.weight.detach().sum()
    found["weights apart"] = pytorch.total(mine[None])[0] / ranks.size - float(mine)
    buffer = pytorch.GradientBuffer(layer.parameters())
    layer(torch.ones(1, 3) * (ranks.rank + 1)).sum().backward()
    buffer.sum()
    found["summed gradient"] = layer.weight.grad.reshape(-1).tolist()[0]
    buffer.zero()
    found["cleared"] = float(layer.weight.grad.abs().sum())

    parameters = list(layer.parameters())
    candidates = torch_optimizers.adam_candidates(0.1, (0.9, 0.999), 1e-8, torch_optimizers.find_apex())
    found["candidates"] = sorted(candidates)
    found["chosen"] = torch_optimizers.choose(candidates, parameters)[0]
    with_apex = torch_optimizers.adam_candidates(0.1, (0.9, 0.999), 1e-8, apex_stand_in())
    times = {"apex": 1.0, "fused": 2.0, "plain": 3.0}
    builds = {id(build): name for name, build in with_apex.items()}
    for winner in ("apex", "fused"):
        times[winner] = 0.5 - 0.1 * (winner == "fused")
        name, _ = torch_optimizers.choose(with_apex, parameters, measure=lambda build, _: times[builds[id(build)]])
        found[f"{winner} measured best"] = name
    try:
        torch_optimizers.choose(candidates, parameters, "apex")
    except ValueError as error:
        found["refusal"] = str(error)

    output = Path(sys.argv[1])
    for name in ("result.txt", "metrics.jsonl"):
        (output / name).touch()
    pytorch.barrier()
    logs = [output / name for name in ("result.txt", "metrics.jsonl")]
    first, again = (Checkpoints(output / "checkpoint", logs, pytorch, ranks) for _ in range(2))
    found["found at first"] = first.find()
    own = {"mine": ranks.rank, "input": b"\0\xff"}
    first.save(13, {"step": 13}, lambda: {"weight": layer.weight.detach()}, lambda: own)
    expected = torch.rand(2).tolist()
    found["step found again"] = again.find()["step"]
    content = again.load()
    found["same weights"] = bool(torch.equal(content["weight"], layer.weight))
    found["own"] = {name: content[name] for name in own} == own
    found["same random numbers"] = torch.rand(2).tolist() == expected
    if ranks.rank == 0:
        print(json.dumps(found))
    pytorch.finish()


if __name__ == "__main__":
    main()
