"""Format figures for the terminal and the report."""

from collections.abc import Mapping, Sequence


def with_names(values: Mapping[str, float], style: str = ".4f") -> str:
    """Format ``0.9259``, or several qualities with names: ``box 0.3100, mask 0.2800``."""
    if len(values) == 1:
        (value,) = values.values()
        return f"{value:{style}}"
    return ", ".join(f"{name} {value:{style}}" for name, value in values.items())


def format_distinct(values: Mapping[str, float], targets: Mapping[str, float]) -> str:
    """Format ``value 0.759`` with enough digits to distinguish it from the target: ``value 0.7589999``."""
    return ", ".join(f"{name} {_distinct_text(value, targets.get(name))}" for name, value in values.items())


def _distinct_text(value: float, target: float | None) -> str:
    target_text = "" if target is None or value == target else f"{target:g}"
    texts = (f"{value:.{digits}g}" for digits in range(5, 17))
    return next((text for text in texts if text != target_text), repr(value))


def against_targets(qualities: Mapping[str, float], targets: Mapping[str, float]) -> str:
    """Format ``quality 0.9259 of 0.95``, or several: ``box 0.3100 of 0.377, mask 0.2800 of 0.339``."""
    several = len(qualities) > 1
    return ", ".join(
        f"{name if several else 'quality'} {value:.4f} of {targets[name]:g}" for name, value in qualities.items()
    )


def figure(value: float | None) -> str:
    """Format with four significant digits, ``0.003225``, and integers from 10,000, ``176,608``; ``-`` for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def percent(share: float) -> str:
    """Format 0.05 as ``5 %``."""
    return f"{share * 100:g} %"


def count_of(number: float, noun: str) -> str:
    """Format ``1 run`` or ``3 runs``; fractions are rounded to three decimals."""
    return f"{round(number, 3):.12g} {noun}{'' if number == 1 else 's'}"


def join_names(names: Sequence[str], most: int = 6) -> str:
    """Format the first ``most`` names: ``a, b and 3 more``."""
    remaining = len(names) - most
    return ", ".join(names[:most]) + (f" and {remaining} more" if remaining > 0 else "")


def round_of(round_: str | None, is_guess: bool) -> str:
    """Format ``v0.7``, ``v0.7?`` if guessed, ``?`` if unknown."""
    return f"{round_ or ''}{'?' if is_guess or not round_ else ''}"


def printable(text: str, replacement: str = "�") -> str:
    """Replace control characters, which logs may contain."""
    return "".join(character if character.isprintable() else replacement for character in text)
