"""The Dockerfiles, each complete and readable by itself, from two templates and the rows of images.toml."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from encore import catalogue
from encore.containers import images
from encore.environment import build_switches


def path_of(name: str) -> Path:
    """Return the Dockerfile of a benchmark's image; of a framework's CPU stand-in as ``standin/NAME``."""
    return images.CONTAINERS / name / "Dockerfile"


def every() -> dict[Path, str]:
    """Return what each Dockerfile should hold, by its path."""
    known, choices = images.catalogue(), catalogue.choices()
    texts = {}
    for name, row in known.image.items():
        framework = choices[name].implementation.framework
        release = images.find_release(framework)
        texts[path_of(name)] = _render("Dockerfile.j2", framework, name=name, row=row, release=release)
    for framework, standin in known.standin.items():
        horovod = catalogue.framework(framework).horovod
        texts[path_of(f"standin/{framework}")] = _render(
            "standin/Dockerfile.j2",
            framework,
            name=framework,
            row=standin,
            benchmark=next(n for n, each in choices.items() if each.implementation.framework == framework),
            switches=build_switches(horovod, mpi=True) if horovod else {},
        )
    return texts


def _render(template: str, framework: str, **facts: object) -> str:
    jinja = Environment(
        loader=FileSystemLoader(images.CONTAINERS),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return jinja.get_template(template).render(framework=catalogue.framework(framework), **facts)
