"""Tables of the scaling study, its printed figures that do not follow from others, and tables of measurements."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError
from encore.lab.scaling.printed_tables import MICROWAY, Span, checks, rounding_range, tables
from encore.results.compare.run_set import load_run_sets
from encore.results.published.published import load_figures, load_published, select
from encore.results.report.figures import all_figures
from encore.results.report.measurements import (
    Measurement,
    all_tables,
    measurement_of,
    published_measurement,
    relative_to,
    study_measurements,
)
from encore.results.table import Table
from tests.results.result_logs import resnet_v07, write_set

Record = Callable[[str, object], None]


def plain(tables: Iterable[Table]) -> dict[str, object]:
    return {table.title: [table.columns, table.note, *table.rows] for table in tables}


def test_tables_of_the_study_and_printed_figures(recorded: Record) -> None:
    results = checks()
    figure = next(figure for figure in load_figures() if figure.printed == "4.080")
    recorded("study.json", {
        "tables": plain(tables()),
        "not following": [
            [check.source, check.place, check.what, check.printed, check.computed, check.note]
            for check in results
            if not check.follows
        ],
        "with a note": [check.what for check in results if check.note],
        "checked": len(results),
        "span of 4.080": vars(rounding_range(figure)),
    })  # fmt: skip
    assert [Span(low=1, high=2).overlaps(Span(low=low, high=3)) for low in (2, 2.1)] == [True, False]


def measurement(benchmark: str, gpus: int, minutes: float, **values: Any) -> Measurement:
    defaults = {"label": f"{benchmark} on {gpus}", "system": "V100", "epochs": 10.0, "minutes_per_epoch": minutes / 10}
    return Measurement(benchmark=benchmark, gpus=gpus, minutes=minutes, **{**defaults, **values})


def test_tables_and_figures_of_measurements(recorded: Record) -> None:
    # Speed-up, efficiency, a baseline, releases and precisions; published cells; figures of the study
    rows = [
        measurement("resnet", 1, 100.0),
        measurement("resnet", 8, 20.0, batch=512.0),
        measurement("ssd", 4, 7.0),
        measurement("bert", 8, 21.0, release="20.03", precision="fp16", label="base"),
        measurement("bert", 8, 10.0, release="20.06", precision="fp16", label="new"),
        measurement("ncf", 1, 30.0, precision="fp32"),
        measurement("ncf", 1, 10.0, precision="fp16"),
    ]
    cells = select(load_published(), benchmark="gnmt", submitter="NVIDIA", system="dgx1_ngc")
    figures = all_figures(study_measurements(MICROWAY), "resnet, 1 GPUs")
    published = [published_measurement(cell) for cell in cells]
    recorded("measurements.json", {
        "made": plain(all_tables(rows, "BASE")), "published": plain(all_tables(published)),
        "figures": {plot.key: [plot.title, len(plot.table.rows)] for plot in (*figures, *all_figures(rows, "base"))},
    })  # fmt: skip
    recorded("figures.svg", "\n".join(plot.svg for plot in (*figures[1:3], *all_figures(rows, "base")[-1:])))
    assert "var(--series-1" in figures[0].standalone_svg()


def test_figure_of_one_quality_over_one_unit(tmp_path: Path, recorded: Record) -> None:
    # Loss over epochs, over samples, and over neither in one log; accuracy after two epochs
    loss = [
        resnet_v07(60.0 + n, quality=(2.8, 2.68), start_ms=1_683_000_000_000, submission_benchmark="gpt3")
        for n in (1, 2)
    ]
    by_samples = [re.sub(r'"epoch_num": (\d+)', r'"samples_count": \g<1>000', text) for text in loss]
    sets = {
        "a": loss, "b": by_samples, "c": [by_samples[0], loss[1].replace('"epoch_num"', '"other"')],
        "d": [resnet_v07()], "e": [resnet_v07(24.0 + n, submission_platform="2xNVIDIA DGX A100") for n in (0, 1)],
    }  # fmt: skip
    for name, texts in sets.items():
        write_set(tmp_path / name, texts)
    rows = [measurement_of(side) for side in load_run_sets(tmp_path)]
    recorded("qualities.json", {
        "measured": [{**vars(row), "curves": [vars(curve) for curve in row.curves]} for row in rows],
        "figures": plain(plot.table for plot in all_figures(rows)), "tables": plain(all_tables(rows)),
    })  # fmt: skip


def test_unknown_baseline_is_an_error_with_a_suggestion() -> None:
    name, part = "v0.7/NVIDIA/dgx1_ngc20.06_mxnet", "v0.7/NVIDIA"
    rows = [measurement("resnet", 8, 100.0, label="base"), measurement("resnet", 8, 50.0, label="new")]
    assert [row[4] for row in relative_to(rows, "BASE").rows] == [1.0, 2.0]
    with pytest.raises(EncoreError, match="did you mean 'base'"):
        relative_to(rows, "bas")
    for label, published in {"v0.7/NVIDIA/dgxa100_ngc20.06_mxnet": part, "own": name}.items():
        for baseline in (name, "DGX1_ngc20.06_mxnet"):
            with pytest.raises(EncoreError) as error:
                relative_to([measurement("resnet", 8, 100.0, label=label)], baseline)
            assert error.value.hint == f"add the published system: --published {published} --baseline {name}"
    done = CliRunner().invoke(app, ["report", "--published", part, "--baseline", name])
    assert (done.exit_code, f"Score relative to {name}" in done.stdout) == (0, True)


def test_table_as_markdown_and_csv() -> None:
    table = Table(title="t", columns=("a", "b"), rows=(("x|y", 1.5), ("z", None)), formats={"b": ".3f"})
    assert table.as_markdown().splitlines() == ["| a | b |", "|---|---:|", "| x/y | 1.500 |", "| z |  |"]
    assert table.as_csv() == "a,b\nx|y,1.5\nz,\n"


def test_text_cells_are_not_formulas_in_csv() -> None:
    cells = ("=1+1", "+cmd", "-a", "@a", "\t=1", "-1.5", "+2", "a=b", -1.5)
    table = Table(title="t", columns=("a",), rows=tuple((cell,) for cell in cells))
    rows = [row[0] for row in csv.reader(io.StringIO(table.as_csv()))][1:]
    assert rows == ["'=1+1", "'+cmd", "'-a", "'@a", "'\t=1", "-1.5", "+2", "a=b", "-1.5"]


def test_command_prints_the_study() -> None:
    text, plain_json = (CliRunner().invoke(app, ["report", "--study", MICROWAY, *form]) for form in ([], ["--json"]))
    assert (text.exit_code, "Table 7" in text.output) == (0, True)
    assert json.loads(plain_json.output)[0]["title"].startswith("Table 1")
