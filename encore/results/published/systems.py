"""Tolerant reader for system descriptions of submissions, and comparable names of accelerators and frameworks.

``data/systems/`` was generated from checkouts of the public result repositories with

    python -m encore.results.published.systems FOLDER
"""

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from encore.results.published.published import DATA, PublishedResult, System, load_published, system_of
from encore.results.rules import canonical

_LIMIT = 1 << 20
_NOT_A_NUMBER = re.compile(r"\D+")
_LONGEST_COUNT = 10
_NOT_IN_A_KEY = re.compile(r"[^a-z0-9]+")
_LINE = re.compile(r"(\w+): (\{.*\})")
_COUNTED_CPU = re.compile(r"(\d+)\s*x\s+(.+)", re.IGNORECASE)
# Google's v0.5 names a TPU pod slice by its number of cores, and repeats that number per node.
_SLICE = re.compile(r"tpuv\d-(\d+)")
_ROUND = re.compile(r"training_results_(v\d\.\d)")
_KNOWN = frozenset({"system_name", "framework", "number_of_nodes", "nodes", "accelerators_per_node"})
_PLACEHOLDERS = frozenset({"", "n/a", "na", "none", "todo", "cpuname", "-", "{}", "[]"})


def described(path: Path) -> System:
    """Return the system in a description file; an empty system if the file cannot be read."""
    description, caveat = read_description(path)
    return from_description(description, caveat) if description else System(described=False, caveat=caveat)


def read_description(path: Path) -> tuple[dict[str, Any], str]:
    """Return a system description and the problem in its file: some submitted files are not valid JSON."""
    try:
        if path.stat().st_size > _LIMIT:
            return {}, f"{path.name} is too large for a system description"
        text = path.read_bytes().decode("utf-8-sig", "replace")
    except OSError as error:
        return {}, f"{path.name} cannot be read: {error.strerror}"
    lines = _lines(text)
    if lines:
        return lines, ""
    loaded, caveat = _load_lenient(text)
    fields = {_key(key): value for key, value in loaded.items()} if isinstance(loaded, dict) else {}
    return (
        (fields, f"{path.name} {caveat}" if caveat else "")
        if _KNOWN & fields.keys()
        else ({}, f"{path.name} does not contain a system description")
    )


# JSON value, and the syntax problem.
def _load_lenient(text: str) -> tuple[object, str]:
    try:
        return json.loads(text, strict=False), ""
    except (ValueError, RecursionError) as error:
        caveat = f"is not valid JSON and was read tolerantly: {error}"
    # Only for a file that is broken: no other command needs to load it.
    from json_repair import repair_json

    try:
        return repair_json(text, return_objects=True), caveat
    except (ValueError, RecursionError):
        return None, caveat


# NVIDIA's v0.6 description: values of log lines that contain Python dictionaries.
def _lines(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line.strip())
        try:
            value = json.loads(match[2])["value"] if match else None
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        inner = _literal(value)
        fields.update(inner if match and match[1] == "entry" and isinstance(inner, dict) else {})
        if match and match[1] in ("status", "division"):
            fields[match[1]] = value
    return {key: _literal(value) for key, value in fields.items()}


def _literal(value: object) -> object:
    try:
        return ast.literal_eval(value) if isinstance(value, str) and value.startswith("{") else value
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return value


def _key(key: object) -> str:
    return _NOT_IN_A_KEY.sub("_", str(key).strip().lower()).strip("_")


def from_description(description: Mapping[str, Any], caveat: str = "") -> System:
    """Return the system for an MLPerf system description; empty fields stay unknown."""
    description = {_key(key): value for key, value in description.items()}
    if isinstance(description.get("nodes"), list | dict):
        description = _description_from_entry(description)

    def text(name: str) -> str | None:
        value = str(description.get(name, "")).strip()
        return None if value.lower() in _PLACEHOLDERS else value

    storage = [part for part in (text("host_storage_capacity"), text("host_storage_type")) if part]
    return System(
        described=True,
        nodes=_count(text("number_of_nodes")),
        accelerators_per_node=_count(text("accelerators_per_node")),
        accelerator=text("accelerator_model_name"),
        accelerator_memory=text("accelerator_memory_capacity"),
        accelerator_interconnect=text("accelerator_interconnect"),
        cpu=text("host_processor_model_name"),
        cpus_per_node=_count(text("host_processors_per_node")),
        cores_per_cpu=_count(text("host_processor_core_count") or text("host_processors_core_count")),
        host_memory=text("host_memory_capacity"),
        storage=" ".join(dict.fromkeys(storage)) or None,
        network=text("host_networking"),
        framework=text("framework"),
        operating_system=text("operating_system"),
        status=text("status"),
        software=dict(_versions(description.get("other_software_stack"))),
        caveat=caveat,
    )


