"""Checks of the training code: bench.py, `encore selftest` and compiled kernels."""

import argparse
import hashlib
import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from benchmarks.common.checks import bench as benches
from benchmarks.common.checks import selftest, trainings
from benchmarks.common.checks.agreement import Losses, Result, Tolerance, compare_losses, read_losses
from benchmarks.common.data import manifest
from benchmarks.common.data.problem import Problem
from encore import catalogue, paths
from encore.containers import compatibility
from encore.machine import node
from tests.preparing import ran
from tests.trainings import resolved, write_small_config


def test_ratio_is_independent_of_a_machine_that_slows_down(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"time": 0.0, "pace": 1.0}
    monkeypatch.setattr(benches.time, "time", lambda: clock["time"])

    def slow(count: int) -> None:
        clock["pace"] *= 1.5
        clock["time"] += 4 * count * clock["pace"]

    def fast(count: int) -> float:
        clock["time"] += count * clock["pace"]
        return 0.25

    loops: dict[str, Callable[[int], float | None]] = {"bare": slow, "synthetic": fast, "real": fast}
    subject = benches.Subject("a", 10, loops, samples={"synthetic": 20}, flops={"bare": 5e9, "synthetic": 6e9})
    measured, share = benches.measure(subject, mock.Mock(), 4, 3)
    found = {name: (entry["ratio"], entry.get("flops_per_sample")) for name, entry in measured.items()}
    assert found == {name: (pytest.approx(ratio), flops) for name, ratio, flops in (
        ("bare", 1, 5e8), ("synthetic", 8, 3e8), ("real", 4, None)
    )}  # fmt: skip
    bare, synthetic = measured["bare"], measured["synthetic"]
    assert (bare["median"], bare["most"] / bare["least"], synthetic["flops_per_second"], share) == pytest.approx(
        (10 / (4 * 1.5**3), 1.5**2, 6e9 / 20 * synthetic["median"], 0.25)
    )


def test_only_the_requested_loops_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    fail = mock.Mock(side_effect=RuntimeError("an illegal memory access"))
    loops = {"bare": fail, "real": fail, "evaluation": benches.repeated(mock.Mock())}
    subject = benches.Subject("a", 10, loops, {"bare": "our step"})
    measured, share = benches.measure(subject, mock.Mock(), 1, 1, ["evaluation"])
    # No ratio without the bare loop
    assert ({name: entry["ratio"] for name, entry in measured.items()}, share) == ({"evaluation": None}, None)
    with pytest.raises(Problem, match=r"no loop sythetic\n  expected: bare, real, evaluation"):
        benches.refuse_unknown(subject, ["real", "sythetic"])
    with pytest.raises(RuntimeError, match="illegal"):
        benches.measure(subject, mock.Mock(), 4, 1)
    assert capsys.readouterr().err.endswith("failed: our step\n")


def gpu(gib: float) -> node.Gpu:
    return node.Gpu(index=0, name="NVIDIA X", memory_gib=gib, driver="550.54", compute_capability="8.0")


def memory_check(name: str, gib: float, *settings: str) -> Any:
    return compatibility.check_memory(resolved(name, "dgxa100", "v0.7", 8, *settings, nodes=1), gpu(gib))


@pytest.mark.parametrize(
    ("name", "gib", "settings", "level"),
    [
        # Submitted: config_DGX1.sh of v0.6, config_DGXA100.sh of v0.7.
        ("resnet", 15.8, "batch_size=208 precision=fp16 dali_prefetch=3", "OK"),
        ("resnet", 39.6, "batch_size=408 precision=fp16 dali_prefetch=3", "OK"),
        # NVIDIA/DeepLearningExamples: PyTorch/Classification/ConvNets/configs.yml, DGX-1 with 16 GB and DGX-2 with 32.
        ("resnet-pytorch", 15.8, "batch_size=256 precision=fp16 dali_prefetch=3", "OK"),
        ("resnet-pytorch", 15.8, "batch_size=112 precision=fp32 dali_prefetch=3", "OK"),
        ("resnet-pytorch", 31.7, "batch_size=256 precision=fp32 dali_prefetch=3", "OK"),
        # TensorFlow/Classification/ConvNets/resnet50v1.5/README.md, DGX-1 with 16 GB.
        ("resnet-tensorflow", 15.8, "batch_size=256 precision=fp16 dali_prefetch=3", "OK"),
        ("resnet-tensorflow", 15.8, "batch_size=128 precision=fp32 dali_prefetch=3", "OK"),
        ("resnet", 39.6, "batch_size=755", "OK"),
        ("resnet", 39.6, "batch_size=756", "WARN"),
        # Near the limit, not near, and a GPU whose memory is not known
        ("resnet-pytorch", 39.6, "precision=fp32", "WARN"),
        ("resnet-pytorch", 79.0, "precision=fp32", "OK"),
        ("resnet-pytorch", 0.0, "precision=fp32", "OK"),
    ],
)
def test_memory_is_checked(name: str, gib: float, settings: str, level: str) -> None:
    assert memory_check(name, gib, *settings.split()).level == level


