"""Choices of a run where its configuration leaves them open: compiler, graph, kernels, optimizer, attention.

Whoever resolves an "auto" calls ``record``; Run writes all of it to the metrics stream and the log, and to the
checkpoints, from which a resumed run takes it again.
"""

import dataclasses
from typing import Any, Dict, Mapping, TypeVar

T = TypeVar("T")

# Keys of configurations that say how something is computed, with the same result but for rounding.
KEYS = ("attention", "compile", "cuda_graph", "first_layer", "fp8", "kernels", "optimizer_kernel", "xla")


class UnavailableError(ValueError):
    """A choice of the configuration is not on every rank's device or in its software; the text says what to do."""


_recorded: Dict[str, Any] = {}


def record(key: str, choice: Any) -> None:
    """Note what a key of the configuration became: a value, or one for each operator."""
    _recorded[key] = dict(choice) if isinstance(choice, Mapping) else choice


def forget() -> None:
    _recorded.clear()


def resolved(config: Any, saved: Mapping[str, Any]) -> Dict[str, Any]:
    """Return each choice of a run with ``config``; ``saved`` are those of the checkpoint that it resumed from."""
    resolved = {key: getattr(config, key) for key in KEYS if hasattr(config, key)}
    if hasattr(config, "compiles"):
        resolved["xla"] = config.compiles
    # A resumed run may be on another device: its arithmetic is not that of the checkpoint.
    resolved.update({**{key: value for key, value in saved.items() if key != "tf32"}, **_recorded})
    if "cuda_graph" in resolved and config.device == "cpu":
        resolved["cuda_graph"] = False
    return resolved


def restore(config: T, saved: Mapping[str, Any]) -> T:
    """Return ``config`` with the choices of a checkpoint in place of "auto"; operators have their own place in it."""
    untyped: Any = config
    names = {key: value for key, value in saved.items() if key in KEYS and not isinstance(value, Mapping)}
    changed = {key: value for key, value in names.items() if getattr(untyped, key, None) == "auto"}
    return dataclasses.replace(untyped, **changed) if changed else config