# Yield names and versions from a dictionary, a list of such, or ``name version / name version``.
def _versions(software: object) -> Iterator[tuple[str, str]]:
    if isinstance(software, str):
        software = [dict([part.strip().rsplit(" ", 1)]) for part in software.split(" / ") if " " in part.strip()]
    for entry in software if isinstance(software, list) else [software]:
        for name, version in entry.items() if isinstance(entry, dict) else ():
            if str(version).strip().lower() not in _PLACEHOLDERS:
                yield str(name), str(version).strip()


# Convert an ``entry.json`` of v0.5 or v0.6 to the field names of v0.7.
def _description_from_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    groups = [entry["nodes"]] if isinstance(entry["nodes"], dict) else entry["nodes"]
    groups = [{_key(key): value for key, value in group.items()} for group in groups if isinstance(group, dict)]
    first = groups[0] if groups else {}
    cpu = _COUNTED_CPU.fullmatch(str(first.get("cpu") or ""))
    memory = str(first.get("sys_mem_size") or "")
    nodes = sum(_count(str(group.get("num_nodes") or "")) or 0 for group in groups)
    accelerators = str(first.get("num_accelerators", ""))
    part = _SLICE.fullmatch(str(first.get("accelerator")))
    if part and part[1] == accelerators and nodes > 1:
        accelerators = str(int(accelerators) // nodes)
    return {
        "number_of_nodes": nodes,
        # 0 is an answer: such a system has none.
        "accelerators_per_node": accelerators,
        "accelerator_model_name": first.get("accelerator"),
        "host_processor_model_name": cpu[2] if cpu else first.get("cpu"),
        "host_processors_per_node": cpu[1] if cpu else None,
        "host_memory_capacity": f"{memory} GB" if memory.isdecimal() and memory != "0" else memory,
        "host_storage_capacity": first.get("sys_storage_size"),
        "host_storage_type": first.get("sys_storage_type"),
        "host_networking": entry.get("interconnect"),
        "framework": entry.get("framework"),
        "operating_system": entry.get("os"),
        "status": entry.get("status"),
        "other_software_stack": entry.get("libraries"),
    }


def _count(text: str | None) -> int | None:
    digits = _NOT_A_NUMBER.split(text.strip()) if text else []
    return int(digits[0]) if digits and 0 < len(digits[0]) < _LONGEST_COUNT else None


# Yield round, submitter, system name and system for all descriptions in checkouts of the result repositories.
def _submitted(root: Path) -> Iterator[tuple[str, str, str, System]]:
    cells = {(cell.round, cell.submitter, cell.system) for cell in load_published()}
    for path in sorted(root.rglob("*.json")):
        parts = path.relative_to(root).parts
        names: set[tuple[str, str, str]] = set()
        match = _ROUND.match(parts[0])
        if match and path.parent.name == "systems":
            names = {(match[1], parts[1], path.stem)}
        elif match and path.name == "entry.json":
            names = {
                cell_key
                for cell_key in cells
                if cell_key[0] == match[1] and {cell_key[1], *cell_key[2].split("/")} <= set(parts)
            }
        yield from ((*name, described(path)) for name in sorted(names))


def _main(root: Path) -> None:
    rounds: dict[str, dict[tuple[str, str], str]] = {}
    for round_, submitter, name, system in _submitted(root):
        if system.caveat:
            print(f"{round_}/{submitter}/{name}: {system.caveat}", file=sys.stderr)
        if system.described:
            # The number of nodes of "multi" differs from benchmark to benchmark.
            excluded = {"described", *(("nodes", "accelerators_per_node") if "_multi_" in name else ())}
            filled = {key: value for key, value in asdict(system).items() if value not in (None, "", {})}
            entry = {key: value for key, value in filled.items() if key not in excluded}
            line = json.dumps({"submitter": submitter, "system": name, **entry}, ensure_ascii=False)
            rounds.setdefault(round_, {}).setdefault((submitter, name), line)
    for round_, lines in rounds.items():
        path = DATA / "systems" / f"{round_}.json"
        path.write_text("[\n" + ",\n".join(lines.values()) + "\n]\n", encoding="utf-8")


# The fields of MLPerf's system description, by the schema of the v0.7 repository.
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
    """Return the accelerator's short name, such as V100 or TPUV3; None if it is unknown."""
    match = _FAMILY.search(_TRADEMARK.sub("", accelerator or ""))
    if match is None:
        return None
    return f"TPUV{match[1].upper()}" if match[1] else _GAP.sub("", match[2]).upper()


def model_of(accelerator: str | None) -> str | None:
    """Return the family with the form factor, which affects power and speed: V100-SXM2 or V100S-PCIe."""
    name = family(accelerator)
    form = _FORM.search(accelerator or "")
    if name is None or form is None:
        return name
    # Since A100, a single SXM socket exists, named with or without a number.
    socket = {"s": f"SXM{form[2] if name == 'V100' else ''}", "p": "PCIe", "n": "NVL"}[form[1][0].lower()]
    return f"{name}-{socket}"


def framework_of(*texts: str | None) -> str | None:
    """Return the framework named in any of the texts, in lower case."""
    joined = " ".join(text or "" for text in texts).lower()
    framework = next((name for name in _FRAMEWORKS if name in joined), None)
    if framework is None and re.search(r"(?:^|[-_\s])tf(?:\d|[-_\s]|$)", joined):
        return "tensorflow"
    return framework


def release_of(*texts: str | None) -> str | None:
    """Return the NGC container release named in any of the texts, such as 20.06."""
    match = next((match for text in texts if text and (match := _RELEASE.search(text))), None)
    return match[1] if match else None


def nearest_description(folder: Path) -> System | None:
    """Return the system of logs: ``system.json`` of an Encore run, or ``systems/SYSTEM.json`` of a submission.

    The latter is in or above the parent of ``results/``.
    """
    parents = [folder.absolute(), *folder.absolute().parents][:_ABOVE]
    submitted = [above / "systems" / f"{system.name}.json" for system in parents[:3] for above in parents]
    return next((described(path) for path in (folder / "system.json", *submitted) if path.is_file()), None)


def cells_at(folder: Path, round_: str | None, benchmark: str | None) -> list[PublishedResult]:
    """Return the published cells with a system name in the path, nearest folder first.

    Round and submitter in the path resolve ambiguous names.
    """
    parts = [part.lower() for part in folder.absolute().parts]
    canonical_name = canonical(benchmark)
    matches = []
    for cell in load_published():
        if cell.system.lower() not in parts or (
            canonical_name is not None and cell.benchmark not in (canonical_name, None)
        ):
            continue
        if round_ is not None and cell.round != round_:
            continue
        position = len(parts) - 1 - parts[::-1].index(cell.system.lower())
        by_submitter = cell.submitter.lower() in parts
        by_round = any(cell.round.lstrip("v") in part for part in parts)
        matches.append(((-by_submitter, -by_round, cell.benchmark is None, -position), cell))
    return [cell for _, cell in sorted(matches, key=lambda pair: pair[0])]


def rounds_system(folder: Path, round_: str | None, platform: str | None) -> System:
    """Return the system by folder name, else by the platform in the logs."""
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
    named, from_platform = (system_of("", "", text.replace(" ", "-")) for text in (name, platform))
    return System(
        described=False,
        nodes=max(nodes or 0, named.nodes or 0) or None,
        accelerators_per_node=named.accelerators_per_node,
        accelerator=named.accelerator or from_platform.accelerator,
        framework=named.framework,
    )


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
