"""The report of a sweep: throughput, plots, and all that is said of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from encore.lab.scaling import releases
from encore.lab.scaling.plots import speed_up
from encore.lab.scaling.sweep_folder import Study
from encore.lab.scaling.throughput import devices, measured, speed_ups, throughput_table
from encore.results.report.report import Report, build_report, write_files
from encore.results.table import Table


def write_study_report(study: Study, extra: Sequence[Table] = ()) -> list[Path]:
    """Write STUDY/report: the throughput, and all that `encore report` says of the runs that have ended."""
    results = measured(study)
    runs = [study.run_of(each.point) for each in results if each.state == "done"]
    table = throughput_table(results)
    report: Report = build_report([run.path for run in runs if run is not None])
    figure = speed_up(speed_ups(results), table, devices(results))
    if study.grid.images:
        figure = releases.releases_figure(next(each for each in extra if each.title == releases.TITLE))
    report = replace(
        report,
        tables=(table, *extra, *report.tables),
        figures=(*((figure,) if figure else ()), *report.figures),
    )
    return write_files(report, study.path / "report")
