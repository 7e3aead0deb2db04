"""Published results and the figures of the studies."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError
from encore.results.compare.digest import digests
from encore.results.published.published import load_figures, load_published, load_studies, select, system_of
from encore.results.rules import ROUNDS


def test_every_row_is_read() -> None:
    results = load_published()
    assert len(results) == 2220
    assert {result.round for result in results} == set(ROUNDS)
    assert all(result.runs > 0 for result in results)
    assert sum(result.benchmark is None for result in results) == 3
    assert sum(result.score_minutes is None for result in results) == 8


def test_every_score_is_the_one_that_the_programs_own_scoring_gives() -> None:
    """The digests are made from the logs. Alibaba's of v0.6 and v0.7 have times of a format of their own."""
    published = {
        (f"{each.round}/{each.submitter}/{each.system}", each.benchmark): each.score_minutes
        for each in load_published()
        if each.submitter != "Alibaba"
    }
    made = {
        (side.label, side.benchmark): side.score.estimate if side.score and side.score_is_official else None
        for round_ in ROUNDS
        for side in digests(round_)
        if "/Alibaba/" not in side.label
    }
    assert published.keys() == made.keys()
    # Of v1.1 Azure's Mask R-CNN a sixth log was not available.
    apart = [key for key in made if made[key] != pytest.approx(published[key], abs=0.001)]
    assert apart == [("v1.1/Azure/nd96amsr_a100_v4_ngc21.09_pytorch", "maskrcnn")]


def test_figures_that_the_submitter_published_too() -> None:
    """Per-accelerator hours of NVIDIA's post on v0.7: single-node minutes times 8, over 60."""
    for benchmark, framework, hours in (
        ("resnet", "mxnet", 5.30), ("ssd", "pytorch", 1.36), ("maskrcnn", "pytorch", 10.95),
        ("gnmt", "pytorch", 1.04), ("transformer", "pytorch", 1.05), ("bert", "pytorch", 6.53),
        ("dlrm", "merlin_hugectr", 0.44), ("minigo", "tensorflow", 39.96),
    ):  # fmt: skip
        found = select(load_published(), benchmark=benchmark, round_="v0.7", system=f"dgxa100_ngc20.06_{framework}")
        assert len(found) == 1
        assert found[0].score_minutes is not None
        assert found[0].score_minutes * 8 / 60 == pytest.approx(hours, abs=0.006)


def test_retinanets_samples_per_second_are_those_of_all_accelerators() -> None:
    """Many logs state one accelerator's: with these, a run would have seen a fraction of an epoch."""
    cells = [cell for cell in load_published() if cell.benchmark in ("ssd", "retinanet") and cell.round >= "v2.0"]
    assert len(cells) > 200
    for cell in cells:
        if cell.samples_per_second is not None and cell.score_minutes is not None:
            assert 2 < cell.samples_per_second * cell.score_minutes * 60 / 1_170_301 < 20, cell.name


def test_selection_takes_names_as_people_write_them() -> None:
    results = load_published()
    assert select(results, round_="0.7") == select(results, round_="v0.7")
    assert select(results, submitter="nvidia", benchmark="mask", round_="v0.7") == select(
        results, submitter="NVIDIA", benchmark="maskrcnn", round_="v0.7"
    )
    assert select(results, system="no such system") == []


def test_systems_are_described_or_read_off_their_names() -> None:
    by_name = {result.name: result.hardware for result in load_published()}
    a100 = by_name["v0.7/NVIDIA/dgxa100_ngc20.06_mxnet"]
    assert a100.described
    assert a100.accelerators == 8
    assert a100.software["cuda_version"] == "11.0.167"
    large = by_name["v0.7/NVIDIA/dgxa100_n96_ngc20.06_mxnet"]
    assert (large.nodes, large.accelerators) == (96, 768)
    # Not valid JSON: log lines with Python dictionaries in them, and a comma too many.
    dgx1 = by_name["v0.6/NVIDIA/dgx1_ngc19.05_mxnet"]
    assert (dgx1.accelerator, dgx1.cpus_per_node, dgx1.software["nccl_version"]) == ("Tesla V100-SXM2-16GB", 2, "2.4.6")
    assert [by_name[f"v0.7/DellEMC/{name}C4140"].accelerators for name in ("", "2x", "4x")] == [4, 8, 16]
    named = system_of("v4.0", "nobody", "dgxh100_n96_pytorch")
    assert (named.described, named.nodes, named.accelerators, named.framework) == (False, 96, 768, "PyTorch")
    assert [result.name for result in load_published() if not result.hardware.described] == [
        f"v0.7/Alibaba/{name}" for name in ("v100-1280", "v100-256", "v100-512", "a100-8")
    ]
    assert by_name["v3.0/Dell/4xXE8545x4A100-SXM-80GB"].accelerators == 16
    # Its description counts chips, its name the cores, of which a chip has two.
    assert by_name["v0.6/Google/tpu-v3-1024"].accelerators == 512
    assert by_name["v0.5/nvidia/dgx2h_multi_ngc18.11_mxnet"].accelerators is None