def test_batch_beyond_the_memory_is_refused_with_the_largest_that_fits() -> None:
    refused, with_accumulation = (memory_check(name, 39.6, "batch_size=1024") for name in ("resnet", "resnet-pytorch"))
    assert (refused.level, refused.found, refused.hint, with_accumulation.hint) == (
        "FAIL",
        "about 50.1 GiB needed by the model, NVIDIA X has 39.6 GiB",
        "--set batch_size=755, another global batch",
        "--set accumulation_steps=2, which keeps the global batch",
    )


CHOICES = sorted(catalogue.choices())


def bench_of(name: str, folder: Path, device: str, **options: Any) -> selftest.Bench:
    config = write_small_config(folder / "config.json", name, 1, ())
    defaults = {"config": config, "data": folder, "work": folder / "work", "device": device, "gpus": 1}
    arguments = {**defaults, "launch": "", "launch_all": "", "full": None, **options}
    return selftest.Bench(
        selftest.suite_of(catalogue.choose(name).implementation.module), argparse.Namespace(**arguments)
    )


def losses_of(*epochs: list[float]) -> Losses:
    return [[(1, loss) for loss in epoch] for epoch in epochs]


FIRST, LAST = [2.0, 1.9, 1.8, 1.7, 1.0], [0.9, 0.8, 0.8, 0.8, 0.7]
LOSSES, LATE, SHORTER = (
    losses_of(*epochs) for epochs in ((FIRST, LAST), (FIRST, [*LAST[:4], 1.1]), (FIRST[:4], LAST[:4]))
)
EPOCH_MEANS: Losses = [[(5, sum(FIRST) / 5)], [(5, sum(LAST) / 5)]]


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
    lines = [
        {"kind": "step", "epoch": epoch, "step": step, "loss": loss}
        for epoch, step, loss in ((1, 3, 2.0), (1, 5, 1.0), (2, 10, 0.5))
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, [{"kind": "start"}, *lines])), encoding="utf-8")
    assert read_losses(tmp_path) == [[(3, 2.0), (2, 1.0)], [(5, 0.5)]]


@pytest.mark.parametrize("name", CHOICES)
def test_every_value_of_a_varied_field_is_a_check(name: str, tmp_path: Path) -> None:
    bench = bench_of(name, tmp_path, "gpu")
    checks, fields = set(selftest.checks(bench.suite, bench.base)), selftest.defaults(bench.suite)
    assert set(selftest.FIXED) < checks
    assert {entry.partition("=")[0] for entry in (*bench.suite.varied, *bench.suite.settings)} <= set(fields)
    precisions = {f"precision={value}" for value in selftest.alternatives(bench.suite.config_class, "precision")}
    assert precisions - checks == precisions & {f"precision={bench.base['precision']}"}
    assert ("cuda_graph=true" in checks) == ("cuda_graph" in fields)
    for settings, _ in selftest.variants(bench.suite, bench.base).values():
        bench.command(settings, "a")  # Validates the configuration


@pytest.mark.parametrize("name", CHOICES)
def test_checks_that_need_a_gpu_are_skipped_with_the_reason(name: str, tmp_path: Path) -> None:
    bench = bench_of(name, tmp_path, "cpu")
    # PyTorch supports fp16 on a CPU, which some benchmarks allow; no CPU has tf32, which some frameworks lack
    has_tf32 = "tf32" in selftest.alternatives(bench.suite.config_class, "precision")
    reasons = {
        "precision=tf32" if has_tf32 else "precision=fp16": "device=cpu",
        "defaults": "needs a GPU",
        "cuda_graph=true": "needs a GPU",
        "two ranks": "--launch",
        "defaults on all GPUs": "--launch-all",
        **dict.fromkeys(bench.suite.slow_on_cpu, "takes minutes on a CPU"),
    }
    results = {check: selftest.check(bench, check) for check in reasons}
    skipped = {check: reasons[check] in found.found for check, found in results.items() if found.result == "SKIPPED"}
    assert skipped == dict.fromkeys(reasons, True), results


