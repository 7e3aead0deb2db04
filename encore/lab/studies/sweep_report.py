"""The report of a sweep: throughput, plots, and all that is said of its runs.

from encore.lab.studies.sweep_report import tables_of, write
results = measured(folder)
write(folder, results, tables_of(folder, results))
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from encore.lab.scaling.sharing import speed_up
from encore.lab.studies import releases
from encore.lab.studies.folder import Folder
from encore.lab.studies.sweep import Sweep
from encore.lab.studies.throughput import Result, devices, predictions, speed_ups, throughput_table
from encore.results.report.report import build_report, write_files
from encore.results.table import Table


def tables_of(folder: Folder[Sweep], results: Sequence[Result], predict: Sequence[int] = ()) -> list[Table]:
    """Return the throughput, next to that of published releases, and what is predicted of other numbers of GPUs."""
    tables = [throughput_table(results)]
    if folder.study.images:
        tables.append(releases.releases_table(results, releases.published(folder.study.request.name)))
    if predict:
        tables.append(predictions(folder, results, predict))
    return tables


def write(folder: Folder[Sweep], results: Sequence[Result], tables: Sequence[Table]) -> list[Path]:
    """Write FOLDER/report with these tables and all that `encore report` says of the runs that have ended."""
    runs = [folder.run_of(each.point) for each in results if each.state == "done"]
    report = build_report([run.path for run in runs if run is not None])
    figure = (
        releases.releases_figure(tables[1])
        if folder.study.images
        else speed_up(speed_ups(results), tables[0], devices(results))
    )
    drawn = (figure, *report.figures) if figure else report.figures
    return write_files(replace(report, tables=(*tables, *report.tables), figures=drawn), folder.path / "report")
