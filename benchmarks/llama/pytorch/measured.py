"""The loops of both benches, from what differs between them."""

import dataclasses
from functools import partial
from typing import Any, Callable, Generator, NamedTuple, Sequence

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks


def for_one_rank(config: Any, most_layers: int = 4) -> Any:
    """Return a configuration without what takes several ranks, and with no more layers than a device holds.

    Each layer is like the others, so that some tell how fast all of them are. Both loops hold their weights, gradients
    and moments at once: 28 bytes a weight, 54 GB for four layers of Llama 3.1 8B, 66 GB for two of gpt-oss-20b.
    """
    shared = [field.name for field in dataclasses.fields(config) if field.name.endswith("_parallelism")]
    return dataclasses.replace(config, layers=min(config.layers, most_layers), **dict.fromkeys(shared, 1))


class Measured(NamedTuple):
    """What a bench of Llama measures; ``synthetic`` is a step's micro-batches, which ``step`` takes."""

    title: str  # begins with this
    vocabulary: int
    synthetic: Sequence[Any]
    bare: Callable[[], None]  # a step of the plain loop
    step: Callable[[Any], Any]
    read: Callable[[], Generator[Any, None, None]]  # begins to read batches, without end
    evaluated: Callable[[], None]  # the first micro-batch
    flops: float  # of a sample


def subject(config: Any, ranks: Ranks, measured: Measured) -> bench.Subject:
    real, input_only = measured.read(), measured.read()

    def close() -> None:
        for batches in (real, input_only):
            batches.close()

    trained = partial(bench.training_loop, pytorch, config, ranks, measured.step)
    loops = {
        "bare": bench.repeated(measured.bare),
        "synthetic": trained(lambda: measured.synthetic),
        "real": trained(partial(next, real)),
        "input": bench.repeated(partial(next, input_only)),
        bench.EVALUATION: bench.repeated(measured.evaluated),
    }
    title = (
        f"{measured.title}, {config.layers} layers, width {config.width}, {measured.vocabulary:,} entries, "
        f"{config.batch_size} samples of {config.sequence_length:,} tokens, {config.precision}, one {config.device}"
    )
    return bench.Subject(
        title,
        config.batch_size * config.sequence_length,
        loops,
        {"bare": "plain PyTorch loop, synthetic data"},
        {bench.EVALUATION: measured.synthetic[0].tokens.numel()},
        close=close,
        unit="tokens",
        flops=dict.fromkeys(("bare", "synthetic", "real"), config.batch_size * measured.flops),
    )