@pytest.mark.parametrize("name", CHOICES)
def test_settings_of_checks_on_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, launch = bench_of(name, tmp_path, "gpu", launch="torchrun --nproc-per-node=2"), "--nproc-per-node=2"
    bench.losses, fields = mock.Mock(return_value=LOSSES), selftest.defaults(bench.suite)
    monkeypatch.setattr(selftest, "interrupt", mock.Mock())
    monkeypatch.setattr(selftest, "read_losses", lambda folder: [LOSSES[0][:3]])
    checks, two_ranks = ("device", "defaults", "overflow", "two ranks"), not bench.suite.shares_gpu
    results = [selftest.check(bench, check) for check in checks]
    assert [result.result for result in results] == ["OK", "OK", "FAIL", "OK" if two_ranks else "SKIPPED"]
    _, folder, steps, _ = selftest.interrupt.call_args.args
    assert (json.loads((folder / "config.json").read_text())["device"], steps) == ("cpu", selftest.CPU_STEPS)
    calls, torchrun = bench.losses.mock_calls, [sys.executable, "-m", "torch.distributed.run", launch]
    assert calls[1].args[0].get("loss_scale") == fields.get("loss_scale")
    is_dynamic = any(field.startswith("loss_scale_") for field in fields)
    in_fp16 = {"precision": "fp16", **({} if is_dynamic else {"loss_scale": 1e30})} if "loss_scale" in fields else {}
    settings = {"batch_size": bench.base["batch_size"] // 2}
    assert [calls[0], *calls[2:5]] == [
        *[mock.call({})] * 2, mock.call({**in_fp16, "learning_rate": 1e30}, "overflow"),
        *([mock.call(settings, "two-ranks", torchrun, {"ENCORE_BACKEND": "gloo"})] if two_ranks else []),
    ]  # fmt: skip


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
    with pytest.raises(trainings.Failed, match="a hang: still running 0 s after the end of the training") as failed:
        trainings.run([sys.executable, "-c", HANGS, str(tmp_path)], tmp_path, {})
    assert any("in leave_group" in line for line in failed.value.lines)
    assert not psutil.pid_exists(int((tmp_path / "heartbeat" / "rank_0").read_text(encoding="ascii").split()[0]))


@pytest.mark.parametrize(
    ("output", "result"),
    [
        ("the loss is not finite at step 3: found nan", "OK"),
        ("Segmentation fault", Result("FAIL", "the training ended with exit code 1", ("Segmentation fault",))),
    ],
)
def test_overflow_must_be_reported(output: str, result: Any, tmp_path: Path) -> None:
    bench, file = bench_of("ncf", tmp_path, "cpu"), tmp_path / "output.txt"
    file.write_text(f"{output}\n", encoding="utf-8")
    bench.losses = mock.Mock(side_effect=trainings.Failed("the training ended with exit code 1", file))
    check = selftest.check(bench, "overflow")
    assert result in (check, check.result)


@pytest.mark.parametrize(
    ("module", "function", "sizes", "digest"),
    [
        ("ncf.pytorch.selftest", "real_sizes", (50, 40, 300), "51037a0d3eeb580275899acc1eb7c91b"),
        ("dlrm.pytorch.selftest", "real_sizes", (3000, 70), "6b69f644c7117ee2805ebb040784756a"),
        ("llama.noise", "write", (), "95bab874c692e07ee1823394005d970a"),
        ("llama2_70b_lora.noise", "write", (64,), "aa731cf6424dc0d6386eb4f9fd9645a9"),
        ("bert_squad.noise", "write", (100, 64), "c370d4ac41996d509ddc275aa68400e5"),
    ],
)
def test_synthetic_data_sets_are_the_recorded_ones(
    module: str, function: str, sizes: tuple[int, ...], digest: str, tmp_path: Path
) -> None:
    # Numbers, order and pairs of the values were checked when the digests were recorded
    getattr(importlib.import_module(f"benchmarks.{module}"), function)(tmp_path, *sizes)
    facts = {key: value for key, value in manifest.read(tmp_path).items() if key in ("benchmark", "facts", "splits")}
    names = sorted({path.name for path in tmp_path.iterdir()} - {manifest.FILE_NAME})
    content = [json.dumps(facts, sort_keys=True).encode(), *((tmp_path / name).read_bytes() for name in names)]
    assert hashlib.md5(b"".join(content)).hexdigest() == digest


@pytest.mark.long
@pytest.mark.usefixtures("kernels_python")
def test_every_kernel_compiles_for_every_target_without_spills() -> None:
    names = {
        f"{path.parts[-3]} {name}"
        for path in sorted(paths.BENCHMARKS.glob("*/pytorch/kernels.py"))
        for name in re.findall(
            r"^@triton\.jit(?:\(.*\))?\ndef ([a-z]\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    kernels = json.loads(ran(sys.executable, "-m", "tools.compile_kernels", "--json").stdout)
    # A100 has no FP8.
    expected = {
        (name, target)
        for name in names
        for target in ("sm_80", "sm_90", "sm_100")
        if (name, target) != ("language cast_tile", "sm_80")
    }
    assert names and {(kernel["kernel"], kernel["target"]) for kernel in kernels} == expected
    # Shared memory of a block: 48 KiB on every GPU, up to 99 KiB on the smallest of these three families
    wrong = [
        kernel
        for kernel in kernels
        if kernel["problem"] or kernel["spills"] or not 0 < kernel["registers"] <= 255 or kernel["shared"] > 99 * 1024
    ]
    assert wrong == []
