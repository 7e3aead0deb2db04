"""A prepared data set: packed samples of equal length as token ids, and a loss mask.

train_tokens.npy test_tokens.npy    int32 (samples, length)
train_counts.npy test_counts.npy    bool, same shape: True if the loss includes the token as a label
tokenizer.json                      of the base model, if given
base.safetensors                    toy data set only: weights to adapt, with Hugging Face's names
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

import numpy as np

from benchmarks.common.data import manifest
from benchmarks.common.data.arrays import check_sizes, opening
from benchmarks.common.data.problem import Problem

PARTS = ("train", "test")
BASE = "base.safetensors"


@dataclass(frozen=True)
class Samples:
    tokens: np.ndarray  # int32 (samples, length), a memory map
    counts: np.ndarray  # bool, the same

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        return int(self.tokens.shape[1])


@dataclass(frozen=True)
class DataSet:
    folder: Path
    train: Samples
    test: Samples
    manifest: Mapping[str, Any]

    @property
    def vocabulary(self) -> int:
        return int(self.manifest["facts"]["vocabulary"])

    def padded_vocabulary(self, multiple: int) -> int:
        return -(-self.vocabulary // multiple) * multiple

    def base(self, name: str) -> Path:
        """Return the file with the weights to adapt: in this folder, or a path.

        Raises:
            Problem: the file does not exist.
        """
        path = self.folder / name
        if not path.is_file():
            raise Problem(
                f"{path} is not there",
                "weights of Llama as safetensors",
                "pass the file or its index with --set base=FILE, or set base= to start from random weights",
            )
        return path


def open_data(folder: Path) -> DataSet:
    """Open a prepared data set; reads no tokens, so it may be called before the clock starts.

    Raises:
        Problem: the data set is missing, incomplete, or does not match its manifest.
    """
    contents = manifest.read(folder)
    with opening(folder, "GovReport"):
        arrays = {
            part: Samples(
                *(np.load(str(folder / f"{part}_{array}.npy"), mmap_mode="r") for array in ("tokens", "counts"))
            )
            for part in PARTS
        }
        data = DataSet(folder, arrays["train"], arrays["test"], contents)
        counts = [(part, array, contents["splits"][part]["count"]) for part, array in arrays.items()]
        sizes = [(f"samples in {part}", len(array), count) for part, array, count in counts]
        sizes += [(f"counts in {part}", len(array.counts), count) for part, array, count in counts]
        check_sizes(
            folder, contents, [*sizes, ("tokens of a sample", data.train.length, contents["facts"]["sequence_length"])]
        )
        _ = data.vocabulary
    return data
