"""Common code of the PyTorch implementations: ranks, sums, checkpoints, choice of an optimizer, compilation, graphs.

Two ranks make the same choice if only rank 1 lacks an implementation or fails; otherwise one would hang.
"""

import dataclasses
import datetime
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.common.checks import compare_optimizers
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.checkpoints import Checkpoints
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import capabilities, cuda_graphs, kernels, optimizers
from benchmarks.language.pytorch import attention
from tests.in_framework.torch_checks import record_collectives

RANKS = (1, 2)
pytorch.TIMEOUT = datetime.timedelta(minutes=5)
# A configuration with the field cuda_graph has a second process group.
ranks = pytorch.start(SimpleNamespace(device="cpu", precision="fp32", cuda_graph=True))
one_rank_only = pytest.mark.skipif(ranks.size > 1, reason="the same on any number of ranks")
two_ranks_only = pytest.mark.skipif(ranks.size == 1, reason="about two ranks")
is_limited = ranks.rank == 1
ADAM = (0.1, (0.9, 0.999), 1e-8)


def test_every_group_is_connected_by_every_collective(monkeypatch):
    """The default group, the one outside of graphs, and a group of rank 0."""
    if ranks.size > 1:
        pytorch.new_group([0])
    calls = set()
    record_collectives(
        monkeypatch,
        ("all_reduce", "all_to_all_single"),
        lambda name, *_, group=None, **options: calls.add((name, pytorch._groups.index(group))),
    )
    # Gloo, which ranks that share a GPU use, has only few collectives on a GPU.
    pytorch.connect(dataclasses.replace(ranks, context=torch.device("meta")))
    groups = range(0 if ranks.size == 1 else 3 - ranks.rank)
    assert calls == {(name, group) for name in ("all_reduce", "all_to_all_single") for group in groups}


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
    weight_sum = float(layer.weight.detach().sum())
    assert pytorch.total([weight_sum])[0] / ranks.size == pytest.approx(weight_sum, abs=1e-6)
    gradients = pytorch.flat_gradients(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    gradients.add_(1)
    assert layer.weight.grad.flatten().tolist() == [2] * 6


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
    for owner, name in ((torch.backends, "cudnn"), (torch.backends.cuda, "matmul")):
        monkeypatch.setattr(owner, name, SimpleNamespace(allow_tf32=allowed))
    gpu = dataclasses.replace(ranks, context=torch.device("cuda"))
    assert pytorch.arithmetic(gpu) == {"tf32": {"matmul": expected, "cudnn": expected}}
    assert pytorch.arithmetic(ranks) == {}


@one_rank_only
def test_environment_variables(tmp_path):
    names = [pytorch.error_handling(version) for version in ("2.1.0a0+32f93b1", "2.2.0", "2.13.0+cpu")]
    assert names == ["NCCL_ASYNC_ERROR_HANDLING", *["TORCH_NCCL_ASYNC_ERROR_HANDLING"] * 2]
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    pytorch.set_caches(variables)
    assert variables == {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": f"{tmp_path}/triton"}
    # NGC images allow TF32 by a variable; a train.py imports its package before PyTorch.
    program = "import benchmarks.ncf.pytorch, torch; print(torch.get_float32_matmul_precision())"
    variables = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    assert subprocess.check_output([sys.executable, "-c", program], env=variables, text=True) == "highest\n"


def test_fastest_optimizer_is_chosen():
    parameters = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match=r"use auto or one of \['fused', 'plain'\]"):
        optimizers.choose(optimizers.adam_candidates(*ADAM, optimizers.find_apex()), parameters, "apex")
    apex = SimpleNamespace(FusedAdam=lambda given, adam_w_mode, weight_decay, **options: torch.optim.Adam(given))
    with_apex = optimizers.adam_candidates(*ADAM, apex)
    for fastest, build in with_apex.items():
        choice = optimizers.choose(with_apex, parameters, measure=lambda other, _, build=build: float(other != build))
        assert choice[0] == fastest


@one_rank_only
def test_wrong_optimizer_implementation_is_named(capsys):
    candidates = optimizers.adam_candidates(0.01, *ADAM[1:], None)
    candidates["apex"] = lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01)
    assert compare_optimizers.main() == 0
    assert capsys.readouterr().out.startswith("fused, plain on c")
    assert compare_optimizers.find_differing(candidates, "cpu") == ["apex"]


