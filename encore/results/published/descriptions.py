"""System descriptions of submissions as their submitters wrote them: read whatever their syntax, in one form.

``data/systems/`` was made from checkouts of the public result repositories with

    python -m encore.results.published.descriptions FOLDER
"""

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from encore.results.published.published import DATA, System, load_published

_LIMIT = 1 << 20
_NOT_A_NUMBER = re.compile(r"\D+")
_LONGEST_COUNT = 10
_NOT_IN_A_KEY = re.compile(r"[^a-z0-9]+")
_LINE = re.compile(r"(\w+): (\{.*\})")
_COUNTED_CPU = re.compile(r"(\d+)\s*x\s+(.+)", re.IGNORECASE)
# Google's v0.5 names a slice of a TPU pod by its cores, and repeats their number as that of a node.
_SLICE = re.compile(r"tpuv\d-(\d+)")
_ROUND = re.compile(r"training_results_(v\d\.\d)")
_KNOWN = frozenset({"system_name", "framework", "number_of_nodes", "nodes", "accelerators_per_node"})
_PLACEHOLDERS = frozenset({"", "n/a", "na", "none", "todo", "cpuname", "-", "{}", "[]"})


def described(path: Path) -> System:
    """Return the system that the file describes; one of which nothing is known where it cannot be read."""
    description, caveat = read_description(path)
    return from_description(description, caveat) if description else System(described=False, caveat=caveat)


def read_description(path: Path) -> tuple[dict[str, Any], str]:
    """Return a system description, and what is wrong with its file: some submitted ones are no valid JSON."""
    try:
        if path.stat().st_size > _LIMIT:
            return {}, f"{path.name} is too large for a system description"
        text = path.read_bytes().decode("utf-8-sig", "replace")
    except OSError as error:
        return {}, f"{path.name} cannot be read: {error.strerror}"
    lines = _lines(text)
    if lines:
        return lines, ""
    loaded, caveat = _loaded(text)
    found = {_key(key): value for key, value in loaded.items()} if isinstance(loaded, dict) else {}
    return (
        (found, f"{path.name} {caveat}" if caveat else "")
        if _KNOWN & found.keys()
        else ({}, f"{path.name} holds no system description")
    )


# JSON value, and what is wrong with its syntax.
def _loaded(text: str) -> tuple[object, str]:
    try:
        return json.loads(text, strict=False), ""
    except (ValueError, RecursionError) as error:
        caveat = f"is no valid JSON and was read tolerantly: {error}"
    # Only for a file that is broken: no other command needs to load it.
    from json_repair import repair_json

    try:
        return repair_json(text, return_objects=True), caveat
    except (ValueError, RecursionError):
        return None, caveat


# Description as NVIDIA wrote it in v0.6: the values of log lines, with Python's dictionaries in them.
def _lines(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line.strip())
        try:
            value = json.loads(match[2])["value"] if match else None
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        inner = _literal(value)
        found.update(inner if match and match[1] == "entry" and isinstance(inner, dict) else {})
        if match and match[1] in ("status", "division"):
            found[match[1]] = value
    return {key: _literal(value) for key, value in found.items()}


def _literal(value: object) -> object:
    try:
        return ast.literal_eval(value) if isinstance(value, str) and value.startswith("{") else value
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return value


def _key(key: object) -> str:
    return _NOT_IN_A_KEY.sub("_", str(key).strip().lower()).strip("_")


def from_description(description: Mapping[str, Any], caveat: str = "") -> System:
    """Return the system that MLPerf's system description describes; what is empty there stays unknown."""
    description = {_key(key): value for key, value in description.items()}
    if isinstance(description.get("nodes"), list | dict):
        description = _of_entry(description)

    def text(name: str) -> str | None:
        value = str(description.get(name, "")).strip()
        return None if value.lower() in _PLACEHOLDERS else value

    storage = [each for each in (text("host_storage_capacity"), text("host_storage_type")) if each]
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
    for each in software if isinstance(software, list) else [software]:
        for name, version in each.items() if isinstance(each, dict) else ():
            if str(version).strip().lower() not in _PLACEHOLDERS:
                yield str(name), str(version).strip()


# Description that an ``entry.json`` of v0.5 and v0.6 is, by the names of v0.7.
def _of_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    groups = [entry["nodes"]] if isinstance(entry["nodes"], dict) else entry["nodes"]
    groups = [{_key(key): value for key, value in group.items()} for group in groups if isinstance(group, dict)]
    first = groups[0] if groups else {}
    cpu = _COUNTED_CPU.fullmatch(str(first.get("cpu") or ""))
    memory = str(first.get("sys_mem_size") or "")
    nodes = sum(_count(str(group.get("num_nodes") or "")) or 0 for group in groups)
    each = str(first.get("num_accelerators", ""))
    part = _SLICE.fullmatch(str(first.get("accelerator")))
    if part and part[1] == each and nodes > 1:
        each = str(int(each) // nodes)
    return {
        "number_of_nodes": nodes,
        # 0 is an answer: such a system has none.
        "accelerators_per_node": each,
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


# Yield round, submitter, system and what it is, of every description in checkouts of the result repositories.
def _submitted(root: Path) -> Iterator[tuple[str, str, str, System]]:
    cells = {(cell.round, cell.submitter, cell.system) for cell in load_published()}
    for path in sorted(root.rglob("*.json")):
        parts = path.relative_to(root).parts
        match = _ROUND.match(parts[0])
        if match is None or not (path.parent.name == "systems" or path.name == "entry.json"):
            continue
        names = (
            {(match[1], parts[1], path.stem)}
            if path.parent.name == "systems"
            else {cell for cell in cells if cell[0] == match[1] and {cell[1], *cell[2].split("/")} <= set(parts)}
        )
        for name in sorted(names):
            yield (*name, described(path))


def _main(root: Path) -> None:
    rounds: dict[str, list[str]] = {}
    seen = set()
    for round_, submitter, name, system in _submitted(root):
        if system.caveat:
            print(f"{round_}/{submitter}/{name}: {system.caveat}", file=sys.stderr)
        if system.described and (round_, submitter, name) not in seen:
            seen.add((round_, submitter, name))
            facts = {
                key: value
                for key, value in asdict(system).items()
                if value not in (None, "", {}) and key != "described"
            }
            if "_multi_" in name:
                # The number of nodes differs from benchmark to benchmark.
                facts = {key: value for key, value in facts.items() if key not in ("nodes", "accelerators_per_node")}
            rounds.setdefault(round_, []).append(
                json.dumps({"submitter": submitter, "system": name, **facts}, ensure_ascii=False)
            )
    for round_, lines in rounds.items():
        path = DATA / "systems" / f"{round_}.json"
        path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
