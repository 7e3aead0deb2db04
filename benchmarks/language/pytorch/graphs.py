"""CUDA graphs for a step on packed tokens, one per row length."""

from typing import Any, Callable, Dict, Tuple

import torch

from benchmarks.common.torch.cuda_graphs import Captured, repeated
from benchmarks.language.pytorch.encoder import BatchT, tensors_of, with_tensors

STEPS_BEFORE_CAPTURE = 3  # at least, as PyTorch's documentation of CUDA graphs asks


def captured(
    eager: Callable[[BatchT], torch.Tensor],
    example: Callable[[int], BatchT],
    longest: int,
    bucket: int,
    warm_up_steps: int,
    capture: Any = Captured,
) -> Callable[[BatchT], torch.Tensor]:
    """Capture a step for row lengths from a quarter of the maximum; shorter rows run eagerly.

    Rows of random samples are at least half full. The longest row is captured first: the other graphs use its
    memory.

    Args:
        eager: forward and backward; returns the loss.
        example: synthetic data with about the given number of tokens, padded.
        longest: maximum tokens per row.
        bucket: rows are padded to a multiple of this number of tokens.
        warm_up_steps: before the first capture, STEPS_BEFORE_CAPTURE at least.
        capture: :class:`Captured`, or a substitute in tests.
    """
    graphs: Dict[Tuple[int, ...], Any] = {}
    first = None
    repeats = max(warm_up_steps, STEPS_BEFORE_CAPTURE)
    for tokens in range(-(-longest // bucket) * bucket, longest // 4, -bucket):
        row = example(tokens)
        shapes = tuple(map(len, tensors_of(row)))
        if shapes in graphs:
            continue

        def step(*tensors: torch.Tensor, like: BatchT = row) -> torch.Tensor:
            return eager(with_tensors(like, tensors))

        # The first call compiles; another call before the capture allocates shape-dependent buffers.
        graph = capture(step, tensors_of(row), repeated(step, repeats if first is None else 1), first)
        graphs[shapes] = graph
        first = first or graph
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def run(row: BatchT) -> torch.Tensor:
        graph = graphs.get(tuple(map(len, tensors_of(row))))
        return eager(row) if graph is None else graph(*tensors_of(row))

    return run
