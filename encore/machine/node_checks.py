"""Health checks of nodes before a job: absolute limits, data sheets, and comparison between nodes.

    from encore.machine.node_checks import check_nodes
    for verdict in check_nodes({"n1": facts_of_n1, "n2": None}):
        print(verdict.node, verdict.level, verdict.reasons)

Facts are from :mod:`encore.machine.health`; None if a node did not answer.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from typing_extensions import TypedDict

from encore import paths
from encore.errors import EncoreError
from encore.files import read_json, utc_now, write_json
from encore.machine.links import PCIE_LANE_RATES, pair_floor
from encore.machine.preflight import Check, Level
from encore.results import peaks
from encore.results.logs.telemetry import THROTTLE
from encore.results.outliers import slow_ones

LEAST_OF_SHEET = 0.5  # Minimum fraction of data sheet peak: an H200 reached 80 % in GEMMs and 90 % in copies
Facts = Mapping[str, Any]
Pairs = Mapping[tuple[str, str], Mapping[str, float]]  # Bandwidth per collective between two nodes, bytes/s

# Xids for which NVIDIA recommends a reset or replacement (docs.nvidia.com/deploy/xid-errors): GPU stopped, double-bit
# error, row remapping and its failure, NVLink, off the bus, contained and uncontained memory errors, GSP time-outs.
# Most other Xids are application errors.
HARDWARE_XIDS = (46, 48, 63, 64, 74, 79, 94, 95, 119, 120)
# No idle and healthy GPU is slowed by these.
SLOWED = {bit: reason for bit, reason in THROTTLE.items() if reason != "power cap"}

CLOCK_SECONDS = 1.0  # Records of nodes are merged by time, and files of the future break builds and caches
BUSY = 0.25  # Maximum fraction of the cores used by other programs
FREE_GIB = 1.0
SLOW_LINK = "see: nvidia-smi nvlink -s, lspci -vv"
SHARE_OF_LINE = 0.5  # Minimum fraction of the line rate for a collective between two nodes
MEMORY_TOLERANCE = 0.03  # Firmware and kernel keep some for themselves


@dataclass(frozen=True)
class Equal:
    """Property that must be equal on all nodes. If ``ordered`` and without majority, lower values are reported."""

    key: str
    title: str
    level: Level = "FAIL"
    ordered: bool = True


OF_NODES = (
    Equal("cpu", "processor", ordered=False),
    Equal("sockets", "sockets"),
    Equal("cores", "cores"),
    Equal("numa_nodes", "NUMA nodes"),
    Equal("kernel", "kernel", "WARN", ordered=False),
    Equal("governors", "CPU governor", "WARN", ordered=False),
    Equal("shared_memory_mib", "shared memory, MiB"),
    Equal("megabits", "network, Mbit/s"),
    Equal("ports", "InfiniBand and RoCE ports", ordered=False),
)
OF_GPUS = (
    Equal("name", "GPU", ordered=False),
    Equal("driver", "driver", ordered=False),
    Equal("vbios", "VBIOS", "WARN", ordered=False),
    Equal("sm_mhz_max", "largest SM clock, MHz"),
    Equal("power_limit", "power limit, W"),
    Equal("pcie_width", "PCIe lanes"),
    Equal("pcie_generation_max", "PCIe generation"),
    Equal("nvlinks", "active NVLinks"),
)
# Name, title, unit, and tolerated deviation below the median of the other nodes.
MEASURED = (
    ("cpu_rate", "SHA-256 on all cores", 1e9, "GB/s", 0.4),
    ("memory_rate", "memory copies on all cores", 1e9, "GB/s", 0.4),
)


@dataclass(frozen=True)
class NodeVerdict:
    """Result of the checks of a node."""

    node: str
    level: Level  # Worst level of the checks
    checks: tuple[Check, ...]

    @property
    def reasons(self) -> list[str]:
        return [f"{check.name}: {check.found}" for check in self.checks if check.level == self.level != "OK"]


class Gate(TypedDict):
    """Results of the node checks before a run: gate.json in its folder."""

    time: str  # UTC
    nodes: list[NodeVerdict]


@dataclass(frozen=True)
class KeptVerdict(NodeVerdict):
    """A node's last verdict, in the user's cache."""

    time: str  # UTC


def check_nodes(
    answers: Mapping[str, Facts | None], pairs: Pairs | None = None, reasons: Mapping[str, str] = MappingProxyType({})
) -> list[NodeVerdict]:
    """Return one verdict per node. ``reasons`` explains missing answers."""
    facts_by_node = {node: answer for node, answer in answers.items() if answer is not None}
    checks_by_node: dict[str, list[Check]] = {node: [] for node in answers}
    for node in answers:
        if node not in facts_by_node:
            checks_by_node[node].append(
                Check(
                    "FAIL", "answer", reasons.get(node) or "no answer", "check slurmd or sshd there: scontrol show node"
                )
            )
        else:
            checks_by_node[node] += [*_check_node(facts_by_node[node]), *_check_gpus(facts_by_node[node])]
    for node, check in (
        *_compare_properties(facts_by_node),
        *_compare_speeds(facts_by_node),
        *_compare_gpu_pairs(facts_by_node),
        *_check_node_pairs(facts_by_node, pairs or {}),
    ):
        checks_by_node[node].append(check)
    for node, checks in checks_by_node.items():
        checks += [] if checks else [Check("OK", "node", _summary(facts_by_node[node]))]
    levels = get_args(Level)
    return [
        NodeVerdict(node, max((check.level for check in checks), key=levels.index), tuple(checks))
        for node, checks in checks_by_node.items()
    ]


def _summary(info: Facts) -> str:
    gpus = Counter(str(gpu["name"]) for gpu in info["gpus"])
    cards = ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "no GPU"
    return f"{info['cores']} cores, {cards}; no problem found"


# -- single node ------------------------------------------------------------------------------------------------


def _check_node(info: Facts) -> Iterator[Check]:
    offset = info.get("clock_offset")
    if offset is not None and abs(offset) > CLOCK_SECONDS:
        yield Check("FAIL", "clock", f"{offset:+.1f} s from the first node's", "synchronize it: chronyc makestep")
    if info["busy"] > BUSY:
        yield Check("WARN", "load", f"other programs use {info['busy']:.0%} of the cores", "see which: top")
    for folder, disk in info.get("disks", {}).items():
        if "problem" in disk:
            yield Check("FAIL", "disk", f"{folder} cannot be written: {disk['problem']}", "see: df, mount, dmesg")
        elif disk["free_gib"] < FREE_GIB:
            yield Check("FAIL", "disk", f"{folder} has {disk['free_gib']:g} GiB free", "free some space")
    if info["pci_gpus"] > len(info["gpus"]):
        message = f"{info['pci_gpus']} on the PCI bus, the driver answers for {len(info['gpus'])}"
        yield Check("FAIL", "GPUs", message, "see: dmesg | grep -i nvrm")
    hardware = sorted({xid for xid in info["xids"] or () if xid in HARDWARE_XIDS})
    other_xids = sorted({xid for xid in info["xids"] or () if xid not in HARDWARE_XIDS})
    if hardware:
        hint = "look it up: docs.nvidia.com/deploy/xid-errors; reset the GPU or the node"
        yield Check("FAIL", "Xid", f"{', '.join(map(str, hardware))} in the kernel log", hint)
    if other_xids:
        yield Check(
            "WARN", "Xid", f"{', '.join(map(str, other_xids))} in the kernel log", "usually an application error"
        )
    if info["xids"] is None and info["gpus"]:
        yield Check(
            "WARN", "Xid", "no permission to read the kernel log", "set kernel.dmesg_restrict=0, or run as root"
        )
    problem = info.get("framework", {}).get("problem")
    if problem:
        yield Check(
            "FAIL", "framework", f"the measurement failed: {problem}", "run it separately: encore study machine"
        )


def _check_gpus(info: Facts) -> Iterator[Check]:
    for number, gpu in enumerate(info["gpus"]):
        name = f"GPU {number}"
        if gpu.get("ecc_uncorrected"):
            message = f"{gpu['ecc_uncorrected']} uncorrectable memory errors since the driver was loaded"
            yield Check("FAIL", name, message, "drain the node and reset the GPU")
        _, uncorrectable, pending, failed = gpu.get("remapped") or (0, 0, 0, 0)
        if failed or pending:
            problem = "row remapping has failed" if failed else "row remapping is pending"
            yield Check("FAIL", name, problem, "replace the GPU" if failed else "reset the GPU")
        elif uncorrectable:
            yield Check("WARN", name, f"{uncorrectable} rows remapped after uncorrectable errors")
        slowed = [reason for bit, reason in SLOWED.items() if (gpu.get("throttle") or 0) & bit]
        if slowed:
            yield Check("FAIL", name, f"clocks are throttled: {', '.join(slowed)}", "see: nvidia-smi -q -d PERFORMANCE")
        width, max_width = gpu.get("pcie_width"), gpu.get("pcie_width_max")
        if width and max_width and width < max_width:
            lane = PCIE_LANE_RATES.get(gpu.get("pcie_generation_max") or 0)
            rate = f", {width * lane:.1f} instead of {max_width * lane:.1f} GB/s" if lane else ""
            yield Check("FAIL", name, f"PCIe x{width} instead of x{max_width}{rate}", "reseat the card or its riser")
        limit, default = gpu.get("power_limit"), gpu.get("power_limit_default")
        if limit and default and limit < default:
            yield Check("WARN", name, f"power limit {limit:g} W, default {default:g} W", "nvidia-smi -pl")


# -- comparison of nodes ----------------------------------------------------------------------------------------


def _compare_properties(facts_by_node: Mapping[str, Facts]) -> Iterator[tuple[str, Check]]:
    for rule in OF_NODES:
        yield from _compare_values(rule, {node: info[rule.key] for node, info in facts_by_node.items()})
    yield from _compare_values(
        Equal("gpus", "number of GPUs"), {node: len(info["gpus"]) for node, info in facts_by_node.items()}
    )
    for rule in OF_GPUS:
        # The lowest value over a node's GPUs, or all names.
        values = {node: [gpu.get(rule.key) for gpu in info["gpus"]] for node, info in facts_by_node.items()}
        plain = {node: [value for value in gpu_values if value is not None] for node, gpu_values in values.items()}
        for node, gpu_values in plain.items():
            if len(set(gpu_values)) > 1:
                yield (
                    node,
                    Check(rule.level, rule.title, f"its GPUs differ: {', '.join(map(str, sorted(set(gpu_values))))}"),
                )
        lowest = {node: min(gpu_values) for node, gpu_values in plain.items() if gpu_values}
        yield from _compare_values(rule, lowest)
    for folder in dict.fromkeys(folder for info in facts_by_node.values() for folder in info.get("disks", {})):
        kinds = {node: info["disks"].get(folder, {}).get("mounted", "") for node, info in facts_by_node.items()}
        yield from _compare_values(Equal("mounted", f"file system of {folder}", ordered=False), kinds)
    memory = {node: info["memory_gib"] for node, info in facts_by_node.items()}
    usual = statistics.median_high(memory.values()) if memory else 0.0
    for node, has in memory.items():
        if has < usual * (1 - MEMORY_TOLERANCE):
            yield (
                node,
                Check("FAIL", "memory", f"{has:g} GiB, others have {usual:g}", "check the DIMMs: dmidecode -t memory"),
            )


def _compare_values(rule: Equal, values: Mapping[str, Any]) -> Iterator[tuple[str, Check]]:
    # Report values that differ from the majority; without a majority the lower value if ordered, else all nodes.
    counts = Counter(map(repr, values.values())).most_common()
    if len(counts) < 2:
        return
    by_majority = counts[0][1] > sum(count for _, count in counts[1:])
    if by_majority:
        usual = next(value for value in values.values() if repr(value) == counts[0][0])
    elif rule.ordered:
        usual = max(value for value in values.values() if value is not None)
    else:
        examples = ", ".join(f"{node} {_text(value)}" for node, value in list(values.items())[:4])
        yield from ((node, Check("WARN", rule.title, f"the nodes differ: {examples}")) for node in values)
        return
    for node, value in values.items():
        if repr(value) != repr(usual):
            # A higher value does not slow down other nodes.
            level: Level = "WARN" if rule.ordered and None not in (value, usual) and value > usual else rule.level
            yield node, Check(level, rule.title, f"{_text(value)}, others have {_text(usual)}")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {rate:g}" for name, rate in value.items()) or "none"
    return (
        ", ".join(map(str, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _compare_speeds(facts_by_node: Mapping[str, Facts]) -> Iterator[tuple[str, Check]]:
    for key, title, unit, word, tolerance in MEASURED:
        yield from _slow({node: info[key] for node, info in facts_by_node.items()}, title, unit, word, tolerance)
    for folder in dict.fromkeys(folder for info in facts_by_node.values() for folder in info.get("disks", {})):
        for rate in ("write_rate", "read_rate"):
            disks = {node: info["disks"].get(folder, {}).get(rate) for node, info in facts_by_node.items()}
            speeds = {node: speed for node, speed in disks.items() if speed is not None}
            # Other jobs and caches make disks differ, of two also by far.
            level: Level = "FAIL" if len(speeds) > 2 else "WARN"
            yield from _slow(speeds, f"{rate.split('_')[0]} of {folder}", 1e6, "MB/s", 0.7, level)
    measured = {
        node: info["framework"] for node, info in facts_by_node.items() if info.get("framework", {}).get("peaks")
    }
    for rate, title, unit, word in (
        ("flops_per_second", "GEMMs", 1e12, "TFLOP/s"),
        ("bytes_per_second", "copies", 1e9, "GB/s"),
    ):
        devices = {
            f"{node} {number}": peak[rate]
            for node, speeds in measured.items()
            for number, peak in enumerate(speeds["peaks"])
        }
        for name, share in slow_ones(devices, 0.15 if _on_gpus(measured) else 0.4).items():
            node, _, number = name.rpartition(" ")
            message = f"{devices[name] / unit:.3g} {word}, {share:.0%} of the others' median"
            yield node, Check("FAIL", f"{title} of device {number}", message)
    for node, speeds in measured.items():
        for index, (gpu, speed) in enumerate(zip(facts_by_node[node]["gpus"], speeds["peaks"], strict=False)):
            yield from ((node, check) for check in _compare_with_sheet(index, str(gpu["name"]), speed))
    for kind in ("all-reduce", "all-to-all"):
        rates = {node: _largest(speeds, kind) for node, speeds in measured.items()}
        yield from _slow(rates, f"{kind} within the node", 1e9, "GB/s", 0.2 if _on_gpus(measured) else 0.5)
        for node, info in facts_by_node.items():
            floor = info.get("floor")
            if kind == "all-reduce" and floor and node in rates and rates[node] < floor:
                message = f"{rates[node] / 1e9:.3g} GB/s, expected at least {floor / 1e9:.3g} for its links"
                yield (
                    node,
                    Check("FAIL", f"{kind} within the node", message, "see: nvidia-smi topo -m, nvidia-smi nvlink -s"),
                )


# Compare a GPU's GEMMs and copies with its data sheet, which assumes no power or thermal limit.
def _compare_with_sheet(number: int, gpu: str, measured: Mapping[str, float]) -> Iterator[Check]:
    for rate, title, unit, word, sheet in (
        ("flops_per_second", "GEMMs", 1e12, "TFLOP/s", peaks.peak_of(gpu, "bf16")),
        ("bytes_per_second", "copies", 1e9, "GB/s", peaks.bandwidth_of(gpu)),
    ):
        if sheet and measured[rate] < LEAST_OF_SHEET * sheet[0]:
            message = f"{measured[rate] / unit:,.0f} {word}, {measured[rate] / sheet[0]:.0%} of the "
            message += f"{sheet[0] / unit:,.0f} of {sheet[1]}"
            yield Check("WARN", f"{title} of device {number}", message, "see: nvidia-smi -q -d PERFORMANCE,CLOCK,POWER")


# Compare pairs of GPUs with all pairs, on any node, that have the same link.
def _compare_gpu_pairs(facts_by_node: Mapping[str, Facts]) -> Iterator[tuple[str, Check]]:
    alike: dict[str, dict[tuple[str, int, int], float]] = {}
    for node, info in facts_by_node.items():
        rows = info.get("framework", {}).get("pairs") or []
        for i, row in enumerate(rows if len(rows) == len(info.get("links", ())) else ()):
            for j, rate in enumerate(row):
                if rate is not None:
                    alike.setdefault(info["links"][i][j], {})[node, i, j] = rate
    for word, rates in alike.items():
        for (node, i, j), share in slow_ones(rates, 0.2).items():
            message = f"{rates[node, i, j] / 1e9:.3g} GB/s, {share:.0%} of the median of {word} pairs"
            yield node, Check("FAIL", f"from GPU {i} to GPU {j}", message, SLOW_LINK)
        for (node, i, j), rate in rates.items():
            least = pair_floor(word, facts_by_node[node].get("nvlink_rate"))
            if least and rate < least:
                message = f"{rate / 1e9:.3g} GB/s, expected at least {least / 1e9:.3g} for {word}"
                yield node, Check("WARN", f"from GPU {i} to GPU {j}", message, SLOW_LINK)


def _on_gpus(measured: Mapping[str, Facts]) -> bool:
    return any(speeds["device"] == "cuda" for speeds in measured.values())


def _largest(speeds: Facts, kind: str) -> float:
    rows = [row for row in speeds["collectives"] if row["kind"] == kind]
    return float(max(rows, key=lambda row: row["bytes"])["rate"]) if rows else 0.0


def _slow(
    values: Mapping[str, float], title: str, unit: float, word: str, tolerance: float, level: Level = "FAIL"
) -> Iterator[tuple[str, Check]]:
    for node, share in slow_ones(values, tolerance).items():
        yield node, Check(level, title, f"{values[node] / unit:.3g} {word}, {share:.0%} of the others' median")


# -- between nodes ------------------------------------------------------------------------------------------------


def rounds_of(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return the neighbours in a ring as rounds of disjoint pairs: two or three rounds for any number of nodes.

    Two pairs per node tell which node in a pair is slow, in constant time.
    """
    ring = [(a, b) for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True) if a != b] if len(nodes) > 1 else []
    if len(nodes) == 2:
        return [ring[:1]]
    last = [ring.pop()] if len(ring) % 2 else []
    return [pairs for pairs in (ring[::2], ring[1::2], last) if pairs]


