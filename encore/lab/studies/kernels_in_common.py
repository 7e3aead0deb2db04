"""Kernels that two frameworks have in common, by name, from two tables of kernels.

    from encore.lab.studies.kernels_in_common import in_common, read_kernels
    print(in_common(read_kernels(Path("a.json")), read_kernels(Path("b.csv"))).as_markdown())

A table is the JSON of a roofline, or what Nsight Systems writes of any framework:
``nsys stats --report cuda_gpu_kern_sum --format csv REPORT``.
"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

from encore.errors import EncoreError
from encore.results.table import Table

_TIME, _NAME = "Total Time (ns)", "Name"


@dataclass(frozen=True)
class Kernels:
    """Seconds by kernel of one program."""

    title: str
    seconds: dict[str, float]
    total: float

    def share(self, name: str) -> float:
        """Return the share of the time in which kernels ran."""
        return self.seconds[name] / self.total if self.total else 0.0


def read_kernels(path: Path) -> Kernels:
    """Return the kernels of a file; EncoreError where it is neither form."""
    try:
        text = path.read_text(encoding="utf-8")
        step = json.loads(text).get("step") or {} if text.lstrip().startswith("{") else {}
    except (OSError, ValueError) as error:
        raise EncoreError(f"{path} cannot be read: {error}", expected="a table of kernels") from error
    if "kernels" in step:
        found = {each["name"]: float(each["seconds"]) for each in step["kernels"]}
        return Kernels(path.stem, found, float(step["busy_seconds"]))
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if _TIME in line and _NAME in line), None)
    if start is None:
        raise EncoreError(
            f"{path} is no table of kernels",
            expected="the JSON of `encore bench --roofline`, or CSV of `nsys stats --report cuda_gpu_kern_sum`",
        )
    rows = [row for row in csv.DictReader(lines[start:]) if row.get(_NAME) and (row.get(_TIME) or "").isdigit()]
    seconds: dict[str, float] = {}
    for row in rows:
        seconds[row[_NAME]] = seconds.get(row[_NAME], 0.0) + int(row[_TIME]) / 1e9
    return Kernels(path.stem, seconds, sum(seconds.values()))


def in_common(first: Kernels, second: Kernels) -> Table:
    """Return the kernels of both, with the share of the time that each program spends in them."""
    names = sorted(first.seconds.keys() & second.seconds.keys(), key=lambda name: -first.share(name))
    shares = [(name, first.share(name), second.share(name)) for name in names]
    one, other = sum(row[1] for row in shares), sum(row[2] for row in shares)
    columns = ("kernel", first.title, second.title if second.title != first.title else f"{second.title} (2)")
    return Table(
        title="Kernels in common",
        columns=columns,
        formats=dict.fromkeys(columns[1:], ".1%"),
        rows=tuple(shares),
        note=f"{len(names)} kernels in common: {one:.0%} of the time of {first.title}, {other:.0%} of {second.title}.",
    )
