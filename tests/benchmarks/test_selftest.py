"""The checks of `encore selftest` on the training code's side: what they vary, compare and skip."""

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
from benchmarks.common.checks.agreement import Losses, Result, Tolerance, compared, read_losses
from benchmarks.common.checks.selftest import Bench
from benchmarks.common.checks.trainings import Failed, Skipped
from benchmarks.common.data import passport
from benchmarks.dlrm import blocks
from encore import catalogue, configuration


def each_step(*epochs: list[float]) -> Losses:
    return [[(1, loss) for loss in epoch] for epoch in epochs]


FIRST, LAST = [2.0, 1.9, 1.8, 1.7, 1.0], [0.9, 0.8, 0.8, 0.8, 0.7]
LOSSES = each_step(FIRST, LAST)

CHOICES = sorted(catalogue.choices())


def bench_of(name: str, folder: Path, device: str, **more: Any) -> Bench:
    choice = catalogue.choose(name)
    system = catalogue.find_system(choice, choice.benchmark.small_data.system, None)
    config = folder / "config.json"
    config.write_text(json.dumps(configuration.resolve(choice, system, 1, 1, []).plain()), encoding="utf-8")
    options = {"config": config, "data": folder, "work": folder / "work", "device": device, "gpus": 1, "launch": ""}
    options |= {"launch_all": "", "full": None}
    return Bench(selftest.suite_of(choice.implementation.module), argparse.Namespace(**{**options, **more}))


def test_losses_that_agree_and_that_do_not() -> None:
    assert compared(LOSSES, LOSSES, Tolerance(0.0, 0.0)).result == "OK"
    late = each_step(FIRST, [0.9, 0.8, 0.8, 0.8, 1.1])
    assert compared(late, LOSSES, Tolerance(0.01, 0.11)).result == "OK"
    assert compared(late, LOSSES, Tolerance(0.01, 0.09)).result == "FAIL"
    first = each_step([2.1, *FIRST[1:]], LAST)
    assert compared(first, LOSSES, Tolerance(0.04, 0.1)).result == "FAIL"
    assert compared([LOSSES[0]], LOSSES, Tolerance(1, 1)).found == "steps per epoch [5] against [5, 5]"
    nan = each_step([float("nan"), *FIRST[1:]], LAST)
    assert compared(nan, LOSSES, Tolerance(1, 1)).result == "FAIL"


def test_losses_of_whole_epochs_and_of_an_epoch_that_is_a_step_shorter() -> None:
    whole: Losses = [[(5, sum(FIRST) / 5)], [(5, sum(LAST) / 5)]]
    found = compared(whole, LOSSES, Tolerance(0.0, 1e-9))
    assert found.result == "OK" and "one loss for all steps" in found.found
    assert compared([whole[0], [(5, 1.0)]], LOSSES, Tolerance(0.0, 0.1)).result == "FAIL"
    shorter = each_step(FIRST[:4], LAST[:4])
    assert compared(shorter, LOSSES, Tolerance(0.0, 0.2)).found == "steps per epoch [4, 4] against [5, 5]"
    assert compared(shorter, LOSSES, Tolerance(0.0, 0.2), fewer_steps=1).result == "OK"
    assert compared(LOSSES, shorter, Tolerance(0.0, 0.2), fewer_steps=1).result == "FAIL"


def test_steps_are_counted_from_record_to_record(tmp_path: Path) -> None:
    records = [(1, 3, 2.0), (1, 5, 1.0), (2, 10, 0.5)]
    lines = [json.dumps({"kind": "step", "epoch": e, "step": s, "loss": x}) for e, s, x in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join(['{"kind": "start"}', *lines]), encoding="utf-8")
    assert read_losses(tmp_path) == [[(3, 2.0), (2, 1.0)], [(5, 0.5)]]


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_of_a_varied_field_is_a_check(name: str, tmp_path: Path) -> None:
    bench = bench_of(name, tmp_path, "gpu")
    found = set(selftest.checks(bench.suite, bench.base))
    assert set(selftest.FIXED) < found
    fields = selftest.defaults(bench.suite)
    assert {entry.partition("=")[0] for entry in (*bench.suite.varied, *bench.suite.settings)} <= set(fields)
    for value in selftest.alternatives(bench.suite.config_class, "precision"):
        assert (f"precision={value}" in found) == (value != bench.base["precision"])
    assert ("cuda_graph=true" in found) == ("cuda_graph" in fields)
    for settings, _ in selftest.variants(bench.suite, bench.base).values():
        bench.command(settings, "a")  # every one is a configuration that a GPU may have


