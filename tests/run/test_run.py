"""Training runs through the command line: target, stop and resume, signals, failures of ranks, full disk."""

import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from encore import files
from encore.machine import processes
from encore.run.supervise import Signals
from tests.conftest import TINY, Encore, ToyRun, logged, only_run, records
from tests.json_schemas import validate
from tests.trainings import HANGS, PATIENCE, Started, assert_none_left, assert_same_run, exported, resumed_as_printed


@pytest.fixture(scope="module")
def finished(mxnet_python: Path, toy_run: Callable[[str], ToyRun]) -> ToyRun:
    return toy_run("resnet")


# -- a run that reaches its target ----------------------------------------------------------------------


def test_run_reaches_the_target_and_is_checked(finished: ToyRun) -> None:
    # The log breaks only rules that small data cannot satisfy, and only rank 0 writes it
    validate("run-result", finished.printed)
    (experiment,) = finished.printed["experiments"]
    assert (finished.printed["run"], experiment["status"]) == (str(finished.folder), "reached")
    assert "never a reproduction" in finished.printed["standing"]
    assert experiment["qualities"]["accuracy"] >= experiment["targets"]["accuracy"] == 0.3 and experiment["minutes"] > 0
    compliance = experiment["compliance"]
    kinds = {finding["kind"] for finding in compliance["findings"] if finding["severity"] == "error"}
    result = (compliance["ruleset"], kinds, compliance["passed"], compliance["passed_but_for_data"])
    assert result == ("0.7.0", {"small_data"}, False, True) and "mlperf-logging" in compliance["checker"]
    keys = [event["key"] for event in logged(finished.folder / "result_0.txt")]
    for key in ("init_start", "init_stop", "run_start", "run_stop", "seed", "global_batch_size"):
        assert keys.count(key) == 1, key


@pytest.mark.long
def test_exported_model_has_the_quality_of_the_run(finished: ToyRun, encore: Encore, tmp_path: Path) -> None:
    # The two ranks evaluate with separate batch-norm statistics, which differ after few steps; the exported model has
    # their means
    content = exported(encore, finished.folder, tmp_path / "exported", "onnx", rel=0.25)
    names = [array["name"] for array in (*content["inputs"], *content["outputs"])]
    assert (content["reached"], content["framework"], names) == (True, "mxnet", ["images", "logits"])
    assert content["inputs"][0]["shape"] == [-1, 3, 32, 32]


def test_passport_has_settings_and_versions_and_no_secrets(finished: ToyRun) -> None:
    names = ("run.json", "system.json", "experiment_0/config.json")
    passport, system, config = (files.read_json(finished.folder / name) for name in names)
    scale = (passport["seeds"], passport["ranks_per_node"], passport["data"]["name"], config["seed"])
    assert scale == ([1], 2, "digits", 1)
    assert passport["configuration"]["learning_rate"] == {"value": 0.1, "origin": "systems/cpu_v0.7.toml"}
    variables, of_ranks = passport["environment"], passport["rank_environment"]
    values = (variables["NOTE"], variables["OMP_WAIT_POLICY"], system["other_software_stack"]["mxnet_version"])
    assert values == ("plain", "PASSIVE", "1.9.1") and passport["links"]["name"] == passport["node"]["hostname"]
    assert of_ranks["OMP_NUM_THREADS"] == variables["OMP_NUM_THREADS"] and "NOTE" not in of_ranks
    assert "hush" not in "".join(path.read_text(encoding="utf-8") for path in finished.folder.glob("*.json"))


