"""The studies' own tables again from their data, and which printed figures do not follow from the others.

    from encore.lab.scaling.printed_tables import checks
    for check in checks():
        if not check.follows:
            print(check.source, check.place, check.what, check.printed, check.computed)

A figure follows when it is within what its own rounding and that of the figures it is made of allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from encore.results.published.published import StudyFigure, load_figures
from encore.results.report.measurements import of_study
from encore.results.table import Cell, Table, shown

MICROWAY, DELL, MULTINODE, BARC = (
    "microway-dgx1-scaling", "dell-demystifying", "dell-multinode-v100", "barc2019-dgx1",
)  # fmt: skip
_ORDER = ("resnet", "maskrcnn", "ssd", "gnmt", "transformer", "ncf")
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
    """A number that is known to be between two others, as a printed one does."""

    low: float
    high: float

    def __mul__(self, other: Span | float) -> Span:
        low, high = (other.low, other.high) if isinstance(other, Span) else (other, other)
        return Span(low=self.low * low, high=self.high * high)

    def __truediv__(self, other: Span) -> Span:
        return Span(low=self.low / other.high, high=self.high / other.low)

    def meets(self, other: Span) -> bool:
        """Return whether one number can be both."""
        return self.low <= other.high + 1e-12 and other.low <= self.high + 1e-12


@dataclass(frozen=True, kw_only=True)
class Check:
    """A printed figure and what the study's other figures make of it."""

    source: str
    place: str
    what: str
    printed: str
    computed: float
    follows: bool
    note: str = ""


def span_of(figure: StudyFigure) -> Span:
    """Return what a printed figure may stand for: half of its last digit to either side."""
    decimals = len(figure.printed.partition(".")[2])
    half = 0.5 * 10.0**-decimals
    return Span(low=figure.value - half, high=figure.value + half)


def tables() -> list[Table]:
    """Return tables 1 to 7 of the scaling study, from its data; table 7 computed from the others."""
    measured = of_study(MICROWAY)
    made = []
    for number, model in enumerate(_ORDER, 1):
        rows: list[tuple[Cell, ...]] = [
            (each.gpus, int(each.batch or 0), each.minutes_per_epoch, int(each.epochs or 0), each.precision)
            for each in sorted(measured, key=lambda each: each.gpus or 0)
            if each.benchmark == model
        ]
        columns = ("# GPUs", "Batch Size", "Average Time per Epoch (min)", "Number of Epochs", "Precision")
        made.append(Table(title=f"Table {number}. {_TITLES[model]}", columns=columns, rows=tuple(rows)))
    printed = {(check.what): check for check in _table_7()}
    rows = []
    for model in ("resnet", "ssd", "maskrcnn", "gnmt", "transformer", "ncf"):
        pair = [printed[f"{model}, {gpus} GPUs"] for gpus in (4, 8)]
        rows.append((model, *(cell for check in pair for cell in (check.computed, check.printed))))
    made.append(
        Table(
            title="Table 7. Speed Ups for all the benchmarks going from 1 to 4 to 8 GPUs",
            columns=("Benchmark", "1-4 GPU", "1-4 GPU, printed", "1-8 GPU", "1-8 GPU, printed"),
            rows=tuple(rows),
            note="Computed from tables 1 to 6: minutes per epoch times epochs on 1 GPU over that on several.",
        )
    )
    return made


def checks() -> list[Check]:
    """Return every printed figure of the studies that others of the same study determine."""
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
    """Return what does not follow, as a table."""
    failing = [check for check in checks() if not check.follows]
    return Table(
        title="Printed figures that do not follow from the others",
        columns=("study", "place", "figure", "printed", "computed", "note"),
        rows=tuple(
            (each.source, each.place, each.what, each.printed, shown(each.computed), each.note) for each in failing
        ),
    )


def _figures(source: str, **wanted: object) -> list[StudyFigure]:
    return [
        figure
        for figure in load_figures()
        if figure.source == source and all(getattr(figure, name) == value for name, value in wanted.items())
    ]


