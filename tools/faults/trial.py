"""Fault trial: benchmark with an uninterrupted run, a stopped run, and the verdict."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from encore import catalogue, configuration, data, environment, paths
from encore.machine import processes
from encore.results.logs import reader
from encore.run import hints
from tests.conftest import evaluations, records

RANKS = 2
LONGEST_SECONDS = 300
DYING_SECONDS = 10.0  # A process that was killed may need so long on a busy machine until it is gone
CANCEL = re.compile(r"\S*encore cancel .+$", re.MULTILINE)
GONE = "its processes have exited"  # cancel message if the run has exited in the meantime
CACHES = ("torchinductor_", "__pycache__", "__autograph")  # compiler caches of PyTorch and TensorFlow in TMPDIR
TEMPORARY = ("*.writing", "writing_*", "*.partial")
# Files that a resume may write before the ranks reject the checkpoints
REPORTED = ("ranks", "heartbeat", "telemetry.jsonl", "state.json", "owner.json", ".owner.lock")
Kind = Literal["as uninterrupted", "refused", "FAULT", "not tried"]


def settings(name: str) -> tuple[str, ...]:
    # Settings for a small run with two evaluations and an unreachable target
    choice = catalogue.choose(name)
    fields, system = configuration.field_types(choice.folder), choice.benchmark.small_data.system
    of_round = choice.benchmark.rounds[catalogue.find_system(choice, system, None).round].targets
    # BLEU and F1 are up to 100, other qualities up to 1.
    overrides = [
        f"{choice.benchmark.qualities[override].config}={100.0 if of_round[override] > 1 else 1.0}"
        for override in of_round
    ]
    config = catalogue.find_system(choice, system, None).config
    interval = config.get("eval_interval_samples")
    if interval is None:
        overrides.append("epochs=2")
    elif "max_samples" in fields:
        overrides.append(f"max_samples={2 * interval}")
    else:
        # The rules leave out the first floor(batch / 8 + 2) evaluations.
        overrides.append(f"max_steps={(config['batch_size'] // 8 + 4) * -(-interval // config['batch_size'])}")
    overrides += ["eval_epochs=[1, 2]"] if "eval_epochs" in fields else []
    return tuple(word for override in overrides for word in ("--set", override))


@dataclass(frozen=True)
class Verdict:
    # Run outcome after a fault

    kind: Kind
    text: str = ""


def verdict_of(problems: list[str], otherwise: Verdict = Verdict("as uninterrupted")) -> Verdict:
    # FAULT with the problems, if any
    return Verdict("FAULT", "; ".join(problems)) if problems else otherwise


@dataclass(frozen=True)
class Done:
    # A finished command

    code: int
    output: str


@dataclass(frozen=True)
class Bench:
    # A benchmark on the toy data set, with a folder for all trials

    name: str
    work: Path
    seed: int

    @property
    def data(self) -> Path:
        # The toy data set, shared by all implementations
        return self.work.parent / "data" / catalogue.choose(self.name).benchmark.name

    @functools.cached_property
    def uninterrupted(self) -> Path:
        # A run without faults
        python = environment.ensure_environment(catalogue.choose(self.name).implementation.framework)
        data.prepare(self.data.name, self.data, data.Preparation(), python)
        return self._made("uninterrupted", lambda trial: trial.ended(trial.begin()), 3)

    @functools.cached_property
    def stopped(self) -> Path:
        # A run stopped in the second epoch, with one checkpoint from there and one from the end of the first
        count = len(steps(self.uninterrupted))
        return self._made("stopped", lambda trial: _stop(trial, count // 2 + 1, count), 130)

    def _made(self, name: str, make: Callable[[Trial], Done], code: int) -> Path:
        trial = Trial(self, self.work / name, random.Random(f"{self.seed} {self.name} {name}"))
        if not trial.results.is_dir():
            done = make(trial)
            if done.code != code:
                raise SystemExit(f"{self.name}, {name}: exit code {done.code}\n{done.output}")
        return trial.run


def _stop(trial: Trial, first: int, last: int) -> Done:
    encore = trial.begin()
    trial.wait_for_records(encore, trial.moment.randrange(first, last - 1))
    encore.send_signal(signal.SIGINT)
    return trial.ended(encore)


@dataclass(frozen=True)
class Trial:
    # One fault on one benchmark: where it happens, and when

    bench: Bench
    folder: Path
    moment: random.Random
    options: list[str] = field(default_factory=list)  # More options of ``encore run``

    @property
    def results(self) -> Path:
        # The results folder of this trial
        return self.folder / "results"

    @property
    def run(self) -> Path:
        # The only run folder
        (folder,) = [path.parent for path in self.results.glob("[!.]*/run.json")]
        return folder

    @property
    def temporary(self) -> Path:
        # TMPDIR of all trials of the benchmark, which run one at a time and share compiler caches
        return self.bench.work / "tmp"

    # -- commands ----------------------------------------------------------------------------------------

    def spawn(self, command: str) -> subprocess.Popen[str]:
        # Start a shell command with ``encore`` in PATH and the output in a file
        programs = self.bench.work.parent / "bin"
        for folder in (self.folder, self.temporary):
            folder.mkdir(parents=True, exist_ok=True)
        program = programs / "encore"
        if not program.exists():
            # This checkout's, whatever environment it runs in
            programs.mkdir(parents=True, exist_ok=True)
            python, root = shlex.quote(sys.executable), shlex.quote(str(paths.ROOT))
            program.write_text(f'#!/bin/sh\nPYTHONPATH={root} exec {python} -m encore.cli.app "$@"\n', encoding="ascii")
            program.chmod(0o755)
        variables = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "TMPDIR": str(self.temporary),
            "COLUMNS": "300",
        }
        number = len(list(self.folder.glob("output_*")))
        with (self.folder / f"output_{number}").open("w+", encoding="utf-8") as output:
            output.write(f"$ {command}\n")
            output.flush()
            return subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, text=True,
                cwd=self.folder, env=variables, pass_fds=(), start_new_session=True,
            )  # fmt: skip

    def ended(self, child: subprocess.Popen[str]) -> Done:
        # Wait for a command of ``spawn``
        code = child.wait(timeout=LONGEST_SECONDS)
        outputs = sorted(self.folder.glob("output_*"), key=lambda path: path.stat().st_mtime)
        return Done(code, outputs[-1].read_text(encoding="utf-8", errors="replace"))

    def do(self, command: str) -> Done:
        # Execute a command as it is printed
        return self.ended(self.spawn(command))

    def run_command(self) -> str:
        # Command for a new run
        locations = ("--data", str(self.bench.data), "--results", str(self.results), "--seed", "7")
        arguments = (
            "encore",
            "run",
            self.bench.name,
            str(RANKS),
            *locations,
            *settings(self.bench.name),
            *self.options,
        )
        return shlex.join(arguments)

    def begin(self) -> subprocess.Popen[str]:
        # Start a new run
        return self.spawn(self.run_command())

    def resume_stopped(self, harm: Callable[[Path], object]) -> Verdict:
        # Resume a copy of the run that was stopped, after something was done to it
        run = self.copied(self.bench.stopped)
        harm(run)
        return self.resumed(run)

    # -- moments -----------------------------------------------------------------------------------------

    def wait_for_records(self, encore: subprocess.Popen[str], count: int) -> None:
        # Wait until the training has reported ``count`` losses or has exited
        end = time.monotonic() + LONGEST_SECONDS
        while encore.poll() is None and time.monotonic() < end:
            for metrics in self.results.glob("[!.]*/experiment_0/metrics.jsonl"):
                if metrics.read_text(encoding="utf-8").count('"kind": "step"') >= count:
                    return
            time.sleep(0.02)

    def wait_for_moment(self, encore: subprocess.Popen[str]) -> None:
        # Wait for a random time in the training: a step, and then up to 0.2 s
        self.wait_for_records(encore, self.moment.randrange(1, len(steps(self.bench.uninterrupted))))
        time.sleep(self.moment.uniform(0, 0.2))

    def ranks(self) -> list[int]:
        # Processes of the ranks
        return [beat.pid for beat in processes.heartbeats(self.run / "experiment_0" / "heartbeat")]

    def copied(self, run: Path) -> Path:
        # Copy a run folder, as if the run had been moved
        return Path(shutil.copytree(run, self.results / run.name))

    # -- verdicts ----------------------------------------------------------------------------------------

    def resumed(self, run: Path, hint: str = "") -> Verdict:
        # Resume a run with the hint that the run or status printed; stop running ranks with the printed command
        original = snapshot(run)
        done = self.do(hint or hints.resume(run))
        cancel = CANCEL.search(done.output)
        if done.code == 2 and cancel:
            cancelled = self.do(cancel.group())
            # Ranks without a supervisor may also exit between the two commands.
            if cancelled.code and GONE not in cancelled.output:
                return Verdict("FAULT", f"{cancel.group()} ends with {cancelled.code}: {cancelled.output[-300:]}")
            original = snapshot(run)
            done = self.do(hint or hints.resume(run))
        return self.judged(run, done, original)

    def after(self, done: Done, killed: bool = False) -> Verdict:
        # Evaluate the run's exit after a fault, and the resume
        allowed = (-signal.SIGKILL,) if killed else (1, 3, 130)
        if done.code not in allowed or (done.code == 130 and traceback_of(done)):
            return Verdict("FAULT", f"ends with {done.code}: {done.output[-600:]}")
        leftovers = [] if killed else self.left()
        if leftovers:
            return Verdict("FAULT", f"after the fault {'; '.join(leftovers)}")
        printed = [line.partition("resume with: ")[2] for line in done.output.splitlines() if "resume with: " in line]
        if not printed and done.code not in (3, -signal.SIGKILL):
            return Verdict("FAULT", "no hint how to resume")
        return self.resumed(self.run, printed[-1] if printed else "")

    def judged(self, run: Path, done: Done, original: dict[str, str]) -> Verdict:
        # Evaluate a resume: as uninterrupted, or refused without changes
        problems = [*self.left(), *(["a traceback"] if traceback_of(done) else [])]
        if done.code in (0, 3):
            problems += differences(run, self.bench.uninterrupted)
        elif done.code in (1, 2) and "hint: " in done.output:
            changed = {name for name, _ in original.items() ^ snapshot(run).items()}
            if done.code == 1:
                changed = {name for name in changed if not set(Path(name).parts) & set(REPORTED)}
                problems += ["advises to resume"] if "resume with: " in done.output else []
            problems += [f"refused and changed {name}" for name in sorted(changed)]
        else:
            problems.append(f"exit code {done.code}: {done.output[-400:]}")
        return verdict_of(
            problems, Verdict("as uninterrupted") if done.code in (0, 3) else Verdict("refused", refusal(done))
        )

    def left(self) -> list[str]:
        # Processes and temporary files that should not be there
        end = time.monotonic() + DYING_SECONDS
        while self.processes() and time.monotonic() < end:
            time.sleep(0.1)
        leftovers = [f"process {process.pid} is left" for process in self.processes()]
        names = [path for pattern in TEMPORARY for path in self.results.rglob(pattern)]
        names += [path for path in self.temporary.glob("*") if not path.name.startswith(CACHES)]
        return leftovers + [f"{path.relative_to(self.bench.work)} is left" for path in names]

    def processes(self) -> list[psutil.Process]:
        # The living processes of this trial
        children = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.folder) in " ".join(process.cmdline()) and process.pid != os.getpid():
                    children.append(process)
        return children


def refusal(done: Done) -> str:
    # First line that explains a rejection
    lines = [line for line in done.output.splitlines() if "error: " in line or " failed" in line or " damaged" in line]
    return lines[0].strip() if lines else ""


def traceback_of(done: Done) -> bool:
    # Whether a command printed a traceback, directly or from a rank
    return "Traceback (most recent call last)" in done.output


def steps(run: Path) -> list[tuple[int, float]]:
    # Number and loss of all steps of the first experiment
    return [(record["step"], record["loss"]) for record in records(run / "experiment_0" / "metrics.jsonl", "step")]


def differences(run: Path, uninterrupted: Path) -> list[str]:
    # Differences from the uninterrupted run: losses, evaluations, order of log events
    numbers = [number for number, _ in steps(run)]
    actual, expected = (evaluations(folder / "experiment_0" / "metrics.jsonl") for folder in (run, uninterrupted))
    wrong = {
        "steps are there twice": sorted(set(numbers)) != numbers,
        "other losses": steps(run) != steps(uninterrupted),
        "other evaluations": actual != expected,
        "other log events": events(run) != events(uninterrupted),
    }
    return [text for text, is_so in wrong.items() if is_so]


def events(run: Path) -> list[str]:
    # Result log keys in order; a damaged line counts as a key
    damage: list[str] = []
    keys = [event.key for event in reader.read_events(run / "result_0.txt", lambda line, text: damage.append(text))]
    return keys + damage


def snapshot(folder: Path) -> dict[str, str]:
    # The digest of every file that counts
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".owner.lock"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@contextlib.contextmanager
def aside(path: Path) -> Iterator[Path]:
    # Move a folder elsewhere while entered; yields where it is
    elsewhere = path.with_name(f"{path.name}-elsewhere")
    path.rename(elsewhere)
    try:
        yield elsewhere
    finally:
        shutil.rmtree(path, ignore_errors=True)
        elsewhere.rename(path)
