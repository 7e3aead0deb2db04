"""Mutation testing by tools/mutants.py: a mutant is killed, survives, or the test is broken."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.results.result_logs import write_files
from tools import mutants

SOURCE = "def is_less(one: int, other: int) -> bool:\n    return one < other\n"
TESTS = {
    "test_sharp.py": "assert is_less(1, 2) and not is_less(2, 2)",
    "test_blunt.py": "assert is_less(1, 2)",
    "test_broken.py": "assert is_less(2, 1)",
}


@pytest.mark.slow
def test_mutant_is_killed_by_a_test_that_passes_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = "from sizes import is_less\n\ndef test() -> None:\n    "
    write_files(tmp_path, {"sizes.py": SOURCE, **{name: f"{head}{line}\n" for name, line in TESTS.items()}})
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "--quiet"), ("add", "."), (*author, "commit", "--quiet", "--message", "sizes")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    # Mutants are tested in a clone, without uncommitted changes.
    write_files(tmp_path, {"test_sharp.py": "def test() -> None:\n    assert True\n"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # faster start of pytest
    killed = {}
    for name in TESTS:
        mutants.main(["sizes.py"], tests=name, output=Path("mutants.json"))
        (mutant,) = json.loads((tmp_path / "mutants.json").read_text(encoding="utf-8"))
        assert (mutant["before"], mutant["after"]) == ("one < other", "(one <= other)")
        killed[name] = mutant["killed"]
    assert killed == {"test_sharp.py": True, "test_blunt.py": False, "test_broken.py": None}
