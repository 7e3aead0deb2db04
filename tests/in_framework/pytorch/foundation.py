"""Common code of the PyTorch implementations: ranks, sums, checkpoints, choice of an optimizer, compilation, graphs."""

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
from benchmarks.common.torch import capabilities, cuda_graphs, optimizers
from tests.in_framework.held import record_collectives

RANKS = (1, 2)
# A configuration with the field cuda_graph has a second process group.
ranks = pytorch.start(SimpleNamespace(device="cpu", precision="fp32", cuda_graph=True))
one_rank_only = pytest.mark.skipif(ranks.size > 1, reason="the same on any number of ranks")
ADAM = (0.1, (0.9, 0.999), 1e-8)


def test_every_group_is_connected_by_every_collective(monkeypatch):
    """The default group, the one outside of graphs, and a group of rank 0."""
    if ranks.size > 1:
        pytorch.new_group([0])
    groups = {}

    def record(name, *arguments, group=None, **options):
        groups.setdefault(name, set()).add(pytorch._groups.index(group))

    record_collectives(monkeypatch, ("all_reduce", "all_to_all_single"), record)
    # Gloo, which ranks that share a GPU use, has only few collectives on a GPU.
    pytorch.connect(dataclasses.replace(ranks, context=torch.device("meta")))
    expected = {0, 1, 2} if ranks.rank == 0 else {0, 1}
    assert groups == ({"all_reduce": expected, "all_to_all_single": expected} if ranks.size > 1 else {})


def test_ranks_and_sums():
    assert (ranks.size, ranks.local_size) == (int(os.environ.get("WORLD_SIZE", "1")),) * 2
    sums = pytorch.LaggedSums(ranks, "step")
    received = [sums.send(torch.tensor(float(step)), step == 2 and ranks.rank == 0) for step in range(4)]
    expected = [[float(ranks.size * step), float(step == 2)] for step in range(4)]
    assert [*received, *sums.drain()] == [None, None, *expected]
    assert pytorch.total(torch.tensor([1.0 + ranks.rank])) == [ranks.size + sum(range(ranks.size))]


def test_weights_are_broadcast_and_gradients_are_views_of_one_tensor():
    torch.manual_seed(ranks.rank)
    layer = torch.nn.Linear(3, 2)
    pytorch.broadcast(layer.parameters())
    weight_sum = layer.weight.detach().sum()
    assert pytorch.total(weight_sum[None])[0] / ranks.size == pytest.approx(float(weight_sum), abs=1e-6)
    gradients = pytorch.flat_gradients(layer.parameters())
    layer(torch.ones(1, 3) * (ranks.rank + 1)).sum().backward()
    gradients.copy_(torch.tensor(pytorch.total(gradients)))
    assert layer.weight.grad.flatten().tolist() == pytest.approx([sum(range(1, ranks.size + 1))] * 6)
    gradients.zero_()
    assert not layer.weight.grad.any()


