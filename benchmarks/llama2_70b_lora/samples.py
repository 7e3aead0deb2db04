"""Packed samples and loss masks, for benchmarks/common/data/sample_checks.py."""

from pathlib import Path
from typing import Any, Iterator, Mapping, Tuple

from benchmarks.common.data import sample_checks
from benchmarks.llama2_70b_lora.dataset import Samples, open_data


def _part(samples: Samples) -> sample_checks.Part:
    return sample_checks.Part(
        len(samples), lambda indices: [sample_checks.key(samples.tokens[index]) for index in indices]
    )


def view(directory: Path, manifest: Mapping[str, Any]) -> sample_checks.View:
    data = open_data(directory)
    parts = {"train": data.train, "test": data.test}

    def own() -> Iterator[Tuple[str, str]]:
        for name, samples in parts.items():
            indices = sample_checks.spread(len(samples)).tolist()
            top = max((int(samples.tokens[index].max()) for index in indices), default=0)
            if top >= data.vocabulary:
                yield f"{name}: tokens up to {top:,}", f"{data.vocabulary:,} entries of the vocabulary"
            has_labels = {index: bool(samples.counts[index].any()) for index in indices}
            yield from sample_checks.agreement(
                has_labels, f"samples of {name} without a token in the loss", "a summary in each", 1.0
            )

    return sample_checks.View({name: _part(samples) for name, samples in parts.items()}, extra_checks=own)
