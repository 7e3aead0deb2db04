"""System descriptions: MLPerf's system.json, what a submission says of itself, and what can be compared."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from encore.results.published import PublishedResult, System, load_published, system_of
from encore.results.rules import canonical

DESCRIPTION_FIELDS = (
    "submitter", "division", "status", "system_name", "number_of_nodes", "host_processors_per_node",
    "host_processor_model_name", "host_processor_core_count", "host_processor_vcpu_count",
    "host_processor_frequency", "host_processor_caches", "host_processor_interconnect", "host_memory_capacity",
    "host_storage_type", "host_storage_capacity", "host_networking", "host_networking_topology",
    "host_memory_configuration", "accelerators_per_node", "accelerator_model_name", "accelerator_host_interconnect",
    "accelerator_frequency", "accelerator_on-chip_memories", "accelerator_memory_configuration",
    "accelerator_memory_capacity", "accelerator_interconnect", "accelerator_interconnect_topology", "cooling",
    "hw_notes", "framework", "other_software_stack", "operating_system", "sw_notes",
)  # fmt: skip
"""Of MLPerf's system description, by the schema of the v0.7 repository."""
_FAMILY = re.compile(
    r"(?<![a-z0-9])(?:tpu[\s_-]*v(\d)[a-z]?|((?:gb|gh)[23]00|[bh][123]00|h800|v100|a100|a800|p100|l40s?|l4|a30|a40"
    r"|a10|a2|t4|mi3\d\dx|gaudi\s*\d?|hl-?\d+|ascend\s*\d*|rtx\s?\w+|4090|7900|radeon\w*))",
    re.IGNORECASE,
)
_GAP = re.compile(r"[\s_-]+")
_FRAMEWORKS = ("hugectr", "mxnet", "pytorch", "tensorflow", "mindspore", "paddle", "jax", "nemo", "popart")
_RELEASE = re.compile(r"(?:ngc|nvidia release\s+|ngc \w+ )(\d\d\.\d\d)", re.IGNORECASE)
_PLATFORM = re.compile(r"^(\d+)\s*x\s*(.+)$", re.IGNORECASE)
_BOXES = (
    ("dgx a100", "NVIDIA A100-SXM4", 8),
    ("dgx-1", "Tesla V100-SXM2", 8),
    ("dgx-2", "Tesla V100-SXM3", 16),
)
_NOT_A_NUMBER = re.compile(r"\D+")
_ABOVE = 5
_LONGEST_COUNT = 10


def family(accelerator: str | None) -> str | None:
    """Return the accelerator's short name, such as V100 or TPUV3; None where the text names none that is known."""
    match = _FAMILY.search(accelerator or "")
    if match is None:
        return None
    return f"TPUV{match[1]}" if match[1] else _GAP.sub("", match[2]).upper()


def framework_of(*texts: str | None) -> str | None:
    """Return the framework named in any of the texts, in lower case."""
    joined = " ".join(text or "" for text in texts).lower()
    found = next((name for name in _FRAMEWORKS if name in joined), None)
    if found is None and re.search(r"(?:^|[-_\s])tf(?:\d|[-_\s]|$)", joined):
        return "tensorflow"
    return found


def release_of(*texts: str | None) -> str | None:
    """Return the NGC container release named in any of the texts, such as 20.06."""
    match = next((match for text in texts if text and (match := _RELEASE.search(text))), None)
    return match[1] if match else None


def from_description(description: Mapping[str, Any]) -> System:
    """Return the system that MLPerf's system description describes; what is empty there stays unknown."""

    def text(name: str) -> str | None:
        value = str(description.get(name) or "").strip()
        return None if value.lower() in ("", "n/a", "na", "none", "todo", "-") else value

    software = description.get("other_software_stack")
    versions = {str(k): str(v) for k, v in software.items()} if isinstance(software, dict) else {}
    return System(
        described=True,
        nodes=_count(text("number_of_nodes")),
        accelerators_per_node=_count(text("accelerators_per_node")),
        accelerator=text("accelerator_model_name"),
        accelerator_memory=text("accelerator_memory_capacity"),
        accelerator_interconnect=text("accelerator_interconnect"),
        cpu=text("host_processor_model_name"),
        cpus_per_node=_count(text("host_processors_per_node")),
        cores_per_cpu=_count(text("host_processor_core_count")),
        host_memory=text("host_memory_capacity"),
        storage=text("host_storage_type"),
        network=text("host_networking"),
        framework=text("framework"),
        operating_system=text("operating_system"),
        status=text("status"),
        software={name: value for name, value in versions.items() if value},
    )


def _count(text: str | None) -> int | None:
    digits = _NOT_A_NUMBER.split(text.strip()) if text else []
    return int(digits[0]) if digits and 0 < len(digits[0]) < _LONGEST_COUNT else None


def nearest_description(folder: Path) -> System | None:
    """Return the system of a submission's logs: ``systems/<system>.json`` next to or above ``results/``."""
    parents = [folder.absolute(), *folder.absolute().parents][:_ABOVE]
    for system in parents[:3]:
        for above in parents:
            path = above / "systems" / f"{system.name}.json"
            try:
                loaded = json.loads(path.read_text("utf-8"))
            except (OSError, ValueError, RecursionError):
                continue
            if isinstance(loaded, dict):
                return from_description(loaded)
    return None


def cells_at(folder: Path, round_: str | None, benchmark: str | None) -> list[PublishedResult]:
    """Return the published cells whose system is a folder in the path, nearest folder first.

    Round and submitter, where the path names them as well, decide between cells of one name.
    """
    parts = [part.lower() for part in folder.absolute().parts]
    wanted = canonical(benchmark)
    found = []
    for cell in load_published():
        if cell.system.lower() not in parts or (wanted is not None and cell.benchmark not in (wanted, None)):
            continue
        if round_ is not None and cell.round != round_:
            continue
        position = len(parts) - 1 - parts[::-1].index(cell.system.lower())
        by_submitter = cell.submitter.lower() in parts
        by_round = any(cell.round.lstrip("v") in part for part in parts)
        found.append(((-by_submitter, -by_round, cell.benchmark is None, -position), cell))
    return [cell for _, cell in sorted(found, key=lambda pair: pair[0])]


def rounds_system(folder: Path, round_: str | None, platform: str | None) -> System:
    """Return the system by the folder's name, else by what the logs call their platform."""
    cells = cells_at(folder, round_, None)
    if cells:
        return system_of(cells[0].round, cells[0].submitter, cells[0].system)
    return _from_platform(platform or "")


def _from_platform(platform: str) -> System:
    """Return ``1xNVIDIA DGX A100`` as v0.6 and later write it."""
    match = _PLATFORM.match(platform.strip())
    nodes, name = (int(match[1]), match[2]) if match and len(match[1]) < 7 else (None, platform)
    for box, accelerator, count in _BOXES:
        if box in name.lower():
            return System(described=False, nodes=nodes or 1, accelerators_per_node=count, accelerator=accelerator)
    found = system_of("", "", platform.replace(" ", "-"))
    return System(
        described=False,
        nodes=found.nodes or nodes,
        accelerators_per_node=found.accelerators_per_node,
        accelerator=found.accelerator,
        framework=found.framework,
    )
