"""The report of a study: its questions, answered by a sentence made from the data, tables and a plot; and why.

from encore.lab.studies.report import build
from encore.results.report.report import write_files
write_files(build(open_folder(path, Study)), path / "report")
"""

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

from encore.errors import EncoreError
from encore.lab.scaling.printed_tables import checks
from encore.lab.studies import topology
from encore.lab.studies.definition import Question, Study, Value
from encore.lab.studies.folder import Folder
from encore.lab.studies.results import (
    Interval,
    Ours,
    Result,
    bounds,
    in_percent,
    in_series,
    printed,
    ratio,
    read,
)
from encore.results.format import percent
from encore.results.report.figures import Figure, bars, over_gpus
from encore.results.report.report import Chapter, Report
from encore.results.report.svg_plot import SERIES
from encore.results.statistics import LEVEL
from encore.results.table import Cell, Table, grouped, shown, whole

_PUBLISHED = ("model", "GPUs", "batch", "way", "printed", "our point", "ours", "from", "to", "difference")
_OWN = 5  # columns of a printed figure by itself
_EPOCH = "s per epoch, extrapolated"
_ITSELF = (1.0, 1.0, 1.0)  # what is compared with itself
_SEEN = 0.1  # percent; below it a gain is printed as none

Series = tuple[Value, ...]
Point = tuple[Series, float, float, float | None, float | None]  # series, x, y, and from where to where y is
Parts = tuple[str, Table, list[Figure], list[Ours]]


def build(folder: Folder[Study]) -> Report:
    study, results = folder.study, read(folder)
    if not results:
        raise EncoreError(f"no point of {folder.path} is measured", hint="encore study run --resume FOLDER")
    mark = _mark(study)
    note = "Measured on CPUs or on a small grid." if mark else ""
    passes = Chapter(
        key="passes",
        title="How far the passes are apart",
        sentence=f"Intervals ({percent(LEVEL)}) are {_intervals(results)}.",
        folded=(_passes(study, results),),
    )
    reasons = tuple((each.text, each.why) for each in study.questions if each.why)
    why = Chapter(key="why", title="Why", tables=tuple(_why(study, results)), terms=reasons)
    answers = [_answer(study, each, results, number, note) for number, each in enumerate(study.questions, 1)]
    return Report(
        title=study.title,
        about=f"{study.about} Points: {folder.summary()}. {_machine(folder.machine())}.",
        notices=tuple(filter(None, (mark, _busy(results)))),
        chapters=(*answers, passes, why, *_inconsistent(study)),
    )


def _answer(study: Study, question: Question, results: Sequence[Result], number: int, note: str) -> Chapter:
    # Points outside of the grid are those alone that the question names.
    points = [
        each
        for each in results
        if each.is_timed
        and all(each.axes.get(name) == value for name, value in question.where.items())
        and set(each.axes) <= {*study.grid, *question.where}
    ]
    sentence, table, figures, values = _KINDS[question.kind](study, question, points, f"question-{number}")
    tables, folded = [table], list[Table]()
    by_quantity = grouped(values, lambda each: each.quantity or question.quantity) or {question.quantity: []}
    for quantity, ours in by_quantity.items():
        said, compared, absent = _compared(study, quantity, ours)
        sentence, tables, folded = sentence + said, tables + compared, folded + absent
    if not table.rows:
        sentence = "None of the points that answer this is measured yet."
    if question.kind == "memory":
        compared, absent = _largest_batches(study, results)
        tables, folded = tables + compared, folded + absent
    return Chapter(
        key=f"question_{number}",
        title=f"{number}. {question.text}",
        sentence=sentence,
        note=note,
        figures=tuple(figures),
        tables=tuple(tables),
        folded=tuple(folded),
    )


def _compared(study: Study, quantity: str, ours: Sequence[Ours]) -> tuple[str, list[Table], list[Table]]:
    # How printed figures compare with ours, in a sentence; the table of those, and that of those without ours.
    found = printed(study, quantity, ours)
    if not found:
        return "", [], []
    words, measured = quantity.replace("_", " "), [each for each in found if each.ours]
    title = f"The study's printed figures: {words}"
    absent = tuple(each.row[:_OWN] for each in found if not each.ours)
    without = [Table(title=f"{title}, not measured here", columns=_PUBLISHED[:_OWN], rows=absent)] if absent else []
    if not measured:
        return f" None of the {len(found)} printed figures ({words}) is of a point that was measured here.", [], without
    tables = [Table(title=title, columns=_PUBLISHED, rows=tuple(each.row for each in measured))]
    said = f" Of {len(found)} printed figures ({words}) {len(measured)} are of points that were measured here"
    if not any(each.has_interval for each in measured):
        return f"{said}, once each: no interval says how far off they may be.", tables, without
    beyond = sum(each.is_beyond for each in measured)
    return f"{said}; {beyond} of them are beyond our interval.", tables, without


