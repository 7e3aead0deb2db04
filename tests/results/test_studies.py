"""Tables 1 to 7 of the scaling study again, each printed figure that does not follow, and tables of any runs."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError
from encore.lab.scaling.printed_tables import MICROWAY, Span, checks, span_of, tables
from encore.results.compare.sides import load_sides
from encore.results.published.published import load_figures, load_published, select
from encore.results.report.figures import all_figures
from encore.results.report.measurements import (
    Measurement,
    all_tables,
    by_release,
    of_published,
    of_side,
    of_study,
    relative_to,
    scaling_efficiency,
)
from encore.results.table import Table
from tests.results.result_logs import resnet_v07, write_set

Record = Callable[[str, object], None]


def plain(tables: Iterable[Table]) -> dict[str, object]:
    return {each.title: [each.columns, each.note, *each.rows] for each in tables}


# Of the printed figures that can be computed from others, with the interval that its digits leave.
def test_tables_of_the_study_and_each_printed_figure_that_does_not_follow(recorded: Record) -> None:
    found = checks()
    failing = [
        [each.source, each.place, each.what, each.printed, each.computed, each.note]
        for each in found
        if not each.follows
    ]
    cut_off = [each.what for each in found if each.note]
    figure = next(each for each in load_figures() if each.printed == "4.080")
    recorded("study.json", {
        "tables": plain(tables()), "not following": failing, "with a note": cut_off, "checked": len(found),
        "span of 4.080": vars(span_of(figure)),
    })  # fmt: skip
    assert [Span(low=1, high=2).meets(Span(low=low, high=3)) for low in (2, 2.1)] == [True, False]


# Speed-up, efficiency, a baseline, releases and precisions; published cells; the study's figures.
def test_tables_and_figures_of_any_measurements(recorded: Record) -> None:
    rows = [
        measured("resnet", 1, 100.0),
        measured("resnet", 8, 20.0, batch=512.0),
        measured("ssd", 4, 7.0),
        measured("bert", 8, 21.0, release="20.03", precision="fp16", label="base"),
        measured("bert", 8, 10.0, release="20.06", precision="fp16", label="new"),
        measured("ncf", 1, 30.0, precision="fp32"),
        measured("ncf", 1, 10.0, precision="fp16"),
    ]
    cells = select(load_published(), benchmark="gnmt", submitter="NVIDIA", system="dgx1_ngc")
    figures = all_figures(of_study(MICROWAY), "resnet, 1 GPUs")
    recorded("measurements.json", {
        "made": plain(all_tables(rows, "BASE")), "published": plain(all_tables([of_published(each) for each in cells])),
        "figures": {each.key: [each.title, len(each.table.rows)] for each in (*figures, *all_figures(rows, "base"))},
    })  # fmt: skip
    recorded("figures.svg", "\n".join(each.svg for each in (*figures[1:3], *all_figures(rows, "base")[-1:])))
    assert "var(--series-1" in figures[0].alone()


# Sets of a loss that count epochs, samples, and neither in one of the logs; a set of two epochs of an accuracy.
def test_a_figure_is_of_one_quality_over_one_unit(tmp_path: Path, recorded: Record) -> None:
    loss = [
        resnet_v07(60.0 + n, quality=(2.8, 2.68), start_ms=1_683_000_000_000, submission_benchmark="gpt3")
        for n in (1, 2)
    ]
    by_samples = [re.sub(r'"epoch_num": (\d+)', r'"samples_count": \g<1>000', each) for each in loss]
    sets = {
        "a": loss, "b": by_samples, "c": [by_samples[0], loss[1].replace('"epoch_num"', '"other"')],
        "d": [resnet_v07()], "e": [resnet_v07(24.0 + n, submission_platform="2xNVIDIA DGX A100") for n in (0, 1)],
    }  # fmt: skip
    for name, texts in sets.items():
        write_set(tmp_path / name, texts)
    rows = [of_side(side) for side in load_sides(tmp_path)]
    recorded("qualities.json", {
        "measured": [{**vars(row), "curves": [vars(curve) for curve in row.curves]} for row in rows],
        "figures": plain(each.table for each in all_figures(rows)), "tables": plain(all_tables(rows)),
    })  # fmt: skip


def measured(benchmark: str, gpus: int, minutes: float, **changed: object) -> Measurement:
    settings: dict[str, object] = {
        "label": f"{benchmark} on {gpus}",
        "system": "V100",
        "epochs": 10.0,
        **changed,
    }
    return Measurement(
        benchmark=benchmark,
        gpus=gpus,
        minutes=minutes,
        minutes_per_epoch=minutes / 10,
        **settings,
    )


def test_relative_to_a_baseline() -> None:
    rows = [measured("resnet", 8, 100.0, label="base"), measured("resnet", 8, 50.0, label="new")]
    assert [row[4] for row in relative_to(rows, "BASE").rows] == [1.0, 2.0]
    with pytest.raises(EncoreError, match="did you mean 'base'"):
        relative_to(rows, "bas")


@pytest.mark.parametrize("baseline", ["v0.7/NVIDIA/dgx1_ngc20.06_mxnet", "DGX1_ngc20.06_mxnet"])
def test_a_published_baseline_says_how_to_add_it(baseline: str) -> None:
    name, part = "v0.7/NVIDIA/dgx1_ngc20.06_mxnet", "v0.7/NVIDIA"
    labels = {"v0.7/NVIDIA/dgxa100_ngc20.06_mxnet": part, "own": name}
    for label, given in labels.items():
        with pytest.raises(EncoreError) as refused:
            relative_to([measured("resnet", 8, 100.0, label=label)], baseline)
        assert refused.value.hint == f"add the published system: --published {given} --baseline {name}"
    done = CliRunner().invoke(app, ["report", "--published", part, "--baseline", name])
    assert done.exit_code == 0, done.output
    assert f"Score relative to {name}" in done.stdout


def test_table_forms() -> None:
    table = Table(title="t", columns=("a", "b"), rows=(("x|y", 1.5), ("z", None)), formats={"b": ".3f"})
    assert table.as_markdown().splitlines() == ["| a | b |", "|---|---:|", "| x/y | 1.500 |", "| z |  |"]
    assert table.as_csv() == "a,b\nx|y,1.5\nz,\n"


def test_the_command_prints_the_study() -> None:
    shown = CliRunner().invoke(app, ["report", "--study", MICROWAY])
    assert shown.exit_code == 0
    assert "Table 7" in shown.output
    found = json.loads(CliRunner().invoke(app, ["report", "--study", MICROWAY, "--json"]).output)
    assert found[0]["title"].startswith("Table 1")


@pytest.mark.slow
def test_the_archive_s_scaling_and_releases(public_logs: Path) -> None:
    rows = [of_side(side) for side in load_sides(public_logs / "v0.7" / "NVIDIA")]
    scaled = {(row[0], row[2], row[3]): row[4] for row in scaling_efficiency(rows).rows}
    assert scaled["resnet", 8, 16] == pytest.approx(39.7798 / 23.7526 / 2, rel=1e-3)
    rows += [of_side(side) for side in load_sides(public_logs / "v0.6" / "NVIDIA")]
    gained = {(row[0], row[2]): row[4] for row in by_release(rows).rows}
    assert gained["gnmt", "20.06"] == pytest.approx(20.553 / 18.502, rel=1e-3)
