"""Measure the framework's all-reduce between the ranks of a node.

    $ torchrun --standalone --nproc-per-node 8 -m benchmarks.common.checks.all_reduce --framework pytorch --output FILE

The rate is the bus bandwidth as in nccl-tests (doc/PERFORMANCE.md): 2 (n-1) / n of the array's bytes per second, the
amount that each rank sends, so that it is limited by the links and independent of the number of ranks. Rank 0 writes
it as JSON.
"""

import argparse
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import List, Optional

from benchmarks.common.run.stopping import end_process
from benchmarks.common.run.timing import seconds_of

# fp32 array size per rank; on a GPU large enough to be limited by the links
ARRAY_BYTES = {"gpu": 1 << 28, "cpu": 1 << 22}
CALLS = 10
REPEATS = 3


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", required=True, help="module of benchmarks/common/frameworks")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--output", type=Path, required=True, help="file for the result (JSON)")
    arguments = parser.parse_args(argv)
    framework = importlib.import_module(f"benchmarks.common.frameworks.{arguments.framework}")
    ranks = framework.start(SimpleNamespace(device=arguments.device, precision="fp32"))
    size = ARRAY_BYTES[arguments.device]
    call = framework.summing(ranks, size // 4)
    call()
    framework.barrier()
    seconds = min(seconds_of(call, CALLS, framework.synchronize) for _ in range(REPEATS))
    rate = 2 * (ranks.size - 1) / ranks.size * size / seconds
    result = {"ranks": ranks.size, "bytes": size, "seconds": seconds, "rate": rate}
    framework.finish()
    if ranks.rank == 0:
        arguments.output.write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    end_process(main)
