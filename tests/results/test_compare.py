"""The verdicts of comparisons, and which submission a run is compared with."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from encore.errors import EncoreError
from encore.results.compare.compare import (
    SAME_RUNS,
    Comparison,
    Verdict,
    compare,
    compare_with,
)
from encore.results.compare.digest import submission
from encore.results.compare.explain import explain
from encore.results.compare.nearest import AS_GIVEN, How, Match, find_submission
from encore.results.compare.sides import load_side, load_sides, side_of
from encore.results.findings import Finding
from encore.results.published.published import load_published
from encore.results.scores.score import Lack, Score, find_sets
from encore.results.statistics import Sample
from tests.results.result_logs import a100_texts, resnet_v07, write_set

A100 = "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet"


# --- verdicts ---------------------------------------------------------------------------------------------


def a100_run(folder: Path, *arguments: float, **changed: object) -> Path:
    """Return a set of runs that says it is NVIDIA's DGX A100."""
    return write_set(folder, a100_texts(*arguments, **changed))


def verdict(folder: Path, name: str | None = A100) -> Comparison:
    return compare(load_side(folder), name)


def test_a_set_with_too_few_runs_that_converged_has_not_converged(tmp_path: Path) -> None:
    """NCF of v0.5 scores the first 50 of 100 runs that converge, and says so in words of its own."""
    score = Score(
        folder=tmp_path, round="v0.5", benchmark="ncf", runs=(), required=100, lack=Lack.NOT_CONVERGED, missing="?"
    )
    side = replace(side_of(score), score=Sample.of([1.0, 1.1]), runs=100, converged=40)
    cell = next(each for each in load_published() if (each.round, each.benchmark) == ("v0.5", "ncf"))
    assert compare_with(side, submission(cell), Match(How.OWN_SYSTEM, "?")).verdict is Verdict.NOT_CONVERGED


# --- finding the submission -------------------------------------------------------------------------------


def test_the_time_does_not_choose_the_submission(tmp_path: Path) -> None:
    """Logs that say nothing of their hardware are compared with no system, whatever their time is near to."""
    platform = {"submission_platform": "box", "global_batch_size": 1632}
    found = [
        verdict(a100_run(tmp_path / f"{minutes}", minutes, spread=0.004 * minutes, **platform), None)
        for minutes in (105.5, 39.8, 23.7, 4.1, 0.77)
    ]
    assert {each.verdict for each in found} == {Verdict.NOT_COMPARABLE}
    assert len({(each.theirs.label, each.match.text, each.reasons[0]) for each in found}) == 1
    known = [verdict(a100_run(tmp_path / f"a100-{minutes}", minutes), None) for minutes in (30.0, 50.0)]
    assert known[0].theirs.label == known[1].theirs.label


def test_two_sets_of_logs_against_each_other(tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    """The same logs, in any order and folder; the same times with other qualities; a doubtful set; another division."""
    box = a100_run(tmp_path / "a", submission_platform="box")
    texts = [path.read_text("utf-8") for path in sorted(box.iterdir())]
    unknown = load_side(box)
    doubtful = replace(unknown, findings=(Finding(line=None, rule="late_start", expected="", found="", hint=""),))
    others = {
        "reversed": load_side(write_set(tmp_path / "d", texts[::-1])),
        "other qualities": load_side(write_set(tmp_path / "c", [each.replace("0.7605", "0.7606") for each in texts])),
        "open": load_side(a100_run(tmp_path / "b", 40.0, submission_division="open")),
    }
    found = {name: compare_with(unknown, other, AS_GIVEN) for name, other in others.items()}
    found["itself, doubtful"] = compare_with(doubtful, unknown, AS_GIVEN)
    found["other qualities, doubtful"] = compare_with(doubtful, others["other qualities"], AS_GIVEN)
    recorded("pairs.json", {name: [each.verdict.value, each.reasons, each.caveats] for name, each in found.items()})


def test_a_wrong_name_is_reported_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(EncoreError) as error:
        verdict(a100_run(tmp_path), "v0.7/NVIDIA/dgxa100_ngc20.06_mxnt")
    assert A100 in str(error.value)
    with pytest.raises(EncoreError, match="has no result of resnet"):
        verdict(tmp_path, "v0.7/NVIDIA/dgxa100_ngc20.06_pytorch")


def test_several_sets_are_reported(tmp_path: Path) -> None:
    a100_run(tmp_path / "a")
    a100_run(tmp_path / "b")
    with pytest.raises(EncoreError, match="2 sets of runs"):
        load_side(tmp_path)


# --- damaged input ----------------------------------------------------------------------------------------

BROKEN_NUMBERS = st.sampled_from(["0", "-1", "1e400", "NaN", "null", '"text"', "[]", "9" * 40, "1592669288183"])
BROKEN_VALUES = BROKEN_NUMBERS | st.sampled_from(
    ["{}", '[{"text": 1}, 2]', '{"submitted": true, "of": [], "kind": {}}']
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_logs_and_passports_raise_nothing(tmp_path: Path, data: st.DataObject) -> None:
    """Only EncoreError, whatever numbers are in a log, a run.json or a system.json."""
    lines = resnet_v07(40.0, quality=(0.3, 0.5, 0.7605)).splitlines(keepends=True)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(lines) - 1))
        change = data.draw(st.sampled_from(["drop", "double", "number", "move"]))
        if change == "drop":
            lines[at] = ""
        elif change == "double":
            lines[at] *= 2
        elif change == "move":
            lines.append(lines[at])
        else:
            lines[at] = re.sub(r"(?<=: )[\d.]+", data.draw(BROKEN_NUMBERS), lines[at])
    (tmp_path / "result_0.txt").write_text("".join(lines))
    value = data.draw(BROKEN_VALUES)
    names = ("nodes", "ranks_per_node", "node", "environment", "configuration", "deviations", "data", "submission")
    passport = ", ".join(f'"{name}": {value}' for name in names)
    (tmp_path / "run.json").write_text(f'{{"round": "v0.7", {passport}}}')
    (tmp_path / "system.json").write_text(f'{{"accelerators_per_node": {value}, "number_of_nodes": {value}}}')
    try:
        side = load_side(tmp_path)
        found = compare(side)
        json.dumps(found.as_json())
        if found.theirs is not None:
            json.dumps(explain(side, found.theirs).as_json())
    except EncoreError:
        pass


