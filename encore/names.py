"""Names that a user may have mistyped: offer the nearest."""

import difflib
from collections.abc import Iterable

from encore.errors import EncoreError

MOST_LISTED = 16
NEAREST = 5  # Names that are offered out of more
# Similarity from which on a name may be meant: half of the letters are the same in 'nobody' and 'MangoBoost'.
_CUTOFF = 0.6


def unknown(kind: str, name: str, candidates: Iterable[str]) -> EncoreError:
    """Return an error for an unknown ``name`` of this ``kind``, with the nearest of ``candidates``.

    Candidates that contain the name are preferred over similar spellings.
    """
    choices, lowered = sorted(candidates), name.lower()
    by_case = {choice.lower(): choice for choice in reversed(choices)}
    containing = [
        choice for choice in sorted(by_case, key=lambda choice: (len(choice), choice)) if lowered and lowered in choice
    ]
    near = containing[:NEAREST] or difflib.get_close_matches(lowered, by_case, n=1, cutoff=_CUTOFF)
    # A long list would bury the names that were meant.
    expected = f"one of {', '.join(choices)}" if len(choices) <= MOST_LISTED else ""
    if len(choices) > MOST_LISTED and not near:
        alike = difflib.get_close_matches(lowered, by_case, n=NEAREST, cutoff=0.0)
        expected = f"one of {len(choices):,}, such as {', '.join(by_case[choice] for choice in alike)}"
    hint = f"did you mean {' or '.join(repr(by_case[choice]) for choice in near)}?" if near else ""
    return EncoreError(f"unknown {kind} {name!r}", expected=expected, hint=hint)
