"""Runs of Llama's train.py: in every split, stopped, killed around a save, resumed on other ranks.

Each rank is a fork of this process, which has loaded PyTorch and computed nothing. When one fails, the others are
killed, as a launcher does.
"""

import dataclasses
import functools
import json
import os
import signal
import socket
import time

import pytest
import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import checkpoints, stopping
from benchmarks.common.run.run import Run
from benchmarks.llama import noise
from benchmarks.llama31_8b.pytorch import train
from benchmarks.llama31_8b.pytorch.config import Config

LONG = True
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
    """Reference runs by number of ranks and settings, each trained once."""

    @functools.cache
    def train_once(ranks, **settings):
        output = tmp_path_factory.mktemp("uninterrupted")
        assert run_train(data, output, ranks, **settings) == [0] * ranks
        return output

    return train_once


def run_train(data, output, ranks, hook=lambda rank: None, **settings):
    # Train to the end, or until a rank is killed; return the exit codes. Each rank calls ``hook`` before.
    output.mkdir(exist_ok=True)
    config = dataclasses.replace(CONFIG, **settings)
    config = dataclasses.replace(config, batch_size=GLOBAL_BATCH * config.group // ranks)
    path, pids, codes = output / "config.json", [], {}
    arguments = ["--config", str(path), "--data", str(data), "--output", str(output)]
    path.write_text(json.dumps(dataclasses.asdict(config)), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for rank in range(ranks):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ.update(RANK=f"{rank}", WORLD_SIZE=f"{ranks}", MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}")
            torch.set_num_threads(1)
            hook(rank)
            stopping.end_process(lambda: train.main(arguments))
    while len(codes) < ranks:
        pid, status = os.waitpid(-1, 0)
        codes[pid] = os.waitstatus_to_exitcode(status)
        for other in set(pids) - set(codes) if codes[pid] else ():
            os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def records(output, kind):
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def losses(output):
    # Losses of the steps, then of the evaluations
    evaluations = [float(loss) for record in records(output, "eval") for loss in record["qualities"].values()]
    return [record["loss"] for record in records(output, "step")] + evaluations


@pytest.mark.parametrize("settings", [{}, {"tensor_parallelism": 2}, {"context_parallelism": 2}])
def test_two_ranks_train_like_one_in_every_split(settings, uninterrupted):
    one, two = uninterrupted(1), uninterrupted(2, **settings)
    assert losses(two) == pytest.approx(losses(one), rel=1e-4) and len(losses(one)) == 12 + 4

    assert [record["step"] for record in records(two, "checkpoint_written")] == [3, 6, 9, 12]
    assert not (two / "order").exists(), "a finished run needs it no longer"


def replace(owner, name, action, condition=lambda *arguments: True, rank=0):
    # Return a hook: ``rank`` runs ``action`` in place of a call whose arguments meet the condition

    def hook(own_rank):
        plain = getattr(owner, name)

        def replacement(*arguments, **options):
            if own_rank == rank and condition(*arguments):
                return action(plain, *arguments)
            return plain(*arguments, **options)

        setattr(owner, name, replacement)

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


def is_rank_file(path, *arguments):
    return path.name.startswith("rank_")


def is_step_4(run, *arguments):
    return run.position == 4


# Hooks in the order in which one run is killed, each with the step that it resumes from: the last complete save.
KILLS = {
    "in a step after a save": (replace(Run, "report", die_after_a_save, is_step_4), 3),
    "before a save": (replace(checkpoints.Checkpoints, "save_async", die), 3),
    "while the weights are copied": (replace(pytorch, "snapshot", die, rank=1), 3),
    "before a file": (replace(pytorch, "write", die), 3),
    "within a file": (replace(pytorch, "write", die_within_the_file, is_rank_file), 3),
    "before the checksum of another rank": (replace(checkpoints, "_write_digest", die, is_rank_file, rank=1), 3),
    "before the folder has its name": (replace(checkpoints, "publish", die), 3),
    "after the folder has its name": (replace(checkpoints, "publish", call_and_die), 6),
    "in an evaluation": (replace(train, "evaluation_input", die, rank=1), 6),
}


def test_run_killed_around_its_saves_has_the_same_losses(data, uninterrupted, tmp_path):
    for moment, (hook, step) in KILLS.items():
        assert -signal.SIGKILL in run_train(data, tmp_path, 2, hook), moment
        assert max((tmp_path / "checkpoint").glob("step_*")).name == f"step_{step:08d}", moment
    assert run_train(data, tmp_path, 2) == [0, 0]
    assert losses(tmp_path) == losses(uninterrupted(2))
    assert [record["resumed_step"] for record in records(tmp_path, "start")] == [0, 3, 6]


@pytest.mark.parametrize(("before", "split", "after"), [(2, {"tensor_parallelism": 2}, 1), (1, {}, 2)])
def test_stopped_run_resumes_on_other_ranks(before, split, after, data, uninterrupted, tmp_path):
    assert run_train(data, tmp_path, before, replace(Run, "report", stop, is_step_4), **split) == [0] * before
    assert run_train(data, tmp_path, after) == [0] * after
    assert losses(tmp_path) == pytest.approx(losses(uninterrupted(1)), rel=1e-4)
