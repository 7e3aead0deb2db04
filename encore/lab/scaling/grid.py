"""The grid of a sweep: which numbers of GPUs, with which batch, and what each point asks to be run.

from encore.lab.scaling.grid import Grid, points, request_of
grid = Grid(benchmark="resnet", gpus=(1, 2, 4, 8), mode="strong")
for point in points(grid):
    print(point.key, request_of(grid, point, Path("results")).settings)
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from encore import catalogue, configuration
from encore.catalogue import System
from encore.containers import building, images
from encore.errors import EncoreError
from encore.machine import node
from encore.run import planning
from encore.run.planning import Request
from encore.ssh import hosts

Mode = Literal["strong", "weak"]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What a sweep is of; the fields behind ``mode`` are those of a run."""

    benchmark: str
    gpus: tuple[int, ...]
    """GPUs of each node; ranks where there are none."""
    nodes: tuple[int, ...] = (1,)
    precisions: tuple[str, ...] = ()
    """Each such as fp16, or fp16:128 with the batch of a rank, of weak scaling; empty: as the system has it."""
    full_nodes: bool = False
    """Of several nodes only points with the most GPUs that are named."""
    hosts: tuple[str, ...] = ()
    """``n1:4``: where points of several nodes run over ssh, the first ones of these; empty: a scheduler runs them."""
    images: tuple[str, ...] = ()
    """Releases of the base of the benchmark's image, the first one to be compared with; empty: no such axis."""
    mode: Mode = "strong"
    global_batch: int | None = None
    """Of strong scaling; None: the system's."""
    runs: int = 1
    system: str | None = None
    round: str | None = None
    data: str | None = None
    seed: int | None = None
    settings: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    drop_caches: bool | None = None
    runtime: str | None = None
    image: str | None = None
    python: str | None = None
    cluster: str | None = None
    """Slurm's cluster file; None: the one at its usual place."""


@dataclass(frozen=True)
class GridPoint:
    """One point of a grid."""

    nodes: int
    gpus_per_node: int
    precision: str | None = None
    image: str | None = None
    """Release of the image's base."""
    batch: int | None = None
    """Of a rank, where the precision brings one along."""

    @property
    def gpus(self) -> int:
        """GPUs over all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def key(self) -> str:
        """``2x8-fp16``: the name of the point's folder."""
        precision = f"-{self.precision}" if self.precision else ""
        image = f"-{self.image}" if self.image else ""
        return f"{self.nodes}x{self.gpus_per_node}{precision}{image}"


def points(grid: Grid) -> list[GridPoint]:
    """Return every combination, small ones first, images in their order; EncoreError for numbers that cannot be."""
    for name, counts in (("--gpus", grid.gpus), ("--nodes", grid.nodes)):
        if not counts or min(counts) < 1 or max(counts) > planning.MAX_GPUS:
            raise EncoreError(
                f"{name} {','.join(map(str, counts))}",
                expected=f"numbers from 1 to {planning.MAX_GPUS}",
                remedy=f"such as {name} 1,2,4",
            )
    batches = dict(_precision(each, grid.mode) for each in grid.precisions)
    found = [
        GridPoint(nodes, gpus, precision, image, batches.get(precision))
        for nodes, gpus, precision, image in itertools.product(
            dict.fromkeys(grid.nodes),
            dict.fromkeys(grid.gpus),
            dict.fromkeys(batches or (None,)),
            dict.fromkeys(grid.images or (None,)),
        )
        if nodes == 1 or not grid.full_nodes or gpus == max(grid.gpus)
    ]
    return sorted(found, key=lambda point: (point.gpus, point.nodes, point.precision or ""))


def _precision(text: str, mode: Mode) -> tuple[str | None, int | None]:
    """Split ``fp16:128`` into the precision and the batch of a rank."""
    name, colon, batch = text.partition(":")
    if not colon:
        return name, None
    if not batch.isdecimal() or int(batch) < 1:
        raise EncoreError(f"--precision {text}", expected="a batch from 1 on", remedy=f"--precision {name}:64")
    if mode == "strong":
        raise EncoreError(f"--precision {text} with strong scaling", remedy="add --weak: a batch is that of a rank")
    return name, int(batch)


