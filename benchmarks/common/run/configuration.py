"""Read a resolved ``config.json`` into an implementation's Config, and check it; standard library only."""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Dict, List, Optional, Type, TypeVar

from benchmarks.common.data import manifest
from benchmarks.common.data.problem import Problem

T = TypeVar("T")


def arguments(description: Optional[str], argv: Optional[List[str]]) -> argparse.Namespace:
    """Parse the command line of ``train.py``: paths of config, data and output."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (JSON)")
    parser.add_argument("--data", type=Path, required=True, help="prepared data set")
    parser.add_argument("--output", type=Path, required=True, help="folder for results, may be shared by nodes")
    return parser.parse_args(argv)


def load(config_class: Type[T], path: Path) -> T:
    """Read ``path`` into ``config_class``; raise ValueError for missing keys, unknown keys and invalid values.

    There are no defaults: the resolved configuration contains every field.
    """
    values: Dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names = {field.name for field in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    unknown, missing = sorted(set(values) - names), sorted(names - set(values))
    if unknown or missing:
        raise ValueError(f"config.json has unknown keys {unknown} and lacks {missing}")
    return config_class(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})


def reject_mismatches(config: Any, data: Path, ranks: int, memory: float = math.inf) -> None:
    """Reject a data set or a number of ranks that does not fit ``config``.

    The host runs the same check before the start, but may not know ``memory``, the bytes of a rank's device.

    Raises:
        Problem: the first mismatch, or the data set does not exist.
    """
    if hasattr(config, "mismatches"):
        for mismatch in config.mismatches(manifest.read(data), ranks, memory):
            problem, *rest = mismatch
            raise Problem(f"{data}: {problem}", *rest)
