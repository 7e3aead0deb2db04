"""Study definitions: measurements, grid, published figures, and questions.

from encore.lab.studies.definition import load
study = load("multi-gpu")
for point in study.points():
    print(point.key, point.config)
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from encore import catalogue, configuration, paths
from encore.catalogue import Strict
from encore.errors import EncoreError, unknown_name
from encore.lab.studies.folder import Definition
from encore.run.planning import Request

DATA = Path(__file__).parent / "data"
Value = str | int | float | bool
Kind = Literal["speed-up", "against", "size", "stages", "memory", "weak"]


@dataclass(frozen=True)
class Point:
    axes: Mapping[str, Value]
    config: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Return the folder name of the point: axis values in order; for switches the axis name."""
        return "-".join(axis if value is True else str(value).replace("/", "_") for axis, value in self.axes.items())


class Program(Strict):
    """The measuring program: config.json in, measurement.json out."""

    module: str  # Python module; the config.py in its folder validates a point before anything starts
    framework: str  # names the environment, and how ranks are started
    image: str = ""  # benchmark whose image has the framework; empty: the program runs on the host only
    ranks: str = "ranks"  # axis with the number of devices
    # Axis values for which a single process drives all devices; otherwise one process per device.
    one_process: dict[str, tuple[Value, ...]] = Field(default_factory=dict)
    seconds: float = 10.0  # assumed duration per point before any measurement, for the dry-run estimate


class Epoch(Strict):
    """Epoch size, to convert seconds per step to seconds per epoch."""

    images: int  # total over all devices for strong scaling; per device for weak scaling
    batch: str = "batch_size"  # axis with the samples per step and device


class Published(Strict):
    """Which printed figures belong to which points."""

    source: str  # key of studies.toml in the results' data
    model: str  # axis that is the figures' model
    # Names of axis values in the figures, if different.
    models: dict[str, str] = Field(default_factory=dict)
    # Axis, and the terms for its values in a figure's context.
    context: dict[str, dict[str, str]] = Field(default_factory=dict)


class Question(Strict):
    text: str
    kind: Kind
    x: str = ""  # axis of the plot's x values
    series: tuple[str, ...] = ()  # axes; a line per combination of their values
    # Axis values that select the points of the answer; other axes are not restricted.
    where: dict[str, Value] = Field(default_factory=dict)
    between: tuple[Value, ...] = ()  # two values of ``x`` that are compared
    quantity: str = ""  # quantity of the corresponding printed figures; empty: none
    why: str = ""  # reason in the study; printed in the last section


class Part(Strict):
    """Replacements for a smaller grid, such as ``--small``."""

    base: dict[str, Value] = Field(default_factory=dict)
    grid: dict[str, tuple[Value, ...]] = Field(default_factory=dict)
    values: dict[str, dict[str, dict[str, Value]]] = Field(default_factory=dict)
    # Replaced fields by question number, starting at 1.
    questions: dict[str, dict[str, Any]] = Field(default_factory=dict)
    skip: tuple[dict[str, Value], ...] = ()  # in addition to the study's
    more: tuple[dict[str, tuple[Value, ...]], ...] = ()
    seconds: float | None = None
    epoch: Epoch | None = None


class Study(Definition):
    name: str
    title: str
    about: str = ""
    program: Program
    base: dict[str, Value]
    grid: dict[str, tuple[Value, ...]]
    # Additional configuration keys by axis and value.
    values: dict[str, dict[str, dict[str, Value]]] = Field(default_factory=dict)
    skip: tuple[dict[str, Value], ...] = ()  # combinations that are not measured
    # Additional grids: axis values, and any configuration keys.
    more: tuple[dict[str, tuple[Value, ...]], ...] = ()
    passes: int = Field(2, ge=1)  # measurements per point: first in grid order, then shuffled
    epoch: Epoch
    published: Published | None = None
    links: str = ""  # links of the machine used in the study: a file in data/links
    questions: tuple[Question, ...]
    small: Part = Part()
    is_small: bool = False
    request: Request = Request(name="", gpus=None, runtime="host")  # where it is measured: runtime, image and Python

    def points(self) -> list[Point]:
        """Return all points, starting with few devices, so that an interrupted study has complete results for these."""
        points = []
        for grid in (self.grid, *self.more):
            for combination in itertools.product(*grid.values()):
                axes = dict(zip(grid, combination, strict=True))
                if any(skipped.items() <= axes.items() for skipped in self.skip):
                    continue
                overrides: dict[str, Value] = {}
                for axis, value in axes.items():
                    overrides.update(self.values.get(axis, {}).get(str(value), {}))
                points.append(Point(axes, {**self.base, **overrides, **axes}))
        return sorted(points, key=lambda point: float(point.axes[self.program.ranks]))

    def order(self) -> list[tuple[int, Point]]:
        """Return pass numbers, starting at 1, and points in measuring order.

        Shuffled passes decorrelate points from slow changes of the machine, such as its temperature; these then
        appear as differences between passes.
        """
        points = self.points()
        shuffled = {n: random.Random(n).sample(points, len(points)) for n in range(2, self.passes + 1)}
        return [(number, point) for number, order in {1: points, **shuffled}.items() for point in order]


