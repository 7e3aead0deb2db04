"""The verdicts of comparisons, and which submission a run is compared with."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError
from encore.results.compare.compare import (
    SAME_LOGS,
    SAME_RUNS,
    Comparison,
    Verdict,
    compare,
    compare_path,
    compare_with,
)
from encore.results.compare.digest import submission
from encore.results.compare.explain import explain
from encore.results.compare.nearest import AS_GIVEN, How, Match, find_submission, rank, why
from encore.results.compare.sides import load_side, load_sides, side_of
from encore.results.findings import Finding
from encore.results.published.published import load_published
from encore.results.scores.score import Lack, Score, find_sets
from encore.results.statistics import Sample
from tests.results.result_logs import START_MS, resnet_v05, resnet_v07, uneven, write_set

A100 = "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet"


def a100_run(
    folder: Path,
    minutes: float = 39.8,
    runs: int = 5,
    spread: float = 0.4,
    epochs: int = 40,
    **changed: object,
) -> Path:
    """Return a set of runs that says it is NVIDIA's DGX A100: evaluations every 4 epochs, target met at the last."""
    settings: dict[str, object] = {
        "submission_org": "MyLab",
        "submission_platform": "1xNVIDIA DGX A100",
        "global_batch_size": 3264,
        **changed,
    }
    texts = [
        resnet_v07(
            minutes + spread * (n - (runs - 1) / 2),
            quality=(*(0.3 + 0.01 * k + 0.001 * n for k in range(epochs // 4 - 1)), 0.7605),
            start_ms=START_MS + 10**7 * n,
            **{"seed": 100 + n, **settings},  # type: ignore[arg-type]
        )
        for n in range(runs)
    ]
    return write_set(folder, [uneven(text, n) for n, text in enumerate(texts)])


# --- verdicts ---------------------------------------------------------------------------------------------


def verdict(folder: Path, name: str | None = A100) -> Comparison:
    return compare(load_side(folder), name)


def test_reproduced_with_both_factors(tmp_path: Path) -> None:
    found = verdict(a100_run(tmp_path))
    assert found.verdict is Verdict.REPRODUCED
    assert found.score is not None
    assert found.per_length is not None
    assert found.lengths is not None
    assert found.score.ratio == pytest.approx(39.8 / 39.7798, abs=1e-4)
    assert found.lengths.ratio == pytest.approx(40 / 41)
    product = (found.per_length.ratio or 0) * (found.lengths.ratio or 0)
    assert product == pytest.approx(found.score.ratio, rel=0.005)
    assert found.further_runs == 0
    assert found.confidence is not None
    assert found.confidence >= 0.95


@pytest.mark.parametrize(
    ("minutes", "epochs", "expected"),
    [
        (30.0, 40, Verdict.FASTER),
        (60.0, 40, Verdict.SLOWER),
        (40.5, 40, Verdict.REPRODUCED),
        (41.5, 40, Verdict.UNDECIDED),
        (54.6, 56, Verdict.CONVERGES_DIFFERENTLY),
        (27.3, 28, Verdict.CONVERGES_DIFFERENTLY),
    ],
)
def test_each_verdict(tmp_path: Path, minutes: float, epochs: int, expected: Verdict) -> None:
    assert verdict(a100_run(tmp_path, minutes, epochs=epochs)).verdict is expected


def test_runs_that_missed_are_not_converged(tmp_path: Path) -> None:
    folder = write_set(tmp_path, [resnet_v07(40.0, quality=(0.3, 0.7), start_ms=START_MS + n) for n in range(5)])
    found = verdict(folder)
    assert found.verdict is Verdict.NOT_CONVERGED
    assert any("target" in reason for reason in found.reasons)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"submission_platform": "1xNVIDIA DGX-1"}, "run on V100, submitted on A100"),
        ({"submission_platform": "2xNVIDIA DGX A100"}, "run on 16 accelerators, submitted on 8"),
        ({"train_samples": 1500}, "trained on 1,500 samples"),
    ],
)
def test_what_is_not_the_same_kind_of_run_is_not_comparable(
    tmp_path: Path, changed: dict[str, object], why: str
) -> None:
    found = verdict(a100_run(tmp_path, **changed))  # type: ignore[arg-type]
    assert found.verdict is Verdict.NOT_COMPARABLE
    assert why in found.reasons[0]
    assert (found.score is None) == ("trained on" in why), "figures of another GPU are compared, of toy data are not"


def test_another_target_is_not_comparable(tmp_path: Path) -> None:
    folder = write_set(tmp_path, [resnet_v05(134.0 + n) for n in range(5)])
    found = verdict(folder, "v0.6/NVIDIA/dgx1_ngc19.05_mxnet")
    assert found.verdict is Verdict.NOT_COMPARABLE
    assert "different quality targets" in found.reasons[0]


