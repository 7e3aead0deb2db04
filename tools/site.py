"""Build the documentation site; exit code 1 for a broken link or anchor.

    $ python -m tools.site        # `make docs` writes the generated tables first; the site is .site/html

Pages are README.md, CONTRIBUTING.md, docs/ and the README.md of each benchmark. They are copied together with all
linked files to the same relative paths, so that links remain valid.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import typer

from encore import paths
from encore.cli import documentation
from tools import run

LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


def linked(page: Path) -> set[Path]:
    # Files that a page links to; for a folder, the files in it
    targets = {(page.parent / name).resolve() for name in LINK.findall(page.read_text(encoding="utf-8"))}
    return {file for path in targets for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file()}


def stage(folder: Path) -> None:
    # Copy the pages and the linked files to an empty ``folder``
    pages = set(documentation.pages(paths.ROOT))
    for file in pages.union(*map(linked, pages)):
        target = folder / file.relative_to(paths.ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def build(folder: Path) -> int:
    # Build html/ from the pages in ``folder``; MkDocs prints problems, and returns 1 for a broken link
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder / "html")]
    # The theme prints an advertisement for a successor at every start.
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "ENCORE_PAGES": str(folder / "pages")}
    return subprocess.run(command, cwd=paths.ROOT, env=variables, check=False).returncode


def main() -> None:
    folder = paths.ROOT / ".site"
    shutil.rmtree(folder, ignore_errors=True)
    stage(folder / "pages")
    raise typer.Exit(build(folder))


if __name__ == "__main__":
    run(main, __doc__)