@pytest.mark.parametrize("name", CHOICES)
def test_what_a_cpu_cannot_do_is_skipped_with_the_reason(name: str, tmp_path: Path) -> None:
    bench = bench_of(name, tmp_path, "cpu")
    # PyTorch has fp16 on a CPU, which some benchmarks admit; no CPU has tf32, which some frameworks do not know.
    has_tf32 = "tf32" in selftest.alternatives(bench.suite.config_class, "precision")
    for check, words in (
        ("precision=tf32" if has_tf32 else "precision=fp16", "device=cpu"),
        ("defaults", "needs a GPU"),
        ("cuda_graph=true", "needs a GPU"),
        ("two ranks", "--launch"),
        ("defaults on all GPUs", "--launch-all"),
    ):
        found = selftest.check(bench, check)
        assert (found.result, words in found.found) == ("SKIPPED", True), found


class Recorder:
    """Stands in for trainings: keeps what was asked for, answers LOSSES."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, Any], tuple[str, ...], dict[str, str]]] = []

    def __call__(self, settings: Any, name: str = "", launch: Any = (), environment: Any = None) -> Any:
        self.asked.append((dict(settings), tuple(launch), dict(environment or {})))
        return LOSSES


@pytest.mark.parametrize("name", CHOICES)
def test_what_a_gpu_is_asked_for(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, trained = bench_of(name, tmp_path, "gpu", launch="torchrun --nproc-per-node=2"), Recorder()
    monkeypatch.setattr(bench, "losses", trained)
    on_cpu: list[tuple[str, int]] = []

    def interrupt(command: list[str], folder: Path, steps: int, environment: object) -> None:
        on_cpu.append((json.loads((folder / "config.json").read_text(encoding="utf-8"))["device"], steps))

    monkeypatch.setattr(selftest, "interrupt", interrupt)
    monkeypatch.setattr(selftest, "read_losses", lambda folder: [LOSSES[0][:3]])
    assert selftest.check(bench, "device").result == "OK"
    assert ([settings for settings, *_ in trained.asked], on_cpu) == ([{}], [("cpu", selftest.CPU_STEPS)])
    trained.asked.clear()
    found = selftest.check(bench, "defaults")
    fields = selftest.defaults(bench.suite)
    assert found.result == "OK" and f"precision={fields['precision']}" in found.found
    assert trained.asked[0][0].get("loss_scale") == fields.get("loss_scale")
    trained.asked.clear()
    assert selftest.check(bench, "overflow").found.startswith("the training came to its end")
    is_dynamic = any(name.startswith("loss_scale_") for name in fields)
    scale = {} if is_dynamic else {"loss_scale": 1e30}
    in_fp16 = {"precision": "fp16", **scale} if "loss_scale" in fields else {}
    assert trained.asked[0][0] == {**in_fp16, "learning_rate": 1e30}
    trained.asked.clear()
    shared = selftest.check(bench, "two ranks")
    assert (shared.result == "SKIPPED") == bool(bench.suite.shares_gpu)
    if not bench.suite.shares_gpu:
        settings, launch, environment = trained.asked[0]
        assert settings == {"batch_size": bench.base["batch_size"] // 2}
        assert launch == (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
        assert environment == {"ENCORE_BACKEND": "gloo"}


@pytest.mark.parametrize(("gpus", "epochs"), [(1, 1), (2, 1), (8, 4)])
def test_the_defaults_run_on_all_gpus(gpus: int, epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As submitted, on as many ranks, with as many steps; one GPU makes the training of `defaults`."""
    launch = f"torchrun --nproc-per-node={gpus}" if gpus > 1 else ""
    bench, trained = bench_of("resnet-pytorch", tmp_path, "gpu", gpus=gpus, launch_all=launch), Recorder()
    monkeypatch.setattr(bench, "losses", trained)
    bench.suite = replace(bench.suite, steps=10)
    found = selftest.check(bench, "defaults on all GPUs")
    assert found.result == "OK" and f"{gpus} rank" in found.found and "cuda_graph=" in found.found
    (settings, words, _) = trained.asked[0]
    assert words[3:] == ((f"--nproc-per-node={gpus}",) if gpus > 1 else ())
    assert settings.get("batch_size", 64) == (64 if gpus == 1 else 32)
    assert settings.get("epochs", selftest.EPOCHS) == selftest.EPOCHS * epochs
    assert {"compile", "cuda_graph", "precision", "kernels"} <= set(settings)
    assert selftest.check(bench, "defaults").result == "OK"
    assert (trained.asked[1][:2] == trained.asked[0][:2]) == (gpus == 1)
    bench.suite = replace(bench.suite, steps=11)
    assert selftest.check(bench, "defaults on all GPUs").found.endswith("10 steps: at least 11 are needed")


