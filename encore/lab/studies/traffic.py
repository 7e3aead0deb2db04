"""Bytes that a step moves over each link of a machine, from its links and the sizes of the arrays.

    from encore.lab.studies.traffic import links_of, tree, ring
    for pair, moved in ring(links_of("dgx1-v100"), [4 * 60_000], 8).items():
        print(pair, moved)

P2P is what a key-value store does: each array has an owner, the largest first given to the device with the least so
far; the others copy their gradients to the owner and copy the weights back. A ring passes each array's parts round,
2 (n - 1) / n of its bytes over each link (all-reduce). Two GPUs without a link between them reach each other by
NVLinks through a third, two hops, of those the one with the widest narrower link.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from encore import catalogue
from encore.lab.studies.definition import DATA
from encore.results.table import Table

Pair = tuple[int, int]  # two GPUs, the lower number first


@dataclass(frozen=True)
class Links:
    title: str
    gpus: int
    gb_per_second: float  # of one link in one direction
    widths: dict[Pair, int]  # links between two GPUs
    ring: tuple[int, ...]  # order of a ring through all GPUs over links alone

    def path(self, one: int, other: int) -> tuple[int, ...]:
        """Return the GPUs on the way from one to the other; empty where NVLinks do not connect them in two hops."""
        if _pair(one, other) in self.widths:
            return (one, other)
        through = [
            (min(self.widths[_pair(one, each)], self.widths[_pair(each, other)]), -each)
            for each in range(self.gpus)
            if {_pair(one, each), _pair(each, other)} <= set(self.widths)
        ]
        return (one, -max(through)[1], other) if through else ()


def _pair(one: int, other: int) -> Pair:
    return (min(one, other), max(one, other))


def links_of(name: str) -> Links:
    content = catalogue.read_toml(DATA / "links" / f"{name}.toml")
    widths = {_pair(one, other): count for one, other, count in content.pop("pairs")}
    return Links(widths=widths, ring=tuple(content.pop("ring")), **content)


def owners(sizes: Sequence[int], devices: int) -> list[tuple[int, int]]:
    """Return (bytes, owner) of each array, the largest first to the device that owns least."""
    load = [0] * devices
    found = []
    for size in sorted(sizes, reverse=True):
        owner = load.index(min(load))
        load[owner] += size
        found.append((size, owner))
    return found


def tree(links: Links, sizes: Sequence[int], devices: int) -> dict[Pair, float]:
    """Return bytes of a step over each link by P2P, both directions together; two hops count on both links."""
    moved: dict[Pair, float] = {}
    for size, owner in owners(sizes, devices):
        for other in range(devices):
            path = links.path(owner, other) if other != owner else ()
            for pair in itertools.pairwise(path):
                key = _pair(*pair)
                moved[key] = moved.get(key, 0.0) + 2.0 * size
    return moved


def ring(links: Links, sizes: Sequence[int], devices: int) -> dict[Pair, float]:
    """Return bytes of a step over each link by an all-reduce in a ring, both directions together.

    A ring of some of the GPUs closes over the path from its last to its first.
    """
    order = [gpu for gpu in links.ring if gpu < devices]
    moved: dict[Pair, float] = {}
    if devices < 2:
        return moved
    for one, other in zip(order, [*order[1:], order[0]], strict=True):
        path = links.path(one, other)
        for pair in itertools.pairwise(path):
            key = _pair(*pair)
            moved[key] = moved.get(key, 0.0) + 2.0 * (devices - 1) / devices * sum(sizes)
    return moved


def two_hops(links: Links, devices: int) -> list[tuple[int, ...]]:
    pairs = [(one, other) for one in range(devices) for other in range(one + 1, devices)]
    return [path for path in (links.path(*pair) for pair in pairs) if len(path) == 3]


def table(links: Links, by_network: Mapping[str, Sequence[int]], devices: int) -> Table:
    """Return what a step moves at most over one link by either way, and the least time that takes, by network."""
    rows = []
    for name, sizes in by_network.items():
        row: list[str | float | int] = [name, len(sizes), sum(sizes) / 1e6]
        for way in (tree, ring):
            moved = way(links, sizes, devices)
            times = {pair: each / 2 / (links.widths[pair] * links.gb_per_second * 1e9) for pair, each in moved.items()}
            pair = max(times, key=lambda each: (times[each], each))
            row += [f"{pair[0]}-{pair[1]}", moved[pair] / 1e6, 1000 * times[pair]]
        rows.append(tuple(row))
    hops = ", ".join("-".join(map(str, path)) for path in two_hops(links, devices))
    return Table(
        title=f"Bytes of a step over the busiest link, {devices} GPUs of a {links.title}",
        columns=(
            "network", "arrays", "gradients, MB", "P2P: link", "P2P: MB", "P2P: least ms",
            "ring: link", "ring: MB", "ring: least ms",
        ),
        rows=tuple(rows),
        note=f"Computed from the links and the sizes of the arrays, not measured. Two hops: {hops or 'none'}.",
    )  # fmt: skip