def _check_node_pairs(facts_by_node: Mapping[str, Facts], pairs: Pairs) -> Iterator[tuple[str, Check]]:
    for kind in ("all-reduce", "all-to-all"):
        rates = {pair: rate[kind] for pair, rate in pairs.items() if kind in rate and {*pair} <= {*facts_by_node}}
        # A node's faster pair: the slow one may be the other's fault.
        best: dict[str, float] = {}
        for pair, rate in rates.items():
            for node in pair:
                best[node] = max(rate, best.get(node, 0.0))
        if len(best) > 2:
            yield from _slow(best, f"{kind} between nodes", 1e9, "GB/s", 0.3)
        for pair, rate in rates.items():
            lines = [line for node in pair if (line := _line(facts_by_node[node]))]
            # All-reduce and all-to-all in a pair: bytes sent per node and second, limited by the line rate.
            if len(lines) == 2 and rate < SHARE_OF_LINE * min(lines):
                message = f"{rate / 1e9:.3g} GB/s between {' and '.join(pair)}, line rate {min(lines) / 1e9:.3g} GB/s"
                hint = "see NCCL_DEBUG=INFO for NET/Socket (TCP), and NCCL_IB_HCA"
                yield from ((node, Check("FAIL", f"{kind} between nodes", message, hint)) for node in pair)
    for pair, measured in pairs.items():
        if not measured:
            yield from (
                (node, Check("FAIL", "between nodes", f"{' and '.join(pair)} cannot communicate")) for node in pair
            )


def _line(info: Facts) -> float:
    # Bytes per second of all ports, else of the interface; 0 if unknown to the kernel.
    return float((sum(info["ports"].values()) * 1e9 or info["megabits"] * 1e6) / 8)


# -- stored results ---------------------------------------------------------------------------------------------


def folder() -> Path:
    return paths.cache_folder() / "gate"


def store(verdicts: Sequence[NodeVerdict]) -> None:
    """Store verdicts in the cache for ``encore doctor --slurm``. Errors, such as a full disk, are ignored."""
    with suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        for verdict in verdicts:
            write_json(folder() / f"{verdict.node}.json", KeptVerdict(**vars(verdict), time=utc_now()))


def last_result(name: str) -> str:
    """Return a node's last stored result with its time; empty if none."""
    with suppress(EncoreError, KeyError, TypeError):
        content = read_json(folder() / f"{name}.json")
        worst = [
            f"{check['name']}: {check['found']}" for check in content["checks"] if check["level"] == content["level"]
        ]
        return f"{content['level']} at {content['time']}: {'; '.join(worst)}"
    return ""