def _check(figure: StudyFigure, what: str, computed: Span, note: str = "") -> Check:
    middle = (computed.low + computed.high) / 2
    follows = computed.meets(span_of(figure))
    if not follows and not note:
        decimals = len(figure.printed.partition(".")[2])
        cut = int(middle * 10**decimals) / 10**decimals
        note = "cut off, not rounded" if abs(cut - figure.value) < 10.0 ** -(decimals + 3) else ""
    return Check(
        source=figure.source,
        place=figure.place,
        what=what,
        printed=figure.printed,
        computed=middle,
        follows=follows,
        note=note if not follows else "",
    )


def _totals() -> dict[tuple[str, int | None], Span]:
    # Minutes per epoch times epochs of tables 1 to 6.
    parts: dict[tuple[str, int | None], dict[str, StudyFigure]] = {}
    for figure in _figures(MICROWAY):
        if figure.place.startswith("table") and figure.quantity in ("minutes_per_epoch", "epochs"):
            parts.setdefault((figure.model, figure.gpus), {})[figure.quantity] = figure
    return {key: span_of(found["minutes_per_epoch"]) * found["epochs"].value for key, found in parts.items()}


def _table_7() -> Iterator[Check]:
    totals = _totals()
    for figure in _figures(MICROWAY, place="table 7", quantity="speedup"):
        computed = totals[figure.model, 1] / totals[figure.model, figure.gpus]
        yield _check(figure, f"{figure.model}, {figure.gpus} GPUs", computed)


def _running_text() -> Iterator[Check]:
    # Check what the text says next to the tables: about, more than, less than.
    totals = _totals()
    for figure in _figures(MICROWAY, place="text"):
        if figure.gpus is None or (figure.model, figure.gpus) not in totals:
            continue
        total = totals[figure.model, figure.gpus]
        if figure.quantity == "speedup":
            yield _check(figure, f"{figure.model}, {figure.gpus} GPUs", totals[figure.model, 1] / total)
        elif figure.quantity == "training_minutes":
            follows = {">": total.high > figure.value, "<": total.low < figure.value}.get(
                figure.relation, total.meets(span_of(figure))
            )
            yield Check(
                source=MICROWAY,
                place="text",
                what=f"{figure.model}, {figure.gpus} GPUs, minutes {figure.relation}",
                printed=figure.printed,
                computed=(total.low + total.high) / 2,
                follows=follows,
            )


def _memory() -> Iterator[Check]:
    # Compare GPU 0 with the others, and each batch with the smallest.
    place = "backup: memory usage"
    memory = {
        (figure.model, figure.batch, figure.context): figure
        for figure in _figures(BARC, place=place, quantity="memory_training")
    }
    for figure in _figures(BARC, place=place):
        first = memory.get((figure.model, figure.batch, "GPU0"))
        if figure.quantity == "memory_gpu0_more_percent" and first is not None:
            ratio = span_of(first) / span_of(memory[figure.model, figure.batch, "GPUx"])
        elif figure.quantity == "memory_growth_percent" and first is not None:
            ratio = span_of(first) / span_of(memory[figure.model, 16, "GPU0"])
        else:
            continue
        percent = Span(low=(ratio.low - 1) * 100, high=(ratio.high - 1) * 100)
        yield _check(figure, f"{figure.model}, batch {figure.batch}, {figure.context}", percent)


def _layers() -> Iterator[Check]:
    # Check that convolution, Inception and fully connected layers add up to the network's, a module being several.
    by_model: dict[str, dict[str, StudyFigure]] = {}
    for figure in _figures(BARC, place="slide: workloads"):
        by_model.setdefault(figure.model, {})[figure.quantity] = figure
    for model, parts in by_model.items():
        if parts["inception_layers"].value:
            # How many layers a module counts for is not printed.
            continue
        total = parts["conv_layers"].value + parts["fc_layers"].value
        yield _check(parts["layers"], f"layers of {model}", Span(low=total, high=total))


