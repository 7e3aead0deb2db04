"""The documentation builds as a site, with the picture of the code as it is."""

from pathlib import Path

import pytest

from tools import architecture, site


@pytest.mark.slow
def test_site_has_every_page_and_no_dead_link(tmp_path: Path) -> None:
    site.stage(tmp_path / "pages")
    assert site.build(tmp_path) == 0
    built = {path.relative_to(tmp_path / "html") for path in (tmp_path / "html").rglob("*.html")}
    assert {Path("index.html"), Path("docs/glossary.html"), Path("benchmarks/resnet/index.html")} <= built
    with (tmp_path / "pages" / "docs" / "glossary.md").open("a", encoding="utf-8") as file:
        file.write("[gone](slurm.md#no-such-heading)")
    assert site.build(tmp_path) == 1


def test_picture_is_the_codes() -> None:
    assert architecture.PICTURE.read_text(encoding="utf-8") == architecture.drawn(), "`make docs` draws it again"
