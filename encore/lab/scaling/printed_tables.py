"""Tables of the studies, recomputed from their data, and printed figures that contradict other figures.

    from encore.lab.scaling.printed_tables import checks
    for check in checks():
        if not check.follows:
            print(check.source, check.place, check.what, check.printed, check.computed)

A figure follows if it is within the rounding of itself and of the figures it is computed from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from encore.results.published.published import StudyFigure, load_figures
from encore.results.report.measurements import study_measurements
from encore.results.table import Table, cell_text, grouped

MICROWAY, DELL, MULTINODE, BARC = (
    "microway-dgx1-scaling", "dell-demystifying", "dell-multinode-v100", "barc2019-dgx1",
)  # fmt: skip
_TITLES = {
    "resnet": "Synopsis of Image Classification benchmarks",
    "maskrcnn": "Synopsis of Object Detection (heavy) benchmarks",
    "ssd": "Synopsis of SSD benchmark",
    "gnmt": "Synopsis of RNN benchmark for Language Translation (GNMT)",
    "transformer": "Synopsis of Non-Recurrent benchmark for Language Translation (Transformer)",
    "ncf": "Synopsis of Recommendation Systems benchmark",
}
_WORK_DAY_MINUTES = 480


@dataclass(frozen=True)
class Span:
    """Number between two bounds, such as a rounded printed number."""

    low: float
    high: float

    def __mul__(self, other: Span | float) -> Span:
        low, high = (other.low, other.high) if isinstance(other, Span) else (other, other)
        return Span(self.low * low, self.high * high)

    def __truediv__(self, other: Span) -> Span:
        return Span(low=self.low / other.high, high=self.high / other.low)

    def overlaps(self, other: Span) -> bool:
        return self.low <= other.high + 1e-12 and other.low <= self.high + 1e-12


@dataclass(frozen=True, kw_only=True)
class Check:
    """Printed figure and the value computed from other figures of the study."""

    source: str
    place: str
    what: str
    printed: str
    computed: float
    follows: bool
    note: str = ""


def rounding_range(figure: StudyFigure) -> Span:
    """Return the range that rounds to a printed figure: half a unit of the last digit in both directions."""
    decimals = len(figure.printed.partition(".")[2])
    half = 0.5 * 10.0**-decimals
    return Span(low=figure.value - half, high=figure.value + half)


def tables() -> list[Table]:
    """Return tables 1 to 7 of the scaling study from its data; table 7 is computed from tables 1 to 6."""
    measured = study_measurements(MICROWAY)
    by_gpus = grouped(sorted(measured, key=lambda figure: figure.gpus or 0), lambda figure: figure.benchmark)
    results = [
        Table(
            title=f"Table {number}. {title}",
            columns=("# GPUs", "Batch Size", "Average Time per Epoch (min)", "Number of Epochs", "Precision"),
            rows=tuple(
                (row.gpus, int(row.batch or 0), row.minutes_per_epoch, int(row.epochs or 0), row.precision)
                for row in by_gpus[model]
            ),
        )
        for number, (model, title) in enumerate(_TITLES.items(), 1)
    ]
    printed = {check.what: check for check in _table_7()}
    pairs = {
        model: (printed[f"{model}, 4 GPUs"], printed[f"{model}, 8 GPUs"])
        for model in ("resnet", "ssd", "maskrcnn", "gnmt", "transformer", "ncf")
    }
    speed_ups = Table(
        title="Table 7. Speed Ups for all the benchmarks going from 1 to 4 to 8 GPUs",
        columns=("Benchmark", "1-4 GPU", "1-4 GPU, printed", "1-8 GPU", "1-8 GPU, printed"),
        rows=tuple((model, a.computed, a.printed, b.computed, b.printed) for model, (a, b) in pairs.items()),
        note="Computed from tables 1 to 6: minutes per epoch times epochs on 1 GPU over that on several.",
    )
    return [*results, speed_ups]


def checks() -> list[Check]:
    """Return all printed figures that are determined by other figures of the same study."""
    return [
        *_table_7(),
        *_running_text(),
        *_memory(),
        *_layers(),
        *_precision_and_scaling(),
        *_servers(),
        *_contradictions(),
    ]


def findings() -> Table:
    return Table(
        title="Printed figures that do not follow from the others",
        columns=("study", "place", "figure", "printed", "computed", "note"),
        rows=tuple(
            (check.source, check.place, check.what, check.printed, cell_text(check.computed), check.note)
            for check in checks()
            if not check.follows
        ),
    )


def tables_and_findings(study: str) -> list[Table]:
    """Return a study's tables, the findings last; empty for studies without printed tables."""
    return [*tables(), findings()] if study == MICROWAY else []


