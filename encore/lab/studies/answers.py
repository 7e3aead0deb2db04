"""The answers to a study's questions: each a sentence made from the data, tables, and a plot."""

from collections.abc import Callable, Sequence
from typing import Any

from encore.lab.studies.definition import Question, Study, Value
from encore.lab.studies.results import (
    Ours,
    Printed,
    Result,
    Standing,
    bounds,
    chosen,
    in_percent,
    in_series,
    next_to_printed,
    ratio,
)
from encore.results.report.figures import Figure, bars, over_gpus
from encore.results.report.panel import SERIES
from encore.results.report.report import Chapter
from encore.results.table import Table, whole

_PUBLISHED = ("model", "GPUs", "batch", "way", "printed", "our point", "ours", "from", "to", "difference")
_OWN = 5  # columns of a printed figure by itself

Parts = tuple[str, Table, Sequence[Figure], list[Ours]]
Row = tuple[Any, ...]
# By name: x, y, and from where to where y is by its interval.
Lines = dict[str, list[tuple[float, float, float | None, float | None]]]


def answer(study: Study, question: Question, results: Sequence[Result], number: int, note: str = "") -> Chapter:
    points = chosen(results, question.where)
    sentence, table, figures, values = _KINDS[question.kind](study, question, points, f"question-{number}")
    tables: list[Table] = [table]
    unmeasured: list[Table] = []
    for quantity in dict.fromkeys(each.quantity or question.quantity for each in values or [_NOTHING]):
        ours = [each for each in values if (each.quantity or question.quantity) == quantity]
        rows = next_to_printed(study, quantity, ours)
        if rows:
            sentence += _compared(quantity, rows)
            compared, absent = _printed(quantity, rows)
            tables, unmeasured = [*tables, *compared], [*unmeasured, *absent]
    if not table.rows:
        sentence = "None of the points that answer this is measured yet."
    if question.kind == "memory":
        compared, absent = largest_batches(study, results)
        tables, unmeasured = [*tables, *compared], [*unmeasured, *absent]
    return Chapter(
        key=f"question_{number}",
        title=f"{number}. {question.text}",
        sentence=sentence,
        note=note,
        figures=tuple(figures),
        tables=tuple(tables),
        folded=tuple(unmeasured),
    )


def _printed(quantity: str, rows: Sequence[Printed]) -> tuple[list[Table], list[Table]]:
    # The table of printed figures next to ours, and that of those which have none; each if it has a row.
    title = f"The study's printed figures: {quantity.replace('_', ' ')}"
    absent = [each.row[:_OWN] for each in rows if each.standing is Standing.NOT_MEASURED]
    compared = [each.row for each in rows if each.standing is not Standing.NOT_MEASURED]
    without = Table(title=f"{title}, not measured here", columns=_PUBLISHED[:_OWN], rows=tuple(absent))
    return (
        [Table(title=title, columns=_PUBLISHED, rows=tuple(compared))] if compared else [],
        [without] if absent else [],
    )


_NOTHING = Ours({}, 0.0, None, None)
_EPOCH = "s per epoch, extrapolated"


def _epoch_note(study: Study) -> str:
    # What an epoch of the tables is: none is run as a whole.
    return (
        f"Extrapolated: an epoch is {study.epoch.images:,} images, of which some steps were run. Its seconds are its"
        " steps times the seconds of a step, and once what the first step takes longer."
    )


def _compared(quantity: str, rows: Sequence[Printed]) -> str:
    # How many of the printed figures are compared, and what comes of it.
    words = quantity.replace("_", " ")
    compared = [each.standing for each in rows if each.standing is not Standing.NOT_MEASURED]
    if not compared:
        return f" None of the {len(rows)} printed figures ({words}) is of a point that was measured here."
    found = f" Of {len(rows)} printed figures ({words}) {len(compared)} are of points that were measured here"
    if all(each is Standing.NO_INTERVAL for each in compared):
        return f"{found}, once each: no interval says how far off they may be."
    return f"{found}; {compared.count(Standing.BEYOND)} of them are beyond our interval."


