"""Batches of a prepared data set: those of Llama 3.1 8B, whose data these are."""

from benchmarks.llama31_8b.pytorch.data import (
    Batch,
    evaluated_samples,
    evaluation_input,
    shown_samples,
    synthetic_batch,
    training_input,
    training_order,
)

__all__ = [
    "Batch",
    "evaluated_samples",
    "evaluation_input",
    "shown_samples",
    "synthetic_batch",
    "training_input",
    "training_order",
]
