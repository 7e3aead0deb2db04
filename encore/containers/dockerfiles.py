"""The Dockerfiles, each complete and readable by itself, from two templates and the rows of images.toml."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from encore import catalogue
from encore.catalogue import Choice
from encore.containers import images
from encore.environment import build_switches


def path_of(choice: Choice) -> Path:
    """The Dockerfile of a benchmark's image."""
    return images.CONTAINERS / choice.name / "Dockerfile"


def standin_path(framework: str) -> Path:
    """The Dockerfile of a framework's CPU stand-in."""
    return images.CONTAINERS / "standin" / framework / "Dockerfile"


def every() -> dict[Path, str]:
    """What each Dockerfile should hold, by its path."""
    known, choices = images.catalogue(), catalogue.choices()
    texts = {path_of(choices[name]): benchmark_image(choices[name], row) for name, row in known.image.items()}
    for framework, row in known.standin.items():
        texts[standin_path(framework)] = standin(framework, row)
    return texts


def benchmark_image(choice: Choice, row: images.Row) -> str:
    """The Dockerfile of a benchmark's image."""
    framework = catalogue.framework(choice.implementation.framework)
    return _render(
        "Dockerfile.j2",
        name=choice.name,
        title=f"{row.title} in {framework.title}",
        row=row,
        framework=framework,
        release=images.find_release(choice.implementation.framework),
    )


def standin(name: str, row: images.StandIn) -> str:
    """The Dockerfile of a framework's CPU stand-in."""
    framework = catalogue.framework(name)
    horovod = framework.horovod
    named = next(key for key, each in catalogue.choices().items() if each.implementation.framework == name)
    return _render(
        "standin/Dockerfile.j2",
        name=name,
        benchmark=named,
        row=row,
        framework=framework,
        horovod=horovod,
        switches=build_switches(horovod, mpi=True) if horovod else {},
    )


def _render(template: str, **facts: object) -> str:
    jinja = Environment(
        loader=FileSystemLoader(images.CONTAINERS),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return jinja.get_template(template).render(**facts)
