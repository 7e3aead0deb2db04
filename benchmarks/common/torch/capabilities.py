"""Capabilities of the installed PyTorch for a fast step: torch.compile and CUDA graphs; and who compiles first."""

import dataclasses
import fcntl
import importlib.util
import inspect
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Optional, TypeVar

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import choices, startup, stopping
from benchmarks.common.run.ranks import Ranks

T = TypeVar("T")


def resolve(settings: T, ranks: Ranks) -> T:
    """Replace each "auto" in ``settings``; raise UnavailableError on all ranks if a requested feature is missing.

    ``settings`` is a dataclass with device, compile (a mode of torch.compile, none or auto) and cuda_graph (bool or
    auto).
    """
    config: Any = settings
    on_gpu = config.device == "gpu"
    resolved = {
        "compile": _choose("compile", config.compile, "default" if on_gpu else "none", "none", ranks),
        "cuda_graph": _choose("cuda_graph", config.cuda_graph, on_gpu, False, ranks),
    }
    for key, choice in resolved.items():
        choices.record(key, choice)
    return dataclasses.replace(config, **resolved)


def compile_in_turns(compiles: Callable[[], Any], ranks: Ranks) -> None:
    """Call ``compiles`` on each node's first rank, then on the others, which mostly hit the node's cache.

    ``compiles`` compiles the step without its collectives, on synthetic data; a single rank per node compiles in the
    step itself. The others wait for a file lock, which the kernel releases whenever the process exits, instead of a
    message.
    """
    if ranks.size == 1:
        return
    with startup.part("compile"):
        _compile_in_turns(compiles, ranks)
    stopping.progress()


def _compile_in_turns(compiles: Callable[[], Any], ranks: Ranks) -> None:
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    job = f"{os.environ.get('MASTER_ADDR', '')}_{os.environ.get('MASTER_PORT', '')}".replace("/", "_")
    with open(folder / f"compiles_{job}", "a", encoding="ascii") as file:
        # If locking is not available, as on some shared file systems, all ranks compile at once.
        with suppress(OSError):
            if ranks.local_rank == 0:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        pytorch.barrier()  # by now the first rank has the lock; single-rank nodes wait here as well
        if ranks.local_size == 1:
            return
        with suppress(OSError):
            if ranks.local_rank > 0:
                fcntl.flock(file, fcntl.LOCK_SH)
        try:
            compiles()
        finally:
            # Not by closing it: processes that the compiler has forked keep the file open.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def _choose(key: str, setting: Any, best: Any, off: Any, ranks: Ranks) -> Any:
    choice = best if setting == "auto" else setting
    lack = "" if choice == off else pytorch.agreed(LACKS[key](ranks.context) or "")
    if not lack:
        return choice
    if setting != "auto":
        raise choices.UnavailableError(
            f"{key}={setting}: {lack}\n  hint: set {key}={str(off).lower()}, or use a newer image"
        )
    if ranks.rank == 0:
        print(f"{key}={str(off).lower()}, which is slower: {lack}", file=sys.stderr)
    return off


def lack_of_compiler(device: torch.device) -> Optional[str]:
    """Return why torch.compile cannot be used on ``device``; None if it can."""
    if not hasattr(torch, "compile"):
        return f"PyTorch {torch.__version__} has no torch.compile (since 2.0)"
    if device.type != "cuda":
        return None
    if importlib.util.find_spec("triton") is None:
        return "torch.compile needs Triton, which is not installed"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= (7, 0) else f"torch.compile needs compute capability 7.0, the GPU has {capability}"


def lack_of_graphs(device: torch.device) -> Optional[str]:
    """Return why the step cannot be captured, or None."""
    if "capture_error_mode" not in inspect.signature(torch.cuda.graph.__init__).parameters:
        return f"PyTorch {torch.__version__} cannot capture while other threads use the GPU, which came with 2.1"
    # The captured update reads its learning rate from the device.
    if not hasattr(getattr(torch.ops.aten, "_fused_sgd_", None), "tensor_lr"):
        return f"PyTorch {torch.__version__} has no fused SGD with a tensor learning rate (since 2.3)"
    return None


LACKS = {"compile": lack_of_compiler, "cuda_graph": lack_of_graphs}