def test_a_cpu_run_of_encore_is_not_comparable(tmp_path: Path) -> None:
    folder = a100_run(tmp_path, 0.3, runs=1, epochs=12, train_samples=1500, submission_platform="2 ranks")
    passport = {"round": "v0.7", "nodes": 1, "ranks_per_node": 2, "submission": {"kind": "small"}}
    (folder / "run.json").write_text(json.dumps(passport))
    (folder / "system.json").write_text(json.dumps({"accelerators_per_node": "0", "framework": "mxnet"}))
    found = compare(load_side(folder))
    assert found.verdict is Verdict.NOT_COMPARABLE
    assert "CPU" in found.reasons[0]
    assert found.theirs is not None
    assert found.theirs.round == "v0.7"
    assert not found.factors
    assert found.as_json()["ratio"] is None


def test_few_runs_are_compared_by_their_mean_and_it_is_said(tmp_path: Path) -> None:
    found = verdict(a100_run(tmp_path, runs=3))
    assert found.verdict is Verdict.REPRODUCED
    assert any("no official score" in caveat for caveat in found.caveats)


def reworded(folder: Path) -> Verdict:
    """Return the verdict on ``folder`` where every message that leads to it has other words."""
    side = load_side(folder)
    cell, match = find_submission(side)
    assert cell is not None
    said = {**side.submission, "text": "?"} if side.submission else None
    side = replace(side, missing="?", passport={**side.passport, "submission": said})
    side = replace(side, flags=tuple(replace(flag, text="?") for flag in side.flags))
    found = compare_with(side, submission(cell), replace(match, text="?"))
    assert not any("has no time" in caveat for caveat in found.caveats if side.flags), "a flag says it already"
    return found.verdict


def test_no_verdict_hangs_on_the_words_of_a_message(tmp_path: Path) -> None:
    """Missed targets, a nearest system, a study and a flagged log are codes: other words, the same verdict."""
    missed = a100_run(tmp_path / "missed", submission_org="NVIDIA")
    for path in sorted(missed.glob("result_*.txt"))[:2]:
        path.write_text(path.read_text("utf-8").replace('"success"', '"aborted"'), encoding="utf-8")
    unknown = a100_run(tmp_path / "unknown", submission_platform="box")
    studied = a100_run(tmp_path / "studied")
    text = {"kind": "study", "submitted": False, "of": "x", "text": "not a submitted configuration: batch_size = 8"}
    (studied / "run.json").write_text(json.dumps({"round": "v0.7", "submission": text}))
    crashed = a100_run(tmp_path / "crashed", submission_org="NVIDIA")
    log = crashed / "result_1.txt"
    kept = [line for line in log.read_text("utf-8").splitlines(keepends=True) if "run_stop" not in line]
    log.write_text("".join(kept), encoding="utf-8")
    expected = {
        missed: Verdict.NOT_CONVERGED, unknown: Verdict.NOT_COMPARABLE, studied: Verdict.NOT_COMPARABLE,
        crashed: Verdict.REPRODUCED,
    }  # fmt: skip
    for folder, wanted in expected.items():
        assert (verdict(folder, None).verdict, reworded(folder)) == (wanted, wanted), folder.name


def test_a_set_with_too_few_runs_that_converged_has_not_converged(tmp_path: Path) -> None:
    """NCF of v0.5 scores the first 50 of 100 runs that converge, and says so in words of its own."""
    score = Score(
        folder=tmp_path, round="v0.5", benchmark="ncf", runs=(), required=100, lack=Lack.NOT_CONVERGED, missing="?"
    )
    side = replace(side_of(score), score=Sample.of([1.0, 1.1]), runs=100, converged=40)
    cell = next(each for each in load_published() if (each.round, each.benchmark) == ("v0.5", "ncf"))
    assert compare_with(side, submission(cell), Match(How.OWN_SYSTEM, "?")).verdict is Verdict.NOT_CONVERGED


# --- finding the submission -------------------------------------------------------------------------------


def test_the_nearest_has_the_same_accelerator_and_count(tmp_path: Path) -> None:
    found = verdict(a100_run(tmp_path), None)
    assert found.theirs is not None
    assert found.theirs.label in (A100, "v0.7/Inspur/nf5488_mxnet")
    own = verdict(a100_run(tmp_path / "nvidia", submission_org="NVIDIA"), None)
    assert own.theirs is not None
    assert own.theirs.label == A100


