"""Published results and the figures of the studies."""

from collections import Counter
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError
from encore.results.compare.digest import digests
from encore.results.published.published import load_figures, load_published, load_studies, select, system_of
from encore.results.rules import ROUNDS

SYSTEMS = (
    "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet", "v0.7/NVIDIA/dgxa100_n96_ngc20.06_mxnet", "v0.6/NVIDIA/dgx1_ngc19.05_mxnet",
    "v0.7/DellEMC/C4140", "v0.7/DellEMC/2xC4140", "v0.7/DellEMC/4xC4140", "v0.7/Alibaba/v100-1280",
    "v0.7/Alibaba/a100-8", "v3.0/Dell/4xXE8545x4A100-SXM-80GB", "v0.6/Google/tpu-v3-1024",
    "v0.5/nvidia/dgx2h_multi_ngc18.11_mxnet",
)  # fmt: skip
"""Valid JSON, log lines with Python dictionaries in them, a comma too many; described nowhere; chips, and cores."""


def test_published_results_and_studies(recorded: Callable[[str, object], None]) -> None:
    results, studies = load_published(), load_studies()
    by_name = {each.name: {**each.as_json(), "accelerators": each.hardware.accelerators} for each in results}
    counts = Counter(f"{each.round} {each.division} {each.availability}" for each in results)
    recorded("published.json", {
        "rows": len(results), "counts": counts,
        "without a benchmark": [each.name for each in results if each.benchmark is None],
        "without a score": [each.name for each in results if each.score_minutes is None],
        "not described": sorted({each.name for each in results if not each.hardware.described}),
        "systems": [by_name[name] for name in SYSTEMS],
        "read off its name": vars(system_of("v4.0", "nobody", "dgxh100_n96_pytorch")),
        "studies": [vars(each) for each in studies], "figures": Counter(each.source for each in load_figures()),
    })  # fmt: skip
    assert {each.relation for each in load_figures()} <= {"=", "~", "<", ">", "<=", ">="}


COMMANDS = (
    "--benchmark resnet --round 0.7 --submitter nvidia", "--benchmark resnet --round v0.7 --submitter NVIDIA --csv",
    "--system dgxa100_ngc20 --benchmark mask --json",
    "--accelerator h200 --division closed --sort minutes --round v5.0",
    "--accelerator a100 --round v0.7 --sort accelerators", "--system XE9680 --round v4.0 --sort name",
    "--division open --round v0.7", "--system nothing", "--table --round v0.6", "--table --round v0.6 --markdown",
    "--table --round v0.6 --csv", "--table --round v0.7 --submitter nvidia",
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_command(number: int, recorded: Callable[[str, object], None]) -> None:
    done = CliRunner().invoke(app, ["published", *COMMANDS[number].split()], env={"COLUMNS": "130"})
    recorded(f"published/{number}.txt", f"{COMMANDS[number]}\n{done.stdout}")


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


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        (["--benchmark", "resnett"], "resnet"),
        (["--submitter", "nvida"], "NVIDIA"),
        (["--round", "v9.9"], "name one of these"),
        (["--submitter", "nobody"], ""),
    ],
)
def test_a_wrong_name_is_reported_with_the_nearest(options: list[str], meant: str) -> None:
    result = CliRunner().invoke(app, ["published", *options])
    assert isinstance(result.exception, EncoreError)
    assert meant in result.exception.hint


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
