"""A server for a while: started, awaited for a bounded time, ended with whatever it has started."""

import contextlib
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from encore.errors import EncoreError, ExitCode
from encore.job import Command
from encore.machine import processes

POLL_SECONDS = 0.2
STOP_SECONDS = 40.0  # Triton gives requests in flight 30 s by default (--exit-timeout-secs)


@dataclass(frozen=True)
class Ports:
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002  # 0: no metrics

    def options(self, address: str) -> tuple[str, ...]:
        metrics = (f"--metrics-port={self.metrics}",) if self.metrics else ("--allow-metrics=false",)
        where = (f"--http-address={address}", f"--grpc-address={address}")
        return (*where, f"--http-port={self.http}", f"--grpc-port={self.grpc}", *metrics)


@contextlib.contextmanager
def running(
    command: Command, ports: Ports, models: Sequence[str], log: Path, seconds: float
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the server and wait until all ``models`` are ready; its output goes to ``log``.

    EncoreError if it ends or is not ready after ``seconds``.
    """
    try:
        with log.open("wb") as output:
            child = processes.start(command, output)
    except OSError as error:
        raise EncoreError(f"{command.argv[0]} does not start: {error}", exit_code=ExitCode.FAILED) from error
    try:
        _wait(child, ports, models, log, seconds)
        yield child
    finally:
        _stop(child, command)


def _wait(child: subprocess.Popen[bytes], ports: Ports, models: Sequence[str], log: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not all(_is_ready(ports, model) for model in models):
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL_SECONDS)
            raise explain(log, f"the server ended with exit code {child.returncode}")
        # Triton does not notice that its backend's process was never started, and waits for it.
        if STUB_FAILED.search(log.read_text(encoding="utf-8", errors="replace")):
            raise explain(log, "the server cannot start its backend")
        if time.monotonic() > end:
            raise explain(log, f"the server is not ready after {seconds:g} s")


def _is_ready(ports: Ports, model: str) -> bool:
    url = f"http://127.0.0.1:{ports.http}/v2/models/{model}/ready"
    # Not by way of a proxy of the environment.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


# What the shell and the loader print in place of the Python backend's stub.
STUB_FAILED = re.compile(r"^(?:bash: .+|.+: error while loading shared libraries: .+)$", re.MULTILINE)

# An error that every server on a machine without a GPU prints, and that stops nothing.
WITHOUT_GPU = "CudaDriverHelper has not been initialized."

# What the server prints, what it means, what to do; the first that matches counts.
SYMPTOMS = (
    (r"failed to (?:start|listen).*|[Aa]ddress already in use", "a port is taken", "--http-port and --grpc-port"),
    (
        r"No space left on device|[Uu]nable to (?:create|initialize) shared memory",
        "/dev/shm is full",
        "free some of it",
    ),
    (r"unable to find backend library for backend '[^']*'", "the image lacks the backend", "--image NAME: one with it"),
    (r"cannot open shared object file|unable to load shared library", "a library is missing", "see the last lines"),
)


def explain(log: Path, found: str) -> EncoreError:
    """Return what went wrong by the server's own words."""
    text = log.read_text(encoding="utf-8", errors="replace")
    reasons = re.findall(r"^(?:E\d.*\] |error: )\"?(.+?)\"?$", text, re.MULTILINE)
    reasons = STUB_FAILED.findall(text)[:1] or [each for each in reasons if each != WITHOUT_GPU]
    last = reasons[-1] if reasons else ""
    loading = re.findall(r"failed to load '[^']*' version \d+: (.+?)(?:\\n|\"?$)", text, re.MULTILINE)
    words = (loading or [last or " ".join(text.split()[-20:])])[-1]
    for pattern, meaning, hint in SYMPTOMS:
        if re.search(pattern, text):
            return EncoreError(
                f"{found}: {meaning}: {words}", hint=f"{hint}; output in {log}", exit_code=ExitCode.FAILED
            )
    return EncoreError(f"{found}: {words}", hint=f"read {log}", exit_code=ExitCode.FAILED)


def _stop(child: subprocess.Popen[bytes], command: Command) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
    # The Python backend's processes are in the server's group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if command.cleanup:
        subprocess.run(command.cleanup, capture_output=True, timeout=60, check=False, env=dict(command.environment))
