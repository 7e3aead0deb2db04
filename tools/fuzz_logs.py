"""Long fuzzing of the reader, the scoring and the audit, in addition to the short runs of the tests.

    python -m tools.fuzz_logs 1000000      # random and mutated lines

Builds mutated logs, reads and judges them, until it has read that many lines. It ends with an exception where the
reader raises, takes more than a second for a log, or gives a time that is not the log's.
"""

import random
import tempfile
import time
from pathlib import Path

from tests.results.result_logs import check_mutant, mll, mutate, resnet_v05, resnet_v07
from tools import run

_SECONDS_PER_LOG = 1.0


def originals() -> list[tuple[bytes, float]]:
    # Whole logs with their minutes
    start = 1_560_881_731.835
    v06 = (
        mll("submission_benchmark", "resnet", start)
        + mll("run_start", None, start)
        + mll("eval_accuracy", 0.7593, start + 6900, epoch_num=60)
        + mll("run_stop", None, start + 6900, status="success")
    )
    prefixed = "".join(f"{rank}: {line}" for rank, line in enumerate(resnet_v07(5.0).splitlines(True)))
    return [
        (resnet_v07(40.0).encode(), 40.0),
        (resnet_v05(134.0, stop='{"success": true}').encode(), 134.0),
        (v06.encode(), 115.0),
        (prefixed.encode(), 5.0),
    ]


def random_line(rng: random.Random) -> bytes:
    # A line with a mark and noise, or noise alone
    mark = rng.choice([b":::MLLOG ", b":::MLL ", b":::MLPv0.5.0 ", b"MLPerf: ", b":::ML", b""])
    body = bytes(rng.choices(b'{}[]":, 0123456789.eE-truefalsnl\\u\x00\xff(abc)', k=rng.randint(0, 80)))
    return mark + body + b"\n"


def main(count: int) -> None:
    rng = random.Random()
    logs = originals()
    done = read = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result_0.txt"
        while done < count:
            original, minutes = rng.choice(logs)
            mutant = mutate(original, rng)
            lines = mutant.splitlines(keepends=True)
            for _ in range(rng.randint(0, 40)):
                lines.insert(rng.randint(0, len(lines)), random_line(rng))
            mutant = b"".join(lines)
            start = time.perf_counter()
            check_mutant(original, mutant, minutes, path)
            if time.perf_counter() - start > _SECONDS_PER_LOG:
                raise AssertionError(f"more than {_SECONDS_PER_LOG} s for a log of {len(mutant)} bytes")
            done, read = done + len(lines), read + 1
    print(f"{done} lines in {read} logs: no exception, no hang, no wrong time")


if __name__ == "__main__":
    run(main, __doc__)
