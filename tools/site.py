"""Build the documentation as a site; exit code 1 where a link or an anchor leads nowhere.

    $ python -m tools.site        # `make docs` writes the generated tables first; the site is .site/html

Pages are README.md, CONTRIBUTING.md, docs/ and each benchmark's README.md. They are copied with every file they link
to, each to its own place, so that links between them stay as they are.
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
    # The files that a page links to; a folder's are those directly in it
    targets = {(page.parent / name).resolve() for name in LINK.findall(page.read_text(encoding="utf-8"))}
    return {file for path in targets for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file()}


def stage(folder: Path) -> None:
    # Copy the pages, and what they link to, into an empty ``folder``
    pages = set(documentation.pages(paths.ROOT))
    for file in pages.union(*map(linked, pages)):
        target = folder / file.relative_to(paths.ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def build(folder: Path) -> int:
    # Write html/ from the pages in ``folder``; MkDocs prints what is wrong, and 1 is returned for a dead link
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder / "html")]
    # Its theme announces its successor at every start.
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "ENCORE_PAGES": str(folder / "pages")}
    return subprocess.run(command, cwd=paths.ROOT, env=variables, check=False).returncode


def main() -> None:
    folder = paths.ROOT / ".site"
    shutil.rmtree(folder, ignore_errors=True)
    stage(folder / "pages")
    raise typer.Exit(build(folder))


if __name__ == "__main__":
    run(main, __doc__)
