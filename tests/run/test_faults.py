"""The fault runner of tools/: what it finds, and the short list of faults on real trainings."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from encore import catalogue, configuration, paths
from encore.run import supervise
from tools import run
from tools.faults import __main__ as faults
from tools.faults import kinds
from tools.faults.trial import GONE, Bench, Done, Trial, settings, snapshot


def test_an_unknown_fault_is_refused_before_a_run() -> None:
    with pytest.raises(typer.BadParameter, match="no fault sigkil-rank; see --help"):
        faults.main(["dlrm"], "sigkill-rank,sigkil-rank")


def test_an_unknown_benchmark_is_a_wrong_command_and_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["faults", "nosuch"])
    with pytest.raises(SystemExit, match="2"):
        run(faults.main, "")
    assert "error: unknown benchmark 'nosuch'" in capsys.readouterr().err


@pytest.mark.parametrize("name", catalogue.benchmarks())
def test_every_benchmark_knows_the_settings_of_its_trials(name: str) -> None:
    choice = catalogue.choose(name)
    system = catalogue.find_system(choice, choice.benchmark.small_data.system, None)
    found = configuration.resolve(choice, system, 1, 1, [word for word in settings(name) if word != "--set"])
    assert {found.get(quality.config) for quality in choice.benchmark.qualities.values()} <= {1.0, 100.0}


LOSSES = (0.5, 0.4, 0.3)


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    # A trial whose uninterrupted run is made of text
    bench = Bench("dlrm", tmp_path / "dlrm", seed=1)
    for results in (bench.work / "uninterrupted", bench.work / "trial"):
        run = results / "results" / "run"
        (run / "experiment_0").mkdir(parents=True)
        (run / "run.json").write_text("{}", encoding="ascii")
        (run / "result_0.txt").write_text(':::MLLOG {"key": "run_start", "time_ms": 1}\n', encoding="ascii")
        steps = [{"kind": "step", "step": number, "loss": loss} for number, loss in enumerate(LOSSES)]
        lines = [json.dumps(line) for line in (*steps, {"kind": "eval", "qualities": {"x": 0.5}, "time": 2.0})]
        (run / "experiment_0" / "metrics.jsonl").write_text("\n".join(lines), encoding="ascii")
    # Else it would be trained.
    bench.__dict__["uninterrupted"] = bench.work / "uninterrupted" / "results" / "run"
    return Trial(bench, bench.work / "trial", random.Random(1))


def replaced(file: str, old: str, new: str) -> Callable[[Path], object]:
    def act(run: Path) -> None:
        text = (run / file).read_text(encoding="ascii")
        assert old in text
        (run / file).write_text(text.replace(old, new), encoding="ascii")

    return act


METRICS = "experiment_0/metrics.jsonl"
CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a loss": (replaced(METRICS, "0.4", "0.41"), "other losses"),
    "an evaluation": (replaced(METRICS, '"x": 0.5', '"x": 0.6'), "other evaluations"),
    "a step twice": (replaced(METRICS, '"step": 2', '"step": 1'), "steps are there twice"),
    "an event": (replaced("result_0.txt", "run_start", "run_stop"), "other log events"),
    "a damaged event": (replaced("result_0.txt", '"key": "run_start", ', ""), "other log events"),
    "a temporary file": (lambda run: (run / "a.writing").touch(), "a.writing is left"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_that_differs_is_a_fault(trial: Trial, change: str) -> None:
    assert trial.judged(trial.run, Done(3, ""), {}).kind == "as uninterrupted"
    act, found = CHANGES[change]
    act(trial.run)
    verdict = trial.judged(trial.run, Done(3, ""), {})
    assert verdict.kind == "FAULT" and found in verdict.text


def test_a_refusal_says_what_to_do_and_changes_nothing(trial: Trial) -> None:
    before, said = snapshot(trial.run), "error: it is missing\n  hint: restore it"
    verdicts = {
        Done(2, said): "refused", Done(2, "error: it is missing"): "FAULT",
        Done(2, f"Traceback (most recent call last)\n{said}"): "FAULT",
        Done(1, f"{said}\nresume with: encore"): "FAULT",
    }  # fmt: skip
    assert {done: trial.judged(trial.run, done, before).kind for done in verdicts} == verdicts
    (trial.run / "run.json").write_text("{ }", encoding="ascii")
    assert "refused and changed run.json" in trial.judged(trial.run, Done(2, said), before).text


@pytest.mark.parametrize(
    ("said", "kind"), [(f"error: it does not run: lost, {GONE}", "as uninterrupted"), ("no", "FAULT")]
)
def test_ranks_may_end_before_they_are_cancelled(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, said: str, kind: str
) -> None:
    assert any(GONE in path.read_text(encoding="utf-8") for path in (paths.ROOT / "encore" / "run").glob("*.py"))
    answers = iter([Done(2, "error: still run here\n  hint: encore cancel X"), Done(2, said), Done(3, "")])
    monkeypatch.setattr(Trial, "do", lambda self, command: next(answers))
    assert trial.resumed(trial.run).kind == kind


@pytest.mark.parametrize("symptom", [*supervise.DIVERGED, supervise.UNRESUMABLE])
def test_what_a_resume_does_not_help_is_printed_by_the_ranks(symptom: str) -> None:
    assert any(symptom in path.read_text(encoding="utf-8") for path in paths.BENCHMARKS.rglob("*.py"))


def test_the_short_list_of_faults_is_survived(
    pytorch_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The whole list takes an hour: CONTRIBUTING.md
    monkeypatch.setenv("ENCORE_CLUSTER", "")  # restored afterwards
    assert set(kinds.SHORT) <= set(kinds.FAULTS)
    found = tmp_path / "found.json"
    with pytest.raises(typer.Exit) as ended:
        faults.main(["dlrm"], "short", seed=1, work=tmp_path / "work", output=found)
    assert ended.value.exit_code == 0, capsys.readouterr().out
    verdicts = json.loads(found.read_text(encoding="utf-8"))
    assert [each["fault"] for each in verdicts] == [*kinds.SHORT]
    assert {each["verdict"] for each in verdicts} == {"as uninterrupted", "refused"}
