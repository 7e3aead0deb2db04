"""Configuration checks: ``__post_init__`` validates the values, ``mismatches`` the data set and the number of ranks.

Standard library only: the host also imports this module, to reject before the start what the ranks would reject.
"""

from typing import Any, List, Mapping, Tuple

Mismatch = Tuple[str, str, str]  # finding, expectation, hint
Manifest = Mapping[str, Any]  # fields of ``dataset.json``


def reject_if(*problems: Tuple[str, bool]) -> None:
    """Raise ValueError with the first problem that applies."""
    for problem, applies in problems:
        if applies:
            raise ValueError(problem)


def at_least(config: Any, least: float, *names: str) -> None:
    reject_if(*((f"{name} must be at least {least:g}", getattr(config, name) < least) for name in names))


def above_zero(config: Any, *names: str) -> None:
    reject_if(*((f"{name} must be above 0", getattr(config, name) <= 0) for name in names))


def fraction(config: Any, *names: str) -> None:
    reject_if(*((f"{name} must be in 0..1", not 0 < getattr(config, name) <= 1) for name in names))


def precision_on_cpu(config: Any, *possible: str) -> None:
    """Refuse a ``precision`` that the framework does not have on a CPU."""
    supported = " or ".join(f"precision={name}" for name in possible)
    problem = f"device=cpu cannot run precision={config.precision}: set {supported}"
    reject_if((problem, config.device == "cpu" and config.precision not in possible))


def too_few(manifest: Manifest, unit: str, step: int) -> List[Mismatch]:
    """Return the mismatch if a data set has fewer training samples than a ``step`` of all ranks."""
    count = manifest["splits"]["train"]["count"]
    hint = "set a smaller batch_size, take fewer ranks, or more data"
    return [(f"{count:,} {unit}, fewer than the {step:,} of a step", "at least one step", hint)] * (count < step)
