"""What a Config refuses in its ``__post_init__``; standard library only: the host side loads this file too."""

from __future__ import annotations

from typing import Any, Tuple


def refuse(*problems: Tuple[str, bool]) -> None:
    """Raise ValueError with the text of the first problem that is there."""
    for problem, there in problems:
        if there:
            raise ValueError(problem)


def at_least(config: Any, least: float, *names: str) -> None:
    """Refuse the first field that is below ``least``."""
    refuse(*((f"{name} must be at least {least:g}", getattr(config, name) < least) for name in names))


def above_zero(config: Any, *names: str) -> None:
    """Refuse the first field that is not above 0."""
    refuse(*((f"{name} must be above 0", getattr(config, name) <= 0) for name in names))


def fraction(config: Any, *names: str) -> None:
    """Refuse the first field that is not in (0, 1]."""
    refuse(*((f"{name} must lie in 0..1", not 0 < getattr(config, name) <= 1) for name in names))


def precision_on_cpu(config: Any, *possible: str) -> None:
    """Refuse a ``precision`` that the framework does not have on a CPU."""
    wanted = " or ".join(f"precision={name}" for name in possible)
    found = f"device=cpu cannot run precision={config.precision}: set {wanted}"
    refuse((found, config.device == "cpu" and config.precision not in possible))
