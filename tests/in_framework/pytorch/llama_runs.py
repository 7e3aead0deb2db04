"""Whole runs of Llama's train.py: in every split, stopped, killed around a save, resumed on other ranks.

Each rank is a fork of this process, which has PyTorch loaded and has computed nothing. Where one fails, the others are
killed, as a launcher does.
"""

import dataclasses
import json
import os
import signal
import socket
import time

import pytest
import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import checkpoints
from benchmarks.common.run.checkpoints import Checkpoints
from benchmarks.common.run.run import Run
from benchmarks.common.run.stopping import end_process
from benchmarks.llama31_8b import noise
from benchmarks.llama31_8b.pytorch import train
from benchmarks.llama31_8b.pytorch.config import Config

GLOBAL_BATCH = 8
CONFIG = Config(
    device="cpu", precision="fp32", quality_target=0.1, max_steps=20, max_samples=96, sequence_length=32, layers=2,
    width=32, heads=4, key_value_heads=2, inner_width=48, rope_base=10000.0, rope_context=16, initial_weights=0.3,
    micro_batch=2, learning_rate=0.01, end_learning_rate=0.001, warmup_steps=2, epsilon=1e-3, loss_rows=24,
    eval_interval_samples=24, eval_samples=16, eval_batch_size=3, warm_up_steps=1, log_interval=1,
    checkpoint_interval=1, seed=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    noise.write(folder, 96)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """The runs that others are compared with, by ranks and settings."""
    found = {}

    def run(ranks, **settings):
        key = ranks, *sorted(settings.items())
        if key not in found:
            found[key] = tmp_path_factory.mktemp("uninterrupted") / "run"
            assert trained(data, found[key], ranks, **settings) == [0] * ranks
        return found[key]

    return run


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def trained(data, output, ranks, hook=None, **settings):
    """Train to the end, or until a rank is killed; return the exit codes. ``hook`` is called in each rank before."""
    output.mkdir(exist_ok=True)
    config = dataclasses.replace(CONFIG, batch_size=GLOBAL_BATCH // ranks, **settings)
    path, port = output / "config.json", free_port()
    path.write_text(json.dumps(dataclasses.asdict(config)), encoding="utf-8")
    arguments = ["--config", str(path), "--data", str(data), "--output", str(output)]
    pids = []
    for rank in range(ranks):
        pids.append(os.fork())
        if pids[-1] == 0:
            place = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in place.items()})
            torch.set_num_threads(1)
            if hook:
                hook(rank)
            end_process(lambda: train.main(arguments))
    codes = {}
    while len(codes) < ranks:
        pid, status = os.waitpid(-1, 0)
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:
            for other in set(pids) - set(codes):
                os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def records(output, kind):
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [each for each in map(json.loads, lines) if each["kind"] == kind]


def curve(output):
    """Losses of the steps and of the evaluations, one after the other."""
    steps = [(each["step"], each["loss"]) for each in records(output, "step")]
    return steps + [tuple(each["qualities"].items()) for each in records(output, "eval")]


def figures(output):
    return [float(each[-1] if isinstance(each[0], int) else each[0][1]) for each in curve(output)]


@pytest.mark.parametrize("settings", [{}, {"tensor_parallelism": 2}, {"context_parallelism": 2}])
def test_two_ranks_train_like_one_in_every_split(settings, uninterrupted):
    one, two = uninterrupted(1), uninterrupted(2, **settings)
    assert figures(two) == pytest.approx(figures(one), rel=1e-4) and len(figures(one)) == 12 + 4
    lines = (two / "result.txt").read_text(encoding="utf-8").splitlines()
    values = {each["key"]: each["value"] for each in (json.loads(line.split(":::MLLOG ")[1]) for line in lines)}
    splits = ("tensor_parallelism", "context_parallelism")
    assert {key: values[key] for key in splits if values[key] != 1} == settings
    assert (values["global_batch_size"], values["micro_batch_size"]) == (GLOBAL_BATCH, 2)
    written = [each["step"] for each in records(two, "checkpoint_written")]
    assert written == [3, 6, 9, 12] and len(records(two, "checkpoint")) == 5, "the last one is what the run ended with"


def at(owner, name, act, when=lambda *arguments: True, rank=0):
    """Return a hook by which a rank acts in place of a call ``when`` its arguments are those."""

    def hook(mine):
        plain = getattr(owner, name)

        def replaced(*arguments, **options):
            acts = mine == rank and when(*arguments)
            return act(plain, *arguments) if acts else plain(*arguments, **options)

        setattr(owner, name, replaced)

    return hook


