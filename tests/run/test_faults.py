"""The fault runner of tools/: the short list of faults on a real training, and the errors that it knows."""

import json
from pathlib import Path

import pytest
import typer

from encore import paths
from encore.run import supervise
from tools.faults import __main__ as faults
from tools.faults import kinds


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