def _precision_and_scaling() -> Iterator[Check]:
    # Check that the gain of fp16 on 16 GPUs follows from the gain on one and from both speed-ups.
    for framework in ("MXNet", "Caffe2"):
        gains = {
            figure.relation: figure
            for figure in _figures(MULTINODE, quantity="gain_percent")
            if framework in figure.context
        }
        speed = {
            figure.precision: span_of(figure)
            for figure in _figures(MULTINODE, quantity="speedup", gpus=16)
            if framework in figure.context
        }
        top = span_of(gains["<="])
        factor = Span(low=1 + top.low / 100, high=1 + top.high / 100) * (speed["fp16"] / speed["fp32"])
        computed = Span(low=(factor.low - 1) * 100, high=(factor.high - 1) * 100)
        yield _check(gains[">="], f"{framework}, fp16 on 16 GPUs by the largest gain and both speed-ups", computed)
    headline = {figure.relation: figure for figure in _figures(BARC, model="all", place="slide: NCCL overhead")}
    every = [f for f in _figures(BARC, place="slide: NCCL overhead") if f.relation == "="]
    for relation, figure in (
        (">=", min(every, key=lambda f: f.value)), ("<=", max(every, key=lambda f: f.value)),
    ):  # fmt: skip
        yield _check(headline[relation], f"NCCL overhead {relation}", span_of(figure))


def _servers() -> Iterator[Check]:
    # Yield figures of all GPUs of a server together, from those of one.
    single = {
        (figure.system, figure.quantity): span_of(figure)
        for figure in _figures(DELL, place="slide: PCIe and SXM2", gpus=1)
    }
    for figure in _figures(DELL, place="backup: GPU scaling"):
        one = single.get(("Tesla V100 PCIe", figure.quantity))
        if "xV100 " not in figure.system or figure.gpus is None or one is None:
            continue
        if figure.quantity == "gpu_memory":
            # Two sizes are sold.
            one = Span(low=16.0, high=32.0)
        elif figure.quantity == "interconnect_bandwidth":
            yield _check(figure, f"{figure.system}, {figure.quantity}", one)
            continue
        else:
            sxm = single["Tesla V100 SXM2", figure.quantity]
            ends = [one * figure.gpus, sxm * figure.gpus]
            nearest = min(ends, key=lambda span: abs(span.low - figure.value))
            yield _check(
                figure,
                f"{figure.system}, {figure.quantity}",
                nearest,
                "between the figures of PCIe and SXM2, neither of which it is a multiple of",
            )
            continue
        yield _check(figure, f"{figure.system}, {figure.quantity}", one * figure.gpus)


def _contradictions() -> Iterator[Check]:
    # Yield statements of one study that exclude each other.
    for figure in _figures(DELL, place="slide: time to accuracy", model="maskrcnn"):
        yield Check(
            source=DELL,
            place=figure.place,
            what="longest training, minutes; the next line says under 8 hours for all models",
            printed=figure.printed,
            computed=float(_WORK_DAY_MINUTES),
            follows=figure.value < _WORK_DAY_MINUTES,
            note="the two lines exclude each other",
        )
    for figure in _figures(BARC, quantity="largest_batch", model="resnet"):
        yield Check(
            source=BARC,
            place=figure.place,
            what="largest batch of ResNet",
            printed=figure.printed,
            computed=64.0,
            follows=False,
            note="a backup slide says 64 and 128 in one sentence",
        )
    yield from _datasets()


def _datasets() -> Iterator[Check]:
    # Check weak scaling: twice the GPUs, twice the images.
    sizes: Iterable[StudyFigure] = _figures(BARC, place="slide: datasets", quantity="train_samples")
    weak = {figure.gpus: figure for figure in sizes if figure.gpus}
    for gpus, figure in weak.items():
        computed = weak[1].value * (gpus or 1)
        # "1M" and "2M" are printed to a million, the others to a thousand.
        unit = 1_000_000 if figure.value % 1_000_000 == 0 else 1_000
        yield Check(
            source=BARC,
            place=figure.place,
            what=f"images on {gpus} GPUs, weak scaling",
            printed=figure.printed,
            computed=computed,
            follows=abs(computed - figure.value) <= unit / 2,
        )
