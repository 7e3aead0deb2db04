"""What all PyTorch implementations share: ranks, sums, checkpoints, the choice of an optimizer, compilers, graphs."""

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from benchmarks.common.checks import compare_optimizers
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.checkpoints import Checkpoints
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import abilities, cuda_graphs, optimizers

RANKS = (1, 2)
# With the name that a configuration has whose steps may be captured.
ranks = pytorch.start(SimpleNamespace(device="cpu", precision="fp32", cuda_graph=True))
alone = pytest.mark.skipif(ranks.size > 1, reason="the same on any number of ranks")
ADAM = (0.1, (0.9, 0.999), 1e-8)


def test_each_group_is_connected_by_each_kind_of_collective(monkeypatch):
    """That of all ranks, that of what no graph holds, and one of rank 0's own."""
    if ranks.size > 1:
        pytorch.new_group([0])
    seen = {}

    def noted(name, call):
        def collective(*arguments, group=None, **options):
            seen.setdefault(name, set()).add(pytorch._groups.index(group))
            return call(*arguments, group=group, **options)

        return collective

    for name in ("all_reduce", "all_to_all_single"):
        monkeypatch.setattr(dist, name, noted(name, getattr(dist, name)))
    # Ranks that share a GPU are connected by Gloo, which has few collectives there: it is asked for none.
    pytorch.connect(dataclasses.replace(ranks, context=torch.device("meta")))
    groups = {0, 1, 2} if ranks.rank == 0 else {0, 1}
    assert seen == ({"all_reduce": groups, "all_to_all_single": groups} if ranks.size > 1 else {})


def test_ranks_and_sums():
    assert (ranks.size, ranks.local_size) == (int(os.environ.get("WORLD_SIZE", "1")),) * 2
    sums = pytorch.LaggedSums(ranks, "step")
    received = [sums.send(torch.tensor(float(step)), step == 2 and ranks.rank == 0) for step in range(4)]
    expected = [[float(ranks.size * step), float(step == 2)] for step in range(4)]
    assert [*received, *sums.drain()] == [None, None, *expected]
    assert pytorch.total(torch.tensor([1.0 + ranks.rank])) == [ranks.size + sum(range(ranks.size))]


def test_rank_0_gives_its_weights_and_gradients_are_summed():
    torch.manual_seed(ranks.rank)
    layer = torch.nn.Linear(3, 2)
    pytorch.broadcast(layer.parameters())
    mine = layer.weight.detach().sum()
    assert pytorch.total(mine[None])[0] / ranks.size == pytest.approx(float(mine), abs=1e-6)
    gradients = pytorch.flat_gradients(layer.parameters())
    layer(torch.ones(1, 3) * (ranks.rank + 1)).sum().backward()
    gradients.copy_(torch.tensor(pytorch.total(gradients)))
    assert layer.weight.grad.flatten().tolist() == pytest.approx([sum(range(1, ranks.size + 1))] * 6)
    gradients.zero_()
    assert not layer.weight.grad.any()


@alone
@pytest.mark.parametrize(
    ("capability", "wanted", "has"), [((9, 0), False, False), ((9, 0), True, True), ((7, 0), True, False)]
)
def test_arithmetic_in_force_is_reported(monkeypatch, capability, wanted, has):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    flags = SimpleNamespace(allow_tf32=wanted)
    monkeypatch.setattr(torch.backends, "cudnn", flags)
    monkeypatch.setattr(torch.backends.cuda, "matmul", flags)
    gpu = dataclasses.replace(ranks, context=torch.device("cuda"))
    assert pytorch.arithmetic(gpu) == {"tf32": {"matmul": has, "cudnn": has}}
    assert pytorch.arithmetic(ranks) == {}


