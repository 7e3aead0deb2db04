"""Checks of `encore selftest` in the training code: the variants, comparisons and reasons to skip."""

import argparse
import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bert_squad import arrays as squad_arrays
from benchmarks.bert_squad import noise as squad_noise
from benchmarks.common.checks import selftest, trainings
from benchmarks.common.checks.agreement import Losses, Result, Tolerance, compare_losses, read_losses
from benchmarks.common.checks.selftest import Bench
from benchmarks.common.checks.trainings import Failed, Skipped
from benchmarks.common.data import manifest
from benchmarks.dlrm import blocks
from encore import catalogue, configuration


def losses_of(*epochs: list[float]) -> Losses:
    return [[(1, loss) for loss in epoch] for epoch in epochs]


FIRST, LAST = [2.0, 1.9, 1.8, 1.7, 1.0], [0.9, 0.8, 0.8, 0.8, 0.7]
LOSSES = losses_of(FIRST, LAST)

CHOICES = sorted(catalogue.choices())


def bench_of(name: str, folder: Path, device: str, **options: Any) -> Bench:
    choice = catalogue.choose(name)
    system = catalogue.find_system(choice, choice.benchmark.small_data.system, None)
    config = folder / "config.json"
    config.write_text(json.dumps(configuration.resolve(choice, system, 1, 1, []).plain()), encoding="utf-8")
    defaults = {"config": config, "data": folder, "work": folder / "work", "device": device, "gpus": 1}
    arguments = {**defaults, "launch": "", "launch_all": "", "full": None, **options}
    return Bench(selftest.suite_of(choice.implementation.module), argparse.Namespace(**arguments))


EPOCH_MEANS: Losses = [[(5, sum(FIRST) / 5)], [(5, sum(LAST) / 5)]]
LATE = losses_of(FIRST, [*LAST[:4], 1.1])
SHORTER = losses_of(FIRST[:4], LAST[:4])


@pytest.mark.parametrize(
    ("losses", "reference", "tolerance", "fewer_steps", "result"),
    [
        (LOSSES, LOSSES, (0.0, 0.0), 0, "OK"),
        (LATE, LOSSES, (0.01, 0.11), 0, "OK"),
        (LATE, LOSSES, (0.01, 0.09), 0, "FAIL"),
        (losses_of([2.1, *FIRST[1:]], LAST), LOSSES, (0.04, 0.1), 0, "FAIL"),
        (losses_of([float("nan"), *FIRST[1:]], LAST), LOSSES, (1, 1), 0, "FAIL"),
        ([LOSSES[0]], LOSSES, (1, 1), 0, "steps per epoch [5] against [5, 5]"),
        (EPOCH_MEANS, LOSSES, (0.0, 1e-9), 0, "one loss for all steps"),
        ([EPOCH_MEANS[0], [(5, 1.0)]], LOSSES, (0.0, 0.1), 0, "FAIL"),
        (SHORTER, LOSSES, (0.0, 0.2), 0, "steps per epoch [4, 4] against [5, 5]"),
        (SHORTER, LOSSES, (0.0, 0.2), 1, "OK"),
        (LOSSES, SHORTER, (0.0, 0.2), 1, "FAIL"),
    ],
)
def test_losses_are_compared_within_a_tolerance(
    losses: Losses, reference: Losses, tolerance: tuple[float, float], fewer_steps: int, result: str
) -> None:
    comparison = compare_losses(losses, reference, Tolerance(*tolerance), fewer_steps=fewer_steps)
    assert result in (comparison.result, comparison.found) or (comparison.result == "OK" and result in comparison.found)


def test_steps_are_counted_from_record_to_record(tmp_path: Path) -> None:
    records = [(1, 3, 2.0), (1, 5, 1.0), (2, 10, 0.5)]
    lines = [json.dumps({"kind": "step", "epoch": e, "step": s, "loss": x}) for e, s, x in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join(['{"kind": "start"}', *lines]), encoding="utf-8")
    assert read_losses(tmp_path) == [[(3, 2.0), (2, 1.0)], [(5, 0.5)]]


@pytest.mark.parametrize("name", CHOICES)
def test_every_value_of_a_varied_field_is_a_check(name: str, tmp_path: Path) -> None:
    bench = bench_of(name, tmp_path, "gpu")
    checks = set(selftest.checks(bench.suite, bench.base))
    assert set(selftest.FIXED) < checks
    fields = selftest.defaults(bench.suite)
    assert {entry.partition("=")[0] for entry in (*bench.suite.varied, *bench.suite.settings)} <= set(fields)
    for value in selftest.alternatives(bench.suite.config_class, "precision"):
        assert (f"precision={value}" in checks) == (value != bench.base["precision"])
    assert ("cuda_graph=true" in checks) == ("cuda_graph" in fields)
    for settings, _ in selftest.variants(bench.suite, bench.base).values():
        bench.command(settings, "a")  # Validates the configuration