def test_studies_and_their_figures() -> None:
    studies = {study.key: study for study in load_studies()}
    figures = load_figures()
    assert {figure.source for figure in figures} == set(studies)
    assert all(figure.relation in ("=", "~", "<", ">", "<=", ">=") for figure in figures)
    assert all(figure.value == float(figure.printed) for figure in figures)
    assert studies["dell-multinode-v100"].authors == ("Rengan Xu", "Frank Han", "Nishanth Dandapanthula")


def test_tables_1_to_7_are_whole_and_table_7_follows_from_the_others() -> None:
    """Speed-ups are the ratios of minutes per epoch times epochs, to 2 %."""
    figures = [figure for figure in load_figures() if figure.source == "microway-dgx1-scaling"]
    cells = {(f.model, f.gpus, f.quantity): f.value for f in figures if f.place.startswith("table")}
    assert len(cells) == 6 * 3 * 2 + 6 * 2
    for model in ("resnet", "maskrcnn", "ssd", "gnmt", "transformer", "ncf"):
        total = {gpus: cells[model, gpus, "minutes_per_epoch"] * cells[model, gpus, "epochs"] for gpus in (1, 4, 8)}
        for gpus in (4, 8):
            computed, printed = total[1] / total[gpus], cells[model, gpus, "speedup"]
            assert computed == pytest.approx(printed, rel=0.02), (model, gpus)


def test_command_lists_as_json_csv_and_table() -> None:
    options = ["published", "--benchmark", "resnet", "--round", "v0.7", "--submitter", "nvidia"]
    found = json.loads(CliRunner().invoke(app, [*options, "--json"]).stdout)
    assert found[0]["name"] == "v0.7/NVIDIA/dgx1_ngc20.06_mxnet"
    assert found[0]["score_minutes"] == pytest.approx(71.278, abs=0.001)
    rows = list(csv.DictReader(io.StringIO(CliRunner().invoke(app, [*options, "--csv"]).stdout)))
    assert [row["name"] for row in rows] == [result["name"] for result in found]
    assert "Published results: 6" in CliRunner().invoke(app, options).stdout


def test_command_chooses_by_accelerator_and_division_and_sorts() -> None:
    options = ["published", "--accelerator", "a100", "--division", "closed", "--json"]
    found = {
        order: json.loads(CliRunner().invoke(app, [*options, "--sort", order]).stdout)
        for order in ("name", "minutes", "accelerators")
    }
    assert {each["division"] for each in found["minutes"]} == {"closed"}
    assert all("A100" in each["hardware"]["accelerator"] for each in found["minutes"])
    assert len(found["minutes"]) == len(found["name"]) > 5
    for order, key in (("name", "name"), ("minutes", "official_minutes")):
        values = [each[key].lower() if order == "name" else each[key] or math.inf for each in found[order]]
        assert values == sorted(values)
    assert found["accelerators"] != found["minutes"]
    opened = json.loads(CliRunner().invoke(app, ["published", "--division", "open", "--json"]).stdout)
    assert {each["division"] for each in opened} == {"open"}
    assert CliRunner().invoke(app, ["published", "--sort", "speed"]).exit_code == 2
    completed = CliRunner().invoke(
        app,
        [],
        env={"_ENCORE_COMPLETE": "complete_bash", "COMP_WORDS": "encore published --division ", "COMP_CWORD": "3"},
        prog_name="encore",
    )
    assert completed.stdout.split() == ["closed", "open"]


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        (["--benchmark", "resnett"], "resnet"),
        (["--submitter", "nvida"], "NVIDIA"),
        (["--round", "v9.9"], "name one of these"),
    ],
)
def test_a_wrong_name_is_reported_with_the_nearest(options: list[str], meant: str) -> None:
    result = CliRunner().invoke(app, ["published", *options])
    assert isinstance(result.exception, EncoreError)
    assert meant in result.exception.remedy


def test_a_name_like_no_other_has_no_suggestion() -> None:
    result = CliRunner().invoke(app, ["published", "--submitter", "nobody"])
    assert isinstance(result.exception, EncoreError)
    assert not result.exception.remedy


@pytest.mark.parametrize(
    "command",
    [
        ["published", "--csv", "--json"],
        ["published", "--table", "--markdown", "--json"],
        ["published", "--table", "--csv", "--markdown"],
        ["score", "logs", "--json", "--csv"],
    ],
)
def test_two_output_formats_are_refused(command: list[str]) -> None:
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, EncoreError)
    assert "at once" in result.exception.found
    assert result.exception.exit_code == 2
