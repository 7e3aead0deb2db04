"""Where NCF's interactions come from: MovieLens ratings, the files of the NCF paper, or synthetic tastes."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from benchmarks.ncf.sources import movielens, paper, tastes
from benchmarks.ncf.sources.interactions import Interactions


def read_source(origin: Optional[Path], name: Optional[str], seed: int) -> Interactions:
    """Return the interactions of the source at ``origin``, or the toy data set; Problem if it is unusable."""
    if origin is None:
        return tastes.generate()
    negatives = sorted(origin.glob(f"*{paper.NEGATIVES}"))
    return paper.read(negatives[0], name) if negatives else movielens.read(origin, name, seed)