# --- the public logs --------------------------------------------------------------------------------------

# The archive holds one log of five or ten of these: what one run comes to is no score.
INCOMPLETE = {
    ("v0.6/NVIDIA/dgx1_ngc19.05_pytorch", "maskrcnn"): Verdict.UNDECIDED,
    ("v0.6/NVIDIA/dgx1_ngc19.05_tensorflow", "minigo"): Verdict.UNDECIDED,
    ("v0.7/NVIDIA/dgx1_ngc20.06_pytorch", "maskrcnn"): Verdict.REPRODUCED,
    ("v0.7/NVIDIA/dgx1_ngc20.06_pytorch", "bert"): Verdict.NOT_CONVERGED,
    ("v0.7/NVIDIA/dgxa100_ngc20.06_pytorch", "bert"): Verdict.UNDECIDED,
}


def test_every_published_cell_is_recognized_by_its_own_logs(public_logs: Path) -> None:
    complete = 0
    for side in load_sides(public_logs):
        found = compare(side)
        cell = (found.theirs.label, side.benchmark)
        assert found.theirs.label == "/".join((side.folder or Path()).parts[-4:-1])
        if cell in INCOMPLETE:
            assert found.verdict is INCOMPLETE[cell], cell
            continue
        complete += 1
        assert found.verdict is Verdict.SAME_RUNS, cell
        assert found.reasons[0] == SAME_RUNS
        for factor in found.factors:
            assert factor.ratio == pytest.approx(1.0, abs=5e-4), (cell, factor.name)
    assert complete == 47


def test_the_logs_are_found_without_their_folder_s_name(public_logs: Path, tmp_path: Path) -> None:
    """Submitter, platform, framework and batch are enough for most cells of the archive; the others are named."""
    elsewhere = []
    for number, (folder, files) in enumerate(find_sets(public_logs)):
        bare = tmp_path / str(number)
        bare.mkdir()
        for file in files:
            shutil.copyfile(file, bare / file.name)
        found = compare(load_side(bare))
        name = "/".join(folder.parts[-4:-1])
        if found.theirs is None or found.theirs.label != name:
            elsewhere.append(name)
            assert found.verdict is not Verdict.REPRODUCED, name
            assert "name one of them" in " ".join([*found.reasons, *found.caveats]), name
    assert len(elsewhere) == 12
    # Logs of v0.5 say nothing of hardware or batch, Dell's of v0.7 name a box.
    assert {name.split("/")[1] for name in elsewhere} == {"google", "nvidia", "DellEMC", "NVIDIA"}


def test_submitted_logs_replace_what_is_kept_of_them(public_logs: Path, tmp_path: Path) -> None:
    folder = a100_run(tmp_path)
    kept = compare(load_side(folder), A100)
    read = compare(load_side(folder), A100, public_logs)
    assert read.theirs.logs
    assert [f.ratio for f in kept.factors] == pytest.approx([f.ratio for f in read.factors], rel=1e-6)


def test_every_published_name_is_found_as_named(tmp_path: Path) -> None:
    side = load_side(a100_run(tmp_path))
    cells = [cell for cell in load_published() if cell.benchmark == "resnet" and cell.score_minutes]
    for cell in cells[::7]:
        found = compare(side, cell.name)
        assert found.theirs.label == cell.name


def test_a_submission_that_nobody_made_offers_five_of_the_benchmark(tmp_path: Path) -> None:
    side = load_side(a100_run(tmp_path))
    names = {cell.name for cell in load_published() if cell.benchmark == "resnet"}
    with pytest.raises(EncoreError) as refused:
        find_submission(side, "nonsense")
    offered = refused.value.expected.partition(", such as ")[2].split(", ")
    assert len(offered) == 5
    assert set(offered) <= names
    with pytest.raises(EncoreError, match=r"did you mean 'v0\.7/NVIDIA/dgxa100_n2_ngc20\.06_mxnet'"):
        find_submission(side, "dgxa100_n2")