@pytest.mark.parametrize("name", CHOICES)
def test_checks_that_need_a_gpu_are_skipped_with_the_reason(name: str, tmp_path: Path) -> None:
    bench = bench_of(name, tmp_path, "cpu")
    # PyTorch supports fp16 on a CPU, which some benchmarks allow; no CPU has tf32, which some frameworks lack
    has_tf32 = "tf32" in selftest.alternatives(bench.suite.config_class, "precision")
    for check, reason in (
        ("precision=tf32" if has_tf32 else "precision=fp16", "device=cpu"),
        ("defaults", "needs a GPU"),
        ("cuda_graph=true", "needs a GPU"),
        ("two ranks", "--launch"),
        ("defaults on all GPUs", "--launch-all"),
    ):
        result = selftest.check(bench, check)
        assert (result.result, reason in result.found) == ("SKIPPED", True), result


class Recorder:
    """Records the arguments of trainings and returns LOSSES."""

    def __init__(self, bench: Bench, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[dict[str, Any], tuple[str, ...], dict[str, str]]] = []
        self.bench = bench
        patch.setattr(bench, "losses", self)

    def __call__(self, settings: Any, name: str = "", launch: Any = (), environment: Any = None) -> Any:
        self.calls.append((dict(settings), tuple(launch), dict(environment or {})))
        return LOSSES

    def check(self, name: str) -> Result:
        self.calls.clear()
        return selftest.check(self.bench, name)


