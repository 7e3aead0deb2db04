"""The fault runner of tools/: its verdicts, and the short list of faults on real trainings."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from encore import catalogue, paths
from encore.run import supervise
from tests.results.result_logs import write_files
from tests.trainings import resolved
from tools import run
from tools.faults import __main__ as faults
from tools.faults import kinds
from tools.faults.trial import GONE, Bench, Done, Trial, settings, snapshot


@pytest.mark.parametrize(
    ("arguments", "error"), [(["nosuch"], "unknown benchmark 'nosuch'"), (["dlrm", "--faults", "x"], "no fault x; see")]
)
def test_unknown_name_is_refused(
    arguments: list[str], error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["faults", *arguments])
    with pytest.raises(SystemExit, match="2"):
        run(faults.main, "")
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("name", catalogue.benchmarks())
def test_settings_of_a_trial_fit_the_benchmark(name: str) -> None:
    benchmark, words = catalogue.choose(name).benchmark, [word for word in settings(name) if word != "--set"]
    config = resolved(name, benchmark.small_data.system, None, 1, *words, nodes=1)
    assert {config.get(quality.config) for quality in benchmark.qualities.values()} <= {1.0, 100.0}


METRICS = "experiment_0/metrics.jsonl"
STEPS = "".join(
    json.dumps({"kind": "step", "step": step, "loss": loss}) + "\n" for step, loss in enumerate((0.5, 0.4, 0.3))
)


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    # A trial with an uninterrupted run that was not trained
    bench = Bench("dlrm", tmp_path / "dlrm", seed=1)
    for name in ("uninterrupted", "trial"):
        write_files(bench.work / name / "results" / "run", {
            "run.json": "{}",
            "result_0.txt": ':::MLLOG {"key": "run_start", "time_ms": 1}\n',
            METRICS: STEPS + json.dumps({"kind": "eval", "qualities": {"x": 0.5}, "time": 2.0}),
        })  # fmt: skip
    bench.__dict__["uninterrupted"] = bench.work / "uninterrupted" / "results" / "run"
    return Trial(bench, bench.work / "trial", random.Random(1))


def replaced(file: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda run: (run / file).write_text((run / file).read_text("ascii").replace(old, new), encoding="ascii")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        pytest.param(replaced(METRICS, "0.4", "0.41"), "other losses", id="loss"),
        pytest.param(replaced(METRICS, '"x": 0.5', '"x": 0.6'), "other evaluations", id="evaluation"),
        pytest.param(replaced(METRICS, '"step": 2', '"step": 1'), "steps are there twice", id="repeated step"),
        pytest.param(replaced("result_0.txt", "run_start", "run_stop"), "other log events", id="event"),
        pytest.param(replaced("result_0.txt", '"key": "run_start", ', ""), "other log events", id="damaged event"),
        pytest.param(lambda run: (run / "a.writing").touch(), "a.writing is left", id="temporary file"),
    ],
)
def test_different_run_is_a_fault(trial: Trial, change: Callable[[Path], object], text: str) -> None:
    assert trial.judged(trial.run, Done(3, ""), {}).kind == "as uninterrupted"
    change(trial.run)
    verdict = trial.judged(trial.run, Done(3, ""), {})
    assert verdict.kind == "FAULT" and text in verdict.text


def test_refusal_has_a_hint_and_changes_nothing(trial: Trial) -> None:
    before, output = snapshot(trial.run), "error: it is missing\n  hint: restore it"
    verdicts = {
        Done(2, output): "refused", Done(2, "error: it is missing"): "FAULT",
        Done(2, f"Traceback (most recent call last)\n{output}"): "FAULT",
        Done(1, f"{output}\nresume with: encore"): "FAULT",
    }  # fmt: skip
    assert {done: trial.judged(trial.run, done, before).kind for done in verdicts} == verdicts
    (trial.run / "run.json").write_text("{ }", encoding="ascii")
    assert "refused and changed run.json" in trial.judged(trial.run, Done(2, output), before).text


@pytest.mark.parametrize(
    ("output", "kind"), [(f"error: it does not run: lost, {GONE}", "as uninterrupted"), ("no", "FAULT")]
)
def test_ranks_may_end_before_they_are_cancelled(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, output: str, kind: str
) -> None:
    assert any(GONE in path.read_text(encoding="utf-8") for path in (paths.ROOT / "encore" / "run").glob("*.py"))
    answers = iter([Done(2, "error: still run here\n  hint: encore cancel X"), Done(2, output), Done(3, "")])
    monkeypatch.setattr(Trial, "do", lambda self, command: next(answers))
    assert trial.resumed(trial.run).kind == kind


@pytest.mark.parametrize("symptom", [*supervise.DIVERGED, supervise.UNRESUMABLE])
def test_final_errors_are_printed_by_the_ranks(symptom: str) -> None:
    assert any(symptom in path.read_text(encoding="utf-8") for path in paths.BENCHMARKS.rglob("*.py"))


@pytest.mark.long
def test_runs_survive_the_short_list_of_faults(
    pytorch_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ENCORE_CLUSTER", "")  # the fault runner sets it
    with pytest.raises(typer.Exit) as end:
        faults.main(["dlrm"], "short", seed=1, work=tmp_path / "work", output=tmp_path / "verdicts.json")
    assert end.value.exit_code == 0, capsys.readouterr().out
    verdicts = json.loads((tmp_path / "verdicts.json").read_text(encoding="utf-8"))
    assert [verdict["fault"] for verdict in verdicts] == [*kinds.SHORT]
    assert {verdict["verdict"] for verdict in verdicts} == {"as uninterrupted", "refused"}
