"""Make targets, hooks and CI agree; the documentation builds as a site."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

import encore
from encore import paths
from tools import architecture, site


def text_of(*names: str) -> str:
    return paths.ROOT.joinpath(*names).read_text(encoding="utf-8")


def recipe(target: str) -> str:
    return subprocess.run(
        ["make", "--no-print-directory", "-n", target], cwd=paths.ROOT, capture_output=True, text=True, check=True
    ).stdout


def test_hooks_run_what_lint_runs() -> None:
    (repository,) = yaml.safe_load(text_of(".pre-commit-config.yaml"))["repos"]
    assert repository["repo"] == "local" and {hook["language"] for hook in repository["hooks"]} == {"system"}
    entries = " ".join(hook["entry"] for hook in repository["hooks"])
    hooks, lint = (
        set(re.findall(r"\.venv/bin/(\w+(?: (?:check|format --check))?)", text)) for text in (entries, recipe("lint"))
    )
    assert hooks == lint and "lint-workflows" in entries


def test_changelog_begins_with_what_is_to_come_and_this_version() -> None:
    headings = re.findall(r"^## \[([^\]]+)\]", text_of("CHANGELOG.md"), flags=re.MULTILINE)
    assert headings[:2] == ["Unreleased", encore.__version__]


@pytest.mark.slow
def test_site_has_its_pages_and_no_dead_link(tmp_path: Path) -> None:
    site.stage(tmp_path / "pages")
    assert site.build(tmp_path) == 0
    pages = {path.relative_to(tmp_path / "html") for path in (tmp_path / "html").rglob("*.html")}
    assert {Path("index.html"), Path("docs/glossary.html"), Path("benchmarks/resnet/index.html")} <= pages
    with (tmp_path / "pages" / "docs" / "glossary.md").open("a", encoding="utf-8") as file:
        file.write("[gone](slurm.md#no-such-heading)")
    assert site.build(tmp_path) == 1


def test_picture_of_the_architecture_is_up_to_date() -> None:
    assert architecture.PICTURE.read_text(encoding="utf-8") == architecture.draw(), "hint: make docs"