# -- questions ----------------------------------------------------------------------------------------------------


def _lines(question: Question, results: Sequence[Result], least: int = 1) -> Iterator[tuple[Series, list[Result]]]:
    # Yield each line by its values of the question's series, its results by x; with ``least`` of them at least.
    for series, line in in_series(results, question.series).items():
        if len(line) >= least:
            yield series, sorted(line, key=lambda each: _x(each, question))


def _x(result: Result, question: Question) -> float:
    return float(result.axes[question.x])


def _name(values: Sequence[Value], series: Sequence[str]) -> str:
    # A number brings the name of its axis along.
    return ", ".join(
        str(value) if isinstance(value, str) else f"{axis.replace('_', ' ')} {value}"
        for value, axis in zip(values, series, strict=True)
    )


def _words(axis: str) -> str:
    return "devices" if axis == "ranks" else axis.replace("_", " ")


def _epoch_note(study: Study) -> str:
    # None is run as a whole.
    return (
        f"Extrapolated: an epoch is {study.epoch.images:,} images, of which some steps were run. Its seconds are its"
        " steps times the seconds of a step, and once what the first step takes longer."
    )


def _plots(
    key: str, question: Question, title: str, points: Sequence[Point], table: Table, label: str, linear: bool = False
) -> list[Figure]:
    """Return lines over an axis; ``linear``: with what is proportional to it.

    More lines than there are colours and markers are parted into plots that have all but the first word in common.
    """
    lines = grouped(points, lambda point: _name(point[0], question.series))
    drawn = {name: line for name, line in lines.items() if len(line) > 1}
    parted = {"": list(drawn)} if len(drawn) <= SERIES else grouped(drawn, lambda name: name.partition(", ")[2])
    found = []
    for number, (rest, names) in enumerate(parted.items(), 1):
        shown = {name: drawn[name] for name in names[:SERIES]}
        counts = [x for line in shown.values() for _, x, *_ in line]
        if not counts:
            continue
        spans = {
            name: [(x, low, high) for _, x, _, low, high in line if low is not None and high is not None]
            for name, line in shown.items()
        }
        found.append(
            over_gpus(
                key if len(parted) == 1 else f"{key}-{number}",
                f"{title}: {rest}" if rest else title,
                [(name, [(x, y) for _, x, y, *_ in line]) for name, line in shown.items()],
                table,
                label,
                linear=[(x, x / min(counts)) for x in (min(counts), max(counts))] if linear else [],
                axis=_words(question.x),
                spans=spans,
            )
        )
    return found


