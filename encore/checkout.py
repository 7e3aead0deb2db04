"""The state of the checkout: which commit, and what differs from it."""

import hashlib
import subprocess
from typing import Any

from encore import paths


def _git(*arguments: str) -> str | None:
    # An installed wheel may be inside of another repository.
    if paths.IS_INSTALLED:
        return None
    try:
        done = subprocess.run(["git", "-C", str(paths.ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def code_state() -> dict[str, Any]:
    commit = _git("rev-parse", "HEAD")
    difference = _git("diff", "HEAD")
    changed = hashlib.sha256(difference.encode()).hexdigest() if difference else None
    return {"commit": commit.strip() if commit else None, "uncommitted_sha256": changed}
