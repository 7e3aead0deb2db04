"""JSON files written whole or not at all, and the time stamps in them."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from encore.errors import EncoreError


def utc_now() -> str:
    """Return now, in UTC, as ISO 8601 with seconds."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` so that a reader sees the old file or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, sort_keys=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; EncoreError if the file is missing or damaged."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EncoreError(f"{path} cannot be read: {error}", remedy="restore it, or start a new run") from error
    if not isinstance(loaded, dict):
        raise EncoreError(f"{path} holds no JSON object", remedy="restore it, or start a new run")
    return loaded
