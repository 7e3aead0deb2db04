"""What is asked of every host of a run, asked of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from encore import paths
from encore.errors import EncoreError
from encore.machine import fitness, on_node
from encore.machine.fitness import Need


def problems(*needs: Need) -> list[tuple[int, str]]:
    """Return the answer of a process of its own, as srun and ssh start it."""
    command = [sys.executable, "-m", "encore.machine.on_node", "check", fitness.question(needs)]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=True)
    found: list[tuple[int, str]] = [tuple(each) for each in json.loads(done.stdout)["problems"]]
    return found


def test_nothing_is_wrong_with_this_host(tmp_path: Path) -> None:
    with fitness.marked(tmp_path / "new" / "results") as mark:
        needs = [
            fitness.same(paths.BENCHMARKS, ""), fitness.same(paths.ROOT / "LICENSE", ""),
            Need("shared", str(mark), ""), Need("executable", sys.executable, ""),
            Need("readable", str(paths.ROOT), ""), Need("program", "sh", ""), Need("interface", "lo", ""),
            Need("gpus", "0", ""), Need("image", "true", "", "an image"),
        ]  # fmt: skip
        assert {need.kind for need in needs} == set(on_node.PROBES)
        assert problems(*needs) == []
    assert list(mark.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "what", "expected", "message"),
    [
        ("same", "LICENSE", "another digest", "LICENSE is missing or differs"),
        ("same", "no-such-file", "a digest", "no-such-file is missing or differs"),
        ("shared", "no-such-folder/.mark", "", "no-such-folder is not that of the first host"),
        ("executable", "LICENSE", "", "no LICENSE"),
        ("readable", "no-such-file", "", "no-such-file cannot be read"),
        ("program", "no-such-program", "", "no-such-program is not on PATH"),
        ("interface", "z9", "", "no network interface z9"),
        ("gpus", "99", "", "99 wanted"),
        ("image", "false", "resnet", "false: no reason given"),
        ("image", "no-such-engine", "resnet", "no-such-engine"),
    ],
)
def test_what_a_host_lacks_is_named(kind: str, what: str, expected: str, message: str) -> None:
    ((number, problem),) = problems(Need("gpus", "0", ""), Need(kind, what, "", expected))
    assert number == 1
    assert message in problem


def test_data_of_other_content_is_another_data_set(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text("{}", encoding="utf-8")
    need = fitness.same(tmp_path / "dataset.json", "copy it")
    (tmp_path / "dataset.json").write_text("{ }", encoding="utf-8")
    (check,) = fitness.judge("node", "n2", problems(need), [need])
    assert (check.level, check.name, check.remedy) == ("FAIL", "node n2", "copy it")


def test_results_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(EncoreError, match="cannot be written"), fitness.marked(tmp_path / "file"):
        pass
