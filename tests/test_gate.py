"""The documentation builds as a site, and the picture of the architecture is up to date."""

from pathlib import Path

import pytest

from tools import architecture, site


@pytest.mark.slow
def test_site_has_its_pages(tmp_path: Path) -> None:
    site.stage(tmp_path / "pages")
    assert site.build(tmp_path) == 0
    pages = {path.relative_to(tmp_path / "html") for path in (tmp_path / "html").rglob("*.html")}
    assert {Path("index.html"), Path("docs/glossary.html"), Path("benchmarks/resnet/index.html")} <= pages


def test_picture_of_the_architecture_is_up_to_date() -> None:
    assert architecture.PICTURE.read_text(encoding="utf-8") == architecture.draw(), "hint: make docs"
