"""What a run needs of each of its hosts, and what the answers mean; srun or ssh ask the hosts.

The hosts are asked by :mod:`encore.machine.host_actions`, which runs on each of them.
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


def same(path: Path, hint: str) -> Need:
    """Return the need of a file, or of the Python files of a folder, as they are on this host."""
    return Need("same", str(path), hint, host_actions.digest(path))


def question(needs: Sequence[Need]) -> str:
    return json.dumps([(need.kind, need.what, need.expected) for need in needs])


def failed_checks(kind: str, name: str, problems: Sequence[tuple[int, str]], needs: Sequence[Need]) -> list[Check]:
    """Return no check for a host that answered without problems, else one with all of them."""
    if not problems:
        return []
    hint = needs[problems[0][0]].hint
    return [Check("FAIL", f"{kind} {name}", "; ".join(text for _, text in problems), hint)]


@contextmanager
def marked(results: Path) -> Iterator[Path]:
    """Keep a file in the results folder, by which other hosts show that they see the same folder."""
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
