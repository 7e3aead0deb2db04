"""ResNet's data set as samples, for benchmarks/common/data/sample_checks.py: labels and the start of images."""

import struct
from pathlib import Path
from typing import Any, List, Mapping

import numpy as np

from benchmarks.common.data import recordio, sample_checks

HEADER = struct.Struct("<IIIf")  # magic number, length with its flag, number of labels, label (recordio.py)
BEGIN = 4096  # leading bytes that, with the length, identify a record


class Records:
    """A split's records, read at random."""

    def __init__(self, directory: Path, split: Mapping[str, Any]) -> None:
        self._records, index = (directory / file["name"] for file in split["files"])
        self.offsets = np.array([offset for _, offset in recordio.read_index(index)], np.int64)

    def keys(self, indices: np.ndarray) -> List[bytes]:
        return [
            sample_checks.key(np.frombuffer(record[HEADER.size + 16 :], np.uint8)) for record in self._read(indices)
        ]

    def labels(self, indices: np.ndarray) -> np.ndarray:
        return np.array([HEADER.unpack_from(record)[3] for record in self._read(indices)]).astype(np.int64)

    def _read(self, indices: np.ndarray) -> List[bytes]:
        contents = []
        with self._records.open("rb") as file:
            for index in indices:
                file.seek(self.offsets[index])
                length = self.offsets[index + 1] - self.offsets[index] if index + 1 < len(self.offsets) else BEGIN
                contents.append(file.read(min(BEGIN, int(length))))
        return contents


def view(directory: Path, manifest: Mapping[str, Any]) -> sample_checks.View:
    parts = {}
    for name, split in manifest["splits"].items():
        records = Records(directory, split)
        parts[name] = sample_checks.Part(len(records.offsets), records.keys, labels=records.labels)
    return sample_checks.View(parts, classes=len(manifest["classes"]), is_shuffled=True)