@one_rank_only
@pytest.mark.parametrize("killed", [False, True])
def test_first_rank_of_a_node_compiles_first(monkeypatch, tmp_path, killed):
    """If it is killed, the other ranks do not wait for it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    context, log = multiprocessing.get_context("fork"), tmp_path / "ranks"
    monkeypatch.setattr(pytorch, "barrier", context.Barrier(3).wait)

    def compile_on(rank):
        if rank == 0:
            time.sleep(0.5)  # long enough for a rank that does not wait to write its line
            if killed:
                signal.raise_signal(signal.SIGKILL)
        with log.open("a", encoding="ascii") as file:
            print(rank, file=file)

    processes = [
        context.Process(target=capabilities.compile_in_turns, args=(partial(compile_on, ranks.rank), ranks))
        for ranks in (Ranks(rank, 3, rank, 3, torch.device("cpu")) for rank in range(3))
    ]
    for act in (context.Process.start, context.Process.join):
        for process in processes:
            act(process)
    first, *others = [*["0"] * killed, *log.read_text(encoding="ascii").split()]
    assert (first, sorted(others)) == ("0", ["1", "2"])


def test_checkpoint_has_shared_and_per_rank_state(together):
    logs = [together / name for name in ("result.txt", "metrics.jsonl")]
    for log in logs:
        log.touch()
    writer, reader = (Checkpoints(together / "checkpoint", logs, pytorch, ranks) for _ in range(2))
    assert writer.find() == {}
    rank_state = {"rank": ranks.rank, "input": b"\0\xff"}
    writer.save(13, {"step": 13}, lambda: {"weight": torch.arange(3)}, lambda: rank_state)
    expected = torch.rand(2).tolist()
    assert reader.find()["step"] == 13
    saved = reader.load()
    assert saved.pop("weight").tolist() == [0, 1, 2]
    assert (saved, torch.rand(2).tolist()) == (rank_state, expected), "random generators resume"


def test_stream_wait_adds_up_the_fetches_of_a_cuda_stream(monkeypatch):
    # Each event is ready; the last pair only after it was synchronized
    times = iter((500.0, 1000.0, 2000.0))
    events = [mock.Mock(**{"query.return_value": number < 4, "elapsed_time.side_effect": lambda _: next(times)})
              for number in range(6)]  # fmt: skip
    monkeypatch.setattr(torch.cuda, "Event", mock.Mock(side_effect=events))
    wait = pytorch.input_wait(SimpleNamespace(context=torch.device("cuda")))
    for _ in range(3):
        wait.fetch(lambda: None)
    assert (wait.total, wait.take(), wait.total, wait.take()) == (1.5, 3.5, 3.5, 0.0)
    assert events[5].synchronize.called


# -- choices of two ranks -------------------------------------------------------------------------------------


def loss(rows):
    return rows + 1


def measure():
    if is_limited:
        raise OverflowError("out of resource")
    return 1e-9


@two_ranks_only
def test_kernel_that_fails_on_one_rank_is_not_chosen():
    choice, notes = kernels.fastest({"plain": lambda: 1.0, "triton": measure}, ranks.context)
    assert choice == "plain"
    assert notes["triton"].endswith("out of resource" if is_limited else "fails on 1 other ranks")
    with pytest.raises(ValueError, match="no implementation runs on all ranks"):
        kernels.fastest({"triton": measure}, ranks.context)


@two_ranks_only
def test_triton_is_chosen_on_all_ranks_or_none(monkeypatch):
    monkeypatch.setattr(kernels, "why_plain", lambda _: "Triton is not installed" if is_limited else "")
    operators = {"loss": kernels.Operator(loss, "", lambda *_: None, ())}
    assert kernels.choose(operators, "auto", ranks, torch.float32, {}) == {"loss": "plain"}
    operators["loss"] = operators["loss"]._replace(triton=f"{__name__}:loss")
    with pytest.raises(ValueError, match="kernels=triton"):
        kernels.choose(operators, "triton", ranks, torch.float32, {})


@two_ranks_only
def test_optimizer_must_be_available_on_every_rank():
    candidates = {"plain": torch.optim.Adam, **({} if is_limited else {"fused": torch.optim.AdamW})}
    parameters, times = [torch.nn.Parameter(torch.ones(2))], {candidates["plain"]: 1.0}
    assert optimizers.choose(candidates, parameters, "auto", lambda build, _: times.get(build, 0.5))[0] == "plain"
    with pytest.raises(ValueError, match="optimizer_kernel=fused"):
        optimizers.choose(candidates, parameters, "fused")


@two_ranks_only
def test_attention_and_compiler_must_be_available_on_every_rank(monkeypatch):
    monkeypatch.setattr(attention, "why_not", lambda *_: "no flash attention" if is_limited else "")
    gpu = (SimpleNamespace(type="cuda"), torch.float16, 64, ranks.rank)
    assert attention.choose("auto", *gpu) == "padded"
    with pytest.raises(ValueError, match="no flash attention" if is_limited else "not on every rank"):
        attention.choose("flash", *gpu)
    monkeypatch.setitem(capabilities.LACKS, "compile", lambda _: "no Triton" if is_limited else None)
    assert capabilities._choose("compile", "auto", "default", "none", ranks) == "none"
    with pytest.raises(ValueError, match="compile=default"):
        capabilities._choose("compile", "default", "default", "none", ranks)


# -- the end --------------------------------------------------------------------------------------------------


def test_graphs_are_reset_before_the_process_group_is_destroyed(monkeypatch):
    """NCCL waits forever for graphs with kernels of a destroyed communicator."""
    calls = mock.Mock()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=mock.Mock(), reset=calls.reset))
    for name in ("Stream", "current_stream", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    increment = (lambda tensor: tensor + 1, [torch.zeros(1)], lambda tensor: None)
    referenced = [cuda_graphs.Captured(*increment) for _ in range(2)]
    cuda_graphs.Captured(*increment)
    for owner, name in ((pytorch, "synchronize"), (dist, "barrier"), (dist, "destroy_process_group")):
        calls.attach_mock(mock.Mock(wraps=getattr(owner, name)), name)
        monkeypatch.setattr(owner, name, getattr(calls, name))
    pytorch.finish()
    assert len(referenced) == 2
    expected = ["barrier", "destroy_process_group"] if ranks.size > 1 else []
    assert [call[0] for call in calls.mock_calls] == ["synchronize", "reset", "reset", "synchronize", *expected]
