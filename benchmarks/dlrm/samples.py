"""DLRM's data set as samples, for benchmarks/common/data/sample_checks.py: rows of clicks."""

from pathlib import Path
from typing import Any, Iterator, List, Mapping, Tuple

import numpy as np

from benchmarks.common.data import sample_checks
from benchmarks.dlrm.blocks import BLOCK_ROWS, FIRST_TABLE, TABLES, open_blocks

LEAST_ROWS = 5000  # from which a column's relation with the labels shows
LEAST_RELATION = 4.0  # correlation in standard errors; without any correlation, the largest of 26 columns is about 3


class Rows:
    """A split's rows, read at random: a row is a word in every column of its block."""

    def __init__(self, path: Path, count: int) -> None:
        self.count = count
        self._blocks = open_blocks(path, count)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return int32 [rows, columns]."""
        return np.asarray(self._blocks[indices // BLOCK_ROWS, :, indices % BLOCK_ROWS])

    def keys(self, indices: np.ndarray) -> List[bytes]:
        return [sample_checks.key(row) for row in self.read(indices)]

    def labels(self, indices: np.ndarray) -> np.ndarray:
        return np.asarray(self._blocks[indices // BLOCK_ROWS, 0, indices % BLOCK_ROWS])


def relation(labels: np.ndarray, column: np.ndarray) -> float:
    """Return the correlation between labels and a prediction from the row's category, fitted on the other half of the
    rows, in standard errors.
    """
    _, category = np.unique(column, return_inverse=True)
    fitted, predicted = slice(0, None, 2), slice(1, None, 2)
    mean = labels[fitted].mean()
    clicks = np.bincount(category[fitted], labels[fitted] - mean, minlength=category.max() + 1)
    prediction = (clicks / (np.bincount(category[fitted], minlength=category.max() + 1) + 10))[category[predicted]]
    spread = prediction.std() * labels[predicted].std()
    centred = labels[predicted] - labels[predicted].mean()
    return float((prediction * centred).mean() / spread * np.sqrt(len(centred))) if spread else 0.0


def view(directory: Path, manifest: Mapping[str, Any]) -> sample_checks.View:
    parts = {name: Rows(directory / f"{name}.bin", manifest["splits"][name]["count"]) for name in ("train", "val")}
    sizes = np.array(manifest["facts"]["table_sizes"])

    def extra_checks() -> Iterator[Tuple[str, str]]:
        for name, rows in parts.items():
            sampled = rows.read(sample_checks.spread(rows.count))
            indices = sampled[:, FIRST_TABLE:]
            outside = np.flatnonzero(((indices < 0) | (indices >= sizes)).any(0))
            if len(outside):
                yield (
                    f"{name}: rows of table {outside[0]} from {indices[:, outside[0]].max():,} on",
                    "rows of the table",
                )
            elif len(sampled) >= LEAST_ROWS and len(np.unique(sampled[:, 0])) > 1:
                largest = max(relation(sampled[:, 0].astype(float), indices[:, table]) for table in range(TABLES))
                if largest < LEAST_RELATION:
                    text = f"{name}: no category correlates with the labels ({largest:.1f} standard errors)"
                    yield f"{text}: they may be those of other rows", f"at least {LEAST_RELATION}"

    shown = {name: sample_checks.Part(rows.count, rows.keys, labels=rows.labels) for name, rows in parts.items()}
    return sample_checks.View(shown, classes=2, is_shuffled=True, extra_checks=extra_checks)
