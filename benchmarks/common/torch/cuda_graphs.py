"""A function of tensors as one CUDA graph."""

from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Callable, Iterator, Optional, Sequence

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import startup, stopping


@lru_cache(maxsize=None)
def side_stream() -> torch.cuda.Stream:
    """Return the stream for all captures, and for modules built for them.

    DistributedDataParallel keeps autograd nodes that run on the stream on which it was built: on a different stream,
    PyTorch warns of needless synchronization and of invalidated captures.
    """
    return torch.cuda.Stream()


@contextmanager
def on_side_stream() -> Iterator[None]:
    """Run the block on the side stream, ordered with the work before and after it on the current stream."""
    stream = side_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


class Captured:
    """``function`` over fixed memory; call it with tensors of the same shapes, on all ranks together.

    ``warm_up`` runs before the capture on the same stream with the same tensors, as required by PyTorch's notes on
    CUDA graphs; its side effects remain. A result is valid until the next call.

    ``pool_of`` shares the memory pool of another graph, so that many step sizes need only the memory of the largest,
    which is captured first. A result is then valid until either graph is called.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        example: Sequence[torch.Tensor],
        warm_up: Callable[..., None],
        pool_of: Optional["Captured"] = None,
    ) -> None:
        # A replay uses the memory of the function, which must live as long as the graph.
        self._function = function
        self._held = [tensor.clone() for tensor in example]
        with startup.part("capture"):
            with on_side_stream():
                warm_up(*self._held)
            pytorch.barrier()
            stopping.progress()
            self._graph = torch.cuda.CUDAGraph()
            pool = pool_of._graph.pool() if pool_of is not None else None
            # thread_local: calls of other threads do not invalidate the capture.
            with torch.cuda.graph(self._graph, pool=pool, stream=side_stream(), capture_error_mode="thread_local"):
                self._result = function(*self._held)
        pytorch.register(self)
        stopping.progress()

    def reset(self) -> None:
        self._graph.reset()

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Copy the tensors in and replay; a shorter tensor fills only the start of its buffer."""
        for buffer, new in zip(self._held, tensors):
            target = buffer if buffer.shape == new.shape else buffer[: len(new)]
            target.copy_(new, non_blocking=True)
        self._graph.replay()
        return self._result


def repeated(function: Callable[..., Any], times: int) -> Callable[..., None]:
    def warm_up(*tensors: torch.Tensor) -> None:
        for _ in range(times):
            function(*tensors)
            stopping.progress()

    return warm_up
