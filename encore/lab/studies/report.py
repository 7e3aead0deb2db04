"""Study reports: a sentence computed from the data, tables and a plot per question, and explanations.

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
    Measurement,
    Result,
    bounds,
    compare_printed,
    group_by_series,
    ratio,
    read,
    to_percent,
)
from encore.results.format import percent
from encore.results.report.figures import Figure, bars, over_gpus
from encore.results.report.report import Chapter, Report
from encore.results.report.svg_plot import SERIES
from encore.results.statistics import LEVEL
from encore.results.table import Cell, Table, cell_text, compact, grouped

_PUBLISHED = ("model", "GPUs", "batch", "way", "printed", "our point", "ours", "from", "to", "difference")
_FIGURE_COLUMNS = 5  # columns that describe the printed figure
_EPOCH = "s per epoch, extrapolated"
_UNITY = (1.0, 1.0, 1.0)  # ratio of the reference point to itself
_MIN_GAIN = 0.1  # percent; below it a gain is printed as none

Series = tuple[Value, ...]
Point = tuple[Series, float, float, float | None, float | None]  # series, x, y, and from where to where y is
Parts = tuple[str, Table, list[Figure], list[Measurement]]


def build(folder: Folder[Study]) -> Report:
    study, results = folder.study, read(folder)
    if not results:
        raise EncoreError(f"no point of {folder.path} is measured", hint="encore study run --resume FOLDER")
    mark = _cpu_notice(study)
    note = "Measured on CPUs or on a small grid." if mark else ""
    passes = Chapter(
        key="passes",
        title="Variation between passes",
        sentence=f"Intervals ({percent(LEVEL)}) are {_intervals(results)}.",
        folded=(_passes_table(study, results),),
    )
    reasons = tuple((question.text, question.why) for question in study.questions if question.why)
    explanation = Chapter(key="why", title="Why", tables=tuple(_explanations(study, results)), terms=reasons)
    answers = [_answer(study, question, results, number, note) for number, question in enumerate(study.questions, 1)]
    return Report(
        title=study.title,
        about=f"{study.about} Points: {folder.summary()}. {_machine_summary(folder.machine())}.",
        notices=tuple(filter(None, (mark, _busy_notice(results)))),
        chapters=(*answers, passes, explanation, *_contradictions(study)),
    )


def _answer(study: Study, question: Question, results: Sequence[Result], number: int, note: str) -> Chapter:
    # Points outside the grid are used only if the question names them.
    points = [
        result
        for result in results
        if result.is_timed
        and all(result.axes.get(name) == value for name, value in question.where.items())
        and set(result.axes) <= {*study.grid, *question.where}
    ]
    sentence, table, figures, values = _KINDS[question.kind](study, question, points, f"question-{number}")
    tables, folded = [table], list[Table]()
    by_quantity = grouped(values, lambda value: value.quantity or question.quantity) or {question.quantity: []}
    for quantity, measured in by_quantity.items():
        comparison, compared, absent = _compare_printed(study, quantity, measured)
        sentence, tables, folded = sentence + comparison, tables + compared, folded + absent
    if not table.rows:
        sentence = "The points for this answer have not been measured yet."
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


def _compare_printed(
    study: Study, quantity: str, measurements: Sequence[Measurement]
) -> tuple[str, list[Table], list[Table]]:
    # Comparison of printed figures with measurements: sentence, table of matches, and table of unmatched figures.
    printed_figures = compare_printed(study, quantity, measurements)
    if not printed_figures:
        return "", [], []
    label, measured = quantity.replace("_", " "), [figure for figure in printed_figures if figure.measurement]
    title = f"The study's printed figures: {label}"
    rows = tuple(figure.row for figure in measured)
    absent = tuple(figure.row[:_FIGURE_COLUMNS] for figure in printed_figures if not figure.measurement)
    tables = [Table(title=title, columns=_PUBLISHED, rows=rows)] if rows else []
    columns = _PUBLISHED[:_FIGURE_COLUMNS]
    without = [Table(title=f"{title}, not measured here", columns=columns, rows=absent)] if absent else []
    summary = f" Of {len(printed_figures)} printed figures ({label}) {len(measured)} are for measured points"
    if not measured:
        summary = f" None of the {len(printed_figures)} printed figures ({label}) is for a measured point"
    elif any(figure.has_interval for figure in measured):
        summary += f"; {sum(figure.is_beyond for figure in measured)} are outside the measured interval"
    else:
        summary += ", in single measurements without an interval"
    return f"{summary}.", tables, without


# -- questions ----------------------------------------------------------------------------------------------------


def _lines(question: Question, results: Sequence[Result], least: int = 1) -> Iterator[tuple[Series, list[Result]]]:
    # Yield lines by the values of the question's series, with results sorted by x; only lines with ``least`` results.
    for series, line in group_by_series(results, question.series).items():
        if len(line) >= least:
            yield series, sorted(line, key=lambda result: _x(result, question))


def _x(result: Result, question: Question) -> float:
    return float(result.axes[question.x])


def _name(values: Sequence[Value], series: Sequence[str]) -> str:
    # Numbers are preceded by the axis name.
    return ", ".join(
        str(value) if isinstance(value, str) else f"{axis.replace('_', ' ')} {value}"
        for value, axis in zip(values, series, strict=True)
    )


def _axis_name(axis: str) -> str:
    return "devices" if axis == "ranks" else axis.replace("_", " ")


def _epoch_note(study: Study) -> str:
    # No epoch is run completely.
    return (
        f"Extrapolated: an epoch is {study.epoch.images:,} images, of which some steps were run. Epoch time is"
        " steps times step time, plus the extra time of the first step."
    )


def _plots(
    key: str, question: Question, title: str, points: Sequence[Point], table: Table, label: str, linear: bool = False
) -> list[Figure]:
    """Return line plots over an axis; ``linear`` adds the line of proportional scaling.

    If there are more lines than colours and markers, they are split into plots of lines whose names differ only in
    the first word.
    """
    lines = grouped(points, lambda point: _name(point[0], question.series))
    plottable = {name: line for name, line in lines.items() if len(line) > 1}
    has_colours = len(plottable) <= SERIES
    parted = grouped(plottable, lambda name: "" if has_colours else name.partition(", ")[2])
    figures = []
    for number, (rest, names) in enumerate(parted.items(), 1):
        selected = {name: plottable[name] for name in names[:SERIES]}
        counts = [x for line in selected.values() for _, x, *_ in line]
        spans = {
            name: [(x, low, high) for _, x, _, low, high in line if low is not None and high is not None]
            for name, line in selected.items()
        }
        figures.append(
            over_gpus(
                key if len(parted) == 1 else f"{key}-{number}",
                f"{title}: {rest}" if rest else title,
                [(name, [(x, y) for _, x, y, *_ in line]) for name, line in selected.items()],
                table,
                label,
                linear=[(x, x / min(counts)) for x in (min(counts), max(counts))] if linear else [],
                axis=_axis_name(question.x),
                spans=spans,
            )
        )
    return figures


def _speed_up(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    lines, over = list(_lines(question, results, 2)), _axis_name(question.x)
    speedups: list[tuple[Series, Result, Interval]] = [
        (series, result, ratio(line[0].epoch(), result.epoch()) if result is not line[0] else _UNITY)
        for series, line in lines
        for result in line
    ]
    table = Table(
        title=f"Seconds per epoch over {over}",
        columns=(*question.series, question.x, _EPOCH, "from", "to", "speed-up", "least", "most"),
        rows=tuple(
            (*series, compact(_x(result, question)), result.epoch().estimate, *bounds(result.epoch()), *faster)
            for series, result, faster in speedups
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
            sentence += f" At {unsure} of {len(ends)} the interval includes 1: no significant speed-up."
    points = [(series, _x(result, question), *faster) for series, result, faster in speedups]
    figures = _plots(key, question, f"Speed-up over {over}", points, table, "speed-up", linear=True)
    return sentence, table, figures, [Measurement(result.axes, *faster) for _, result, faster in speedups]


def _overhead(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    (fast_way, slow_way), count = question.between, len(question.series)
    rows: list[tuple[Any, ...]] = []
    values, sure = [], 0
    for series, pair in group_by_series(results, question.series).items():
        by_way = {result.axes[question.x]: result for result in pair}
        if fast_way in by_way and slow_way in by_way:
            slow, fast = by_way[slow_way], by_way[fast_way]
            overhead = ratio(slow.step, fast.step)
            percent_more, low, high = (to_percent(value) for value in overhead)
            sure += low is not None and high is not None and (low > 0 or high < 0)
            rows.append((*series, fast.step.estimate, slow.step.estimate, percent_more, low, high, overhead[0]))
            values.append(Measurement(slow.axes, percent_more or 0.0, low, high))
    columns = (*question.series, f"{fast_way}, s a step", f"{slow_way}, s a step", "overhead, %", "from", "to", "ratio")
    table = Table(title=f"Overhead of {slow_way} over {fast_way}", columns=columns, rows=tuple(rows))
    sentence = ""
    if rows:
        least, largest = min(rows, key=lambda row: row[-1]), max(rows, key=lambda row: row[-1])
        sentence = (
            f"{slow_way} takes from {least[-4]:+.1f} % ({_name(least[:count], question.series)})"
            f" to {largest[-4]:+.1f} % ({_name(largest[:count], question.series)}) longer than {fast_way};"
            f" at {sure} of {len(rows)} points the interval excludes zero."
        )
    figure = bars(key, table, tuple(range(count)), len(columns) - 1, f"step by {slow_way} over that by {fast_way}")
    return sentence, table, [figure] if figure else [], values


def _network_size(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    rows: list[tuple[Any, ...]] = []
    lines, first = list(_lines(question, results)), len(question.series)
    for series, line in lines:
        network, last, fewest = line[0].first_pass["network"], line[-1], line[0].epoch().estimate
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
    title = "Network size and time"
    table = Table(title=title, columns=columns, rows=tuple(rows), note=_epoch_note(study))
    sentence = ""
    if rows:
        by_time = sorted(rows, key=lambda row: float(row[-4]))
        fast, slow = by_time[0], max(rows, key=lambda row: float(row[-4]))
        order = "more weights, more time" if by_time == rows else "the order of times differs from the order of weights"
        sentence = (
            f"The epoch of {slow[0]} ({slow[2]:,} weights, {slow[1]} layers) takes {slow[-4] / fast[-4]:.1f} times as"
            f" long as that of {fast[0]} ({fast[2]:,} weights, {fast[1]} layers): {order}."
        )
    points = [
        (series, _x(result, question), result.epoch().estimate, *bounds(result.epoch()))
        for series, line in lines
        for result in line
    ]
    return sentence, table, _plots(key, question, "Seconds per epoch", points, table, _EPOCH), []


def _stages(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    rows: list[tuple[Any, ...]] = []
    points: list[Point] = []
    first = len(question.series)
    for series, line in _lines(question, results):
        for result in line:
            wu, steps = result.stage("wu"), result.steps()
            parts = result.stage("fp_bp") + wu
            operators = [result.operators(name) for name in ("fp", "bp", "wu")]
            rows.append((
                *series, compact(_x(result, question)), result.stage("fp_bp") * steps, wu * steps, 100 * wu / parts,
                100 * parts / result.stage("step"), 100 * result.step.estimate / parts,
                parts * steps - result.step.estimate * steps, result.stage("metric") * steps,
                *(None if seconds is None else seconds * steps for seconds in operators),
            ))  # fmt: skip
            points.append((series, _x(result, question), 100 * wu / parts, None, None))
    table = Table(
        title="FP + BP and WU",
        columns=(
            *question.series, question.x, "FP + BP, s per epoch", "WU, s per epoch", "WU, %",
            "parts over the step with waits, %", "step without waits over the parts, %",
            "saved by overlap, s per epoch", "metric, s per epoch", "FP operators, s per epoch",
            "BP operators, s per epoch", "WU operators, s per epoch",
        ),
        rows=tuple(rows),
        note="Seconds per epoch are extrapolated from step times. FP + BP and WU are from steps with synchronization"
        " after each; steps without it are measured in separate blocks. Above 100 %, the machine's drift between the"
        " two is larger than the overlap. Operator times are sums from MXNet's profiler: concurrent operators count"
        " twice, time between operators does not count.",
    )  # fmt: skip
    sentence = ""
    if rows:
        lowest, high = min(rows, key=lambda row: row[first + 3]), max(rows, key=lambda row: row[first + 3])
        waited, plain = ([row[first + column] for row in rows] for column in (4, 5))
        sentence = (
            f"WU is from {lowest[first + 3]:.0f} % of a step"
            f" ({_name(lowest[:first], question.series)} on {lowest[first]}) to {high[first + 3]:.0f} %"
            f" ({_name(high[:first], question.series)} on {high[first]}). FP + BP and WU add up to"
            f" {min(waited):.1f} to {max(waited):.1f} % of the step with synchronization after each; a step"
            f" without it takes {min(plain):.1f} to {max(plain):.1f} % of their sum, and the difference to 100 % is"
            " saved by overlapping WU with BP."
        )
    return sentence, table, _plots(key, question, "Share of WU", points, table, "WU, % of the step"), []


def _memory(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    rows: list[tuple[Any, ...]] = []
    points: list[Point] = []
    values = []
    max_ranks = max((result.ranks for result in results), default=0)
    for series, line in _lines(question, [result for result in results if result.ranks == max_ranks]):
        for result in line:
            before_training, (first, other_ranks) = result.memory("before_training"), result.memory("training")
            percent_more = to_percent(first / other_ranks) if other_ranks else None
            growth = None if result is line[0] else to_percent(first / line[0].memory("training")[0])
            rows.append(
                (*series, compact(_x(result, question)), before_training[0], first, other_ranks, percent_more, growth)
            )
            points.append((series, _x(result, question), first, None, None))
            # Single readings.
            readings = {
                ("memory_before_training", "others"): before_training[1],
                ("memory_training", "first"): first,
                ("memory_training", "others"): other_ranks,
                ("memory_gpu0_more_percent", ""): percent_more,
                ("memory_growth_percent", ""): growth,
            }
            values += [
                Measurement({**result.axes, "reading": reading}, value, None, None, quantity)
                for (quantity, reading), value in readings.items()
                if value is not None
            ]
    table = Table(
        title=f"Memory on {max_ranks} devices",
        columns=(
            *question.series, question.x, "before, GB", "training, first, GB", "training, others, GB",
            "first over others, %", "growth, %",
        ),
        rows=tuple(rows),
        note="Single reading without an interval. On GPUs, device memory in use (cudaMemGetInfo), including other "
        "programs; on CPUs, resident memory of the process, which has all devices for a key-value store and one "
        "device for Horovod.",
    )  # fmt: skip
    sentence = ""
    grown = [row for row in rows if row[-1] is not None]
    if grown:
        least, most = min(grown, key=lambda row: row[-1]), max(grown, key=lambda row: row[-1])
        sentence = (
            f"From the smallest batch to {most[len(question.series)]} the memory in training grows by {least[-1]:.1f} %"
            f" ({least[0]}) to {most[-1]:.1f} % ({most[0]}); before training"
            f" {min(row[-5] for row in rows):.2f} to {max(row[-5] for row in rows):.2f} GB are in use."
        )
    return sentence, table, _plots(key, question, "Memory in training", points, table, "GB"), values


def _largest_batches(study: Study, results: Sequence[Result]) -> tuple[list[Table], list[Table]]:
    # Searches for the largest batch that fits, if any, and the printed largest batches.
    searched = [
        (result, result.first_pass["largest_batch"]) for result in results if "largest_batch" in result.first_pass
    ]
    if not searched:
        return [], []
    values = [
        Measurement(
            {name: value for name, value in result.axes.items() if name != study.epoch.batch},
            largest_batch["fits"],
            None,
            None,
        )
        for result, largest_batch in searched
    ]
    _, compared, absent = _compare_printed(study, "largest_batch", values)
    table = Table(
        title="Largest batch of a device",
        columns=("point", "devices", "fits", "does not fit"),
        rows=tuple(
            (
                _name(list(result.axes.values()), list(result.axes)),
                result.ranks,
                largest_batch["fits"],
                largest_batch["does_not"],
            )
            for result, largest_batch in searched
        ),
        note="Doubled until a step no longer fits: the largest is from the first figure to below the second.",
    )
    return [table, *compared], absent


def _weak_scaling(study: Study, question: Question, results: Sequence[Result], key: str) -> Parts:
    rows: list[tuple[Any, ...]] = []
    points: list[Point] = []
    gains = []
    for series, line in _lines(question, results, 2):
        for result in line:
            strong, weak = result.epoch(), result.epoch(weak=True)
            # Per image: with n devices the weak-scaling epoch has n times the images.
            gain = 100 * (1 - weak.estimate / result.ranks / strong.estimate)
            over = _UNITY if result is line[0] else ratio(weak, line[0].epoch(weak=True))
            if result is not line[0]:
                gains.append((gain, _name(series, question.series), result.ranks))
            rows.append((*series, result.ranks, strong.estimate, weak.estimate, *over, gain))
            points.append((series, _x(result, question), *over))
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
            "For the same images weak scaling takes as long as strong scaling, to a tenth of a percent: only the"
            " first step can differ, and its share is negligible."
            if best < _MIN_GAIN
            else f"For the same images weak scaling takes up to {best:.1f} % less time than strong scaling ({name},"
            f" {devices} devices): the cost of the first step is spread over a longer epoch."
        )
    return sentence, table, _plots(key, question, "Weak scaling", points, table, "epoch relative to one device"), []


_KINDS: dict[str, Callable[[Study, Question, Sequence[Result], str], Parts]] = {
    "speed-up": _speed_up,
    "against": _overhead,
    "size": _network_size,
    "stages": _stages,
    "memory": _memory,
    "weak": _weak_scaling,
}


# -- chapters around the answers ----------------------------------------------------------------------------------


def _cpu_notice(study: Study) -> str:
    if study.base.get("device") != "cpu":
        return "The small grid: not the study's points." if study.is_small else ""
    return (
        "Measured on CPUs instead of GPUs: small images, small batches, resident memory instead of GPU memory. "
        "The results do not apply to GPUs and do not reproduce printed figures."
    )


def _busy_notice(results: Sequence[Result]) -> str:
    busy = [result.background_load for result in results if result.is_disturbed and result.background_load]
    if not busy:
        return ""
    used, cores = max(busy)
    return (
        f"The machine was busy: at {len(busy)} of {len(results)} points other programs took up to {used:.1f} of {cores}"
        " cores. Their times and all derived values may be wrong; repeat the measurement on an idle machine."
    )


def _intervals(results: Sequence[Result]) -> str:
    apart = results[0].drift
    if apart is None:
        return "from blocks of steps in a single process, without drift between points"
    return (
        f"from the passes: two passes of a point differ by {100 * apart.cv:.1f} % (standard deviation, pooled over"
        f" {apart.freedom} repeats; the deviation of the point if larger). The first pass is in grid order, later"
        " passes are shuffled"
    )


def _passes_table(study: Study, results: Sequence[Result]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for result in results:
        if result.is_timed:
            means = [fmean(pass_["step_seconds"]) for pass_ in result.passes]
            apart = max(means) / min(means) if len(means) > 1 else None
            passes = (*means, *[None] * (study.passes - len(means)))
            other_load = result.background_load[0] if result.background_load else None
            rows.append((*(result.axes[name] for name in study.grid), *passes, apart, other_load))
    numbers = (f"pass {number}, s a step" for number in range(1, study.passes + 1))
    columns = (*study.grid, *numbers, "longest over shortest", "cores of other programs")
    return Table(title="All points and passes", columns=columns, rows=tuple(rows)).filled()


def _machine_summary(node: dict[str, Any]) -> str:
    gpus = node.get("gpus") or []
    cpu = str(node.get("cpu_model") or node.get("cpu") or "CPU")
    return f"{len(gpus)} GPUs ({', '.join(sorted({str(gpu.get('name')) for gpu in gpus}))}), {cpu}" if gpus else cpu


def _explanations(study: Study, results: Sequence[Result]) -> Iterator[Table]:
    # Layers, weights, gradient bytes, and link traffic.
    networks = {str(result.axes.get("network", "")): (result, result.first_pass["network"]) for result in results}
    yield Table(
        title="Data volume of an update",
        columns=("network", "convolutions", "fully connected", "arrays", "weights", "gradients, MB", "output"),
        rows=tuple(
            (
                name, network["convolutions"], network["fully_connected"], len(network["sizes"]), network["weights"],
                result.gradient_bytes / 1e6, "x".join(map(str, network["output"][1:])),
            )
            for name, (result, network) in networks.items()
        ),
    )  # fmt: skip
    if study.links:
        links = topology.load_links(study.links)
        sizes = {name: [4 * int(size) for size in network["sizes"].values()] for name, (_, network) in networks.items()}
        yield topology.traffic_table(links, sizes, links.gpus)


def _contradictions(study: Study) -> list[Chapter]:
    # Printed figures of this study that contradict its other figures.
    if study.published is None:
        return []
    study_checks = [check for check in checks() if check.source == study.published.source]
    failing = [check for check in study_checks if not check.follows]
    table = Table(
        title=f"Printed figures that contradict other figures of the study: {len(failing)} of {len(study_checks)}",
        columns=("place", "figure", "printed", "computed", "note"),
        rows=tuple(
            (check.place, check.what, check.printed, cell_text(check.computed), check.note) for check in failing
        ),
    )
    return [Chapter(key="printed", title="The study's printed figures", tables=(table,))]
