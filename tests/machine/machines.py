"""Machines with other GPUs than this one."""

import csv
from dataclasses import replace

from encore import paths
from encore.machine import node
from encore.machine.node import Gpu, Node


def gpus_of(sample: str) -> tuple[Gpu, ...]:
    # GPUs as in tests/samples/gpus: index, name, MiB, driver, compute capability
    text = (paths.ROOT / "tests" / "samples" / "gpus" / f"{sample}.csv").read_text(encoding="utf-8")
    return tuple(
        Gpu(
            index=int(index),
            name=name,
            memory_gib=round(float(mib) / 1024, 1),
            driver=driver,
            compute_capability=capability if capability[:1].isdigit() else None,
        )
        for index, name, mib, driver, capability in csv.reader(text.splitlines(), skipinitialspace=True)
    )


def machine(*names: str, memory_gib: float = 80.0, capability: str | None = "9.0", cores: int = 64) -> Node:
    # This machine with other cores, and with GPUs of these names
    facts = {"memory_gib": memory_gib, "driver": "550.54", "compute_capability": capability}
    gpus = tuple(Gpu(index=index, name=name, **facts) for index, name in enumerate(names))  # type: ignore[arg-type]
    return replace(node.this_node(), hostname="box", cores=cores, gpus=gpus)
