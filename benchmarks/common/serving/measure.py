"""Throughput and latency of a served model, compared with direct calls in this process.

Each client is a thread that sends one request at a time; direct calls use the same number of threads. A cell of the
grid is a batch size and a number of clients, measured through the server and directly.
"""

import argparse
import contextlib
import json
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

from benchmarks.common.serving import client, model
from benchmarks.common.serving.client import Arrays, RefusedError, Server

PERCENTILES = (50, 90, 99)
WARM_UP = 3  # uncounted requests per client

Call = Callable[[], Any]


def samples(example: Arrays, names: Sequence[str], batch: int) -> Arrays:
    """Return a batch of the example's samples, repeated where it has fewer."""
    count = len(example[names[0]])
    return {name: np.ascontiguousarray(example[name][np.arange(batch) % count]) for name in names}


def time_clients(make: Callable[[], Call], clients: int, requests: int) -> Dict[str, float]:
    """Return requests a second and percentiles of the latency in milliseconds, of ``clients`` threads."""
    latencies: List[float] = []
    failures: List[Exception] = []
    # The clock starts when all clients are warm.
    barrier = threading.Barrier(clients + 1)

    def run(share: int) -> None:
        try:
            call = make()
            for _ in range(WARM_UP):
                call()
            barrier.wait()
            times = []
            for _ in range(share):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            latencies.extend(times)
        except Exception as error:
            failures.append(error)
            barrier.abort()

    shares = [requests // clients + (number < requests % clients) for number in range(clients)]
    threads = [threading.Thread(target=run, args=(share,), daemon=True) for share in shares]
    for thread in threads:
        thread.start()
    # Broken by a client that failed.
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - start
    causes = [failure for failure in failures if not isinstance(failure, threading.BrokenBarrierError)]
    if causes:
        raise causes[0]
    percentiles = np.percentile(np.array(latencies) * 1000, PERCENTILES)
    return {"requests_per_second": requests / wall, **{f"p{p}_ms": float(v) for p, v in zip(PERCENTILES, percentiles)}}


def cells(args: argparse.Namespace) -> List[Dict[str, Any]]:
    """Return the measurements of the grid: batches times numbers of clients."""
    manifest, example = client.load(args.folder)
    server = Server(args.url, args.protocol, manifest)
    server.wait(args.wait)
    settings = server.settings()
    largest = client.largest_batch(settings)
    names = [size["name"] for size in manifest["inputs"]]
    outputs = [size["name"] for size in manifest["outputs"]]
    direct = model.OPENERS[manifest["format"]](args.model, outputs, args.device) if args.model else None
    results = []
    for batch in [size for size in args.batches if size <= largest] if largest else [0]:
        inputs = samples(example, names, batch) if batch else {name: example[name] for name in names}
        sent = client.to_request(settings, inputs)

        def through_server(sent: Arrays = sent) -> Call:
            # One connection per client.
            connection = Server(args.url, args.protocol, manifest)
            return lambda: connection.ask(sent)

        def directly(inputs: Arrays = inputs) -> Call:
            return lambda: direct(inputs) if direct else None

        for clients in args.clients:
            cell: Dict[str, Any] = {
                "model": manifest["name"],
                "batch": batch or len(example[names[0]]),
                "clients": clients,
            }
            cell["server"] = time_clients(through_server, clients, args.requests)
            if direct is not None:
                cell["direct"] = time_clients(directly, clients, args.requests)
                cell["ratio"] = cell["server"]["requests_per_second"] / cell["direct"]["requests_per_second"]
            results.append(cell)
    return results


def numbers(text: str) -> List[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    client.options(parser)
    parser.add_argument("--model", help="model file for direct calls; default: no direct calls")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="of the direct calls")
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--clients", type=numbers, default=[1, 4])
    parser.add_argument("--requests", type=int, default=200, help="of each cell")
    args = parser.parse_args(arguments)
    try:
        print(json.dumps(cells(args)))
    except (RefusedError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
