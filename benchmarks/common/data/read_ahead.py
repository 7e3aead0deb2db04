"""Prefetching on threads, for the input pipelines of all frameworks."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Deque, Generator, Iterable, TypeVar

S = TypeVar("S")
T = TypeVar("T")


def read_ahead(make: Callable[[S], T], tasks: Iterable[S], ahead: int, threads: int) -> Generator[T, None, None]:
    """Yield ``make`` results in task order, computed by threads up to ``ahead`` tasks early; ``close`` stops them."""
    if ahead == 0:
        yield from map(make, tasks)
        return
    waiting: Deque[Future[T]] = deque()
    with ThreadPoolExecutor(min(ahead, threads)) as pool:
        try:
            for task in tasks:
                waiting.append(pool.submit(make, task))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
