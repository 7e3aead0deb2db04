"""Pages of Markdown and HTML through templates, and their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from encore import __version__
from encore.errors import EncoreError, ExitCode
from encore.results.statistics import LEVEL
from encore.results.words import percent

if TYPE_CHECKING:
    from markupsafe import Markup

# Of the report; what it has, such as its styles, the templates of other folders may take by ``part(FILE)``.
TEMPLATES = Path(__file__).parents[1] / "templates"


def render(folder: Path, template: str, **values: Any) -> str:
    """Return a page through a template of ``folder``, which sees ``values``; one of HTML escapes them."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def part(file: str) -> Markup:
        return Markup((TEMPLATES / file).read_text("utf-8"))

    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=template.endswith("html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plain"] = _plain
    environment.filters["breakable"] = lambda name: Markup("_<wbr>").join(str(name).split("_"))
    always = {"part": part, "version": __version__, "svg": Markup, "level": percent(LEVEL)}
    # Imported templates see globals alone.
    environment.globals.update({**always, **values})
    return environment.get_template(template).render()


# Log's text on one line of Markdown.
def _plain(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "/").replace("<", "&lt;")


def write(contents: Mapping[str, str], folder: Path) -> list[Path]:
    """Write a page's files into ``folder``, which is made; return them. EncoreError if the disk does not take them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in contents.items():
            (folder / file).write_text(content, encoding="utf-8", errors="replace")
    except OSError as error:
        raise EncoreError(
            f"the report cannot be written to {folder}: {error.strerror or error}",
            hint="give a folder that you may write to: -o DIR",
            exit_code=ExitCode.FAILED,
        ) from error
    return [folder / file for file in contents]