def test_the_time_does_not_choose_the_submission(tmp_path: Path) -> None:
    """Logs that say nothing of their hardware are held against no system, whatever their time is near to."""
    chosen = set()
    for minutes in (105.5, 39.8, 23.7, 4.1, 0.77):
        platform = {"submission_platform": "box", "global_batch_size": 1632}
        found = verdict(a100_run(tmp_path / f"{minutes}", minutes, spread=0.004 * minutes, **platform), None)
        assert found.verdict is Verdict.NOT_COMPARABLE, minutes
        assert "accelerator and number of accelerators of this run not known; these fit: " in found.reasons[0]
        assert found.reasons[0].endswith("--with names one")
        assert found.match.text.endswith("not known: accelerator, count")
        assert found.theirs is not None
        chosen.add(found.theirs.label)
    assert len(chosen) == 1


def test_a_named_submission_needs_no_known_hardware(tmp_path: Path) -> None:
    found = verdict(a100_run(tmp_path, submission_platform="box"))
    assert found.verdict is Verdict.REPRODUCED
    assert "the logs do not say what they ran on: taken to be what was submitted" in found.caveats


def test_what_is_not_known_is_not_the_same(tmp_path: Path) -> None:
    side = load_side(a100_run(tmp_path, submission_platform="box"))
    for cell in rank(side)[:200]:
        assert not re.search(r"same [^;]*(accelerator|count)", why(side, cell)), cell.name


def test_others_that_are_as_near_are_named(tmp_path: Path) -> None:
    """A DGX A100 with this batch was submitted twice: neither is chosen for its time."""
    found = verdict(a100_run(tmp_path, 30.0), None)
    assert found.theirs is not None
    names = [found.theirs.label, *(caveat for caveat in found.caveats if caveat.startswith("equally near: "))]
    assert A100 in names[0] + names[-1]
    again = verdict(a100_run(tmp_path / "slow", 50.0), None)
    assert again.theirs is not None
    assert again.theirs.label == found.theirs.label


def test_a_wrong_name_is_reported_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(EncoreError) as error:
        verdict(a100_run(tmp_path), "v0.7/NVIDIA/dgxa100_ngc20.06_mxnt")
    assert A100 in str(error.value)
    with pytest.raises(EncoreError, match="has no result of resnet"):
        verdict(tmp_path, "v0.7/NVIDIA/dgxa100_ngc20.06_pytorch")


def test_logs_whose_times_are_doubtful_prove_nothing(tmp_path: Path) -> None:
    """One log five times, an hour apart: no evidence comes of copying."""
    text = (a100_run(tmp_path / "one", runs=1) / "result_0.txt").read_text("utf-8")
    later = [
        re.sub(r'("time_ms": )(\d+)', lambda found, n=n: f"{found[1]}{int(found[2]) + 3_600_000 * n}", text)
        for n in range(5)
    ]
    found = verdict(write_set(tmp_path / "copies", later))
    assert found.verdict is Verdict.NOT_COMPARABLE
    assert found.confidence is None
    assert "the audit doubts these logs: " in found.reasons[0]
    assert "shifted_copy" in found.reasons[0]


def test_what_the_scoring_did_is_told(tmp_path: Path) -> None:
    folder = a100_run(tmp_path)
    crashed = folder / "result_1.txt"
    lines = crashed.read_text("utf-8").splitlines(keepends=True)
    crashed.write_text("".join(line for line in lines if "run_stop" not in line), encoding="utf-8")
    (folder / "scaling.json").write_text('{"scaling_factor": 1.19}', encoding="utf-8")
    found = verdict(folder)
    assert found.score is not None
    assert found.score.ratio == pytest.approx(1.0, abs=0.02), "v0.7 had no factors"
    told = " ".join(found.caveats)
    assert "result_1.txt counts as a run that missed the target" in told
    assert "scaling.json is not used: v0.7 had none" in told


def test_times_that_are_none_are_not_a_missed_target(tmp_path: Path) -> None:
    folder = a100_run(tmp_path)
    for path in folder.iterdir():
        path.write_text(re.sub(r'("time_ms": \d{10})\d{3}', r"\1", path.read_text("utf-8")), encoding="utf-8")
    assert verdict(folder).verdict is Verdict.NOT_COMPARABLE


