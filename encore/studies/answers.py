"""The answers to a study's questions: each a sentence made from the data, tables, and a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from encore.results.figures import Figure, bars, over_gpus
from encore.results.panel import SERIES
from encore.results.tables import Table
from encore.studies.definition import Question, Study, Value
from encore.studies.results import Ours, Result, beside, bounds, chosen, grouped, ratio

_PUBLISHED = ("model", "GPUs", "batch", "way", "printed", "ours", "from", "to", "difference")


@dataclass(frozen=True)
class Answer:
    """What the data says to one question."""

    question: str
    sentence: str
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]
    why: str


def answer(study: Study, question: Question, results: Sequence[Result], number: int) -> Answer:
    """Return the answer to the question with this number."""
    ours = chosen(results, question.where)
    sentence, table, figures, values = _KINDS[question.kind](study, question, ours, f"question-{number}")
    tables = [table]
    rows = beside(study, question.quantity, values)
    if rows:
        compared = [row for row in rows if row[5] is not None]
        beyond = [row for row in compared if str(row[-1]).startswith("beyond")]
        sentence += (
            f" Of {len(rows)} printed figures {len(compared)} are of points that were measured here;"
            f" {len(beyond)} of them are beyond our interval."
            if compared
            else f" None of the {len(rows)} printed figures is of a point that was measured here."
        )
        tables.append(Table(title="The study's printed figures", columns=_PUBLISHED, rows=tuple(rows)))
    if not table.rows:
        sentence = "None of the points that answer this is measured yet."
    return Answer(question.text, sentence, tuple(tables), tuple(figures), question.why)


Parts = tuple[str, Table, Sequence[Figure], list[Ours]]
Row = tuple[Any, ...]
Lines = dict[str, list[tuple[float, float]]]


def _name(values: Sequence[Value], series: Sequence[str]) -> str:
    """Return the name of a line; a number brings the name of its axis along."""
    words = [
        str(value) if isinstance(value, str) else f"{axis.replace('_', ' ')} {value}"
        for value, axis in zip(values, series, strict=True)
    ]
    return ", ".join(words)


def _lines(question: Question, results: Sequence[Result]) -> dict[tuple[Value, ...], list[Result]]:
    """Return the results of each line by x, of lines with more than one."""
    lines = {
        key: sorted(line, key=lambda r: _x(r, question)) for key, line in grouped(results, question.series).items()
    }
    return {key: line for key, line in lines.items() if len(line) > 1}


def _x(result: Result, question: Question) -> float:
    return float(result.axes[question.x])


def _plots(
    key: str, question: Question, title: str, lines: Lines, table: Table, label: str, linear: bool = False
) -> list[Figure]:
    """Return lines over an axis; ``linear``: with what is proportional to it.

    More lines than there are colours and markers are parted into plots that have all but the first word in common.
    """
    drawn = {name: points for name, points in lines.items() if len(points) > 1}
    if len(drawn) > SERIES:
        common = list(dict.fromkeys(name.partition(", ")[2] for name in drawn))
        parted = [{n: points for n, points in drawn.items() if n.partition(", ")[2] == rest} for rest in common]
    else:
        common, parted = [""], [drawn] if drawn else []
    found = []
    axis = _words(question.x)
    for number, (rest, part) in enumerate(zip(common, parted, strict=False), 1):
        shown = list(part.items())[:SERIES]
        ends = [min(x for _, points in shown for x, _ in points), max(x for _, points in shown for x, _ in points)]
        straight = [(x, x / ends[0]) for x in ends] if linear else []
        named = f"{title}: {rest}" if rest else title
        name = key if len(parted) == 1 else f"{key}-{number}"
        found.append(over_gpus(name, named, shown, table, label, linear=straight, axis=axis))
    return found


def _speed_up(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    rows: list[Row] = []
    lines: Lines = {}
    values, ends, unsure = [], [], 0
    for series, line in _lines(question, results).items():
        base = line[0].epoch()
        for each in line:
            epoch = each.epoch()
            value, low, high = ratio(base, epoch) if each is not line[0] else (1.0, 1.0, 1.0)
            rows.append((*series, _whole(_x(each, question)), epoch.estimate, *bounds(epoch), value, low, high))
            lines.setdefault(_name(series, question.series), []).append((_x(each, question), value))
            values.append(Ours(each.axes, value, low, high))
        ends.append((value, _name(series, question.series), _x(line[-1], question) / _x(line[0], question)))
        unsure += low <= 1.0 <= high
    columns = (*question.series, question.x, "s per epoch", "from", "to", "speed-up", "least", "most")
    table = Table(title=f"Seconds per epoch over {_words(question.x)}", columns=columns, rows=tuple(rows))
    sentence = ""
    if ends:
        slowest, fastest = min(ends), max(ends)
        sentence = (
            f"{fastest[2]:g} times the {_words(question.x)} makes an epoch {slowest[0]:.2f} times"
            f" ({slowest[1]}) to {fastest[0]:.2f} times ({fastest[1]}) as fast; {fastest[2]:g} would be linear."
            f" At {unsure} of {len(ends)} the interval includes 1: too noisy to say whether it is faster at all."
        )
    title = f"Speed-up over {_words(question.x)}"
    return sentence, table, _plots(key, question, title, lines, table, "speed-up", linear=True), values


def _against(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    one, other = question.between
    rows: list[Row] = []
    values, sure = [], 0
    for series, pair in grouped(results, question.series).items():
        by_way = {each.axes[question.x]: each for each in pair}
        if one not in by_way or other not in by_way:
            continue
        found = ratio(by_way[other].step, by_way[one].step)
        percent, low, high = (100 * (value - 1) for value in found)
        sure += low > 0 or high < 0
        rows.append((*series, by_way[one].step.estimate, by_way[other].step.estimate, percent, low, high, found[0]))
        values.append(Ours(by_way[other].axes, percent, low, high))
    columns = (*question.series, f"{one}, s a step", f"{other}, s a step", "overhead, %", "from", "to", "ratio")
    title = f"What {other} takes longer than {one}"
    table = Table(title=title, columns=columns, rows=tuple(rows))
    sentence = ""
    if rows:
        least, most = min(rows, key=lambda row: row[-1]), max(rows, key=lambda row: row[-1])
        count = len(question.series)
        sentence = (
            f"{other} takes from {least[-4]:+.1f} % ({_name(least[:count], question.series)}) to {most[-4]:+.1f} %"
            f" ({_name(most[:count], question.series)}) longer than {one};"
            f" at {sure} of {len(rows)} points the interval leaves out zero."
        )
    label = tuple(range(len(question.series)))
    figure = [bars(key, table, label=label, value=len(columns) - 1, axis=f"step by {other} over that by {one}")]
    return sentence, table, [each for each in figure if each], values


def _size(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    rows: list[Row] = []
    lines: Lines = {}
    for series, line in grouped(results, question.series).items():
        ordered = sorted(line, key=lambda each: _x(each, question))
        network = ordered[0].found["network"]
        last, name = ordered[-1], _name(series, question.series)
        speed_up = ordered[0].epoch().estimate / last.epoch().estimate
        layers = network["convolutions"] + network["fully_connected"]
        rows.append((
            *series, layers, network["weights"], network["weights"] / layers, last.gradient_bytes / 1e6,
            ordered[0].epoch().estimate, last.ranks, last.epoch().estimate, speed_up,
        ))  # fmt: skip
        lines[name] = [(_x(each, question), each.epoch().estimate) for each in ordered]
    rows.sort(key=lambda row: int(row[len(question.series) + 1]))
    least = "s per epoch on the fewest"
    columns = (
        *question.series, "layers", "weights", "weights a layer", "gradients, MB", least, "devices",
        "s per epoch on them", "speed-up",
    )  # fmt: skip
    table = Table(title="Size of a network and its time", columns=columns, rows=tuple(rows))
    sentence = ""
    if rows:
        fast, slow = min(rows, key=lambda row: row[-4]), max(rows, key=lambda row: row[-4])
        sentence = (
            f"The epoch of {slow[0]} ({slow[2]:,} weights, {slow[1]} layers) takes {slow[-4] / fast[-4]:.1f} times as"
            f" long as that of {fast[0]} ({fast[2]:,} weights, {fast[1]} layers):"
            f" {'weights alone do not order the times' if not _rises(rows) else 'more weights, more time'}."
        )
    return sentence, table, _plots(key, question, "Seconds per epoch", lines, table, "s per epoch"), []


def _rises(rows: Sequence[Row]) -> bool:
    times = [row[-4] for row in rows]
    return times == sorted(times)


def _stages(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    rows: list[Row] = []
    lines: Lines = {}
    for series, line in grouped(results, question.series).items():
        for each in sorted(line, key=lambda one: _x(one, question)):
            both, wu = each.stage("step"), each.stage("wu")
            parts = each.stage("fp_bp") + wu
            rows.append((
                *series, _whole(_x(each, question)), each.stage("fp_bp") * each.steps(), wu * each.steps(),
                100 * wu / parts, 100 * parts / both, 100 * (1 - each.step.estimate / both),
                each.stage("metric") * each.steps(),
            ))  # fmt: skip
            lines.setdefault(_name(series, question.series), []).append((_x(each, question), 100 * wu / parts))
    columns = (
        *question.series, question.x, "FP + BP, s per epoch", "WU, s per epoch", "WU, %", "parts of the step, %",
        "saved without waits, %", "metric, s per epoch",
    )  # fmt: skip
    note = (
        "Stages are steps with a wait after each; what plain steps save against them is the overlap of WU with BP"
        " (below zero: the machine's drift is larger)."
    )
    table = Table(title="FP + BP and WU", columns=columns, rows=tuple(rows), note=note)
    sentence = ""
    if rows:
        low, high = min(rows, key=lambda row: row[-4]), max(rows, key=lambda row: row[-4])
        count = len(question.series)
        sentence = (
            f"WU is from {low[-4]:.0f} % of a step ({_name(low[:count], question.series)} on {low[count]}) to"
            f" {high[-4]:.0f} % ({_name(high[:count], question.series)} on {high[count]}); both parts add up to"
            f" {min(row[-3] for row in rows):.1f} to {max(row[-3] for row in rows):.1f} % of the step that they are of."
        )
    return sentence, table, _plots(key, question, "Share of WU", lines, table, "WU, % of a step"), []


def _memory(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    rows: list[Row] = []
    lines: Lines = {}
    values = []
    most = max((each.ranks for each in results), default=0)
    for series, line in grouped([each for each in results if each.ranks == most], question.series).items():
        ordered = sorted(line, key=lambda each: _x(each, question))
        smallest = ordered[0].memory("training")[0]
        for each in ordered:
            first, others = each.memory("training")
            more = 100 * (first / others - 1) if others else None
            growth = 100 * (first / smallest - 1) if each is not ordered[0] else None
            before = each.memory("before_training")[0]
            rows.append((*series, _whole(_x(each, question)), before, first, others, more, growth))
            lines.setdefault(_name(series, question.series), []).append((_x(each, question), first))
            values.append(Ours(each.axes, first, first, first))
    columns = (
        *question.series, question.x, "before, GB", "training, first, GB", "training, others, GB",
        "first over others, %", "growth, %",
    )  # fmt: skip
    table = Table(title=f"Memory on {most} devices", columns=columns, rows=tuple(rows), note=_MEMORY_NOTE)
    sentence = ""
    grown = [row for row in rows if row[-1] is not None]
    if grown:
        low, high = min(grown, key=lambda row: row[-1]), max(grown, key=lambda row: row[-1])
        sentence = (
            f"From the smallest batch to {high[len(question.series)]} the memory in training grows by {low[-1]:.1f} %"
            f" ({low[0]}) to {high[-1]:.1f} % ({high[0]}); before training there is"
            f" {min(row[-5] for row in rows):.2f} to {max(row[-5] for row in rows):.2f} GB in use."
        )
    # A single reading has no interval: printed figures of the first device are shown next to the table.
    return sentence, table, _plots(key, question, "Memory in training", lines, table, "GB"), values


_MEMORY_NOTE = (
    "On GPUs what the device has in use; on CPUs resident memory of the process, in which a key-value store has all"
    " devices and Horovod one."
)


def _weak(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    rows: list[Row] = []
    lines: Lines = {}
    gains = []
    for series, line in _lines(question, results).items():
        for each in line:
            strong, weak = each.epoch().estimate, each.epoch(weak=True).estimate
            # Per image: the weak epoch has as many times the images as there are devices.
            gain = 100 * (1 - weak / each.ranks / strong)
            gains.append((gain, _name(series, question.series), each.ranks))
            rows.append((*series, each.ranks, strong, weak, weak / line[0].epoch(weak=True).estimate, gain))
            name = _name(series, question.series)
            lines.setdefault(name, []).append((_x(each, question), weak / line[0].epoch(weak=True).estimate))
    columns = (
        *question.series,
        "devices",
        "strong, s per epoch",
        "weak, s per epoch",
        "weak over one",
        "gain per image, %",
    )
    note = "Both from the same steps: a step is the same in both, and an epoch has the cost of its first step once."
    table = Table(title="Weak and strong scaling", columns=columns, rows=tuple(rows), note=note)
    sentence = ""
    if gains:
        best = max(gains)
        sentence = (
            f"For the same images weak scaling takes at most {best[0]:.1f} % less time than strong scaling"
            f" ({best[1]}, {best[2]} devices)."
        )
    return sentence, table, _plots(key, question, "Weak scaling", lines, table, "epoch over that of one device"), []


def _words(axis: str) -> str:
    return "devices" if axis == "ranks" else axis.replace("_", " ")


def _whole(number: float) -> float | int:
    return int(number) if number == int(number) else number


_KINDS: dict[str, Callable[[Study, Question, Sequence[Result], str], Parts]] = {
    "speed-up": _speed_up,
    "against": _against,
    "size": _size,
    "stages": _stages,
    "memory": _memory,
    "weak": _weak,
}