def test_finished_run_prints_its_result_and_is_not_run_again(encore: Encore, finished: ToyRun) -> None:
    log = finished.folder / "result_0.txt"
    written = log.stat().st_mtime_ns
    # The token is not stored: a resume needs it again
    assert "MY_TOKEN" in encore("run", "--resume", str(finished.folder), code=2).stderr
    printed = encore("run", "--resume", str(finished.folder), environment={"MY_TOKEN": "hush"}, code=0).stdout
    assert log.stat().st_mtime_ns == written
    result = r"^OK: trained on 2 CPU ranks to 0\.\d{4} \(target 0\.3\) in \d+ s; toy data, not a reproduction$"
    assert re.search(result, printed, re.MULTILINE), printed
    assert not re.search("warning|cannot be met|compare", printed)
    assert printed.splitlines()[-1] == "next, on a GPU server: ./run.sh resnet 8 --data DIR"


def test_signal_writes_a_checkpoint_and_resume_is_exact(digits: Path, tmp_path: Path, finished: ToyRun) -> None:
    # In the second of two or more epochs of 24 steps: rank 1 must resume with the running statistics of rank 1
    started = Started.run(digits, tmp_path / "my results", "--seed", "1", "--set", "quality_target=0.3")
    folder = started.wait_for_step(28)
    ranks = started.ranks(folder)
    started.process.send_signal(signal.SIGINT)
    output = started.ended(130)
    assert "a checkpoint was written" in output
    assert_none_left(ranks)
    resumed = resumed_as_printed(output)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [record["resumed_step"] > 0 for record in records(folder / "metrics.jsonl", "start")] == [False, True]
    assert_same_run(folder, finished.experiment)


# -- failures -------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("number", "end"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "hangs")])
def test_rank_that_dies_or_hangs_ends_the_run(
    few_digits: Path, tmp_path: Path, number: signal.Signals, end: str
) -> None:
    started = Started.run(few_digits, tmp_path, *(HANGS if number == signal.SIGSTOP else ()))
    ranks = started.ranks(started.wait_for_step(5))
    ranks[1].send_signal(number)
    output = started.ended(1)
    assert f"rank 1 {end}" in output and "--resume" in output
    assert_none_left(ranks)


@pytest.mark.long
@pytest.mark.parametrize(("name", "launcher"), [("resnet", "horovodrun"), ("resnet-pytorch", "torchrun")])
def test_ranks_end_when_the_launcher_dies(
    few_digits: Path, pytorch_python: Path, tmp_path: Path, name: str, launcher: str
) -> None:
    started = Started.run(few_digits, tmp_path, name=name)
    started.wait_for_step(5)
    first, *others = processes.family(started.process.pid)[1:]
    first.kill()
    assert f"launcher {launcher} was killed by SIGKILL" in started.ended(1) and len(others) > 1
    assert_none_left([first, *others])


@pytest.mark.long
def test_run_with_an_infinite_loss_is_final(encore: Encore, few_digits: Path, tmp_path: Path) -> None:
    folders = ("--data", str(few_digits), "--results", str(tmp_path))
    output = encore("run", "resnet", "1", *folders, *TINY, "--set", "learning_rate=1e30", code=1).stdout
    assert "the loss is not finite; resuming would fail in the same way" in output
    assert "hint: start a new run with a lower learning_rate" in output and "resume with" not in output
    assert files.read_json(only_run(tmp_path) / "experiment_0" / "state.json")["is_final"] is True


@pytest.mark.long
def test_run_resumes_after_the_disk_was_full(few_digits: Path, tmp_path: Path, encore: Encore) -> None:
    def limit() -> None:
        # A checkpoint of ResNet-18 has files of 45 MB
        resource.setrlimit(resource.RLIMIT_FSIZE, (20 * 2**20, 20 * 2**20))

    folders = ("--data", str(few_digits), "--results", str(tmp_path))
    stopped = encore("run", "resnet", "1", *folders, *TINY, preexec_fn=limit, code=1)
    assert "disk is full" in stopped.stdout and "Traceback" not in stopped.stderr
    assert not list(only_run(tmp_path).glob("experiment_0/checkpoint/step_*"))
    encore("run", "--resume", str(only_run(tmp_path)), code=3)


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