@alone
def test_variables_for_libraries():
    names = [pytorch.error_handling(each) for each in ("2.1.0a0+32f93b1", "2.2.0", "2.13.0+cpu")]
    assert names == ["NCCL_ASYNC_ERROR_HANDLING", *["TORCH_NCCL_ASYNC_ERROR_HANDLING"] * 2]
    default, given = {}, {"TORCHINDUCTOR_CACHE_DIR": "/cache"}
    pytorch.set_caches(default)
    pytorch.set_caches(given)
    folder = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    assert default == {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
    assert given == {"TORCHINDUCTOR_CACHE_DIR": "/cache", "TRITON_CACHE_DIR": "/cache/triton"}


@alone
def test_an_images_choice_of_tf32_is_not_that_of_the_training():
    """NGC's images set the variable, and `precision` decides; a `train.py` imports its package before PyTorch."""
    program = "import benchmarks.ncf.pytorch, torch; print(torch.get_float32_matmul_precision())"
    variables = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    assert subprocess.check_output([sys.executable, "-c", program], env=variables, text=True) == "highest\n"


def test_optimizer_is_chosen_by_asking_and_measuring():
    parameters = [torch.nn.Parameter(torch.ones(3))]
    candidates = optimizers.adam_candidates(*ADAM, optimizers.find_apex())
    assert sorted(candidates) == ["fused", "plain"]
    assert optimizers.choose(candidates, parameters)[0] in candidates
    with pytest.raises(ValueError, match=r"use auto or one of \['fused', 'plain'\]"):
        optimizers.choose(candidates, parameters, "apex")
    apex = SimpleNamespace(FusedAdam=lambda given, adam_w_mode, weight_decay, **options: torch.optim.Adam(given))
    with_apex = optimizers.adam_candidates(*ADAM, apex)
    for best in with_apex:
        times = {build: float(name != best) for name, build in with_apex.items()}
        assert optimizers.choose(with_apex, parameters, measure=lambda build, _: times[build])[0] == best  # noqa: B023


@alone
def test_a_wrong_implementation_of_an_optimizer_is_named(capsys):
    right = optimizers.adam_candidates(0.01, (0.9, 0.999), 1e-8, None)
    wrong = {**right, "apex": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01)}
    assert compare_optimizers.main() == 0
    assert capsys.readouterr().out.startswith("fused, plain on c")
    assert compare_optimizers.differing(wrong, "cpu") == ["apex"]


@alone
@pytest.mark.parametrize("first_dies", [False, True])
def test_the_first_rank_of_a_node_compiles_first(monkeypatch, tmp_path, first_dies):
    """And nobody waits for one that was killed."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    context = multiprocessing.get_context("fork")
    everyone, lines = context.Barrier(3), tmp_path / "lines"
    monkeypatch.setattr(pytorch, "barrier", everyone.wait)

    def compiles(rank):
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

    def run(rank):
        abilities.compile_in_turns(lambda: compiles(rank), Ranks(rank, 3, rank, 3, torch.device("cpu")))

    processes = [context.Process(target=run, args=(rank,)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found, first = lines.read_text(encoding="ascii").splitlines(), 1 if first_dies else 2
    assert found[:first] == ["0 begins", "0 ends"][:first]
    assert sorted(found[first:]) == ["1 begins", "1 ends", "2 begins", "2 ends"]


def test_a_checkpoint_has_what_all_and_what_each_rank_saved(together):
    logs = [together / name for name in ("result.txt", "metrics.jsonl")]
    for log in logs:
        log.touch()
    first, again = (Checkpoints(together / "checkpoint", logs, pytorch, ranks) for _ in range(2))
    assert first.find() == {}
    own, weight = {"mine": ranks.rank, "input": b"\0\xff"}, torch.rand(3)
    first.save(13, {"step": 13}, lambda: {"weight": weight}, lambda: own)
    expected = torch.rand(2).tolist()
    assert again.find()["step"] == 13
    saved = again.load()
    shared = saved.pop("weight")
    assert saved == own
    assert ranks.rank or torch.equal(shared, weight)
    assert torch.rand(2).tolist() == expected, "the generators resume"


def test_graphs_are_let_go_before_the_group(monkeypatch):
    """NCCL waits without end for graphs that hold kernels of a communicator which is destroyed."""
    order, stream = [], SimpleNamespace(wait_stream=lambda other: None)

    class Graph:
        """A graph on a device that is not there, which notes its end."""

        def pool(self):
            return None

        def reset(self):
            order.append("reset")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: nullcontext())
    increment = (lambda tensor: tensor + 1, [torch.zeros(1)], lambda tensor: None)
    kept = [cuda_graphs.Captured(*increment) for _ in range(2)]
    cuda_graphs.Captured(*increment)

    def noted(name, call):
        return lambda *arguments, **options: (order.append(name), call(*arguments, **options))[1]

    for owner, name in ((pytorch, "synchronize"), (dist, "barrier"), (dist, "destroy_process_group")):
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    pytorch.finish()
    assert len(kept) == 2
    ended = ["barrier", "destroy_process_group"] if ranks.size > 1 else []
    assert order == ["synchronize", "reset", "reset", "synchronize", *ended]
