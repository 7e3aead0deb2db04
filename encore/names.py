"""Names that a user may have mistyped: offer the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from encore.errors import EncoreError

MOST_LISTED = 16
_CUTOFF = 0.6
"""Similarity from which on a name may be meant: half of the letters are the same in 'nobody' and 'MangoBoost'."""


def unknown(kind: str, name: str, known: Iterable[str]) -> EncoreError:
    """Return an error for ``name``, which is no ``kind``, that offers the nearest of ``known``."""
    choices = sorted(known)
    by_case = {each.lower(): each for each in reversed(choices)}
    near = [by_case[each] for each in difflib.get_close_matches(name.lower(), by_case, n=1, cutoff=_CUTOFF)]
    # A long list would bury the one name that was meant.
    expected = f"one of {', '.join(choices)}" if len(choices) <= MOST_LISTED or not near else ""
    remedy = f"did you mean {near[0]!r}?" if near else ""
    return EncoreError(f"unknown {kind} {name!r}", expected=expected, remedy=remedy)
