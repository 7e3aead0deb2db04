"""Machines with other GPUs than this one, and facts of a Python of the user."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

from encore import paths
from encore.containers.runtimes import Target
from encore.machine import interpreters, node


def gpus_of(sample: str) -> tuple[node.Gpu, ...]:
    # Columns of tests/samples/gpus: index, name, MiB, driver, compute capability
    text = (paths.ROOT / "tests" / "samples" / "gpus" / f"{sample}.csv").read_text(encoding="utf-8")
    return tuple(
        node.Gpu(
            index=int(index),
            name=name,
            memory_gib=round(float(mib) / 1024, 1),
            driver=driver,
            compute_capability=capability if capability[:1].isdigit() else None,
        )
        for index, name, mib, driver, capability in csv.reader(text.splitlines(), skipinitialspace=True)
    )


def machine(*names: str, memory_gib: float = 80.0, capability: str | None = "9.0", cores: int = 64) -> node.Node:
    # This machine with other cores and with the named GPUs
    properties = {"memory_gib": memory_gib, "driver": "550.54", "compute_capability": capability}
    gpus = tuple(node.Gpu(index=index, name=name, **properties) for index, name in enumerate(names))  # type: ignore[arg-type]
    return replace(node.this_node(), hostname="box", cores=cores, gpus=gpus)


def check_build(sample: str) -> str:
    # Output of `horovodrun --check-build`
    return (paths.ROOT / "tests" / "samples" / "horovod" / f"{sample}.txt").read_text(encoding="utf-8")


# Packages that prepare the toy data set of resnet
PACKAGES = dict.fromkeys(("joblib", "mlperf_logging", "pillow", "scikit-learn", "scipy", "threadpoolctl"), "1")


def answered(**changes: Any) -> Target:
    defaults = {"python": "3.11.7", "problems": {}, "packages": {}, "cuda": "12.4", "gpus": 8}
    facts = interpreters.PythonInfo(**{**defaults, "mpirun": False, "horovod": 0, "check_build": "", **changes})
    return Target(python=Path("/apps/bin/python"), python_info=facts)


def write_program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}", encoding="utf-8")
    path.chmod(0o755)
    return path
