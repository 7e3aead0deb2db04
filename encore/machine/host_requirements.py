"""A run's requirements for its hosts, and conversion of the answers into checks.

The hosts are checked by :mod:`encore.machine.host_actions`, started by srun or ssh.
"""

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from encore.errors import EncoreError
from encore.machine import host_actions
from encore.machine.preflight import Check

SHARE = "share the folder over the network, at the same path on all hosts"


@dataclass(frozen=True)
class Need:
    kind: str  # A key of host_actions.PROBES
    what: str
    hint: str
    expected: str = ""


def same_file(path: Path, hint: str) -> Need:
    """Require a file, or the Python files in a folder, with the same content as on this host."""
    return Need("same", str(path), hint, host_actions.digest(path))


def question(needs: Sequence[Need]) -> str:
    return json.dumps([(need.kind, need.what, need.expected) for need in needs])


def failed_checks(kind: str, name: str, problems: Sequence[tuple[int, str]], needs: Sequence[Need]) -> list[Check]:
    """Combine a host's problems into one failed check; empty without problems."""
    if not problems:
        return []
    hint = needs[problems[0][0]].hint
    return [Check("FAIL", f"{kind} {name}", "; ".join(text for _, text in problems), hint)]


@contextmanager
def shared_marker(results: Path) -> Iterator[Path]:
    """Create a temporary file in the results folder, which verifies that other hosts share the folder."""
    mark = results / f".encore-{secrets.token_hex(8)}"
    try:
        results.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise EncoreError(f"{results} cannot be written: {error.strerror}", hint="--results DIR") from error
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)
