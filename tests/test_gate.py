"""The gate, its workflow, the hooks before a commit and the targets of make say the same."""

import re
import subprocess
import sys

import yaml

import encore
from encore import paths
from tests.conftest import LONGEST

HOOKS = paths.ROOT / ".pre-commit-config.yaml"
WORKFLOW = paths.ROOT / ".github" / "workflows" / "gate.yml"


def recipe(target: str) -> str:
    done = subprocess.run(["make", "-n", target], cwd=paths.ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_hooks_run_what_lint_runs() -> None:
    (repository,) = yaml.safe_load(HOOKS.read_text(encoding="utf-8"))["repos"]
    assert repository["repo"] == "local", "nothing is downloaded"
    entries = " ".join(hook["entry"] for hook in repository["hooks"])
    commands = r"\.venv/bin/(\w+(?: (?:check|format --check))?)"
    assert set(re.findall(commands, entries)) == set(re.findall(commands, recipe("lint")))
    assert {hook["language"] for hook in repository["hooks"]} == {"system"} and "lint-workflows" in entries


def test_workflow_runs_the_gate() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert [step["run"] for step in workflow["jobs"]["gate"]["steps"] if "run" in step][-1] == ".ci/run"


def test_the_gate_runs_the_readmes_command_and_that_runs_every_test() -> None:
    assert "make test " in (paths.ROOT / "README.md").read_text(encoding="utf-8")
    assert "\nmake test\n" in (paths.ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "tests/all.sh" in recipe("test")
    text = (paths.ROOT / "tests" / "all.sh").read_text(encoding="utf-8")
    (fast,) = re.findall(r'-m "([^"]+)"', recipe("test-fast"))
    assert f"host_side='{fast}'" in text
    # Together they are every test.
    assert re.findall(r'pytest -m ("[^"]+")', text) == ['"$host_side"', '"not ($host_side)"']


def test_the_files_that_come_first_are_there() -> None:
    assert [file for file in LONGEST if not (paths.ROOT / file).is_file()] == []


def test_no_test_marked_gpu_is_said() -> None:
    # Without `setup`, with the Python that runs this, and in a file which has none for sure.
    command = ["make", "--old-file", "setup", "test-gpu", f"PYTHON={sys.executable}", "ARGS=tests/test_wall.py"]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "nothing was tested on a GPU" in done.stderr) == (2, True)


def test_changelog_begins_with_what_is_to_come_and_this_version() -> None:
    text = (paths.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[([^\]]+)\]", text, flags=re.MULTILINE)
    assert headings[:2] == ["Unreleased", encore.__version__]