def _figures(source: str, **fields: object) -> list[StudyFigure]:
    return [
        figure
        for figure in load_figures()
        if figure.source == source and all(getattr(figure, name) == value for name, value in fields.items())
    ]


def _verdict(figure: StudyFigure, description: str, computed: float, follows: bool, note: str = "") -> Check:
    return Check(
        source=figure.source,
        place=figure.place,
        what=description,
        printed=figure.printed,
        computed=computed,
        follows=follows,
        note="" if follows else note,
    )


def _check(figure: StudyFigure, description: str, computed: Span, note: str = "") -> Check:
    middle = (computed.low + computed.high) / 2
    follows = computed.overlaps(rounding_range(figure))
    if not follows and not note:
        decimals = len(figure.printed.partition(".")[2])
        cut = int(middle * 10**decimals) / 10**decimals
        note = "cut off, not rounded" if abs(cut - figure.value) < 10.0 ** -(decimals + 3) else ""
    return _verdict(figure, description, middle, follows, note)


def _totals() -> dict[tuple[str, int | None], Span]:
    # Minutes per epoch times epochs of tables 1 to 6.
    minutes, epochs = (
        {(figure.model, figure.gpus): figure for figure in _figures(MICROWAY, quantity=quantity)}
        for quantity in ("minutes_per_epoch", "epochs")
    )
    return {key: rounding_range(figure) * epochs[key].value for key, figure in minutes.items()}


def _table_7() -> Iterator[Check]:
    totals = _totals()
    for figure in _figures(MICROWAY, place="table 7", quantity="speedup"):
        computed = totals[figure.model, 1] / totals[figure.model, figure.gpus]
        yield _check(figure, f"{figure.model}, {figure.gpus} GPUs", computed)


def _running_text() -> Iterator[Check]:
    # Check the running text of the tables: about, more than, less than.
    totals = _totals()
    for figure in _figures(MICROWAY, place="text"):
        if figure.gpus is None or (figure.model, figure.gpus) not in totals:
            continue
        total = totals[figure.model, figure.gpus]
        if figure.quantity == "speedup":
            yield _check(figure, f"{figure.model}, {figure.gpus} GPUs", totals[figure.model, 1] / total)
        elif figure.quantity == "training_minutes":
            follows = {">": total.high > figure.value, "<": total.low < figure.value}.get(
                figure.relation, total.overlaps(rounding_range(figure))
            )
            description = f"{figure.model}, {figure.gpus} GPUs, minutes {figure.relation}"
            yield _verdict(figure, description, (total.low + total.high) / 2, follows)


def _percent(ratio: Span) -> Span:
    return Span((ratio.low - 1) * 100, (ratio.high - 1) * 100)


def _memory() -> Iterator[Check]:
    # Compare GPU 0 with the other GPUs, and all batches with the smallest.
    location = "backup: memory usage"
    memory = {
        (figure.model, figure.batch, figure.context): rounding_range(figure)
        for figure in _figures(BARC, place=location, quantity="memory_training")
    }
    for figure in _figures(BARC, place=location):
        first = memory.get((figure.model, figure.batch, "GPU0"))
        bases = {
            "memory_gpu0_more_percent": (figure.model, figure.batch, "GPUx"),
            "memory_growth_percent": (figure.model, 16, "GPU0"),
        }
        if first is not None and figure.quantity in bases:
            ratio = _percent(first / memory[bases[figure.quantity]])
            yield _check(figure, f"{figure.model}, batch {figure.batch}, {figure.context}", ratio)


