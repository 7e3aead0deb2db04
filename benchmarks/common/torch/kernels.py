"""Selection of operator implementations: PyTorch operators or Triton kernels.

Triton kernels are in a ``kernels.py``, imported only if they can run. They are used if their values and gradients
match the plain path on this device and a short measurement finds them faster. CPUs always use the plain path.
"""

import importlib
import importlib.util
import os
import statistics
import sys
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import choices, startup, stopping
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.timing import seconds_of

WARMUP, MEASURED = 2, 5  # calls per candidate
HELD_CYCLES = 50_000_000  # for which a GPU is held up while calls are queued: some 25 ms
# Maximum kernel error relative to the largest value, by activation type: a few units in the last place of 24, 11
# and 8 bits, since the order of sums is arbitrary. TF32 has the precision of fp16.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Options of every kernel: fused multiply-add. The default depends on Triton's release.
OPTIONS = {"enable_fp_fusion": True}

Results = List[torch.Tensor]
# Runs an operator forward and backward on fixed inputs; returns values and gradients.
Call = Callable[[], Results]
Time = Callable[[Call], float]  # measures a call, in seconds


class Operator(NamedTuple):
    """Step part with a plain path and Triton kernels."""

    plain: Any
    # Module and name of the implementation in Triton, as in ``benchmarks.dlrm.pytorch.kernels:gather``; "": none.
    triton: str
    example: Callable[..., Call]  # creates a call to an implementation: (implementation, device, dtype, **sizes)
    # Sizes of the compared examples: block edges and index types
    small: Tuple[Mapping[str, Any], ...]


class Library(NamedTuple):
    """Implementations in a library that an image may have."""

    name: str
    operators: Mapping[str, Any]  # available operators, by name
    missing: str  # reason if none is available


class Specification(NamedTuple):
    """A kernel to compile: each argument's type, such as ``*fp16``, or a constant's value."""

    kernel: Any
    variant: str
    arguments: Mapping[str, Any]
    warps: int
    # Integer arguments divisible by 16 in a run, which Triton detects at launch to use wider loads.
    divisible: Tuple[str, ...] = ()
    least: int = 0  # minimum compute capability, such as 89 for FP8


