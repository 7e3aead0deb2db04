"""Compare values and gradients of the Triton kernels with the plain PyTorch operators.

    $ python -m benchmarks.common.checks.compare_kernels
    $ TRITON_INTERPRET=1 python -m benchmarks.common.checks.compare_kernels --json

Runs on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter on the CPU. Exit code 1: an error exceeds its
tolerance.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch

from benchmarks.common.torch import kernels

ROOT = Path(__file__).resolve().parents[3]


def compare_all(device: torch.device) -> List[Dict[str, Any]]:
    comparisons: List[Dict[str, Any]] = []
    for path in sorted(ROOT.glob("benchmarks/*/pytorch/operators.py")):
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for name, operator in module.OPERATORS.items():
            if not operator.triton:
                continue
            for dtype in kernels.TOLERANCES:
                error = kernels.distance_of(operator, kernels.implementation(operator, "triton"), device, dtype)
                tolerance = kernels.tolerance(device, dtype)
                type_ = str(dtype).rpartition(".")[2]
                operation = f"{path.parts[-3]} {name}"
                comparisons.append({"operator": operation, "type": type_, "error": error, "tolerance": tolerance})
    return comparisons


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of lines")
    as_json = parser.parse_args(argv).json
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reason = kernels.why_plain(device)
    if reason:
        print(f"nothing to compare: {reason}", file=sys.stderr)
        return 1
    comparisons = compare_all(device)
    lines = [
        f"{row['operator']:<28}{row['type']:<10}{row['error']:.2e} of at most {row['tolerance']:.0e}"
        for row in comparisons
    ]
    print(json.dumps(comparisons) if as_json else "\n".join(lines))
    return int(any(row["error"] > row["tolerance"] for row in comparisons))


if __name__ == "__main__":
    sys.exit(main())
