"""A run's resolved "auto" settings: compiler, CUDA graph, kernels, optimizer, attention.

Code that resolves an "auto" calls ``record``. Run writes all choices to the metrics stream, the log and the
checkpoints; a resumed run reuses them.
"""

import dataclasses
from typing import Any, Dict, Mapping, TypeVar

T = TypeVar("T")

# Keys of configurations that say how something is computed, with the same result but for rounding.
KEYS = ("attention", "compile", "cuda_graph", "first_layer", "fp8", "kernels", "optimizer_kernel", "xla")


class UnavailableError(ValueError):
    """A requested feature is missing on some rank's device or in its software; the message includes the fix."""


_recorded: Dict[str, Any] = {}


def record(key: str, choice: Any) -> None:
    """Record a configuration key's resolved value, or one value per operator."""
    _recorded[key] = dict(choice) if isinstance(choice, Mapping) else choice


def forget() -> None:
    _recorded.clear()


def resolved(config: Any, saved: Mapping[str, Any]) -> Dict[str, Any]:
    """Return a run's choices; ``saved``: choices in the loaded checkpoint."""
    resolved = {key: getattr(config, key) for key in KEYS if hasattr(config, key)}
    if hasattr(config, "compiles"):
        resolved["xla"] = config.compiles
    # TF32 depends on the device, which may have changed since the checkpoint.
    resolved.update({**{key: value for key, value in saved.items() if key != "tf32"}, **_recorded})
    if "cuda_graph" in resolved and config.device == "cpu":
        resolved["cuda_graph"] = False
    return resolved


def restore(config: T, saved: Mapping[str, Any]) -> T:
    """Replace "auto" in ``config`` by a checkpoint's choices; per-operator choices are restored elsewhere."""
    untyped: Any = config
    names = {key: value for key, value in saved.items() if key in KEYS and not isinstance(value, Mapping)}
    changed = {key: value for key, value in names.items() if getattr(untyped, key, None) == "auto"}
    return dataclasses.replace(untyped, **changed) if changed else config
