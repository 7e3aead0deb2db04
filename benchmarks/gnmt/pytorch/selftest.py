"""What `encore selftest` checks of GNMT in PyTorch; see benchmarks/common/selftest.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.common import selftest
from benchmarks.common.selftest import Suite, Tolerance, write_passport
from benchmarks.gnmt.pytorch.config import Config
from benchmarks.translation import arrays, vocabulary

PAIRS = 1 << 16
ENTRIES = 32316
"""Of the submitted vocabulary, which is padded to 32,320."""
LONGEST = 50


def real_sizes(folder: Path, pairs: int = PAIRS, entries: int = ENTRIES) -> None:
    """Write noise with the vocabulary and lengths of WMT's sentences."""
    random = np.random.RandomState(0)
    counts = {"train": pairs, "test": 128}
    for part, count in counts.items():
        for side in arrays.SIDES:
            offsets = np.concatenate(([0], np.cumsum(random.randint(4, LONGEST, count)))).astype(np.int64)
            np.save(str(folder / f"{part}_{side}_offsets.npy"), offsets)
            tokens = random.randint(vocabulary.EOS + 1, entries, offsets[-1])
            np.save(str(folder / f"{part}_{side}.npy"), tokens.astype(np.uint16))
    (folder / arrays.VOCABULARY).write_text("".join(f"w{n}\n" for n in range(entries - len(vocabulary.SPECIAL))))
    (folder / arrays.CODES).write_text("")
    for name in (arrays.SOURCES, arrays.REFERENCES):
        (folder / name).write_text("w1 w2\n" * counts["test"])
    facts = {"vocabulary": entries, "kind": vocabulary.BPE, "detokenized": False}
    write_passport(folder, "gnmt", counts, {**facts, "source_language": "qaa", "target_language": "qab"})


ROUNDED = Tolerance(0.005, 0.02)
SUITE = Suite(
    module="benchmarks.gnmt.pytorch",
    config_class=Config,
    # The device's own generator draws the dropout.
    device=Tolerance(0.1, 0.1),
    settings={"dropout": 0.0, "epochs": 1},
    two_ranks=ROUNDED,
    resume=Tolerance(1e-3, 1e-3),  # a GPU adds in any order
    varied={"precision": ROUNDED, "optimizer_kernel": ROUNDED, "split_optimizer": ROUNDED},
    left_out=("optimizer_kernel=apex",),
    real_sizes=real_sizes,
    programs={"optimizers": "benchmarks.common.compare_optimizers"},
)

if __name__ == "__main__":
    raise SystemExit(selftest.main(SUITE))
