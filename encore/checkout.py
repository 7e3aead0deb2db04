"""State of the checkout: commit and uncommitted changes."""

import hashlib
import subprocess

from typing_extensions import TypedDict

from encore import paths


class CodeState(TypedDict):
    commit: str | None  # None outside of a git checkout
    uncommitted_sha256: str | None  # Hash of the uncommitted changes; None: no such changes


def _git(*arguments: str) -> str | None:
    # An installed wheel may be inside an unrelated repository.
    if paths.IS_INSTALLED:
        return None
    try:
        done = subprocess.run(["git", "-C", str(paths.ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def code_state() -> CodeState:
    commit = _git("rev-parse", "HEAD")
    difference = _git("diff", "HEAD")
    changed = hashlib.sha256(difference.encode()).hexdigest() if difference else None
    return {"commit": commit.strip() if commit else None, "uncommitted_sha256": changed}
