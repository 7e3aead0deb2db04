"""Read a resolved ``config.json`` into an implementation's Config dataclass; standard library only."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Dict, Type, TypeVar

T = TypeVar("T")


def from_mapping(config_class: Type[T], values: Dict[str, Any]) -> T:
    """Build ``config_class`` from JSON values; a missing or unknown key raises ValueError.

    Nothing is filled in silently: the resolved configuration names every field.
    """
    names = [field.name for field in dataclasses.fields(config_class)]  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(names))
    missing = sorted(set(names) - set(values))
    if unknown or missing:
        raise ValueError(f"config.json has unknown keys {unknown} and lacks {missing}")
    return config_class(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})


def load(config_class: Type[T], path: Path) -> T:
    """Read ``path`` into ``config_class``; ValueError names what does not fit."""
    return from_mapping(config_class, json.loads(path.read_text(encoding="utf-8")))