def die(plain, *arguments):
    os.kill(os.getpid(), signal.SIGKILL)


def call_and_die(plain, *arguments):
    plain(*arguments)
    die(plain)


def die_after_a_save(plain, run, *arguments):
    while not list((run.output / "checkpoint").glob("step_*")):
        time.sleep(0.01)
    die(plain)


def die_within_the_file(plain, path, packed):
    plain(path, packed)
    os.truncate(path, path.stat().st_size // 2)
    die(plain)


def stop(plain, *arguments):
    signal.raise_signal(signal.SIGTERM)
    return plain(*arguments)


def of_a_rank(path, *arguments):
    return path.name.startswith("rank_")


# In this order on one run: what it resumes from is the last save that came to its end.
KILLS = {
    "in a step after a save": (at(Run, "report", die_after_a_save, lambda run, *_: run.position == 4), 3),
    "before a save": (at(Checkpoints, "begin", die), 3),
    "while the weights are copied": (at(pytorch, "copied", die, rank=1), 3),
    "before a file": (at(pytorch, "write", die), 3),
    "within a file": (at(pytorch, "write", die_within_the_file, of_a_rank), 3),
    "before the checksum of another rank": (at(checkpoints, "_write_digest", die, of_a_rank, rank=1), 3),
    "before the folder has its name": (at(checkpoints, "publish", die), 3),
    "after the folder has its name": (at(checkpoints, "publish", call_and_die), 6),
    "in an evaluation": (at(train, "evaluation_input", die, rank=1), 6),
}


def test_a_run_killed_around_its_saves_is_one_that_was_not(data, uninterrupted, tmp_path):
    output = tmp_path / "killed"
    for place, (hook, resumes) in KILLS.items():
        assert -signal.SIGKILL in trained(data, output, 2, hook), place
        names = sorted(path.name for path in (output / "checkpoint").glob("step_*"))
        assert names[-1] == f"step_{resumes:08d}", place
    assert trained(data, output, 2) == [0, 0]
    assert curve(output) == curve(uninterrupted(2))
    assert [each["resumed_step"] for each in records(output, "start")] == [0, 3, 6]
    assert not list((output / "checkpoint").glob("writing_*"))


def test_a_stopped_run_waits_for_its_save_and_resumes_with_the_same_losses(data, uninterrupted, tmp_path):
    """The signal comes while the save of step 3 is written, which takes until the ranks have stopped."""
    output = tmp_path / "stopped"

    def slowly(plain, *arguments):
        while not list(output.glob("asked")):
            time.sleep(0.01)
        time.sleep(0.3)
        return plain(*arguments)

    def asked(plain, *arguments):
        (output / "asked").touch()
        return stop(plain, *arguments)

    def hook(rank):
        at(pytorch, "write", slowly, of_a_rank)(rank)
        at(Run, "report", asked, lambda run, *_: run.position == 4, rank=1)(rank)

    assert trained(data, output, 2, hook) == [0, 0]
    assert [each["step"] for each in records(output, "checkpoint_written")] == [3]
    assert records(output, "end")[-1]["outcome"] == "interrupted"
    assert trained(data, output, 2) == [0, 0]
    assert curve(output) == curve(uninterrupted(2))


@pytest.mark.parametrize(("before", "split", "after"), [(2, {"tensor_parallelism": 2}, 1), (1, {}, 2)])
def test_a_stopped_run_resumes_on_other_ranks(before, split, after, data, uninterrupted, tmp_path):
    output = tmp_path / "stopped"
    assert trained(data, output, before, at(Run, "report", stop, lambda run, *_: run.position == 4), **split) == (
        [0] * before
    )
    assert trained(data, output, after) == [0] * after
    assert figures(output) == pytest.approx(figures(uninterrupted(1)), rel=1e-4)


def test_a_rank_that_cannot_write_ends_the_run(data, tmp_path, capfd):
    def full(plain, *arguments):
        raise OSError(28, "No space left on device")

    output = tmp_path / "full"
    codes = trained(data, output, 2, at(pytorch, "write", full, of_a_rank, rank=1))
    assert 1 in codes and 0 not in codes, "the first one that fails has the other one killed"
    assert "No space left on device" in capfd.readouterr().err
    assert not list((output / "checkpoint").glob("step_*"))
