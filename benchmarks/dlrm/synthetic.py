"""Toy data set: synthetic clicks in Criteo's text format, with a known distribution.

Categories and some of the numbers add effects to the click logit; one pair of tables adds a product of hidden
vectors, which only the interaction can learn. Popular values are more frequent, as in real logs. The text is
determined by the seed on all machines.
"""

from pathlib import Path

import numpy as np

from benchmarks.dlrm.blocks import NUMBERS, TABLES

NAME = "made-clicks"
ROWS = {"train": 131072, "val": 16384}
# Number of values of the first tables; other tables have LAST_SIZE. Some have only tens of values, as in Criteo's logs
SIZES = (900, 600, 400, 300, 200, 3, 120, 80, 63, 900, 500, 250, 10, 150, 100, 55, 4, 97, 14)
LAST_SIZE = 36
SPREAD = 0.55  # standard deviation of a category's effect on the logit
HIDDEN = 4  # width of the hidden vectors of the interacting pair
INTERCEPT = -1.3
MISSING = 0.1  # fraction of empty fields, where allowed


def write_text(folder: Path, seed: int) -> None:
    generator = np.random.RandomState(seed % 2**32)
    sizes = (*SIZES, *[LAST_SIZE] * (TABLES - len(SIZES)))
    effects = [SPREAD * generator.randn(size) for size in sizes]
    pair = [generator.randn(size, HIDDEN) / HIDDEN**0.5 for size in sizes[:2]]
    slopes = 0.15 * generator.randn(NUMBERS)
    hashes = [generator.randint(1, 2**32, size=size, dtype=np.int64) for size in sizes]
    for name, split in (("train", "train"), ("test", "val")):
        rows = ROWS[split]
        # Squares of uniform numbers are concentrated at the first values.
        indices = [(generator.rand(rows) ** 2 * size).astype(np.int64) for size in sizes]
        numbers = np.floor(np.exp(generator.randn(rows, NUMBERS) * 1.5 + 1.0)).astype(np.int64) - 1
        logits = INTERCEPT + np.log1p(np.maximum(numbers, 0)).dot(slopes) - slopes.sum() * 1.4
        logits += sum(effect[index] for effect, index in zip(effects, indices))
        logits += 1.5 * (pair[0][indices[0]] * pair[1][indices[1]]).sum(axis=1)
        labels = generator.rand(rows) < 1 / (1 + np.exp(-logits))
        empty = generator.rand(rows, NUMBERS) < MISSING
        with (folder / f"{name}.txt").open("w", encoding="ascii") as file:
            for row in range(rows):
                fields = [str(int(labels[row]))]
                fields += ["" if no else str(value) for value, no in zip(numbers[row], empty[row])]
                fields += [f"{table[index[row]]:08x}" for table, index in zip(hashes, indices)]
                file.write("\t".join(fields) + "\n")