def _layers() -> Iterator[Check]:
    # Convolution and fully connected layers add up to the network's layers. The layer count per Inception module is not
    # printed.
    for model, figures in grouped(_figures(BARC, place="slide: workloads"), lambda figure: figure.model).items():
        parts = {figure.quantity: figure for figure in figures}
        if not parts["inception_layers"].value:
            total = parts["conv_layers"].value + parts["fc_layers"].value
            yield _check(parts["layers"], f"layers of {model}", Span(total, total))


def _precision_and_scaling() -> Iterator[Check]:
    # The gain of fp16 on 16 GPUs follows from the gain on one and from both speed-ups.
    for framework in ("MXNet", "Caffe2"):
        framework_figures = [figure for figure in _figures(MULTINODE) if framework in figure.context]
        gains = {figure.relation: figure for figure in framework_figures if figure.quantity == "gain_percent"}
        on_16 = [figure for figure in framework_figures if (figure.quantity, figure.gpus) == ("speedup", 16)]
        speed = {figure.precision: rounding_range(figure) for figure in on_16}
        top = rounding_range(gains["<="])
        factor = Span(1 + top.low / 100, 1 + top.high / 100) * (speed["fp16"] / speed["fp32"])
        description = f"{framework}, fp16 on 16 GPUs by the largest gain and both speed-ups"
        yield _check(gains[">="], description, _percent(factor))
    overheads = _figures(BARC, place="slide: NCCL overhead")
    headline = {figure.relation: figure for figure in overheads if figure.model == "all"}
    sorted_overheads = sorted(
        (figure for figure in overheads if figure.relation == "="), key=lambda figure: figure.value
    )
    for relation, figure in ((">=", sorted_overheads[0]), ("<=", sorted_overheads[-1])):
        yield _check(headline[relation], f"NCCL overhead {relation}", rounding_range(figure))


def _servers() -> Iterator[Check]:
    # All GPUs in a server together are the GPU count times one GPU.
    single = {
        (figure.system, figure.quantity): rounding_range(figure)
        for figure in _figures(DELL, place="slide: PCIe and SXM2", gpus=1)
    }
    for figure in _figures(DELL, place="backup: GPU scaling"):
        baseline, note = single.get(("Tesla V100 PCIe", figure.quantity)), ""
        if "xV100 " not in figure.system or figure.gpus is None or baseline is None:
            continue
        if figure.quantity == "interconnect_bandwidth":
            computed = baseline
        elif figure.quantity == "gpu_memory":
            computed = Span(16.0, 32.0) * figure.gpus  # two sizes are sold
        else:
            ends = [baseline * figure.gpus, single["Tesla V100 SXM2", figure.quantity] * figure.gpus]
            computed = min(ends, key=lambda span: abs(span.low - figure.value))
            note = "between the figures of PCIe and SXM2, neither of which it is a multiple of"
        yield _check(figure, f"{figure.system}, {figure.quantity}", computed, note)


def _contradictions() -> Iterator[Check]:
    # Contradictory statements in the same study.
    for figure in _figures(DELL, place="slide: time to accuracy", model="maskrcnn"):
        description = "longest training, minutes; the next line says under 8 hours for all models"
        follows = figure.value < _WORK_DAY_MINUTES
        yield _verdict(figure, description, float(_WORK_DAY_MINUTES), follows, "the two lines contradict each other")
    for figure in _figures(BARC, quantity="largest_batch", model="resnet"):
        yield _verdict(figure, "largest batch of ResNet", 64.0, False, "a backup slide says 64 and 128 in one sentence")
    # Weak scaling: twice the GPUs, twice the images.
    samples = _figures(BARC, place="slide: datasets", quantity="train_samples")
    weak = {figure.gpus: figure for figure in samples if figure.gpus}
    for gpus, figure in weak.items():
        computed = weak[1].value * (gpus or 1)
        # "1M" and "2M" are printed to a million, the other numbers to a thousand.
        unit = 1_000_000 if figure.value % 1_000_000 == 0 else 1_000
        follows = abs(computed - figure.value) <= unit / 2
        yield _verdict(figure, f"images on {gpus} GPUs, weak scaling", computed, follows)
