"""Tables 1 to 7 of the scaling study again, each printed figure that does not follow, and tables of any runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError
from encore.lab.scaling.printed_tables import MICROWAY, Span, checks, span_of, tables
from encore.results.compare.sides import load_sides
from encore.results.published.published import load_figures, load_published, select
from encore.results.report.figures import all_figures, time_over_gpus
from encore.results.report.measurements import Measurement, of_published, of_side, of_study
from encore.results.report.tables import (
    by_precision,
    by_release,
    quality_table,
    relative_to,
    scaling_efficiency,
    speed_up_table,
    synopsis,
)
from encore.results.table import Table
from tests.results.result_logs import START_MS, resnet_v07, write_set

PRINTED = {
    "Table 1": [(1, 512, 16.21, 83), (4, 1664, 4.56, 63), (8, 1664, 2.2002, 63)],
    "Table 2": [(1, 2, 179.183, 11), (4, 4, 44.315, 18), (8, 4, 24.9895, 13)],
    "Table 3": [(1, 152, 4.080, 49), (4, 152, 1.115, 49), (8, 152, 0.5628, 49)],
    "Table 4": [(1, 512, 39.98, 5), (4, 512, 12.31, 5), (8, 1024, 6.4, 3)],
    "Table 5": [(1, 5120, 60.34, 8), (4, 5120, 22.38, 4), (8, 5120, 7.648, 4)],
    "Table 6": [(1, 1048576, 0.135384615, 13), (4, 1048576, 0.076923077, 13), (8, 1048576, 0.048461538, 13)],
}


def test_tables_1_to_6_as_printed() -> None:
    made = {table.title.partition(".")[0]: table for table in tables()}
    for name, rows in PRINTED.items():
        assert [row[:4] for row in made[name].rows] == rows
        assert {row[4] for row in made[name].rows} == {"fp16"}


def test_table_7_is_computed_from_the_others() -> None:
    (table,) = (each for each in tables() if each.title.startswith("Table 7"))
    computed = {row[0]: (row[1], row[3]) for row in table.rows}
    assert computed["resnet"] == pytest.approx((16.21 * 83 / (4.56 * 63), 16.21 * 83 / (2.2002 * 63)), rel=1e-3)
    assert computed["ssd"] == pytest.approx((3.659, 7.249), abs=1e-3)
    assert computed["maskrcnn"] == pytest.approx((2.471, 6.067), abs=1e-3)
    assert computed["transformer"] == pytest.approx((5.392, 15.779), abs=1e-3)


# (study, place, figure): printed, computed. Everything else that can be computed follows.
NOT_FOLLOWING = {
    ("microway-dgx1-scaling", "table 7", "resnet, 4 GPUs"): ("4.76", 4.683),
    ("microway-dgx1-scaling", "table 7", "maskrcnn, 8 GPUs"): ("6.066", 6.067),
    ("microway-dgx1-scaling", "table 7", "gnmt, 4 GPUs"): ("3.24", 3.248),
    ("microway-dgx1-scaling", "table 7", "ncf, 8 GPUs"): ("2.789", 2.794),
    ("barc2019-dgx1", "backup: memory usage", "resnet, batch 32, GPU0 against GPUx"): ("6.2", 0.533),
    ("barc2019-dgx1", "backup: memory usage", "inception-v3, batch 64, GPU0 against GPUx"): ("2.4", 2.134),
    ("barc2019-dgx1", "slide: workloads", "layers of lenet"): ("5", 4),
    ("barc2019-dgx1", "slide: workloads", "layers of resnet"): ("110", 108),
    ("barc2019-dgx1", "slide: batch size", "largest batch of ResNet"): ("128", 64),
    ("dell-demystifying", "backup: GPU scaling", "4xV100 1U server, tensor_performance"): ("480", 500),
    ("dell-demystifying", "backup: GPU scaling", "8xV100 4U server, tensor_performance"): ("960", 1000),
    (
        "dell-demystifying",
        "slide: time to accuracy",
        "longest training, minutes; the next line says under 8 hours for all models",
    ): ("540", 480),
}


@pytest.mark.parametrize("where", NOT_FOLLOWING)
def test_a_printed_figure_that_does_not_follow(where: tuple[str, str, str]) -> None:
    (found,) = (check for check in checks() if (check.source, check.place, check.what) == where)
    printed, computed = NOT_FOLLOWING[where]
    assert not found.follows
    assert found.printed == printed
    assert found.computed == pytest.approx(computed, rel=1e-3)


def test_every_other_figure_follows() -> None:
    every = checks()
    assert len(every) > 60
    failing = {(check.source, check.place, check.what) for check in every if not check.follows}
    assert failing == set(NOT_FOLLOWING)


def test_a_cut_figure_is_called_that() -> None:
    (found,) = (check for check in checks() if check.what == "gnmt, 4 GPUs" and check.place == "table 7")
    assert found.note == "cut off, not rounded"


def test_spans_of_printed_figures() -> None:
    figure = next(f for f in load_figures() if f.printed == "4.080")
    assert (span_of(figure).low, span_of(figure).high) == pytest.approx((4.0795, 4.0805))
    assert Span(low=1, high=2).meets(Span(low=2, high=3))
    assert not Span(low=1, high=2).meets(Span(low=2.1, high=3))


# --- any set of runs --------------------------------------------------------------------------------------


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
        **settings,  # type: ignore[arg-type]
    )


def test_speed_up_and_efficiency() -> None:
    rows = [measured("resnet", 1, 100.0), measured("resnet", 8, 20.0), measured("ssd", 4, 7.0)]
    assert speed_up_table(rows).rows == (("resnet", "V100", 1, 8, 5.0),)
    assert scaling_efficiency(rows).rows[0][4] == pytest.approx(5 / 8)


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
        assert refused.value.remedy == f"add the published system: --published {given} --baseline {name}"
    done = CliRunner().invoke(app, ["tables", "--published", part, "--baseline", name])
    assert done.exit_code == 0, done.output
    assert f"Score relative to {name}" in done.stdout


def test_by_release_and_by_precision() -> None:
    rows = [
        measured("bert", 8, 21.0, release="20.03", precision="fp16"),
        measured("bert", 8, 10.0, release="20.06", precision="fp16"),
    ]
    assert [(row[2], row[4]) for row in by_release(rows).rows] == [
        ("20.03", 1.0),
        ("20.06", pytest.approx(2.1)),
    ]
    rows = [measured("ssd", 1, 30.0, precision="fp32"), measured("ssd", 1, 10.0, precision="fp16")]
    assert [(row[2], row[4]) for row in by_precision(rows).rows] == [("fp32", 1.0), ("fp16", 3.0)]


def test_published_cells_by_release() -> None:
    cells = [
        cell
        for cell in select(load_published(), benchmark="gnmt", submitter="NVIDIA", system="dgx1_ngc")
        if cell.hardware.accelerators == 8
    ]
    found = by_release([of_published(cell) for cell in cells])
    assert [row[2] for row in found.rows] == ["18.11", "19.05", "20.06"]


def test_table_forms() -> None:
    table = Table(title="t", columns=("a", "b"), rows=(("x|y", 1.5), ("z", None)), formats={"b": ".3f"})
    assert table.as_markdown().splitlines() == ["| a | b |", "|---|---:|", "| x/y | 1.500 |", "| z |  |"]
    assert table.as_csv() == "a,b\nx|y,1.5\nz,\n"


def test_figures_have_the_data_behind_them() -> None:
    figures = all_figures(of_study(MICROWAY), "resnet, 1 GPUs")
    assert [figure.key for figure in figures] == ["time", "time-short", "efficiency", "relative"]
    time = time_over_gpus(of_study(MICROWAY))[0]
    assert "the short ones magnified" in figures[1].title
    assert len(time.table.rows) == 18
    assert "var(--series-1" in time.alone()
    assert time.svg == time_over_gpus(of_study(MICROWAY))[0].svg, "the same data give the same file"


def test_sets_of_logs_fill_the_tables(tmp_path: Path) -> None:
    for name, platform, minutes in (("one", "1xNVIDIA DGX A100", 40.0), ("two", "2xNVIDIA DGX A100", 24.0)):
        texts = [resnet_v07(minutes + n, start_ms=START_MS + 10**7 * n, submission_platform=platform) for n in range(5)]
        write_set(tmp_path / name, texts)
    rows = [of_side(side) for side in load_sides(tmp_path)]
    assert [(row.gpus, row.minutes) for row in rows] == [(8, 42.0), (16, 26.0)]
    assert speed_up_table(rows).rows[0][4] == pytest.approx(42 / 26)
    assert len(quality_table(rows, "value", "epochs").rows) == 20
    assert synopsis(rows)[0].title == "Synopsis of resnet"


def test_a_figure_is_of_one_quality_over_one_unit(tmp_path: Path) -> None:
    """Sets of a loss that count epochs, samples, and neither in one of the logs; a set of two epochs of an accuracy."""

    def logs(name: str, count: str, *texts: str) -> None:
        write_set(tmp_path / name, [re.sub(r'"epoch_num": (\d+)', count, text) for text in texts])

    loss = [
        resnet_v07(60.0 + n, quality=(2.8, 2.68), start_ms=1_683_000_000_000, submission_benchmark="gpt3")
        for n in (1, 2)
    ]
    logs("a", r'"epoch_num": \1', *loss)
    logs("b", r'"samples_count": \g<1>000', *loss)
    logs("c", r'"samples_count": \g<1>000', loss[0], loss[1].replace('"epoch_num"', '"other"'))
    logs("d", r'"epoch_num": \1', resnet_v07())
    rows = [of_side(side) for side in load_sides(tmp_path)]
    assert [{curve.over for curve in row.curves} for row in rows] == [
        {"epochs"},
        {"samples"},
        {"evaluations"},
        {"epochs"},
    ]
    figures = {each.key: each for each in all_figures(rows)}
    assert [(key, each.title) for key, each in figures.items()] == [
        ("quality-gpt3-epochs", "Log perplexity over epochs: gpt3"),
        ("quality-gpt3-samples", "Log perplexity over samples: gpt3"),
        ("quality-gpt3-evaluations", "Log perplexity over evaluations: gpt3"),
        ("quality-resnet", "Top-1 accuracy over epochs: resnet"),
    ]
    assert [row[3] for row in figures["quality-gpt3-samples"].table.rows] == [4000, 8000, 4000, 8000]
    assert "log perplexity" in figures["quality-gpt3-samples"].svg
    assert synopsis(rows[1:2])[0].columns == ("system", "batch", "samples", "minutes")


def test_the_command_prints_the_study() -> None:
    shown = CliRunner().invoke(app, ["tables", "--study", MICROWAY])
    assert shown.exit_code == 0
    assert "Table 7" in shown.output
    found = json.loads(CliRunner().invoke(app, ["tables", "--study", MICROWAY, "--json"]).output)
    assert found[0]["title"].startswith("Table 1")
    wrong = CliRunner().invoke(app, ["tables", "--study", "microway-dgx1"])
    assert isinstance(wrong.exception, EncoreError)
    assert MICROWAY in str(wrong.exception)


def test_the_archive_s_scaling_and_releases(public_logs: Path) -> None:
    rows = [of_side(side) for side in load_sides(public_logs / "v0.7" / "NVIDIA")]
    scaled = {(row[0], row[2], row[3]): row[4] for row in scaling_efficiency(rows).rows}
    assert scaled["resnet", 8, 16] == pytest.approx(39.7798 / 23.7526 / 2, rel=1e-3)
    rows += [of_side(side) for side in load_sides(public_logs / "v0.6" / "NVIDIA")]
    gained = {(row[0], row[2]): row[4] for row in by_release(rows).rows}
    assert gained["gnmt", "20.06"] == pytest.approx(20.553 / 18.502, rel=1e-3)
