"""A study as data: what is measured, on which grid, what was published of it, and which questions it answers.

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

from encore import catalogue, configuration, names, paths
from encore.catalogue import Strict
from encore.errors import EncoreError
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
        """Return the name of the point's folder: the values of the axes in their order, of a switch its name."""
        words = [axis if value is True else str(value).replace("/", "_") for axis, value in self.axes.items()]
        return "-".join(words)


class Program(Strict):
    """The measuring program: config.json in, measurement.json out."""

    module: str  # Python module; the config.py next to it checks a point before anything starts
    framework: str  # names the environment, and how ranks are started
    image: str = ""  # benchmark whose image holds the framework; empty: the program runs on the host alone
    ranks: str = "ranks"  # axis with the number of devices
    # Axis and values for which one process drives all devices; else each has its own.
    one_process: dict[str, tuple[Value, ...]] = Field(default_factory=dict)
    seconds: float = 10.0  # a point's duration before any was measured, for the estimate of a dry run


class Epoch(Strict):
    """What an epoch is, so that seconds per step become seconds per epoch."""

    images: int  # of strong scaling, over all devices; of weak scaling, of each device
    batch: str = "batch_size"  # axis with the samples of a step on each device


class Published(Strict):
    """Which printed figures belong to which points."""

    source: str  # key of studies.toml in the results' data
    model: str  # axis that is the figures' model
    # Name of a value of that axis in the figures, where it is another.
    models: dict[str, str] = Field(default_factory=dict)
    # Axis, and the words for its values that a figure's context has.
    context: dict[str, dict[str, str]] = Field(default_factory=dict)


class Question(Strict):
    text: str
    kind: Kind
    x: str = ""  # axis from left to right
    series: tuple[str, ...] = ()  # axes of which each combination of values is a line
    # Points that the answer is made of; an axis that is not named is taken as it is.
    where: dict[str, Value] = Field(default_factory=dict)
    between: tuple[Value, ...] = ()  # two values of ``x`` that are compared with each other
    quantity: str = ""  # of the printed figures next to it; empty: there are none
    why: str = ""  # what the study gives as the reason; printed in the last section


class Part(Strict):
    """What a smaller grid, such as ``--small``, has in place of the whole one."""

    base: dict[str, Value] = Field(default_factory=dict)
    grid: dict[str, tuple[Value, ...]] = Field(default_factory=dict)
    values: dict[str, dict[str, dict[str, Value]]] = Field(default_factory=dict)
    # By the number of a question, from 1: what it has in place of its own.
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
    # Axis, value, and what else the configuration has with it.
    values: dict[str, dict[str, dict[str, Value]]] = Field(default_factory=dict)
    skip: tuple[dict[str, Value], ...] = ()  # combinations that are not measured
    # Grids of points next to the first one: values of its axes, and of any key of the configuration.
    more: tuple[dict[str, tuple[Value, ...]], ...] = ()
    passes: int = Field(2, ge=1)  # how often each point is measured: the first time in the grid's order, then shuffled
    epoch: Epoch
    published: Published | None = None
    links: str = ""  # links of the machine that the study was made on: a file in data/links
    questions: tuple[Question, ...]
    small: Part = Part()
    is_small: bool = False
    request: Request = Request(name="", gpus=None, runtime="host")  # where it is measured: runtime, image and Python

    def points(self) -> list[Point]:
        """Return every point, those with few devices first, so that a study that is cut short has the whole of them."""
        found = []
        for grid in (self.grid, *self.more):
            for combination in itertools.product(*grid.values()):
                axes = dict(zip(grid, combination, strict=True))
                if any(all(axes.get(name) == value for name, value in each.items()) for each in self.skip):
                    continue
                more: dict[str, Value] = {}
                for axis, value in axes.items():
                    more.update(self.values.get(axis, {}).get(str(value), {}))
                found.append(Point(axes, {**self.base, **more, **axes}))
        return sorted(found, key=lambda point: float(point.axes[self.program.ranks]))

    def order(self) -> list[tuple[int, Point]]:
        """Return each pass's number, from 1, and its points in the order in which they are measured.

        What the machine does meanwhile, such as growing warm, is another thing at each point of a shuffled pass, so
        that two passes differ by it.
        """
        every = self.points()
        found = [(1, point) for point in every]
        for number in range(2, self.passes + 1):
            found += [(number, point) for point in random.Random(number).sample(every, len(every))]
        return found


def known() -> list[str]:
    return sorted(path.stem for path in DATA.glob("*.toml"))


def load(name: str, small: bool = False) -> Study:
    """Return the study ``name``, or that of a TOML file; EncoreError for one that cannot be."""
    path = Path(name) if name.endswith(".toml") or "/" in name else DATA / f"{name}.toml"
    if not path.is_file():
        if path.parent != DATA:
            raise EncoreError(f"no file {path}", hint="name the TOML file of the study")
        raise names.unknown("study", name, known())
    study = catalogue.parse(Study, path, name=path.stem)
    if small:
        if not study.small.grid:
            raise EncoreError(f"the study {name} has no small grid", hint="leave out --small, or add [small.grid]")
        study = _reduced(study)
    _check(study)
    return study


def _reduced(study: Study) -> Study:
    # The study on its small grid.
    part = study.small
    values = {axis: dict(by_value) for axis, by_value in study.values.items()}
    for axis, by_value in part.values.items():
        for value, more in by_value.items():
            values.setdefault(axis, {})[value] = {**values.get(axis, {}).get(value, {}), **more}
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
    # Refuse what would only be found out while it is measured.
    axes = {study.program.ranks, study.epoch.batch, *study.program.one_process}
    for question in study.questions:
        axes |= {*question.series, *question.where, *([question.x] if question.x else [])}
    for axis in sorted(axes):
        if axis not in study.grid:
            raise names.unknown(f"axis in the study {study.name}", axis, study.grid)
    for each in study.more:
        absent = sorted(set(study.grid) - set(each))
        if absent:
            raise EncoreError(f"[[more]] of the study {study.name} does not say {', '.join(absent)}")
    fields, config_of = configuration.field_types(folder(study)), configuration.config_class(folder(study))
    points = study.points()
    for name, value in dict.fromkeys(pair for point in points for pair in point.config.items()):
        if name not in fields:
            raise names.unknown(f"key in the study {study.name}", name, fields)
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
    """Return the folder of the measuring program, with its config.py."""
    return paths.ROOT.joinpath(*study.program.module.split(".")[:-1])


def changed(study: Study, settings: Sequence[str]) -> Study:
    """Return the study with other values in its base, each ``key=value``; EncoreError for an axis or an unknown key."""
    if not settings:
        return study
    fields = configuration.field_types(folder(study))
    values = dict(configuration.parse_setting(each, fields) for each in settings)
    axes = sorted(set(values) & set(study.grid))
    if axes:
        raise EncoreError(f"--set {axes[0]}: the study's grid sets it", hint="write a study of your own")
    found = study.model_copy(update={"base": {**study.base, **values}})
    _check(found)
    return found
