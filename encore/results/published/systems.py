"""System descriptions: MLPerf's system.json, what a submission says of itself, and what can be compared."""

import re
from pathlib import Path

from encore.results.published.descriptions import described
from encore.results.published.published import PublishedResult, System, load_published, system_of
from encore.results.rules import canonical

# Of MLPerf's system description, by the schema of the v0.7 repository.
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
_FAMILY = re.compile(
    r"(?<![a-z0-9])(?:tpu[\s_-]*v(\d[ep]?)|((?:gb|gh)[23]00|[bh][123]00|h800|v100s?|a100x?|a800|p100|l40s?|l4|a30|a40"
    r"|a10g?|a2|t4|mi3\d\dx|gaudi\s*\d?|hl-?\d+|ascend\s*\d*|rtx\s?(?:pro\s?)?\w+|rx\s?7900\s?xtx?|bow ipu|gc200"
    r"|trillium))",
    re.IGNORECASE,
)
_FORM = re.compile(r"(?<![a-z])(sxm|pcie?|nvl)\s*(\d?)", re.IGNORECASE)
_TRADEMARK = re.compile(r"\(r\)|®|™", re.IGNORECASE)
_GAP = re.compile(r"[\s_-]+")
_FRAMEWORKS = ("hugectr", "mxnet", "pytorch", "tensorflow", "mindspore", "paddle", "jax", "nemo", "popart")
_RELEASE = re.compile(r"(?:ngc|nvidia release\s+|ngc \w+ )(\d\d\.\d\d)", re.IGNORECASE)
_PLATFORM = re.compile(r"^(\d+)\s*x\s*(.+)$", re.IGNORECASE)
_BOXES = (
    ("dgx a100", "NVIDIA A100-SXM4", 8),
    ("dgx-1", "Tesla V100-SXM2", 8),
    ("dgx-2", "Tesla V100-SXM3", 16),
)
_ABOVE = 5


def family(accelerator: str | None) -> str | None:
    """Return the accelerator's short name, such as V100 or TPUV3; None where the text names none that is known."""
    match = _FAMILY.search(_TRADEMARK.sub("", accelerator or ""))
    if match is None:
        return None
    return f"TPUV{match[1].upper()}" if match[1] else _GAP.sub("", match[2]).upper()


def model_of(accelerator: str | None) -> str | None:
    """Return the family with its form factor, such as V100-SXM2 or V100S-PCIe: these differ in power and speed."""
    name = family(accelerator)
    form = _FORM.search(accelerator or "")
    if name is None or form is None:
        return name
    # Of the A100 and later there is one SXM socket, with and without its number.
    socket = {"s": f"SXM{form[2] if name == 'V100' else ''}", "p": "PCIe", "n": "NVL"}[form[1][0].lower()]
    return f"{name}-{socket}"


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


def nearest_description(folder: Path) -> System | None:
    """Return the system of a submission's logs: ``systems/<system>.json`` next to or above ``results/``."""
    parents = [folder.absolute(), *folder.absolute().parents][:_ABOVE]
    paths = [above / "systems" / f"{system.name}.json" for system in parents[:3] for above in parents]
    return next((described(path) for path in paths if path.is_file()), None)


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


# ``1xNVIDIA DGX A100`` as v0.6 and later write it: the number in front is one of nodes.
def _from_platform(platform: str) -> System:
    match = _PLATFORM.match(platform.strip())
    nodes, name = (int(match[1]), match[2]) if match and len(match[1]) < 7 else (None, platform)
    for box, accelerator, count in _BOXES:
        if box in name.lower():
            return System(described=False, nodes=nodes or 1, accelerators_per_node=count, accelerator=accelerator)
    found, whole = (system_of("", "", text.replace(" ", "-")) for text in (name, platform))
    return System(
        described=False,
        nodes=max(nodes or 0, found.nodes or 0) or None,
        accelerators_per_node=found.accelerators_per_node,
        accelerator=found.accelerator or whole.accelerator,
        framework=found.framework,
    )