@one_rank_only
@pytest.mark.parametrize(
    ("tasks", "rank", "node", "local_size"),
    [("4(x2)", 5, "", 4), ("8,4", 7, "", 8), ("8,4", 9, "", 4), ("2(x3),1", 6, "", 1), ("2,1", 1, "1", 1)],
)
def test_ranks_per_node_of_slurm(tasks, rank, node, local_size):
    variables = {"SLURM_NTASKS": "12", "SLURM_TASKS_PER_NODE": tasks, "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}
    assert pytorch.read_place({**variables, "SLURM_NODEID": node, "MASTER_ADDR": "n1"}) == (rank, 12, 0, local_size)


@pytest.mark.parametrize(
    ("capability", "allowed", "expected"), [((9, 0), False, False), ((9, 0), True, True), ((7, 0), True, False)]
)
def test_tf32_is_reported(monkeypatch, capability, allowed, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    flags = SimpleNamespace(allow_tf32=allowed)
    monkeypatch.setattr(torch.backends, "cudnn", flags)
    monkeypatch.setattr(torch.backends.cuda, "matmul", flags)
    gpu = dataclasses.replace(ranks, context=torch.device("cuda"))
    assert pytorch.arithmetic(gpu) == {"tf32": {"matmul": expected, "cudnn": expected}}
    assert pytorch.arithmetic(ranks) == {}


@one_rank_only
def test_environment_variables(tmp_path):
    names = [pytorch.error_handling(version) for version in ("2.1.0a0+32f93b1", "2.2.0", "2.13.0+cpu")]
    assert names == ["NCCL_ASYNC_ERROR_HANDLING", *["TORCH_NCCL_ASYNC_ERROR_HANDLING"] * 2]
    cache = str(tmp_path / "cache")
    default, custom = {}, {"TORCHINDUCTOR_CACHE_DIR": cache}
    pytorch.set_caches(default)
    pytorch.set_caches(custom)
    folder = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    assert default == {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
    assert custom == {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    # NGC images allow TF32 by a variable; a train.py imports its package before PyTorch.
    program = "import benchmarks.ncf.pytorch, torch; print(torch.get_float32_matmul_precision())"
    variables = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    assert subprocess.check_output([sys.executable, "-c", program], env=variables, text=True) == "highest\n"


def test_fastest_optimizer_is_chosen():
    parameters = [torch.nn.Parameter(torch.ones(3))]
    candidates = optimizers.adam_candidates(*ADAM, optimizers.find_apex())
    assert sorted(candidates) == ["fused", "plain"]
    assert optimizers.choose(candidates, parameters)[0] in candidates
    with pytest.raises(ValueError, match=r"use auto or one of \['fused', 'plain'\]"):
        optimizers.choose(candidates, parameters, "apex")
    apex = SimpleNamespace(FusedAdam=lambda given, adam_w_mode, weight_decay, **options: torch.optim.Adam(given))
    with_apex = optimizers.adam_candidates(*ADAM, apex)
    for fastest in with_apex:
        times = {build: float(name != fastest) for name, build in with_apex.items()}
        choice = optimizers.choose(with_apex, parameters, measure=lambda build, _: times[build])  # noqa: B023
        assert choice[0] == fastest


@one_rank_only
def test_wrong_optimizer_implementation_is_named(capsys):
    candidates = optimizers.adam_candidates(0.01, (0.9, 0.999), 1e-8, None)
    candidates["apex"] = lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01)
    assert compare_optimizers.main() == 0
    assert capsys.readouterr().out.startswith("fused, plain on c")
    assert compare_optimizers.find_differing(candidates, "cpu") == ["apex"]


@one_rank_only
@pytest.mark.parametrize("killed", [False, True])
def test_first_rank_of_a_node_compiles_first(monkeypatch, tmp_path, killed):
    """If it is killed, the other ranks do not wait for it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(pytorch, "barrier", context.Barrier(3).wait)

    def compile_on(rank):
        with (tmp_path / "lines").open("a", encoding="ascii") as file:
            print(f"{rank} begins", file=file, flush=True)
            if rank == 0:
                time.sleep(0.5)  # long enough for a rank that does not wait to write its line
                if killed:
                    signal.raise_signal(signal.SIGKILL)
                if os.fork() == 0:  # like the processes of a compiler, which inherit open files
                    time.sleep(5)
                    os._exit(0)
            print(f"{rank} ends", file=file, flush=True)

    def run(rank):
        capabilities.compile_in_turns(lambda: compile_on(rank), Ranks(rank, 3, rank, 3, torch.device("cpu")))

    processes = [context.Process(target=run, args=(rank,)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    lines, count = (tmp_path / "lines").read_text(encoding="ascii").splitlines(), 1 if killed else 2
    assert lines[:count] == ["0 begins", "0 ends"][:count]
    assert sorted(lines[count:]) == ["1 begins", "1 ends", "2 begins", "2 ends"]


def test_checkpoint_has_shared_and_per_rank_state(together):
    logs = [together / name for name in ("result.txt", "metrics.jsonl")]
    for log in logs:
        log.touch()
    writer, reader = (Checkpoints(together / "checkpoint", logs, pytorch, ranks) for _ in range(2))
    assert writer.find() == {}
    rank_state, weight = {"rank": ranks.rank, "input": b"\0\xff"}, torch.rand(3)
    writer.save(13, {"step": 13}, lambda: {"weight": weight}, lambda: rank_state)
    expected = torch.rand(2).tolist()
    assert reader.find()["step"] == 13
    saved = reader.load()
    shared = saved.pop("weight")
    assert saved == rank_state
    assert ranks.rank or torch.equal(shared, weight)
    assert torch.rand(2).tolist() == expected, "random generators resume"


def test_stream_wait_adds_up_the_fetches_of_a_cuda_stream(monkeypatch):
    clock = SimpleNamespace(now=0.0)

    class Event:  # A stream without a delay; the last event is ready only after it was synchronized
        def __init__(self, enable_timing):
            self.is_ready = enable_timing

        def record(self):
            self.at, self.is_ready = clock.now, clock.now < 3.0

        def query(self):
            return self.is_ready

        def synchronize(self):
            self.is_ready = True

        def elapsed_time(self, other):
            return 1000 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    wait = pytorch.input_wait(SimpleNamespace(context=torch.device("cuda")))
    for seconds in (0.5, 1.0, 2.0):
        assert wait.fetch(lambda seconds=seconds: setattr(clock, "now", clock.now + seconds)) is None
    assert (wait.total, wait.take(), wait.total, wait.take()) == (1.5, 3.5, 3.5, 0.0)


def test_graphs_are_reset_before_the_process_group_is_destroyed(monkeypatch):
    """NCCL waits forever for graphs with kernels of a destroyed communicator."""
    calls, stream = [], SimpleNamespace(wait_stream=lambda other: None)

    class Graph:
        """A CUDA graph without a device."""

        def pool(self):
            return None

        def reset(self):
            calls.append("reset")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: nullcontext())
    increment = (lambda tensor: tensor + 1, [torch.zeros(1)], lambda tensor: None)
    referenced = [cuda_graphs.Captured(*increment) for _ in range(2)]
    cuda_graphs.Captured(*increment)

    def record(name, function):
        return lambda *arguments, **options: (calls.append(name), function(*arguments, **options))[1]

    for owner, name in ((pytorch, "synchronize"), (dist, "barrier"), (dist, "destroy_process_group")):
        monkeypatch.setattr(owner, name, record(name, getattr(owner, name)))
    pytorch.finish()
    assert len(referenced) == 2
    expected = ["barrier", "destroy_process_group"] if ranks.size > 1 else []
    assert calls == ["synchronize", "reset", "reset", "synchronize", *expected]