HANGS = """
import faulthandler, os, pathlib, signal, sys, time
faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
folder = pathlib.Path(sys.argv[1])
(folder / "heartbeat").mkdir()
(folder / "heartbeat" / "rank_0").write_text(f"{os.getpid()} host 7 0.0 0.0")
(folder / "metrics.jsonl").write_text('{"kind": "step"}\\n{"kind": "end", "outcome": "reached"}\\n')

def leaves_the_group():
    time.sleep(9999)

leaves_the_group()
"""


@pytest.mark.slow
def test_a_training_whose_process_stays_is_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process group that is left while a graph still holds its collectives (NCCL since 2.26)."""
    monkeypatch.setattr(trainings, "EXIT_SECONDS", 0.2)
    folder = tmp_path / "training"
    folder.mkdir()
    with pytest.raises(Failed, match="a hang: still running 0 s after the end of the training") as failed:
        trainings.run([sys.executable, "-c", HANGS, str(folder)], folder, {})
    assert any("in leaves_the_group" in line for line in failed.value.lines)
    pid = int((folder / "heartbeat" / "rank_0").read_text(encoding="ascii").split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_cpu_evaluates_the_submitted_network_as_a_cpu_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = catalogue.choose("ncf")
    submitted = configuration.resolve(choice, catalogue.find_system(choice, "dgx1", None), 1, 1, []).plain()
    full = tmp_path / "full.json"
    full.write_text(json.dumps(submitted), encoding="utf-8")
    asked: list[dict[str, Any]] = []

    def measured(bench: Bench, name: str, config: dict[str, Any], loops: list[str], steps: int) -> object:
        asked.append(config)
        return {"evaluation": 1234.0}

    monkeypatch.setattr(Bench, "measured", measured)
    bench = bench_of("ncf", tmp_path, "cpu", full=full)
    assert selftest.check(bench, "evaluation").found == "1,234 samples/s with the full network"
    (config,) = asked
    submitted = json.loads(full.read_text(encoding="utf-8"))
    differing = {name for name, value in config.items() if value != submitted[name]}
    assert differing <= {"device", "loss_scale", *bench.suite.varied} and config["device"] == "cpu"
    bench.suite.config_class(**{key: tuple(v) if isinstance(v, list) else v for key, v in config.items()})
    assert selftest.check(bench_of("dlrm", tmp_path, "cpu", full=full), "evaluation").found.startswith("the tables")


def test_overflow_must_be_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of("ncf", tmp_path, "cpu")

    def fails_with(text: str) -> Result:
        output = tmp_path / "output.txt"
        output.write_text(text, encoding="utf-8")

        def losses(*given: object) -> object:
            raise Failed("the training ended with exit code 1", output)

        monkeypatch.setattr(bench, "losses", losses)
        return selftest.check(bench, "overflow")

    assert fails_with("the loss is not finite at step 3: found nan\n").result == "OK"
    assert fails_with("Segmentation fault\n") == Result(
        "FAIL", "the training ended with exit code 1", ("Segmentation fault",)
    )


def test_a_refused_configuration_is_skipped(tmp_path: Path) -> None:
    with pytest.raises(Skipped, match="layers needs at least two values"):
        bench_of("ncf", tmp_path, "cpu").command({"layers": [2]}, "a")


def test_real_sizes_are_a_data_set(tmp_path: Path) -> None:
    ncf, dlrm = (importlib.import_module(f"benchmarks.{name}.pytorch.selftest") for name in ("ncf", "dlrm"))
    ncf.real_sizes(tmp_path, 50, 40, 300)
    users, items = (np.load(tmp_path / f"train_{name}.npy") for name in ("users", "items"))
    keys = users.astype(int) * 40 + items
    assert (np.diff(keys) > 0).all(), "sorted by user, then item, each pair once"
    assert users.max() < 50 and items.max() < 40 and passport.read(tmp_path)["facts"]["users"] == 50
    dlrm.real_sizes(tmp_path, 3000, 70)
    stored = blocks.open_blocks(tmp_path / "train.bin", 3000)
    indices = stored[:, blocks.FIRST_TABLE :]
    assert indices.min() >= 0 and indices.max() < 70
    assert set(np.unique(stored[:, 0])) == {0, 1}
    assert passport.read(tmp_path)["splits"]["train"]["count"] == 3000


def test_noise_of_squad_is_a_data_set(tmp_path: Path) -> None:
    squad_noise.write(tmp_path, 100, 64)
    data = squad_arrays.open_data(tmp_path)
    assert data.sequence_length == 64 and data.vocabulary.size == 100
    assert data.train.lengths.max() == 64 and data.train.lengths.min() >= squad_noise.SHORTEST
    assert (data.train.end < data.train.lengths).all() and (data.train.start > data.train.second - 1).all()
    assert len(data.questions) == len(data.test)