def why_plain(device: torch.device) -> str:
    """Return why ``device`` cannot run Triton kernels, or an empty string."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton compiles for GPUs only"
    return "" if importlib.util.find_spec("triton") else "Triton is not installed"


def implementation(operator: Operator, name: str) -> Any:
    if name == "plain":
        return operator.plain
    module, _, attribute = operator.triton.partition(":")
    return getattr(importlib.import_module(module), attribute)


def power_of_two(number: int, least: int = 16) -> int:
    """Return the next power of two, at least ``least``: a Triton block size; GEMMs need 16."""
    return max(least, 1 << (number - 1).bit_length())


# -- are they equal -----------------------------------------------------------------------------------


def tolerance(device: torch.device, dtype: torch.dtype) -> float:
    """Return the maximum kernel error that counts as rounding."""
    uses_tf32 = device.type == "cuda" and dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return TOLERANCES[torch.float16 if uses_tf32 else dtype]


def distance_of(operator: Operator, other: Any, device: torch.device, dtype: torch.dtype) -> float:
    """Return the maximum error in ``other``, an implementation of the operator, relative to the plain one."""
    largest = 0.0
    for sizes in operator.small:
        plain, results = (
            operator.example(candidate, device, dtype, **sizes)() for candidate in (operator.plain, other)
        )
        largest = max([largest, *(_distance(actual, expected) for actual, expected in zip(results, plain))])
    return largest


def _distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise TypeError(f"{actual.shape} of {actual.dtype} instead of {expected.shape} of {expected.dtype}")
    if not actual.numel():
        return 0.0
    distance = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)
    # NaN compares false with everything: it must not look like no error.
    return float(distance) if bool(torch.isfinite(distance)) else float("inf")


# -- which is faster ----------------------------------------------------------------------------------


def seconds(call: Callable[[], object]) -> float:
    times = [seconds_of(call, 1, pytorch.synchronize) for _ in range(WARMUP + MEASURED)]
    return statistics.median(times[WARMUP:])


def seconds_on_device(call: Callable[[], object]) -> float:
    """Return a call's device time, without launch overhead: the GPU is kept busy while calls are queued.

    This is the time in a CUDA graph, and in a step whose kernels take longer than their launches.
    """
    if not torch.cuda.is_available():
        return seconds(call)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(WARMUP):
        call()
    pytorch.synchronize()
    torch.cuda._sleep(HELD_CYCLES)
    start.record()
    for _ in range(MEASURED):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / MEASURED


def clock(captured: bool) -> Time:
    """Return the timing function for a step, without launch overhead if it is captured."""
    return seconds_on_device if captured else seconds


@startup.part("kernels")
def fastest(measures: Mapping[str, Callable[[], float]], device: torch.device) -> Tuple[str, Dict[str, str]]:
    """Return the name with the shortest time on rank 0, for all ranks, and all measurement outcomes.

    A candidate that fails on any rank is excluded: that rank would exit, and the others would wait for it. Raises
    ValueError on all ranks if none is left.
    """
    names = sorted(measures)
    times, outcomes = [], {}
    for name in names:
        try:
            times.append(measures[name]())
            outcomes[name] = f"{times[-1] * 1e3:.3f} ms"
        # Triton's compile errors have their own classes, which only Triton defines.
        except Exception as problem:
            times.append(float("inf"))
            outcomes[name] = (
                f"{type(problem).__name__}: {str(problem).strip().splitlines()[-1] if str(problem) else ''}"
            )
        stopping.progress()
    failed = pytorch.total([float(time == float("inf")) for time in times])
    for name, time, ranks in zip(names, times, failed):
        if ranks and time < float("inf"):
            outcomes[name] += f", fails on {ranks:.0f} other ranks"
    runnable = [number for number, ranks in enumerate(failed) if not ranks]
    if not runnable:
        raise ValueError(f"no implementation runs on all ranks: {outcomes}")
    best = torch.tensor([min(runnable, key=times.__getitem__)], device=device)
    pytorch.broadcast([best])
    return names[int(best.item())], outcomes


def choose(
    operators: Mapping[str, Operator],
    setting: str,
    ranks: Ranks,
    dtype: torch.dtype,
    sizes: Mapping[str, Mapping[str, Any]],
    saved: Optional[Mapping[str, str]] = None,
    time: Optional[Time] = None,
) -> Dict[str, str]:
    """Return ``plain`` or ``triton`` for each operator; on GPUs, rank 0 prints the choice.

    ``setting``: one for all operators, or "auto" to measure each on ``sizes`` with ``time`` (default: seconds).
    ``saved``: a checkpoint's choices.
    Raises ValueError if kernels are requested and cannot run.
    """
    device = ranks.context
    reason = pytorch.agreed(why_plain(device))
    names = dict(saved or {name: setting if operator.triton else "plain" for name, operator in operators.items()})
    if reason and "triton" in names.values():
        raise choices.UnavailableError(
            f"kernels=triton: {reason}; use kernels=auto, or resume in the environment of the run"
        )
    if reason or setting == "plain":
        if device.type == "cuda":
            report(ranks, [f"plain: {reason or 'kernels=plain'}"])
        names = dict.fromkeys(operators, "plain")
        choices.record("kernels", names)
        return names
    outcomes = []
    for name in names:
        if names[name] == "auto":
            candidates = {kind: partial(implementation, operators[name], kind) for kind in ("plain", "triton")}
            names[name], timings = fastest_correct(
                operators[name], candidates, device, dtype, sizes[name], time or seconds
            )
            outcomes.append(f"{name} {names[name]} ({timings})")
        else:
            outcomes.append(f"{name} {names[name]}")
    report(ranks, outcomes)
    choices.record("kernels", names)
    return names


def choose_with(
    library: Library,
    operators: Mapping[str, Operator],
    setting: str,
    ranks: Ranks,
    dtype: torch.dtype,
    sizes: Mapping[str, Mapping[str, Any]],
    saved: Mapping[str, str],
) -> Tuple[Dict[str, str], Dict[str, Any]]:
    """Return name and implementation per operator: the result of ``choose``, or the library's.

    ``setting``: may be the name of the library, for all operators that it has; "auto" uses it if it is correct and
    faster, and rank 0 prints the measurements. ``saved``: a checkpoint's choices.
    Raises ValueError if the library is requested, or was used, and is not available.
    """
    available = {name: library.operators[name] for name in pytorch.everywhere(library.operators, operators)}
    if setting == library.name and not available:
        raise choices.UnavailableError(f"kernels={library.name}: {library.missing}; use kernels=auto")
    names = dict(saved) or choose(operators, "plain" if setting == library.name else setting, ranks, dtype, sizes)
    if not saved and setting == library.name:
        names.update(dict.fromkeys(available, library.name))
    elif not saved and setting == "auto":
        for name in available:
            best, operator = names[name], operators[name]
            candidates: Dict[str, Callable[[], Any]] = {
                best: partial(implementation, operator, best),
                library.name: partial(available.get, name),
            }
            names[name], timings = fastest_correct(operator, candidates, ranks.context, dtype, sizes[name], seconds)
            report(ranks, [f"{name} {names[name]} ({timings})"])
    lost = sorted(name for name in names if names[name] == library.name and name not in available)
    if lost:
        raise choices.UnavailableError(
            f"the checkpoint was written with {library.name}'s {', '.join(lost)}, which is missing: resume in its image"
        )
    choices.record("kernels", names)
    return names, {
        name: available[name] if kind == library.name else implementation(operators[name], kind)
        for name, kind in names.items()
    }


def fastest_correct(
    operator: Operator,
    candidates: Mapping[str, Callable[[], Any]],
    device: torch.device,
    dtype: torch.dtype,
    sizes: Mapping[str, Any],
    time: Time,
) -> Tuple[str, str]:
    """Return the fastest candidate that matches the plain path, and the measurements; candidates are loaded lazily."""

    def measure(load: Callable[[], Any]) -> float:
        candidate = load()
        error = 0.0 if candidate is operator.plain else distance_of(operator, candidate, device, dtype)
        if error > tolerance(device, dtype):
            raise ArithmeticError(f"wrong by {error:.3g} of the largest value")
        return time(operator.example(candidate, device, dtype, **sizes))

    best, outcomes = fastest({name: partial(measure, load) for name, load in candidates.items()}, device)
    return best, ", ".join(f"{name} {text}" for name, text in outcomes.items())


def report(ranks: Ranks, outcomes: Sequence[str]) -> None:
    if ranks.rank == 0:
        print(f"kernels: {'; '.join(outcomes)}", file=sys.stderr, flush=True)