def _speed_up(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    lines, over = list(_lines(question, results, 2)), _words(question.x)
    found: list[tuple[Series, Result, Interval]] = [
        (series, each, ratio(line[0].epoch(), each.epoch()) if each is not line[0] else _ITSELF)
        for series, line in lines
        for each in line
    ]
    table = Table(
        title=f"Seconds per epoch over {over}",
        columns=(*question.series, question.x, _EPOCH, "from", "to", "speed-up", "least", "most"),
        rows=tuple(
            (*series, whole(_x(each, question)), each.epoch().estimate, *bounds(each.epoch()), *faster)
            for series, each, faster in found
        ),
        note=_epoch_note(study),
    )
    sentence = ""
    if lines:
        ends = [
            (
                ratio(line[0].epoch(), line[-1].epoch()),
                _name(series, question.series),
                _x(line[-1], question) / _x(line[0], question),
            )
            for series, line in lines
        ]
        by_speed = sorted(ends, key=lambda end: (end[0][0], *end[1:]))
        (slow, slowest, _), (fast, fastest, growth) = by_speed[0], by_speed[-1]
        unsure = sum(low is None or high is None or low <= 1.0 <= high for (_, low, high), _, _ in ends)
        sentence = (
            f"{growth:g} times the {over} makes an epoch {slow[0]:.2f} times"
            f" ({slowest}) to {fast[0]:.2f} times ({fastest}) as fast; {growth:g} would be linear."
        )
        if unsure:
            sentence += f" At {unsure} of {len(ends)} the interval includes 1: too noisy to say whether it is faster."
    points = [(series, _x(each, question), *faster) for series, each, faster in found]
    figures = _plots(key, question, f"Speed-up over {over}", points, table, "speed-up", linear=True)
    return sentence, table, figures, [Ours(each.axes, *faster) for _, each, faster in found]


def _against(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    (one, other), count = question.between, len(question.series)
    rows: list[tuple[Any, ...]] = []
    values, sure = [], 0
    for series, pair in in_series(results, question.series).items():
        by_way = {each.axes[question.x]: each for each in pair}
        if one in by_way and other in by_way:
            slow, fast = by_way[other], by_way[one]
            found = ratio(slow.step, fast.step)
            more, low, high = (in_percent(value) for value in found)
            sure += low is not None and high is not None and (low > 0 or high < 0)
            rows.append((*series, fast.step.estimate, slow.step.estimate, more, low, high, found[0]))
            values.append(Ours(slow.axes, more or 0.0, low, high))
    columns = (*question.series, f"{one}, s a step", f"{other}, s a step", "overhead, %", "from", "to", "ratio")
    table = Table(title=f"What {other} takes longer than {one}", columns=columns, rows=tuple(rows))
    sentence = ""
    if rows:
        least, most = min(rows, key=lambda row: row[-1]), max(rows, key=lambda row: row[-1])
        sentence = (
            f"{other} takes from {least[-4]:+.1f} % ({_name(least[:count], question.series)}) to {most[-4]:+.1f} %"
            f" ({_name(most[:count], question.series)}) longer than {one};"
            f" at {sure} of {len(rows)} points the interval leaves out zero."
        )
    figure = bars(key, table, tuple(range(count)), len(columns) - 1, f"step by {other} over that by {one}")
    return sentence, table, [figure] if figure else [], values


def _size(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    rows: list[tuple[Any, ...]] = []
    lines, first = list(_lines(question, results)), len(question.series)
    for series, line in lines:
        network, last, fewest = line[0].found["network"], line[-1], line[0].epoch().estimate
        layers = network["convolutions"] + network["fully_connected"]
        rows.append((
            *series, layers, network["weights"], network["weights"] / layers, last.gradient_bytes / 1e6,
            fewest, last.ranks, last.epoch().estimate, fewest / last.epoch().estimate,
        ))  # fmt: skip
    rows.sort(key=lambda row: int(row[first + 1]))
    columns = (
        *question.series, "layers", "weights", "weights a layer", "gradients, MB", f"{_EPOCH}, on the fewest",
        "devices", f"{_EPOCH}, on them", "speed-up",
    )  # fmt: skip
    title = "Size of a network and its time"
    table = Table(title=title, columns=columns, rows=tuple(rows), note=_epoch_note(study))
    sentence = ""
    if rows:
        times = [row[-4] for row in rows]
        fast, slow = rows[times.index(min(times))], rows[times.index(max(times))]
        order = "more weights, more time" if times == sorted(times) else "weights alone do not order the times"
        sentence = (
            f"The epoch of {slow[0]} ({slow[2]:,} weights, {slow[1]} layers) takes {slow[-4] / fast[-4]:.1f} times as"
            f" long as that of {fast[0]} ({fast[2]:,} weights, {fast[1]} layers): {order}."
        )
    points = [
        (series, _x(each, question), each.epoch().estimate, *bounds(each.epoch()))
        for series, line in lines
        for each in line
    ]
    return sentence, table, _plots(key, question, "Seconds per epoch", points, table, _EPOCH), []


def _stages(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    rows: list[tuple[Any, ...]] = []
    points: list[Point] = []
    first = len(question.series)
    for series, line in _lines(question, results):
        for each in line:
            wu, steps = each.stage("wu"), each.steps()
            parts = each.stage("fp_bp") + wu
            operators = [each.operators(name) for name in ("fp", "bp", "wu")]
            rows.append((
                *series, whole(_x(each, question)), each.stage("fp_bp") * steps, wu * steps, 100 * wu / parts,
                100 * parts / each.stage("step"), 100 * each.step.estimate / parts,
                parts * steps - each.step.estimate * steps, each.stage("metric") * steps,
                *(None if seconds is None else seconds * steps for seconds in operators),
            ))  # fmt: skip
            points.append((series, _x(each, question), 100 * wu / parts, None, None))
    table = Table(
        title="FP + BP and WU",
        columns=(
            *question.series, question.x, "FP + BP, s per epoch", "WU, s per epoch", "WU, %",
            "parts over the step with waits, %", "step without waits over the parts, %",
            "saved by overlap, s per epoch", "metric, s per epoch", "FP operators, s per epoch",
            "BP operators, s per epoch", "WU operators, s per epoch",
        ),
        rows=tuple(rows),
        note="Seconds per epoch are extrapolated from those of a step. FP + BP and WU are of steps with a wait after"
        " each; steps without waits are measured in blocks of their own. Above 100 % the machine's drift between the"
        " two is larger than the overlap. Operators are those of MXNet's profiler: sums, in which two that run at once"
        " count twice, and what runs between operators does not count.",
    )  # fmt: skip
    sentence = ""
    if rows:
        low, high = min(rows, key=lambda row: row[first + 3]), max(rows, key=lambda row: row[first + 3])
        waited, plain = ([row[first + place] for row in rows] for place in (4, 5))
        sentence = (
            f"WU is from {low[first + 3]:.0f} % of a step ({_name(low[:first], question.series)} on {low[first]}) to"
            f" {high[first + 3]:.0f} % ({_name(high[:first], question.series)} on {high[first]}). FP + BP and WU add up"
            f" to {min(waited):.1f} to {max(waited):.1f} % of the step with a wait after each; a step without waits"
            f" takes {min(plain):.1f} to {max(plain):.1f} % of their sum, and what is below 100 % is saved by the"
            " overlap of WU with BP."
        )
    return sentence, table, _plots(key, question, "Share of WU", points, table, "WU, % of a step"), []


def _memory(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    rows: list[tuple[Any, ...]] = []
    points: list[Point] = []
    values = []
    most = max((each.ranks for each in results), default=0)
    for series, line in _lines(question, [each for each in results if each.ranks == most]):
        for each in line:
            before, (first, others) = each.memory("before_training"), each.memory("training")
            more = in_percent(first / others) if others else None
            growth = None if each is line[0] else in_percent(first / line[0].memory("training")[0])
            rows.append((*series, whole(_x(each, question)), before[0], first, others, more, growth))
            points.append((series, _x(each, question), first, None, None))
            # Single readings.
            readings = {
                ("memory_before_training", "others"): before[1],
                ("memory_training", "first"): first,
                ("memory_training", "others"): others,
                ("memory_gpu0_more_percent", ""): more,
                ("memory_growth_percent", ""): growth,
            }
            values += [
                Ours({**each.axes, "reading": reading}, value, None, None, quantity)
                for (quantity, reading), value in readings.items()
                if value is not None
            ]
    table = Table(
        title=f"Memory on {most} devices",
        columns=(
            *question.series, question.x, "before, GB", "training, first, GB", "training, others, GB",
            "first over others, %", "growth, %",
        ),
        rows=tuple(rows),
        note="One reading, which has no interval. On GPUs what CUDA has in use on the device (cudaMemGetInfo), other "
        "programs included; on CPUs resident memory of the process, in which a key-value store has all devices and "
        "Horovod one.",
    )  # fmt: skip
    sentence = ""
    grown = [row for row in rows if row[-1] is not None]
    if grown:
        low, high = min(grown, key=lambda row: row[-1]), max(grown, key=lambda row: row[-1])
        sentence = (
            f"From the smallest batch to {high[len(question.series)]} the memory in training grows by {low[-1]:.1f} %"
            f" ({low[0]}) to {high[-1]:.1f} % ({high[0]}); before training there is"
            f" {min(row[-5] for row in rows):.2f} to {max(row[-5] for row in rows):.2f} GB in use."
        )
    return sentence, table, _plots(key, question, "Memory in training", points, table, "GB"), values


def _largest_batches(study: Study, results: Sequence[Result]) -> tuple[list[Table], list[Table]]:
    # Searches for the largest batch that fits, if there were any, and the printed ones.
    searched = [(each, each.found["largest_batch"]) for each in results if "largest_batch" in each.found]
    if not searched:
        return [], []
    values = [
        Ours({name: value for name, value in each.axes.items() if name != study.epoch.batch}, found["fits"], None, None)
        for each, found in searched
    ]
    _, compared, absent = _compared(study, "largest_batch", values)
    table = Table(
        title="Largest batch of a device",
        columns=("point", "devices", "fits", "does not fit"),
        rows=tuple(
            (_name(list(each.axes.values()), list(each.axes)), each.ranks, found["fits"], found["does_not"])
            for each, found in searched
        ),
        note="Doubled until a step no longer fits: the largest is from the first figure to below the second.",
    )
    return [table, *compared], absent


def _weak(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    rows: list[tuple[Any, ...]] = []
    points: list[Point] = []
    gains = []
    for series, line in _lines(question, results, 2):
        for each in line:
            strong, weak = each.epoch(), each.epoch(weak=True)
            # Per image: the weak epoch has as many times the images as there are devices.
            gain = 100 * (1 - weak.estimate / each.ranks / strong.estimate)
            over = _ITSELF if each is line[0] else ratio(weak, line[0].epoch(weak=True))
            if each is not line[0]:
                gains.append((gain, _name(series, question.series), each.ranks))
            rows.append((*series, each.ranks, strong.estimate, weak.estimate, *over, gain))
            points.append((series, _x(each, question), *over))
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
    return sentence, table, _plots(key, question, "Weak scaling", points, table, "epoch over that of one device"), []


_KINDS: dict[str, Callable[[Study, Question, Sequence[Result], str], Parts]] = {
    "speed-up": _speed_up,
    "against": _against,
    "size": _size,
    "stages": _stages,
    "memory": _memory,
    "weak": _weak,
}


# -- what stands around the answers -------------------------------------------------------------------------------


def _mark(study: Study) -> str:
    if study.base.get("device") != "cpu":
        return "The small grid: not the study's points." if study.is_small else ""
    return (
        "Measured on CPUs, which stand in for GPUs: small images, small batches, resident memory for GPU memory. "
        "Nothing here says how GPUs behave, and nothing is a reproduction of a printed figure."
    )


def _busy(results: Sequence[Result]) -> str:
    busy = [each.others for each in results if each.is_disturbed and each.others]
    if not busy:
        return ""
    used, cores = max(busy)
    return (
        f"The machine was busy: at {len(busy)} of {len(results)} points other programs took up to {used:.1f} of {cores}"
        " cores. Their times, and all that is made of them, may be wrong by much; measure them again with nothing else"
        " running."
    )


def _intervals(results: Sequence[Result]) -> str:
    apart = results[0].drift
    if apart is None:
        return "from the blocks of steps of one process: what drifts between two points is not in them"
    return (
        f"from the passes: two of one point differ by {100 * apart.cv:.1f} % (standard deviation, pooled over"
        f" {apart.freedom} repeats; a point's own where that is more). The first pass is in the grid's order, the"
        " others are shuffled"
    )


def _passes(study: Study, results: Sequence[Result]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for each in results:
        if each.is_timed:
            means = [fmean(one["step_seconds"]) for one in each.passes]
            apart = max(means) / min(means) if len(means) > 1 else None
            passes = (*means, *[None] * (study.passes - len(means)))
            others = each.others[0] if each.others else None
            rows.append((*(each.axes[name] for name in study.grid), *passes, apart, others))
    numbers = (f"pass {number}, s a step" for number in range(1, study.passes + 1))
    columns = (*study.grid, *numbers, "longest over shortest", "cores of other programs")
    return Table(title="Every point and its passes", columns=columns, rows=tuple(rows)).filled()


def _machine(facts: dict[str, Any]) -> str:
    gpus = facts.get("gpus") or []
    cpu = str(facts.get("cpu_model") or facts.get("cpu") or "CPU")
    return f"{len(gpus)} GPUs ({', '.join(sorted({str(each.get('name')) for each in gpus}))}), {cpu}" if gpus else cpu


def _why(study: Study, results: Sequence[Result]) -> Iterator[Table]:
    # Layers, weights, gradient bytes, and what the links carry.
    networks = {str(each.axes.get("network", "")): (each, each.found["network"]) for each in results}
    yield Table(
        title="What an update has to move",
        columns=("network", "convolutions", "fully connected", "arrays", "weights", "gradients, MB", "output"),
        rows=tuple(
            (
                name, network["convolutions"], network["fully_connected"], len(network["sizes"]), network["weights"],
                each.gradient_bytes / 1e6, "x".join(map(str, network["output"][1:])),
            )
            for name, (each, network) in networks.items()
        ),
    )  # fmt: skip
    if study.links:
        links = topology.links_of(study.links)
        sizes = {name: [4 * int(size) for size in network["sizes"].values()] for name, (_, network) in networks.items()}
        yield topology.traffic_table(links, sizes, links.gpus)


def _inconsistent(study: Study) -> list[Chapter]:
    # Which printed figures of this study do not follow from its others.
    if study.published is None:
        return []
    ours = [each for each in checks() if each.source == study.published.source]
    failing = [each for each in ours if not each.follows]
    table = Table(
        title=f"Printed figures of the study that do not follow from its others: {len(failing)} of {len(ours)}",
        columns=("place", "figure", "printed", "computed", "note"),
        rows=tuple((each.place, each.what, each.printed, shown(each.computed), each.note) for each in failing),
    )
    return [Chapter(key="printed", title="The study's printed figures", tables=(table,))]
