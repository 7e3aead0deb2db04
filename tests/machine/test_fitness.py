"""What is asked of every host of a run, asked of this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from encore import paths
from encore.errors import EncoreError
from encore.machine import fitness, on_node
from encore.machine.fitness import Need
from encore.machine.preflight import Check

LACKING = {
    ("same", "LICENSE", "another digest"): "LICENSE is missing or differs",
    ("same", "no-such-file", "a digest"): "no-such-file is missing or differs",
    ("shared", "no-such-folder/.mark", ""): "the results folder no-such-folder is not that of the first host",
    ("executable", "LICENSE", ""): "no LICENSE",
    ("readable", "no-such-file", ""): "no-such-file cannot be read",
    ("program", "no-such-program", ""): "no-such-program is not on PATH",
    ("interface", "z9", ""): "no network interface z9",
    ("gpus", "99", ""): "0 GPUs, 99 wanted",
    ("image", "false", "resnet"): "false: no reason given",
    ("image", "no-such-engine", "resnet"): "no-such-engine: [Errno 2] No such file or directory: 'no-such-engine'",
}


def judged(*needs: Need) -> list[Check]:
    # What comes of the answer of a process of its own, as srun and ssh start it
    command = [sys.executable, "-m", "encore.machine.on_node", "check", fitness.question(needs)]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=True)
    return fitness.judge("node", "n2", json.loads(done.stdout)["problems"], needs)


def test_nothing_is_wrong_with_this_host(tmp_path: Path) -> None:
    with fitness.marked(tmp_path / "new" / "results") as mark:
        needs = [
            fitness.same(paths.BENCHMARKS, ""), fitness.same(paths.ROOT / "LICENSE", ""),
            Need("shared", str(mark), ""), Need("executable", sys.executable, ""),
            Need("readable", str(paths.ROOT), ""), Need("program", "sh", ""), Need("interface", "lo", ""),
            Need("gpus", "0", ""), Need("image", "true", "", "an image"),
        ]  # fmt: skip
        assert {need.kind for need in needs} == set(on_node.PROBES)
        assert judged(*needs) == []
    assert list(mark.parent.iterdir()) == []


def test_what_a_host_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(on_node, "GPU_FILES", ((str(tmp_path), "*"),))
    found = on_node.check([("gpus", "0", ""), *LACKING])["problems"]
    assert found == [(number, text) for number, text in enumerate(LACKING.values(), 1)]
    (tmp_path / "dataset.json").write_text("{}", encoding="utf-8")
    need = fitness.same(tmp_path / "dataset.json", "copy it")
    (tmp_path / "dataset.json").write_text("{ }", encoding="utf-8")
    wrong = f"{tmp_path / 'dataset.json'} is missing or differs; no LICENSE"
    assert judged(Need("gpus", "0", ""), need, Need("executable", "LICENSE", "")) == [
        Check("FAIL", "node n2", wrong, "copy it")
    ]


def test_results_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(EncoreError, match="cannot be written"), fitness.marked(tmp_path / "file"):
        pass
