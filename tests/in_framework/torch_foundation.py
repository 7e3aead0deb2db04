"""Sums, gradients, checkpoints and the choice of an optimizer in PyTorch; run on any number of ranks.

The only argument is an empty folder. Rank 0 prints what it found as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.checkpoints import Checkpoints
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import abilities, cuda_graphs, optimizers


def apex_stand_in() -> object:
    class Apex:
        """Has the two optimizers that are asked for, as apex has."""

        @staticmethod
        def FusedAdam(parameters, adam_w_mode, weight_decay, **options):
            return torch.optim.Adam(parameters, **options)

    return Apex


def captured(order: list[str]) -> cuda_graphs.Captured:
    """A graph on a device that is not there, which notes its end."""

    class Graph:
        def pool(self):
            return None

        def reset(self):
            order.append("reset")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    stands_for = {
        "CUDAGraph": Graph,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: nullcontext(),
        "graph": lambda graph, **options: nullcontext(),
    }
    with mock.patch.multiple(torch.cuda, **stands_for):
        return cuda_graphs.Captured(lambda tensor: tensor + 1, [torch.zeros(1)], lambda tensor: None)


def finished() -> list[str]:
    """Leave the group with two graphs alive and one gone; what was called in which order."""
    order: list[str] = []
    kept, _ = [captured(order), captured(order)], captured([])

    def noted(name, call):
        return lambda *arguments, **options: (order.append(name), call(*arguments, **options))[1]

    with (
        mock.patch.object(pytorch, "synchronize", noted("synchronize", pytorch.synchronize)),
        mock.patch.object(dist, "barrier", noted("barrier", dist.barrier)),
        mock.patch.object(dist, "destroy_process_group", noted("destroy", dist.destroy_process_group)),
    ):
        pytorch.finish()
    assert len(kept) == 2
    return order


@contextmanager
def collectives():
    """The groups of each kind of collective inside, as places in pytorch's list."""
    seen: dict[str, set[int]] = {}
    with mock.patch.multiple(dist, **{name: noted_group(name, seen) for name in ("all_reduce", "all_to_all_single")}):
        yield seen


def noted_group(name, seen):
    call = getattr(dist, name)

    def noted(*arguments, group=None, **options):
        seen.setdefault(name, set()).add(pytorch._groups.index(group))
        return call(*arguments, group=group, **options)

    return noted


def turns(folder: Path, first_dies: bool) -> list[str]:
    """What three ranks of a node wrote while they compiled in turns; the first one may be killed at it."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    everyone, lines = multiprocessing.Barrier(3), folder / "lines"
    folder.mkdir()

    def compiles(rank: int) -> None:
        with lines.open("a", encoding="ascii") as file:
            print(f"{rank} begins", file=file, flush=True)
            if rank == 0:
                time.sleep(0.5)  # so that another one that does not wait comes between
                if first_dies:
                    signal.raise_signal(signal.SIGKILL)
                if os.fork() == 0:  # as a compiler's own processes, which keep files open
                    time.sleep(5)
                    os._exit(0)
            print(f"{rank} ends", file=file, flush=True)

    def run(rank: int) -> None:
        with mock.patch.object(pytorch, "barrier", everyone.wait):
            abilities.compile_in_turns(lambda: compiles(rank), Ranks(rank, 3, rank, 3, torch.device("cpu")))

    processes = [multiprocessing.get_context("fork").Process(target=run, args=(rank,)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    return lines.read_text(encoding="ascii").splitlines()


def main() -> None:
    # With the name that a configuration has whose steps may be captured.
    ranks = pytorch.start(SimpleNamespace(device="cpu", precision="fp32", cuda_graph=True))
    found = {"size": ranks.size, "local size": ranks.local_size}
    if ranks.size == 1:
        found["turns"] = [turns(Path(sys.argv[1]) / f"turns_{dies}", dies) for dies in (False, True)]
    pytorch.new_group([0]) if ranks.size > 1 else None
    with collectives() as seen:
        # Ranks that share a GPU are connected by Gloo, which has few collectives there: it is asked for none.
        pytorch.connect(dataclasses.replace(ranks, context=torch.device("meta")))
    found["connected"] = {name: sorted(groups) for name, groups in seen.items()}
    found["old and new name"] = [pytorch.error_handling(each) for each in ("2.1.0a0+32f93b1", "2.2.0", "2.13.0+cpu")]
    found["caches"] = [{}, {"TORCHINDUCTOR_CACHE_DIR": "/cache"}]
    for each in found["caches"]:
        pytorch.set_caches(each)
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

    gpu = dataclasses.replace(ranks, context=torch.device("cuda"))
    found["arithmetic"] = [pytorch.arithmetic(ranks)]
    for capability, wanted in (((9, 0), False), ((9, 0), True), ((7, 0), True)):
        torch.cuda.get_device_capability = lambda _, capability=capability: capability
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = wanted
        found["arithmetic"].append(pytorch.arithmetic(gpu))

    parameters = list(layer.parameters())
    candidates = optimizers.adam_candidates(0.1, (0.9, 0.999), 1e-8, optimizers.find_apex())
    found["candidates"] = sorted(candidates)
    found["chosen"] = optimizers.choose(candidates, parameters)[0]
    with_apex = optimizers.adam_candidates(0.1, (0.9, 0.999), 1e-8, apex_stand_in())
    times = {"apex": 1.0, "fused": 2.0, "plain": 3.0}
    builds = {id(build): name for name, build in with_apex.items()}
    for winner in ("apex", "fused"):
        times[winner] = 0.5 - 0.1 * (winner == "fused")
        name, _ = optimizers.choose(with_apex, parameters, measure=lambda build, _: times[builds[id(build)]])
        found[f"{winner} measured best"] = name
    try:
        optimizers.choose(candidates, parameters, "apex")
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
    found["end"] = finished()
    if ranks.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