def study_names() -> list[str]:
    return sorted(path.stem for path in DATA.glob("*.toml"))


def load(name: str, small: bool = False) -> Study:
    """Return the study ``name`` or the study in a TOML file; EncoreError if it is invalid."""
    path = Path(name) if name.endswith(".toml") or "/" in name else DATA / f"{name}.toml"
    if not path.is_file():
        if path.parent != DATA:
            raise EncoreError(f"no file {path}", hint="pass the TOML file of the study")
        raise unknown_name("study", name, study_names())
    study = catalogue.parse(Study, path, name=path.stem)
    if small:
        if not study.small.grid:
            raise EncoreError(f"the study {name} has no small grid", hint="omit --small, or add [small.grid]")
        study = _small_study(study)
    _check(study)
    return study


def _small_study(study: Study) -> Study:
    # Study with its small grid.
    part = study.small
    values = {axis: dict(by_value) for axis, by_value in study.values.items()}
    for axis, by_value in part.values.items():
        for value, overrides in by_value.items():
            values.setdefault(axis, {})[value] = {**values.get(axis, {}).get(value, {}), **overrides}
    questions = tuple(
        Question.model_validate({**question.model_dump(), **part.questions.get(str(number), {})})
        for number, question in enumerate(study.questions, 1)
    )
    program = study.program.model_copy(update={"seconds": part.seconds or study.program.seconds})
    changes = {
        "base": {**study.base, **part.base}, "grid": {**study.grid, **part.grid}, "values": values,
        "questions": questions, "program": program, "skip": (*study.skip, *part.skip), "more": part.more,
        "epoch": part.epoch or study.epoch, "is_small": True,
    }  # fmt: skip
    return study.model_copy(update=changes)


def _check(study: Study) -> None:
    # Reject errors that would otherwise appear only while measuring.
    axes = {study.program.ranks, study.epoch.batch, *study.program.one_process}
    for question in study.questions:
        axes |= {*question.series, *question.where, *([question.x] if question.x else [])}
    for axis in sorted(axes):
        if axis not in study.grid:
            raise unknown_name(f"axis in the study {study.name}", axis, study.grid)
    for extra_grid in study.more:
        absent = sorted(set(study.grid) - set(extra_grid))
        if absent:
            raise EncoreError(f"[[more]] of the study {study.name} lacks {', '.join(absent)}")
    fields, config_of = configuration.field_types(folder(study)), configuration.config_class(folder(study))
    points = study.points()
    for name, value in dict.fromkeys(pair for point in points for pair in point.config.items()):
        if name not in fields:
            raise unknown_name(f"key in the study {study.name}", name, fields)
        configuration.checked(name, value, fields[name])
    for point in points:
        missing = sorted(set(fields) - set(point.config))
        if missing:
            raise EncoreError(f"the study {study.name} does not say {', '.join(missing)}", hint="add it to [base]")
        try:
            config_of(**point.config)
        except (ValueError, TypeError) as error:
            raise EncoreError(f"point {point.key}: {error}", hint="change [base] or [grid]") from error


def folder(study: Study) -> Path:
    """Return the folder of the measuring program, which has its config.py."""
    return paths.ROOT.joinpath(*study.program.module.split(".")[:-1])


def changed(study: Study, settings: Sequence[str]) -> Study:
    """Return the study with ``key=value`` settings in its base; EncoreError for an axis or an unknown key."""
    fields = configuration.field_types(folder(study))
    values = dict(configuration.parse_setting(setting, fields) for setting in settings)
    axes = sorted(set(values) & set(study.grid))
    if axes:
        raise EncoreError(f"--set {axes[0]}: the study's grid sets it", hint="define a new study")
    updated = study.model_copy(update={"base": {**study.base, **values}})
    _check(updated)
    return updated
