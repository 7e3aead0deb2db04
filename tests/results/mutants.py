"""Damaged logs, for the tests of the reader and for tools/fuzz_logs.py."""

import random
from pathlib import Path

import pytest

from encore.results.audit.judge import audit_score
from encore.results.logs.run_log import read_run
from encore.results.scores.score import score_runs


# Few of the accidents that happen to logs.
def mutate(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 3)):
        at, length = rng.randrange(len(data) + 1), rng.randint(0, 60)
        match rng.randrange(6):
            case 0:
                data = data[:at]
            case 1:
                data = data[:at] + data[at + length :]
            case 2:
                data = data[:at] + rng.randbytes(length) + data[at:]
            case 3:
                data = data[:at] + data[at : at + length] + data[at:]
            case 4:
                flipped = bytes(byte ^ (1 << rng.randrange(8)) for byte in data[at : at + 2])
                data = data[:at] + flipped + data[at + 2 :]
            case _:
                other = rng.randrange(len(data) + 1)
                data = data[:at] + data[other : other + length] + data[at:]
    return data


# Lines that hold the times, digits and all.
def times_of(data: bytes, keys: tuple[bytes, ...]) -> set[bytes]:
    return {line for line in data.split(b"\n") if any(key in line for key in keys)}


# A mutant has no time, or the right one, or a whole run_start or run_stop that says another; it can be audited.
def check_mutant(original: bytes, mutant: bytes, minutes: float, path: Path) -> None:
    path.write_bytes(mutant)
    run = read_run(path, "v0.5" if b"MLPv0.5" in original else "v0.7")
    audit_score(score_runs(path.parent, [run]))
    if run.minutes is None:
        assert run.reason
        return
    keys = (b"run_start", b"run_stop")
    if times_of(mutant, keys) == times_of(original, keys):
        assert run.minutes == pytest.approx(minutes, abs=1e-6)
