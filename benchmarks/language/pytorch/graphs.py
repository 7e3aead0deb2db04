"""A step over rows of tokens as CUDA graphs, one for each length of row."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Protocol, Sequence, Tuple, TypeVar

import torch

from benchmarks.common.torch.cuda_graphs import Captured, repeated

STEPS_BEFORE_CAPTURE = 3  # at least, as PyTorch's documentation of CUDA graphs asks
RowT = TypeVar("RowT", bound="Filled")


class Filled(Protocol):
    """A row of sequences that are computed together: sequences behind each other, filled up to one of few lengths."""

    def tensors(self) -> List[torch.Tensor]:
        """Return all that is computed on."""

    def of(self: RowT, tensors: Sequence[torch.Tensor]) -> RowT:
        """Return the same with other ``tensors``."""


def shapes(row: Filled) -> Tuple[int, ...]:
    return tuple(map(len, row.tensors()))


def captured(
    eager: Callable[[RowT], torch.Tensor],
    example: Callable[[int], RowT],
    longest: int,
    bucket: int,
    warm_up_steps: int,
    capture: Any = Captured,
) -> Callable[[RowT], torch.Tensor]:
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
        if shapes(row) in graphs:
            continue

        def step(*tensors: torch.Tensor, like: RowT = row) -> torch.Tensor:
            return eager(like.of(tensors))

        # Compiled by the first; then a call before a capture is for what a shape allocates.
        graph = capture(step, row.tensors(), repeated(step, repeats if first is None else 1), first)
        graphs[shapes(row)] = graph
        first = first or graph
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def run(row: RowT) -> torch.Tensor:
        graph = graphs.get(shapes(row))
        found: torch.Tensor = eager(row) if graph is None else graph(*row.tensors())
        return found

    return run
