"""The report: its files, and its page in headless Chromium without a network."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError
from encore.results.report import build_report, write_report
from encore.results.studies import MICROWAY
from tests.results.result_logs import START_MS, resnet_v07, write_set

OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
HOSTILE = '</td><script>document.title="taken"</script>|<b>'


def runs(folder: Path) -> list[Path]:
    """Return two sets: a DGX A100 and two of them; the second has a value that would be markup."""
    sets = []
    for name, platform, minutes in (("$one$", "1xNVIDIA DGX A100", 39.0), ("two", "2xNVIDIA DGX A100", 22.5)):
        texts = [
            resnet_v07(
                minutes + 0.3 * n,
                quality=(*(0.3 + 0.01 * k for k in range(9)), 0.7605),
                start_ms=START_MS + 10**7 * n,
                submission_platform=platform,
                opt_name=HOSTILE if name == "two" else "sgd",
            )
            for n in range(5)
        ]
        sets.append(write_set(folder / name, texts))
    return sets


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_report(runs(folder / "runs"), folder / "out", study=MICROWAY, baseline="$one$")
    return folder / "out" / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no Chromium: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for option in OPTIONS:
        options.add_argument(option)
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


def column(browser: Any, table: str, number: int) -> list[str]:
    script = (
        "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)]"
        ".map(row => row.cells[arguments[1]].textContent)"
    )
    found: list[str] = browser.execute_script(script, table, number)
    return found


def sort(browser: Any, table: str, number: int) -> None:
    browser.execute_script(
        "document.querySelectorAll(`#${arguments[0]} th button`)[arguments[1]].click()", table, number
    )


def test_files_of_a_report(page: Path) -> None:
    names = {path.name for path in page.parent.iterdir()}
    assert {"report.html", "report.md", "time.svg", "time.csv", "accuracy-resnet.svg", "table_1.csv"} <= names
    text = (page.parent / "report.md").read_text("utf-8")
    assert "## Summary" in text
    assert "**reproduced**" in text
    assert "<script>" not in text


def test_the_page_needs_nothing_else(page: Path) -> None:
    text = page.read_text("utf-8")
    links = re.findall(r'(?:src|href)="([^"#][^"]*)"', text)
    assert set(links) <= {"data:,"}
    assert "@import" not in text
    assert "url(http" not in text


def test_the_page_in_a_browser(page: Path, browser: Any) -> None:
    browser.get(page.as_uri())
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert browser.title == "Encore report", "a log's text is text and not markup"
    requests = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in requests if not name.startswith("data:")] == []
    plots = browser.execute_script(
        "return [...document.querySelectorAll('figure')].map(f => [f.querySelector('svg path') !== null,"
        " f.querySelector('svg').getBoundingClientRect().height, f.querySelector('details table') !== null])"
    )
    assert len(plots) >= 6
    assert all(drawn and height > 50 and table for drawn, height, table in plots)
    doubled = browser.execute_script(
        "const n = {}; for (const e of document.querySelectorAll('[id]')) n[e.id] = (n[e.id] || 0) + 1;"
        "return Object.keys(n).filter(k => n[k] > 1)"
    )
    assert doubled == []


def test_tables_sort_by_number_and_by_text(page: Path, browser: Any) -> None:
    browser.get(page.as_uri())
    for _ in range(2):
        sort(browser, "run-1-runs", 1)
    minutes = column(browser, "run-1-runs", 1)
    assert minutes == ["40.200", "39.900", "39.600", "39.300", "39.000"]
    sort(browser, "run-1-runs", 1)
    assert column(browser, "run-1-runs", 1) == minutes[::-1]
    sort(browser, "summary", 5)
    names = column(browser, "summary", 5)
    assert names == sorted(names)
    state = browser.execute_script(
        "return [...document.querySelectorAll('#summary th')].map(t => t.getAttribute('aria-sort'))"
    )
    assert state.count("none") == len(state) - 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_ink_is_readable_in_both_schemes(page: Path, browser: Any, scheme: str) -> None:
    """WCAG 2.1: text 4.5 to 1, lines of plots 3 to 1."""
    features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
    browser.get(page.as_uri())
    names = ["--paper", "--card", "--ink", "--quiet", "--link", *(f"--series-{n}" for n in range(1, 9))]
    script = (
        "const style = getComputedStyle(document.documentElement);"
        "return arguments[0].map(name => style.getPropertyValue(name).trim())"
    )
    paper, card, *inks = browser.execute_script(script, names)
    assert (luminance(paper) < 0.1) == (scheme == "dark")
    for name, ink in zip(names[2:], inks, strict=True):
        least = 3.0 if "series" in name else 4.5
        assert contrast(ink, paper) >= least, name
        assert contrast(ink, card) >= least, name


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * each for each in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_page_fits_a_phone(page: Path, browser: Any) -> None:
    metrics = {"width": 375, "height": 700, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        browser.get(page.as_uri())
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_prints(page: Path, browser: Any) -> None:
    """With its plots and the tables behind them, and on several pages."""
    browser.get(page.as_uri())
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert len(printed["data"]) > 50_000
    assert browser.execute_script("return [...document.querySelectorAll('details')].every(d => d.open)")


def test_what_the_report_says(tmp_path: Path) -> None:
    report = build_report(runs(tmp_path), name="v0.7/NVIDIA/dgxa100_ngc20.06_mxnet")
    first, second = report.sections
    assert first.comparison.verdict.value == "reproduced"
    assert second.comparison.verdict.value == "not comparable"
    assert [figure.key for figure in report.figures] == ["accuracy-resnet", "time", "efficiency"]
    assert any("probability" in sentence for sentence in first.sentences)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    sets = runs(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(EncoreError, match="cannot be written"):
        write_report(sets, tmp_path / "file" / "report")


def test_the_command(tmp_path: Path) -> None:
    sets = [str(path) for path in runs(tmp_path)]
    result = CliRunner().invoke(app, ["report", *sets, "-o", str(tmp_path / "out")])
    assert result.exit_code == 0
    assert (tmp_path / "out" / "report.html").is_file()
    nothing = CliRunner().invoke(app, ["report", "-o", str(tmp_path / "none")])
    assert isinstance(nothing.exception, EncoreError)


def test_public_sets_make_one_page(public_logs: Path, tmp_path: Path) -> None:
    files = write_report([public_logs / "v0.7" / "NVIDIA"], tmp_path, baseline="dgx1_ngc20.06_pytorch")
    assert files[0].stat().st_size < 3_000_000
    text = files[1].read_text("utf-8")
    assert text.count("**reproduced**") >= 14