def request_of(grid: Grid, point: GridPoint, results: Path) -> Request:
    """Return the run of a point, whose folder goes into ``results``."""
    _refuse_settings(grid)
    system = _system(grid, point)
    precision = [f"precision={point.precision}"] if point.precision else []
    precision += [f"batch_size={point.batch}"] if point.batch else []
    rates = catalogue.choose(grid.benchmark).benchmark.rates
    batch = batch_settings(system, point, grid.mode, grid.global_batch, rates)
    return Request(
        name=grid.benchmark,
        gpus=point.gpus,
        system=system.system,
        round=grid.round,
        data=Path(grid.data) if grid.data else None,
        results=results,
        runs=grid.runs,
        seed=grid.seed,
        # The user's settings come last and win.
        settings=(*batch, *precision, *grid.settings),
        environment=grid.environment,
        drop_caches=grid.drop_caches,
        runtime=grid.runtime,
        image=_image(grid, point),
        python=Path(grid.python) if grid.python else None,
        cluster=Path(grid.cluster) if grid.cluster else None,
        hosts=hosts_of(grid, point),
    )


def hosts_of(grid: Grid, point: GridPoint) -> tuple[hosts.Host, ...]:
    """Return the hosts of a point of several nodes; EncoreError where they are too few. One node is this machine."""
    if point.nodes == 1 or not grid.hosts:
        return ()
    found = hosts.parse(",".join(grid.hosts))
    if len(found) < point.nodes or min(each.slots for each in found[: point.nodes]) < point.gpus_per_node:
        raise EncoreError(
            f"--hosts {','.join(grid.hosts)} for {point.nodes} nodes of {point.gpus_per_node} GPUs",
            expected="as many hosts as the most nodes, with as many GPUs as the most of a node",
            remedy="name more hosts, or fewer --nodes",
        )
    return tuple(hosts.Host(each.name, point.gpus_per_node) for each in found[: point.nodes])


def _image(grid: Grid, point: GridPoint) -> str | None:
    """Return the benchmark's image on the point's release, as `encore images build --base` names it."""
    if point.image is None:
        return grid.image
    if grid.image is not None or grid.runtime == "host":
        given = "--image" if grid.image is not None else "--runtime host"
        raise EncoreError(f"--images with {given}", remedy=f"leave out {given}: the sweep names the images")
    choice = catalogue.choose(grid.benchmark)
    if point.image == images.STANDIN:
        return building.image_name(choice, images.STANDIN)
    return building.image_name(choice, images.find_release(choice.implementation.framework, point.image).release)


def _refuse_settings(grid: Grid) -> None:
    """Refuse settings of what the grid itself sets."""
    if grid.global_batch is not None and (grid.mode == "weak" or grid.global_batch < 1):
        raise EncoreError(
            f"--global-batch {grid.global_batch} with {grid.mode} scaling",
            expected="a positive batch, which strong scaling divides among the ranks",
            remedy="with --weak, give the batch of a rank: --set batch_size=N",
        )
    names = {setting.partition("=")[0].strip() for setting in grid.settings}
    for name, wrong, option in (
        ("batch_size", grid.mode == "strong", "--global-batch, or --weak"),
        ("batch_size", any(":" in each for each in grid.precisions), "--precision NAME:BATCH"),
        ("precision", bool(grid.precisions), "--precision"),
    ):
        if wrong and name in names:
            raise EncoreError(f"--set {name}: the sweep sets it", remedy=f"use {option}")


def _system(grid: Grid, point: GridPoint) -> System:
    """Return the same system for every point: the one that fits the largest node best, unless it is named."""
    choice = catalogue.choose(grid.benchmark)
    return planning.choose_system(choice, max(grid.gpus), node.this_node(), grid.system, grid.round)


def batch_settings(
    system: System,
    point: GridPoint,
    mode: Mode,
    global_batch: int | None = None,
    rates: Sequence[str] = ("learning_rate",),
) -> tuple[str, ...]:
    """Return what makes the batch of a point strong (one global batch) or weak (one batch per rank).

    The learning rate belongs to the global batch: it stays in strong scaling, and follows Encore's rule for
    other numbers of GPUs in weak scaling. Empty where the system's own rule already does as wanted.
    """
    if global_batch is not None:
        if global_batch % point.gpus:
            raise EncoreError(
                f"{point.gpus} ranks cannot share a global batch of {global_batch} evenly",
                expected="a multiple of every number of ranks",
                remedy="another --global-batch",
            )
        kept = {name: system.config[name] for name in rates if name in system.config}
        return (f"batch_size={global_batch // point.gpus}", *_as_settings(kept))
    strong = mode == "strong"
    if strong == system.keep_global_batch:
        return ()
    scaled = configuration.scaled(
        system.model_copy(update={"keep_global_batch": strong}), point.nodes, point.gpus_per_node, rates
    )
    names = [name for name in ("batch_size", *rates) if name in system.config]
    values: dict[str, Any] = {name: system.config[name] for name in names}
    values.update({name: value.value for name, value in scaled.items()})
    return _as_settings(values)


def _as_settings(values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{name}={json.dumps(value)}" for name, value in values.items())
