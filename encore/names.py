"""Names that a user may have mistyped: offer the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from encore.errors import EncoreError


def unknown(kind: str, name: str, known: Iterable[str]) -> EncoreError:
    """An error for ``name``, which is no ``kind``, that offers the nearest of ``known``."""
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]!r}?" if near else f"choose one of: {', '.join(choices)}"
    return EncoreError(f"unknown {kind} {name!r}", expected=f"one of {', '.join(choices)}", remedy=remedy)