def _name(values: Sequence[Value], series: Sequence[str]) -> str:
    # The name of a line; a number brings the name of its axis along.
    words = [
        str(value) if isinstance(value, str) else f"{axis.replace('_', ' ')} {value}"
        for value, axis in zip(values, series, strict=True)
    ]
    return ", ".join(words)


def _lines(question: Question, results: Sequence[Result]) -> dict[tuple[Value, ...], list[Result]]:
    # The results of each line by x, of lines with more than one.
    lines = {
        key: sorted(line, key=lambda r: _x(r, question)) for key, line in in_series(results, question.series).items()
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
        counts = [point[0] for _, points in shown for point in points]
        ends = [min(counts), max(counts)]
        straight = [(x, x / ends[0]) for x in ends] if linear else []
        named = f"{title}: {rest}" if rest else title
        name = key if len(parted) == 1 else f"{key}-{number}"
        plain = [(one, [point[:2] for point in points]) for one, points in shown]
        spans = {
            one: [(x, low, high) for x, _, low, high in points if low is not None and high is not None]
            for one, points in shown
        }
        found.append(over_gpus(name, named, plain, table, label, linear=straight, axis=axis, spans=spans))
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
            rows.append((*series, whole(_x(each, question)), epoch.estimate, *bounds(epoch), value, low, high))
            lines.setdefault(_name(series, question.series), []).append((_x(each, question), value, low, high))
            values.append(Ours(each.axes, value, low, high))
        ends.append((value, _name(series, question.series), _x(line[-1], question) / _x(line[0], question)))
        unsure += low is None or high is None or low <= 1.0 <= high
    columns = (*question.series, question.x, _EPOCH, "from", "to", "speed-up", "least", "most")
    title = f"Seconds per epoch over {_words(question.x)}"
    table = Table(title=title, columns=columns, rows=tuple(rows), note=_epoch_note(study))
    sentence = ""
    if ends:
        slowest, fastest = min(ends), max(ends)
        sentence = (
            f"{fastest[2]:g} times the {_words(question.x)} makes an epoch {slowest[0]:.2f} times"
            f" ({slowest[1]}) to {fastest[0]:.2f} times ({fastest[1]}) as fast; {fastest[2]:g} would be linear."
            + (
                f" At {unsure} of {len(ends)} the interval includes 1: too noisy to say whether it is faster."
                * (unsure > 0)
            )
        )
    title = f"Speed-up over {_words(question.x)}"
    return sentence, table, _plots(key, question, title, lines, table, "speed-up", linear=True), values


def _against(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    one, other = question.between
    rows: list[Row] = []
    values, sure = [], 0
    for series, pair in in_series(results, question.series).items():
        by_way = {each.axes[question.x]: each for each in pair}
        if one not in by_way or other not in by_way:
            continue
        found = ratio(by_way[other].step, by_way[one].step)
        percent, low, high = 100 * (found[0] - 1), in_percent(found[1]), in_percent(found[2])
        sure += low is not None and high is not None and (low > 0 or high < 0)
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
    for series, line in in_series(results, question.series).items():
        ordered = sorted(line, key=lambda each: _x(each, question))
        network = ordered[0].found["network"]
        last, name = ordered[-1], _name(series, question.series)
        speed_up = ordered[0].epoch().estimate / last.epoch().estimate
        layers = network["convolutions"] + network["fully_connected"]
        rows.append((
            *series, layers, network["weights"], network["weights"] / layers, last.gradient_bytes / 1e6,
            ordered[0].epoch().estimate, last.ranks, last.epoch().estimate, speed_up,
        ))  # fmt: skip
        lines[name] = [(_x(each, question), each.epoch().estimate, *bounds(each.epoch())) for each in ordered]
    rows.sort(key=lambda row: int(row[len(question.series) + 1]))
    least = f"{_EPOCH}, on the fewest"
    columns = (
        *question.series, "layers", "weights", "weights a layer", "gradients, MB", least, "devices",
        f"{_EPOCH}, on them", "speed-up",
    )  # fmt: skip
    title = "Size of a network and its time"
    table = Table(title=title, columns=columns, rows=tuple(rows), note=_epoch_note(study))
    sentence = ""
    if rows:
        fast, slow = min(rows, key=lambda row: row[-4]), max(rows, key=lambda row: row[-4])
        sentence = (
            f"The epoch of {slow[0]} ({slow[2]:,} weights, {slow[1]} layers) takes {slow[-4] / fast[-4]:.1f} times as"
            f" long as that of {fast[0]} ({fast[2]:,} weights, {fast[1]} layers):"
            f" {'weights alone do not order the times' if not _rises(rows) else 'more weights, more time'}."
        )
    return sentence, table, _plots(key, question, "Seconds per epoch", lines, table, _EPOCH), []


def _rises(rows: Sequence[Row]) -> bool:
    times = [row[-4] for row in rows]
    return times == sorted(times)


def _stages(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    rows: list[Row] = []
    lines: Lines = {}
    for series, line in in_series(results, question.series).items():
        for each in sorted(line, key=lambda one: _x(one, question)):
            both, wu = each.stage("step"), each.stage("wu")
            parts = each.stage("fp_bp") + wu
            operators = [_times(each.operators(name), each.steps()) for name in ("fp", "bp", "wu")]
            rows.append((
                *series, whole(_x(each, question)), each.stage("fp_bp") * each.steps(), wu * each.steps(),
                100 * wu / parts, 100 * parts / both, 100 * each.step.estimate / parts,
                parts * each.steps() - each.step.estimate * each.steps(), each.stage("metric") * each.steps(),
                *operators,
            ))  # fmt: skip
            share = 100 * wu / parts
            lines.setdefault(_name(series, question.series), []).append((_x(each, question), share, None, None))
    columns = (
        *question.series, question.x, "FP + BP, s per epoch", "WU, s per epoch", "WU, %",
        "parts over the step with waits, %", "step without waits over the parts, %", "saved by overlap, s per epoch",
        "metric, s per epoch", "FP operators, s per epoch", "BP operators, s per epoch", "WU operators, s per epoch",
    )  # fmt: skip
    table = Table(title="FP + BP and WU", columns=columns, rows=tuple(rows), note=_STAGES_NOTE)
    sentence = ""
    if rows:
        first = len(question.series)
        low, high = min(rows, key=lambda row: row[first + 3]), max(rows, key=lambda row: row[first + 3])
        waited, plain = ([row[first + place] for row in rows] for place in (4, 5))
        sentence = (
            f"WU is from {low[first + 3]:.0f} % of a step ({_name(low[:first], question.series)} on {low[first]}) to"
            f" {high[first + 3]:.0f} % ({_name(high[:first], question.series)} on {high[first]}). FP + BP and WU add up"
            f" to {min(waited):.1f} to {max(waited):.1f} % of the step with a wait after each; a step without waits"
            f" takes {min(plain):.1f} to {max(plain):.1f} % of their sum, and what is below 100 % is saved by the"
            " overlap of WU with BP."
        )
    return sentence, table, _plots(key, question, "Share of WU", lines, table, "WU, % of a step"), []


_STAGES_NOTE = (
    "Seconds per epoch are extrapolated from those of a step. FP + BP and WU are of steps with a wait after each; steps"
    " without waits are measured in blocks of their own. Above 100 % the machine's drift between the two is larger than"
    " the overlap. Operators are those of MXNet's profiler: sums, in which two that run at once count twice, and what"
    " runs between operators does not count."
)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _memory(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    rows: list[Row] = []
    lines: Lines = {}
    values = []
    most = max((each.ranks for each in results), default=0)
    for series, line in in_series([each for each in results if each.ranks == most], question.series).items():
        ordered = sorted(line, key=lambda each: _x(each, question))
        smallest = ordered[0].memory("training")[0]
        for each in ordered:
            first, others = each.memory("training")
            more = 100 * (first / others - 1) if others else None
            growth = 100 * (first / smallest - 1) if each is not ordered[0] else None
            before = each.memory("before_training")[0]
            rows.append((*series, whole(_x(each, question)), before, first, others, more, growth))
            lines.setdefault(_name(series, question.series), []).append((_x(each, question), first, None, None))
            values += _memory_values(each, more, growth)
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
    return sentence, table, _plots(key, question, "Memory in training", lines, table, "GB"), values


_MEMORY_NOTE = (
    "One reading, which has no interval. On GPUs what CUDA has in use on the device (cudaMemGetInfo), other programs"
    " included; on CPUs resident memory of the process, in which a key-value store has all devices and Horovod one."
)


def _memory_values(result: Result, more: float | None, growth: float | None) -> list[Ours]:
    # What the printed figures of GPU 0 and of the others are compared with: single readings.
    before, training = result.memory("before_training"), result.memory("training")
    found = {
        ("memory_before_training", "others"): before[1],
        ("memory_training", "first"): training[0],
        ("memory_training", "others"): training[1],
        ("memory_gpu0_more_percent", ""): more,
        ("memory_growth_percent", ""): growth,
    }
    return [
        Ours({**result.axes, "reading": reading}, value, None, None, quantity)
        for (quantity, reading), value in found.items()
        if value is not None
    ]


def largest_batches(study: Study, results: Sequence[Result]) -> tuple[list[Table], list[Table]]:
    """Return the tables of searches for the largest batch that fits, if there were any, and of the printed ones."""
    rows: list[Row] = []
    values = []
    for each in results:
        if "largest_batch" in each.found:
            found = each.found["largest_batch"]
            rows.append(
                (_name(list(each.axes.values()), list(each.axes)), each.ranks, found["fits"], found["does_not"])
            )
            axes = {name: value for name, value in each.axes.items() if name != study.epoch.batch}
            values.append(Ours(axes, found["fits"], None, None))
    if not rows:
        return [], []
    note = "Doubled until a step no longer fits: the largest is from the first figure to below the second."
    columns = ("point", "devices", "fits", "does not fit")
    found = Table(title="Largest batch of a device", columns=columns, rows=tuple(rows), note=note)
    compared, absent = _printed("largest_batch", next_to_printed(study, "largest_batch", values))
    return [found, *compared], absent


def _weak(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    rows: list[Row] = []
    lines: Lines = {}
    gains = []
    for series, line in _lines(question, results).items():
        name, base = _name(series, question.series), line[0].epoch(weak=True)
        for each in line:
            strong, weak = each.epoch(), each.epoch(weak=True)
            # Per image: the weak epoch has as many times the images as there are devices.
            gain = 100 * (1 - weak.estimate / each.ranks / strong.estimate)
            if each is not line[0]:
                gains.append((gain, name, each.ranks))
            over, low, high = ratio(weak, base) if each is not line[0] else (1.0, 1.0, 1.0)
            rows.append((*series, each.ranks, strong.estimate, weak.estimate, over, low, high, gain))
            lines.setdefault(name, []).append((_x(each, question), over, low, high))
    columns = (
        *question.series, "devices", "strong epoch, s", "weak epoch, s", "weak over one", "least", "most",
        "gain per image, %",
    )  # fmt: skip
    note = f"Both from the same steps: a step is the same in both. {_epoch_note(study)}"
    table = Table(title="Weak and strong scaling, epochs extrapolated", columns=columns, rows=tuple(rows), note=note)
    sentence = ""
    if gains:
        best, name, devices = max(gains)
        sentence = (
            "For the same images weak scaling takes as long as strong scaling, to a tenth of a percent: the first step,"
            " which an epoch has once, is all that can differ, and next to the others it is nothing."
            if best < _SEEN
            else f"For the same images weak scaling takes up to {best:.1f} % less time than strong scaling ({name},"
            f" {devices} devices): its longer epoch has the cost of the first step once as well."
        )
    return sentence, table, _plots(key, question, "Weak scaling", lines, table, "epoch over that of one device"), []


_SEEN = 0.1  # percent; below it a gain is printed as none


def _words(axis: str) -> str:
    return "devices" if axis == "ranks" else axis.replace("_", " ")


_KINDS: dict[str, Callable[[Study, Question, Sequence[Result], str], Parts]] = {
    "speed-up": _speed_up,
    "against": _against,
    "size": _size,
    "stages": _stages,
    "memory": _memory,
    "weak": _weak,
}
