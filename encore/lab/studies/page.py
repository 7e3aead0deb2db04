"""The report of a study: Markdown, one HTML page, and each table and plot as CSV and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean

from encore import files
from encore.errors import EncoreError
from encore.lab.scaling.printed_tables import checks
from encore.lab.studies import traffic
from encore.lab.studies.answers import Answer, answer
from encore.lab.studies.definition import Study
from encore.lab.studies.measuring import STUDY, Folder, summary
from encore.lab.studies.results import Result, read
from encore.results.report import pages
from encore.results.table import Table, shown

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, kw_only=True)
class Page:
    """Everything that the report shows."""

    title: str
    about: str
    created: str
    state: str
    mark: str
    """What has to be said of every figure; empty on GPUs."""
    busy: str
    """At how many points other programs took much of the machine; empty: at none."""
    intervals: str
    """What the intervals are made of."""
    machine: str
    answers: tuple[Answer, ...]
    passes: Table
    """Each point, what each of its passes took, and how much other programs did meanwhile."""
    why: tuple[Table, ...]
    seeds: tuple[Table, ...]
    """What does not follow in the study's own printed figures."""


def build(folder: Folder) -> Page:
    """Read the points that are done, and answer the study's questions."""
    study, results = folder.study, read(folder)
    if not results:
        raise EncoreError(f"no point of {folder.path} is measured", remedy="encore study run --resume FOLDER")
    machine = files.read_json(folder.path / STUDY).get("machine", {})
    return Page(
        title=study.title,
        about=study.about,
        created=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        state=summary(folder),
        mark=_mark(study),
        busy=_busy(results),
        intervals=_intervals(results),
        machine=_machine(machine),
        answers=tuple(answer(study, each, results, number) for number, each in enumerate(study.questions, 1)),
        passes=_passes(study, results),
        why=tuple(_why(study, results)),
        seeds=tuple(_inconsistent(study)),
    )


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
    """Return the table of all points, with a column for each pass."""
    names = list(study.grid)
    rows = []
    for each in results:
        if each.is_timed:
            means = [fmean(one["step_seconds"]) for one in each.passes]
            missing = [None] * (study.passes - len(means))
            apart = max(means) / min(means) if len(means) > 1 else None
            rows.append(
                (*(each.axes[name] for name in names), *means, *missing, apart, each.others[0] if each.others else None)
            )
    numbers = [f"pass {number}, s a step" for number in range(1, study.passes + 1)]
    columns = (*names, *numbers, "longest over shortest", "cores of other programs")
    return Table(title="Every point and its passes", columns=columns, rows=tuple(rows)).filled()


def _machine(machine: dict[str, object]) -> str:
    gpus = machine.get("gpus") or []
    names = sorted({str(each.get("name")) for each in gpus}) if isinstance(gpus, list) else []
    cpu = machine.get("cpu_model") or machine.get("cpu") or "CPU"
    return f"{len(gpus) if isinstance(gpus, list) else 0} GPUs ({', '.join(names)}), {cpu}" if names else str(cpu)


def _why(study: Study, results: Sequence[Result]) -> list[Table]:
    """Return layers, weights, gradient bytes, and what the links carry."""
    networks = {str(each.axes.get("network", "")): each for each in results}
    rows = tuple(
        (
            name, each.found["network"]["convolutions"], each.found["network"]["fully_connected"],
            len(each.found["network"]["sizes"]), each.found["network"]["weights"], each.gradient_bytes / 1e6,
            "x".join(map(str, each.found["network"]["output"][1:])),
        )
        for name, each in networks.items()
    )  # fmt: skip
    columns = ("network", "convolutions", "fully connected", "arrays", "weights", "gradients, MB", "output")
    found = [Table(title="What an update has to move", columns=columns, rows=rows)]
    if study.links:
        links = traffic.links_of(study.links)
        sizes = {
            name: [4 * int(size) for size in each.found["network"]["sizes"].values()] for name, each in networks.items()
        }
        found.append(traffic.table(links, sizes, links.gpus))
    return found


def _inconsistent(study: Study) -> list[Table]:
    """Return which printed figures of this study do not follow from its others."""
    if study.published is None:
        return []
    ours = [each for each in checks() if each.source == study.published.source]
    failing = [each for each in ours if not each.follows]
    rows = tuple((each.place, each.what, each.printed, shown(each.computed), each.note) for each in failing)
    columns = ("place", "figure", "printed", "computed", "note")
    title = f"Printed figures of the study that do not follow from its others: {len(failing)} of {len(ours)}"
    return [Table(title=title, columns=columns, rows=rows)]


def write(page: Page, folder: Path) -> list[Path]:
    """Write the page into ``folder``; return the files."""
    contents = {"report.html": render(page, "study.html.j2"), "report.md": render(page, "study.md.j2")}
    for number, each in enumerate(page.answers, 1):
        for place, table in enumerate((*each.tables, *each.unmeasured), 1):
            contents[f"question_{number}_{place}.csv"] = table.as_csv()
        for figure in each.figures:
            contents[f"{figure.key}.svg"] = figure.alone()
    contents["passes.csv"] = page.passes.as_csv()
    for number, table in enumerate(page.why, 1):
        contents[f"why_{number}.csv"] = table.as_csv()
    return pages.write(contents, folder)


def render(page: Page, template: str) -> str:
    """Return the page through one of the templates of this package."""
    return pages.render(TEMPLATES, template, page=page)
