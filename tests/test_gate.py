"""The gate, its workflow, the hooks before a commit and the targets of make say the same."""

import re
import subprocess

import yaml

import encore
from encore import paths


def text_of(*names: str) -> str:
    return paths.ROOT.joinpath(*names).read_text(encoding="utf-8")


def recipe(target: str) -> str:
    return subprocess.run(["make", "-n", target], cwd=paths.ROOT, capture_output=True, text=True, check=True).stdout


def test_hooks_run_what_lint_runs() -> None:
    (repository,) = yaml.safe_load(text_of(".pre-commit-config.yaml"))["repos"]
    assert repository["repo"] == "local" and {hook["language"] for hook in repository["hooks"]} == {"system"}
    entries = " ".join(hook["entry"] for hook in repository["hooks"])
    found, wanted = (
        set(re.findall(r"\.venv/bin/(\w+(?: (?:check|format --check))?)", text)) for text in (entries, recipe("lint"))
    )
    assert found == wanted and "lint-workflows" in entries


def test_the_gate_is_the_readmes_command_which_runs_every_test() -> None:
    steps = yaml.safe_load(text_of(".github", "workflows", "gate.yml"))["jobs"]["gate"]["steps"]
    assert [step["run"] for step in steps if "run" in step][-1] == ".ci/run"
    assert "make test " in text_of("README.md") and "\nmake test\n" in text_of(".ci", "run")
    assert "tests/all.sh" in recipe("test")
    (fast,) = re.findall(r'-m "([^"]+) and not slow"', recipe("test-fast"))
    whole = text_of("tests", "all.sh")
    # Together they are every test.
    parts = re.findall(r'pytest -m ("[^"]+")', whole)
    assert f"host_side='{fast}'" in whole and parts == ['"$host_side"', '"not ($host_side)"']


def test_changelog_begins_with_what_is_to_come_and_this_version() -> None:
    headings = re.findall(r"^## \[([^\]]+)\]", text_of("CHANGELOG.md"), flags=re.MULTILINE)
    assert headings[:2] == ["Unreleased", encore.__version__]