@pytest.mark.parametrize("name", CHOICES)
def test_settings_of_checks_on_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(name, tmp_path, "gpu", launch="torchrun --nproc-per-node=2")
    trainings, on_cpu, fields = Recorder(bench, monkeypatch), list[tuple[str, int]](), selftest.defaults(bench.suite)

    def interrupt(command: list[str], folder: Path, steps: int, environment: object) -> None:
        on_cpu.append((json.loads((folder / "config.json").read_text(encoding="utf-8"))["device"], steps))

    monkeypatch.setattr(selftest, "interrupt", interrupt)
    monkeypatch.setattr(selftest, "read_losses", lambda folder: [LOSSES[0][:3]])
    assert trainings.check("device").result == "OK"
    assert (trainings.calls, on_cpu) == ([({}, (), {})], [("cpu", selftest.CPU_STEPS)])
    defaults = trainings.check("defaults")
    assert defaults.result == "OK" and f"precision={fields['precision']}" in defaults.found
    assert trainings.calls[0][0].get("loss_scale") == fields.get("loss_scale")
    assert trainings.check("overflow").found.startswith("the training finished")
    is_dynamic = any(field.startswith("loss_scale_") for field in fields)
    in_fp16 = {"precision": "fp16", **({} if is_dynamic else {"loss_scale": 1e30})} if "loss_scale" in fields else {}
    assert trainings.calls[0][0] == {**in_fp16, "learning_rate": 1e30}
    assert (trainings.check("two ranks").result == "SKIPPED") == bool(bench.suite.shares_gpu)
    launch = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
    two_ranks = ({"batch_size": bench.base["batch_size"] // 2}, launch, {"ENCORE_BACKEND": "gloo"})
    assert trainings.calls[:1] == ([] if bench.suite.shares_gpu else [two_ranks])


@pytest.mark.parametrize(("gpus", "epochs"), [(1, 1), (2, 1), (8, 4)])
def test_defaults_run_on_all_gpus(gpus: int, epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The submitted settings with the same number of steps; on one GPU this is the training of `defaults`
    launch = f"torchrun --nproc-per-node={gpus}" if gpus > 1 else ""
    trainings = Recorder(bench_of("resnet-pytorch", tmp_path, "gpu", gpus=gpus, launch_all=launch), monkeypatch)
    trainings.bench.suite = replace(trainings.bench.suite, steps=10)
    result = trainings.check("defaults on all GPUs")
    assert result.result == "OK" and f"{gpus} rank" in result.found and "cuda_graph=" in result.found
    settings, command, _ = first = trainings.calls[0]
    assert command[3:] == ((f"--nproc-per-node={gpus}",) if gpus > 1 else ())
    assert settings.get("batch_size", 64) == (64 if gpus == 1 else 32)
    assert settings.get("epochs", selftest.EPOCHS) == selftest.EPOCHS * epochs
    assert {"compile", "cuda_graph", "precision", "kernels"} <= set(settings)
    assert trainings.check("defaults").result == "OK"
    assert (trainings.calls[0][:2] == first[:2]) == (gpus == 1)
    trainings.bench.suite = replace(trainings.bench.suite, steps=11)
    assert trainings.check("defaults on all GPUs").found.endswith("10 steps: at least 11 are needed")


HANGS = """
import faulthandler, os, pathlib, signal, sys, time
faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
folder = pathlib.Path(sys.argv[1])
(folder / "heartbeat").mkdir()
(folder / "heartbeat" / "rank_0").write_text(f"{os.getpid()} host 7 0.0 0.0")
(folder / "metrics.jsonl").write_text('{"kind": "step"}\\n{"kind": "end", "outcome": "reached"}\\n')

def leave_group():
    time.sleep(9999)

leave_group()
"""


@pytest.mark.slow
def test_process_that_does_not_exit_is_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # NCCL since 2.26 hangs if a process group is destroyed while a graph has its collectives
    monkeypatch.setattr(trainings, "EXIT_SECONDS", 0.2)
    folder = tmp_path / "training"
    folder.mkdir()
    with pytest.raises(Failed, match="a hang: still running 0 s after the end of the training") as failed:
        trainings.run([sys.executable, "-c", HANGS, str(folder)], folder, {})
    assert any("in leave_group" in line for line in failed.value.lines)
    pid = int((folder / "heartbeat" / "rank_0").read_text(encoding="ascii").split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_full_network_is_evaluated_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice, full, configs = catalogue.choose("ncf"), tmp_path / "full.json", list[dict[str, Any]]()
    submitted = configuration.resolve(choice, catalogue.find_system(choice, "dgx1", None), 1, 1, []).plain()
    full.write_text(json.dumps(submitted), encoding="utf-8")

    def measured(bench: Bench, name: str, config: dict[str, Any], loops: list[str], steps: int) -> object:
        configs.append(config)
        return {"evaluation": 1234.0}

    monkeypatch.setattr(Bench, "measured", measured)
    bench = bench_of("ncf", tmp_path, "cpu", full=full)
    assert selftest.check(bench, "evaluation").found == "1,234 samples/s with the full network"
    config = {key: tuple(value) if isinstance(value, list) else value for key, value in configs[0].items()}
    bench.suite.config_class(**config)
    submitted = json.loads(full.read_text(encoding="utf-8"))
    changed = {name for name, value in configs[0].items() if value != submitted[name]}
    assert changed <= {"device", "loss_scale", *bench.suite.varied} and config["device"] == "cpu"
    assert selftest.check(bench_of("dlrm", tmp_path, "cpu", full=full), "evaluation").found.startswith("the tables")


@pytest.mark.parametrize(
    ("output", "result"),
    [
        ("the loss is not finite at step 3: found nan", "OK"),
        ("Segmentation fault", Result("FAIL", "the training ended with exit code 1", ("Segmentation fault",))),
    ],
)
def test_overflow_must_be_reported(output: str, result: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(*arguments: object) -> object:
        (tmp_path / "output.txt").write_text(f"{output}\n", encoding="utf-8")
        raise Failed("the training ended with exit code 1", tmp_path / "output.txt")

    bench = bench_of("ncf", tmp_path, "cpu")
    monkeypatch.setattr(bench, "losses", losses)
    check = selftest.check(bench, "overflow")
    assert result in (check, check.result)


def test_refused_configuration_is_skipped(tmp_path: Path) -> None:
    with pytest.raises(Skipped, match="layers needs at least two values"):
        bench_of("ncf", tmp_path, "cpu").command({"layers": [2]}, "a")


def test_data_sets_of_published_sizes(tmp_path: Path) -> None:
    ncf, dlrm = (importlib.import_module(f"benchmarks.{name}.pytorch.selftest") for name in ("ncf", "dlrm"))
    ncf.real_sizes(tmp_path, 50, 40, 300)
    users, items = (np.load(tmp_path / f"train_{name}.npy") for name in ("users", "items"))
    assert (np.diff(users.astype(int) * 40 + items) > 0).all(), "unique pairs, sorted by user, then by item"
    assert (users.max() < 50, items.max() < 40, manifest.read(tmp_path)["facts"]["users"]) == (True, True, 50)
    dlrm.real_sizes(tmp_path, 3000, 70)
    rows = blocks.open_blocks(tmp_path / "train.bin", 3000)
    indices = rows[:, blocks.FIRST_TABLE :]
    assert (indices.min() >= 0, indices.max() < 70, set(np.unique(rows[:, 0]))) == (True, True, {0, 1})
    assert manifest.read(tmp_path)["splits"]["train"]["count"] == 3000


def test_random_data_set_for_squad(tmp_path: Path) -> None:
    squad_noise.write(tmp_path, 100, 64)
    data = squad_arrays.open_data(tmp_path)
    train = data.train
    assert (data.sequence_length, data.vocabulary.size, train.lengths.max()) == (64, 100, 64)
    assert train.lengths.min() >= squad_noise.SHORTEST
    assert (train.end < train.lengths).all() and (train.start > train.second - 1).all()
    assert len(data.questions) == len(data.test)