def test_two_sets_of_logs_against_each_other(tmp_path: Path) -> None:
    unknown = load_side(a100_run(tmp_path / "a", submission_platform="box"))
    other = load_side(a100_run(tmp_path / "b", 40.0, submission_division="open"))
    found = compare_with(unknown, other, AS_GIVEN)
    assert "the logs do not say what they ran on" in found.caveats
    assert "closed division against open, which has other rules" in found.caveats
    assert "scaling.json" not in " ".join(found.caveats)
    same = compare_with(unknown, unknown, AS_GIVEN)
    assert (same.verdict, same.reasons) == (Verdict.SAME_RUNS, (SAME_LOGS,))
    # The same times, and so mean and spread, with qualities of their own; the same logs in another order and folder.
    for path in sorted((a100_run(tmp_path / "c", submission_platform="box")).iterdir()):
        path.write_text(path.read_text("utf-8").replace("0.7605", "0.7606"), encoding="utf-8")
    alike = compare_with(unknown, load_side(tmp_path / "c"), AS_GIVEN)
    assert alike.score is not None
    assert (alike.score.ratio, alike.verdict) == (pytest.approx(1.0), Verdict.REPRODUCED)
    texts = [path.read_text("utf-8") for path in sorted((tmp_path / "a").iterdir())]
    assert compare_with(unknown, load_side(write_set(tmp_path / "d", texts[::-1])), AS_GIVEN).reasons == (SAME_LOGS,)
    found = replace(unknown, findings=(Finding(line=None, rule="late_start", expected="", found="", remedy=""),))
    assert compare_with(found, unknown, AS_GIVEN).reasons == (SAME_LOGS, "the audit doubts these logs: late_start")
    assert compare_with(found, load_side(tmp_path / "c"), AS_GIVEN).verdict is Verdict.NOT_COMPARABLE


def test_a_wild_run_of_yours_is_why_nothing_is_decided(tmp_path: Path) -> None:
    found = verdict(a100_run(tmp_path, spread=12.0))
    assert found.verdict is Verdict.UNDECIDED
    assert found.reasons[-1].endswith("your own runs vary by 47.7 %")


def test_several_sets_are_reported(tmp_path: Path) -> None:
    a100_run(tmp_path / "a")
    a100_run(tmp_path / "b")
    with pytest.raises(EncoreError, match="2 sets of runs"):
        compare_path(tmp_path)


# --- the command ------------------------------------------------------------------------------------------


def test_command_prints_and_writes_json(tmp_path: Path) -> None:
    folder = str(a100_run(tmp_path))
    shown = CliRunner().invoke(app, ["compare", folder, "--with", A100])
    assert shown.exit_code == 0
    assert "reproduced" in shown.output
    assert "minutes per epoch" in shown.output
    found = json.loads(CliRunner().invoke(app, ["compare", folder, "--with", A100, "--json"]).output)
    assert found["verdict"] == "reproduced"
    assert found["submission"] == A100
    assert [factor["name"] for factor in found["factors"]] == [
        "time to the target", "minutes per epoch", "epochs to the target",
    ]  # fmt: skip
    strict = json.loads(
        CliRunner().invoke(app, ["compare", folder, "--with", A100, "--within", "0.1", "--json"]).output
    )
    assert strict["within"] == 0.001


# --- damaged input ----------------------------------------------------------------------------------------

BROKEN_NUMBERS = st.sampled_from(["0", "-1", "1e400", "NaN", "null", '"text"', "[]", "9" * 40, "1592669288183"])
BROKEN_VALUES = BROKEN_NUMBERS | st.sampled_from(
    ["{}", '[{"text": 1}, 2]', '{"submitted": true, "of": [], "kind": {}}']
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_logs_and_passports_raise_nothing(tmp_path: Path, data: st.DataObject) -> None:
    """Only EncoreError, whatever numbers stand in a log, a run.json or a system.json."""
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
        assert found.theirs is not None
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
        found = compare_path(bare)
        name = "/".join(folder.parts[-4:-1])
        if found.theirs is None or found.theirs.label != name:
            elsewhere.append(name)
            assert found.verdict is not Verdict.REPRODUCED, name
            assert "--with names one" in " ".join([*found.reasons, *found.caveats]), name
    assert len(elsewhere) == 12
    # Logs of v0.5 say nothing of hardware or batch, Dell's of v0.7 name a box.
    assert {name.split("/")[1] for name in elsewhere} == {"google", "nvidia", "DellEMC", "NVIDIA"}


def test_submitted_logs_replace_what_is_kept_of_them(public_logs: Path, tmp_path: Path) -> None:
    folder = a100_run(tmp_path)
    kept = compare(load_side(folder), A100)
    read = compare(load_side(folder), A100, public_logs)
    assert read.theirs is not None
    assert read.theirs.logs
    assert [f.ratio for f in kept.factors] == pytest.approx([f.ratio for f in read.factors], rel=1e-6)


def test_every_published_name_is_found_as_named(tmp_path: Path) -> None:
    side = load_side(a100_run(tmp_path))
    cells = [cell for cell in load_published() if cell.benchmark == "resnet" and cell.score_minutes]
    for cell in cells[::7]:
        found = compare(side, cell.name)
        assert found.theirs is not None
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
