"""Compile all Triton kernels for several GPU generations, without a GPU, and print their resource usage.

    $ python -m benchmarks.common.checks.compile_kernels
    $ python -m benchmarks.common.checks.compile_kernels --json

Registers are per thread, shared memory in bytes per block, spills in bytes per thread. Exit code 1: a kernel does
not compile.
"""

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

from benchmarks.common.torch.kernels import OPTIONS, Specification

TARGETS = (80, 90, 100)  # compute capabilities: A100, H100 and H200, B200
ROOT = Path(__file__).resolve().parents[3]


class Usage(NamedTuple):
    """A compiled kernel's resource usage, or its compile error."""

    kernel: str
    variant: str
    target: str
    warps: int
    registers: int = 0
    shared: int = 0
    spills: int = 0
    problem: str = ""


def compile_usage(module: str, specification: Specification, capability: int) -> Usage:
    kernel = specification.kernel
    usage = Usage(
        f"{module.split('.')[1]} {kernel.__name__}", specification.variant, f"sm_{capability}", specification.warps
    )
    try:
        result = _compile(specification, capability)
    # Triton has a different exception for each stage.
    except Exception as problem:
        return usage._replace(problem=f"{type(problem).__name__}: {problem}".strip())
    resources = _resources(result.asm["cubin"])
    # Spilled registers are on the stack; the cubin does not contain the launch's shared memory.
    return usage._replace(registers=resources["REG"], shared=result.metadata.shared, spills=resources["STACK"])


def _compile(specification: Specification, capability: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    arguments = specification.arguments
    constants = {name: value for name, value in arguments.items() if not isinstance(value, str)}
    signature = {name: "constexpr" if name in constants else value for name, value in arguments.items()}
    # As in a launch: PyTorch allocations are aligned to 16 bytes.
    names = list(signature)
    multiples = [name for name in names if signature[name].startswith("*") or name in specification.divisible]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in multiples}
    source = triton.compiler.ASTSource(specification.kernel, signature, constants, aligned)
    options = {"num_warps": specification.warps, **OPTIONS}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


# Return the kernel's resource usage from cuobjdump: REG, STACK and others.
def _resources(cubin: bytes) -> Dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", done.stdout)}


def all_usages() -> List[Usage]:
    """Compile all kernels for all targets; a kernel without a specification is a problem."""
    import triton

    usages = []
    for path in sorted(ROOT.glob("benchmarks/*/pytorch/kernels.py")):
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        specifications = module.specifications()
        usages += [
            compile_usage(module.__name__, specification, target)
            for specification in specifications
            for target in TARGETS
            if target >= specification.least
        ]
        listed = {specification.kernel.__name__ for specification in specifications}
        # Only launchable kernels: the names of device functions start with an underscore.
        kernels = {name for name, value in vars(module).items() if isinstance(value, triton.runtime.JITFunction)}
        missing = {name for name in kernels - listed if not name.startswith("_")}
        usages += [Usage(name, "", "", 0, problem="not in specifications()") for name in missing]
    return usages


def table(usages: List[Usage]) -> str:
    """Return a line per kernel and variant: registers / shared memory / spills per target."""
    lines: Dict[Any, List[str]] = {}
    for usage in usages:
        cell = usage.problem or f"{usage.registers:3d} / {usage.shared:6,d} / {usage.spills}"
        lines.setdefault((usage.kernel, usage.variant, usage.warps), []).append(cell)
    heads = "".join(f"{f'sm_{target}':<18}" for target in TARGETS)
    title = f"{'kernel':<36}{'type':<6}{'warps':<7}{heads}\n{'':49}registers / shared memory / spills, bytes\n"
    rows = [
        f"{key[0]:<36}{key[1]:<6}{key[2]:<7}{''.join(f'{word:<18}' for word in cell)}" for key, cell in lines.items()
    ]
    return title + "\n".join(row.rstrip() for row in rows)


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of the table")
    usages = all_usages()
    print(json.dumps([usage._asdict() for usage in usages]) if parser.parse_args(argv).json else table(usages))
    return int(any(usage.problem for usage in usages))


if __name__ == "__main__":
    sys.exit(main())
