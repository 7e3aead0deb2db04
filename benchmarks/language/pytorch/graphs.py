"""A step over rows of tokens as CUDA graphs, one for each length of row."""

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
    """Capture a step for each length of row from a quarter of the longest; shorter ones stay eager.

    Samples of any length fill a row to a half. The longest row comes first: the others use its memory.

    Args:
        eager: forward and backward; returns the loss.
        example: synthetic data of about a number of tokens, filled up.
        longest: tokens of a row at most.
        bucket: tokens to a multiple of which rows are filled up.
        warm_up_steps: before the first capture, STEPS_BEFORE_CAPTURE at least.
        capture: :class:`Captured`, or what stands for it.
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

        # Compiled by the first; then a call before a capture is for what a shape allocates.
        graph = capture(step, tensors_of(row), repeated(step, repeats if first is None else 1), first)
        graphs[shapes] = graph
        first = first or graph
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def run(row: BatchT) -> torch.Tensor:
        graph = graphs.get(tuple(map(len, tensors_of(row))))
        return eager(row) if graph is None else graph(*tensors_of(row))

    return run
