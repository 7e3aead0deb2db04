"""Runs whose terminal, output or launcher is lost."""

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from encore import files
from encore.run.supervise import Signals
from tests.trainings import PATIENCE, Started

ENDLESS = ("--set", "epochs=1000", "--set", "quality_target=1.0")
BENCHMARKS = ("ncf", pytest.param("resnet", marks=pytest.mark.long))  # torchrun and horovodrun


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_ranks_without_a_launcher_write_a_checkpoint_and_exit(
    number: signal.Signals, name: str, toy: Callable[[str], Path], tmp_path: Path
) -> None:
    started = Started.run(toy(name), tmp_path, *ENDLESS, name=name)
    experiment = started.wait_for_step(3)
    ranks = started.ranks(experiment)
    started.process.send_signal(number)
    _, alive = psutil.wait_procs(ranks, timeout=PATIENCE)
    assert not alive and list(experiment.glob("checkpoint/step_*"))
    if number == signal.SIGHUP:
        started.ended(130)
        assert files.read_json(experiment / "state.json")["reason"] == "stopped by SIGHUP, a checkpoint was written"


def test_closed_output_changes_neither_exit_code_nor_state(toy: Callable[[str], Path], tmp_path: Path) -> None:
    started = Started.run(toy("ncf"), tmp_path, "--set", "epochs=1", name="ncf")
    assert started.process.stdout is not None
    started.process.stdout.close()
    assert started.process.wait(timeout=PATIENCE) == 3
    (state,) = tmp_path.glob("*/experiment_0/state.json")
    assert files.read_json(state)["status"] == "not_reached"


def test_nohup_ignores_sighup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
