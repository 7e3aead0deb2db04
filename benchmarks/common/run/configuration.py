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
    """Read the command line that every ``train.py`` has: config, data and output, each a path."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (JSON)")
    parser.add_argument("--data", type=Path, required=True, help="folder of a prepared data set")
    parser.add_argument("--output", type=Path, required=True, help="folder for results, may be shared by nodes")
    return parser.parse_args(argv)


def load(config_class: Type[T], path: Path) -> T:
    """Read ``path`` into ``config_class``; a missing or unknown key or a refused value raises ValueError.

    Nothing is filled in silently: the resolved configuration names every field.
    """
    values: Dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names = {field.name for field in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    unknown, missing = sorted(set(values) - names), sorted(names - set(values))
    if unknown or missing:
        raise ValueError(f"config.json has unknown keys {unknown} and lacks {missing}")
    return config_class(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})


def refuse_misfits(config: Any, data: Path, ranks: int, memory: float = math.inf) -> None:
    """Refuse a data set and a number of ranks that ``config`` cannot be trained with.

    The host side asks the Config the same before anything starts, but may not see ``memory``: bytes of a rank's device.

    Raises:
        Problem: the first misfit, or there is no data set.
    """
    if hasattr(config, "misfits"):
        for misfit in config.misfits(manifest.read(data), ranks, memory):
            problem, *rest = misfit
            raise Problem(f"{data}: {problem}", *rest)
