"""Check that all available optimizer implementations compute the same update.

    python -m benchmarks.common.checks.compare_optimizers

Prints one line with the compared implementations. Exit code 1: two differ by more than rounding errors.
"""

import sys
from typing import Dict, List

import torch

from benchmarks.common.torch import optimizers
from benchmarks.common.torch.optimizers import Build

STEPS = 10
SHAPES = ((64, 3, 7, 7), (1000, 17), (5,))  # a convolution, a matrix and a vector; no size is a multiple of GPU blocks
RELATIVE, ABSOLUTE = 1e-5, 1e-6  # rounding of float32, summed up over the steps


def weights_after(build: Build, device: str) -> List[torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=numbers).to(device)) for shape in SHAPES]
    optimizer = build(parameters)
    for _ in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=numbers).to(device)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in parameters]


def find_differing(candidates: Dict[str, Build], device: str) -> List[str]:
    plain = weights_after(candidates["plain"], device)
    names = []
    for name in sorted(set(candidates) - {"plain"}):
        pairs = zip(plain, weights_after(candidates[name], device))
        if not all(torch.allclose(actual, expected, rtol=RELATIVE, atol=ABSOLUTE) for actual, expected in pairs):
            names.append(name)
    return names


def main() -> int:
    """Compare on a GPU if available, else on the CPU, which apex does not support."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    apex = optimizers.find_apex()
    candidates = optimizers.adam_candidates(0.01, (0.9, 0.999), 1e-8, apex)
    wrong = find_differing(candidates, device)
    if wrong:
        print(f"not the plain update of Adam: {', '.join(wrong)}", file=sys.stderr)
        return 1
    suffix = "" if apex is not None else ", apex not compared: no apex or no GPU"
    print(f"{', '.join(sorted(candidates))} on {device}{suffix}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
