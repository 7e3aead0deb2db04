"""The report of a study: Markdown, one HTML page, and each table and plot as CSV and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from encore import files
from encore.errors import EncoreError
from encore.results import pages
from encore.results.studies import checks
from encore.results.tables import Table, shown
from encore.studies import traffic
from encore.studies.answers import Answer, answer
from encore.studies.definition import Study
from encore.studies.measuring import STUDY, Folder, summary
from encore.studies.results import Result, read

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
    machine: str
    answers: tuple[Answer, ...]
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
        machine=_machine(machine),
        answers=tuple(answer(study, each, results, number) for number, each in enumerate(study.questions, 1)),
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
        for place, table in enumerate(each.tables, 1):
            contents[f"question_{number}_{place}.csv"] = table.as_csv()
        for figure in each.figures:
            contents[f"{figure.key}.svg"] = figure.alone()
    for number, table in enumerate(page.why, 1):
        contents[f"why_{number}.csv"] = table.as_csv()
    return pages.write(contents, folder)


def render(page: Page, template: str) -> str:
    """Return the page through one of the templates of this package."""
    return pages.render(TEMPLATES, template, page=page)
