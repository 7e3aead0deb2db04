"""The report: its files, and its page in headless Chromium without a network."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from encore import __version__
from encore.errors import EncoreError, ExitCode
from encore.lab.scaling.printed_tables import MICROWAY, findings
from encore.lab.scaling.printed_tables import tables as study_tables
from encore.results.compare.compare import Factor, compare
from encore.results.compare.sides import load_side
from encore.results.report.figures import STYLE, all_figures
from encore.results.report.measurements import all_tables, of_side
from encore.results.report.report import Report, build_report, render, section, tone, write_files
from encore.results.report.shown import LONGEST, TEXTS, TRANSLATIONS, texts_table, translations_table
from encore.results.table import shown
from tests.results.result_logs import START_MS, dell_texts, resnet_v07, uneven, write_set

OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
NAME = "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet"
HOSTILE = '</td><script>document.title="taken"</script>|<b>'


# Two sets: a DGX A100 and two of them; the second has a value that would be markup.
def runs(folder: Path) -> list[Path]:
    sets = []
    for name, platform, minutes in (("$one$", "1xNVIDIA DGX A100", 39.0), ("two", "2xNVIDIA DGX A100", 22.5)):
        texts = [
            resnet_v07(
                minutes + 0.3 * n,
                quality=(*(0.3 + 0.01 * k + 0.001 * n for k in range(9)), 0.7605),
                seed=100 + n,
                start_ms=START_MS + 10**7 * n,
                submission_org="NVIDIA",
                submission_platform=platform,
                opt_name=HOSTILE if name == "two" else "sgd",
            )
            for n in range(5)
        ]
        sets.append(write_set(folder / name, [uneven(text, n) for n, text in enumerate(texts)]))
    write_translations(sets[1] / "experiment_0", [(HOSTILE, 7.5), ("word " * 400, 3.25), ("x" * 5000, 99.0)])
    return sets


# Write what a training that translates leaves in the folder of an experiment; chrF rises with the number.
def write_translations(experiment: Path, translations: list[tuple[str, float]]) -> None:
    experiment.mkdir()
    lines = [
        {"epoch": 3, "index": n, "source": "s", "hypothesis": text, "reference": f"| {text}", "bleu": bleu, "chrf": n}
        for n, (text, bleu) in enumerate(translations)
    ]
    (experiment / TRANSLATIONS).write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    made = build_report(runs(folder / "runs"), study=MICROWAY, studied=[*study_tables(), findings()], baseline="$one$")
    write_files(made, folder / "out")
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
    assert {"report.html", "report.md", "time.svg", "time.csv", "quality-resnet.svg", "table_1.csv"} <= names
    drawn = ElementTree.parse(page.parent / "time.svg").getroot()
    assert drawn.tag.endswith("}svg")
    assert "stroke" in (drawn[0].text or ""), "a file of its own brings its style along"
    assert "<script>" not in (page.parent / "report.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("number", "text"),
    [(4.424e-05, "4.42e-05"), (0.0, "0"), (0.25, "0.25"), (39.78012, "39.78"), (3777824.0, "3,777,824")],
)
def test_no_number_that_is_not_zero_looks_like_zero(number: float, text: str) -> None:
    assert shown(number) == text


@pytest.mark.slow
def test_the_page_in_a_browser(page: Path, browser: Any) -> None:
    browser.get(page.as_uri())
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert browser.title == "Encore report", "a log's text is text and not markup"
    requests = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in requests if not name.startswith("data:")] == []
    plots = browser.execute_script(
        "return [...document.querySelectorAll('figure svg[role=img]')].map(s =>"
        " [s.querySelector('path') !== null, s.getBoundingClientRect().height, s.getAttribute('aria-label')])"
    )
    assert len(plots) >= 12
    assert all(drawn and height > 50 and len(label) > 10 for drawn, height, label in plots)
    doubled = browser.execute_script(
        "const n = {}; for (const e of document.querySelectorAll('[id]')) n[e.id] = (n[e.id] || 0) + 1;"
        "return Object.keys(n).filter(k => n[k] > 1)"
    )
    assert doubled == []


@pytest.mark.slow
def test_tables_sort_by_number_and_by_text(page: Path, browser: Any) -> None:
    browser.get(page.as_uri())
    for _ in range(2):
        sort(browser, "run-1-runs", 1)
    minutes = column(browser, "run-1-runs", 1)
    assert minutes == ["40.200", "39.900", "39.600", "39.300", "39.000"]
    sort(browser, "run-1-runs", 1)
    assert column(browser, "run-1-runs", 1) == minutes[::-1]
    sort(browser, "summary", 2)
    names = column(browser, "summary", 2)
    assert names == sorted(names)
    state = browser.execute_script(
        "return [...document.querySelectorAll('#summary th:not(.plain)')].map(t => t.getAttribute('aria-sort'))"
    )
    assert state.count("none") == len(state) - 1


# WCAG 2.1: text 4.5 to 1, lines of plots 3 to 1.
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_ink_is_readable_in_both_schemes(page: Path, browser: Any, scheme: str) -> None:
    features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
    browser.get(page.as_uri())
    inks_of_text = ["--ink", "--quiet", "--link", "--good", "--bad", "--open", "--plain"]
    names = ["--paper", "--card", *inks_of_text, "--theirs", *(f"--series-{n}" for n in range(1, 9))]
    script = (
        "const style = getComputedStyle(document.documentElement);"
        "return arguments[0].map(name => style.getPropertyValue(name).trim())"
    )
    paper, card, *inks = browser.execute_script(script, names)
    assert (luminance(paper) < 0.1) == (scheme == "dark")
    for name, ink in zip(names[2:], inks, strict=True):
        least = 4.5 if name in inks_of_text else 3.0
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


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_the_page_never_scrolls_sideways(page: Path, browser: Any, width: int) -> None:
    metrics = {"width": width, "height": 700, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        browser.get(page.as_uri())
        assert browser.execute_script("return document.scrollingElement.scrollWidth") <= width
        cut = browser.execute_script(
            "return [...document.querySelectorAll('#summary .name, article h2')]"
            ".filter(e => e.scrollWidth > e.clientWidth || getComputedStyle(e).textOverflow === 'ellipsis').length"
        )
        assert cut == 0, "names are whole"
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


# With its plots and the tables behind them, and without what only a screen can do.
@pytest.mark.slow
def test_the_page_prints(page: Path, browser: Any) -> None:
    browser.get(page.as_uri())
    shown = (
        "return ['.filter', '.tally', 'nav'].map(s => getComputedStyle(document.querySelector(s)).display !== 'none')"
    )
    assert browser.execute_script(shown) == [True, False, True]
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert len(printed["data"]) > 50_000
    assert browser.execute_script("return [...document.querySelectorAll('details')].every(d => d.open)")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert browser.execute_script(shown) == [False, True, False]
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


# What is shown of the list, and of the sections below it.
def visible(browser: Any) -> list[list[str]]:
    script = (
        "return ['#summary tbody tr', 'article'].map(s => [...document.querySelectorAll(s)]"
        ".filter(e => e.offsetParent !== null).map(e => e.dataset.set || e.id))"
    )
    found: list[list[str]] = browser.execute_script(script)
    return found


@pytest.mark.slow
def test_the_list_is_filtered(page: Path, browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.get(page.as_uri())
    assert visible(browser) == [["run-1", "run-2"], ["run-1", "run-2"]]
    field = browser.find_element("id", "filter")
    field.send_keys("RESNET two")
    assert visible(browser) == [["run-2"], ["run-2"]]
    assert browser.find_element("css selector", ".filter output").text == "1 of 2 sets"
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(Keys.DELETE, Keys.TAB, Keys.SPACE)
    button = browser.switch_to.active_element
    assert button.get_attribute("aria-pressed") == "false", "by the keyboard alone"
    assert [len(each) for each in visible(browser)] == [2 - int(button.text.split()[-1])] * 2
    button.send_keys(Keys.SPACE)
    assert len(visible(browser)[1]) == 2


def test_the_page_without_a_script(page: Path, browser: Any) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(page.as_uri())
        assert not browser.find_element("css selector", ".filter").is_displayed()
        assert browser.find_element("css selector", ".tally").is_displayed()
        assert len(browser.find_elements("css selector", "#summary tbody tr")) == 2
        assert browser.find_elements("css selector", "th button") == []
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


# 56 times five runs of 60 evaluations, compared with a submission and with all that differs from it.
def test_56_sets_make_a_small_page(tmp_path: Path) -> None:
    rising = tuple(0.76 * (1 - 0.9 ** (k + 1)) for k in range(59))
    texts = [
        resnet_v07(39 + 0.3 * n, quality=(*(value + 0.001 * n for value in rising), 0.7605), start_ms=START_MS + n)
        for n in range(5)
    ]
    side = load_side(write_set(tmp_path / "dgxa100_ngc20.06_mxnet" / "resnet", texts))
    compared = compare(side, NAME)
    one = section(replace(compared, theirs=replace(compared.theirs, curves=side.curves)), named=True)
    sections = (one,) * 56
    measured = [of_side(side)] * 56
    tables, figures = tuple(all_tables(measured)), tuple(all_figures(measured))
    report = Report(created="", sections=sections, tables=tables, figures=figures)
    page = render(report, "report.html.j2")
    assert page.count("<article") == 56
    assert page.count('class="l theirs"') + page.count('class="l ours"') > 56 * 15
    assert len(page.encode()) < 1_000_000


def test_verdicts_look_like_what_they_mean() -> None:
    fewer = Factor(name="epochs to the target", unit="epochs", ours=38.0, theirs=41.0, ratio=38 / 41)
    assert tone("converges differently", fewer) == "plain", "fewer epochs are nothing bad"
    assert tone("converges differently", replace(fewer, ratio=1.2)) == "bad"
    assert [tone(each) for each in ("reproduced", "undecided", "slower", "not comparable")] == [
        "good", "open", "bad", "plain",
    ]  # fmt: skip
    style = (STYLE.parent / "report.css").read_text("utf-8")
    assert all(f".verdict.{each} " in style for each in ("good", "open", "bad"))


# What a plot says and shows: its label, texts, and how many marks of each class.
def drawn(svg: str) -> list[object]:
    root = ElementTree.fromstring(svg)
    texts = [str(each.text) for each in root.iter("text")]
    marks = [(each.get("class"), str(each.get("d")).count("M")) for each in root.iter("path")]
    bars = [f"{each.get('class')} {each.get('x')} {each.get('width')}" for each in root.iter("rect")]
    return [root.get("aria-label"), texts, marks, bars]


# Two sets of five runs, one that missed among five, a run on a CPU, a set with a factor, and translations.
def test_what_a_report_says(tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    rising = tuple(0.1 + 0.07 * k for k in range(9))
    missing = [resnet_v07(39.0 + n, quality=(*rising, 0.7605), start_ms=START_MS + 10**7 * n) for n in range(4)]
    write_set(tmp_path / "missing", [*missing, resnet_v07(50.0, quality=rising, status="aborted", cache_clear=False)])
    small = write_set(tmp_path / "small", [resnet_v07(0.5, quality=(0.3, 0.8, 0.97), train_samples=1500)])
    passport = {"system": "cpu", "configuration": {"quality_target": {"value": 0.95}}, "choices": {"0": {"tf32": "on"}}}
    (small / "run.json").write_text(json.dumps(passport))
    (small / "system.json").write_text(json.dumps({"accelerators_per_node": "0", "number_of_nodes": "1"}))
    write_translations(small / "experiment_1", [(f"satz {n}", float(n * 37 % 101)) for n in range(101)])
    write_translations(small / "experiment_10", [("of a later run", 50.0)])
    official = write_set(tmp_path / "official", dell_texts())
    (official / "scaling.json").write_text('{"scaling_factor": 1.0042}')
    report = build_report([*runs(tmp_path), *(tmp_path / name for name in ("missing", "small", "official"))])
    text = render(replace(report, created="now"), "report.md.j2").replace(__version__, "VERSION")
    # The checker puts the events of which it wants one in any order.
    recorded("report.md", "\n".join(line for line in text.splitlines() if not re.search(r"_(?:start|stop) or ", line)))
    plots = {
        f"{each.title}, {plot.title}": [plot.note, *drawn(plot.svg)]
        for each in report.sections
        for plot in (*each.plots, *each.bars)
    }
    recorded("report_plots.json", plots | {figure.key: drawn(figure.svg) for figure in report.figures})
    recorded("report_plots.svg", "\n".join(plot.svg for plot in (*report.sections[2].plots, *report.sections[2].bars)))
    stats = {each.title: [list(each.stats), each.tone, each.ratio] for each in report.sections}
    recorded("report_stats.json", stats)
    html = render(report, "report.html.j2")
    order = [html.index(f"<figcaption>{title}", html.index('id="run-4"')) for title in ("Top-1", "Where the time went")]
    assert order == sorted(order)
    assert order[-1] < html.index('<ul class="reasons">', order[0]), "a small run's own curve and phases come first"
    assert set(re.findall(r'(?:src|href)="([^"#][^"]*)"', html)) <= {"data:,"}
    assert re.findall(r"@import|url\(|https?://", html) == []
    (asked,) = build_report([small], name=NAME).sections
    assert asked.against == NAME


# Neither markup, links, control characters nor a reversed direction of writing; what is damaged is passed over.
def test_continued_texts_are_shown_as_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "experiment_2").mkdir()
    texts = {"text": "The list", "reference": " of all", "likeliest": " is a\n\u202elist " + "x" * 400, "drawn": " <b>"}
    lines = [json.dumps(texts), "{}", json.dumps({**texts, "text": 1})]
    (tmp_path / "experiment_2" / TEXTS).write_text("\n".join(lines), encoding="utf-8")
    table = texts_table(tmp_path)
    assert table is not None and "result_2.txt" in table.note
    ((begin, goes_on, likeliest, drawn),) = table.rows
    assert (begin, goes_on, drawn) == ("The list", "of all", "<b>")
    assert str(likeliest).startswith("is a list xxx") and len(str(likeliest)) == LONGEST
    assert texts_table(tmp_path / "experiment_2") is None


def test_translations_are_text_of_a_limited_length(tmp_path: Path) -> None:
    texts = [f"![{HOSTILE}](http://example.org)", "a\x1b[2J\u202eb\nc", "ü" * 1000, "\ufffd"]
    write_translations(tmp_path / "experiment_0", [(text, 1.0) for text in texts])
    whole = {"epoch": 1, "index": 4, "source": "", "hypothesis": "", "reference": "", "bleu": 1, "chrf": 1}
    damaged = [
        '{"epoch": 1, "source": "cut o',
        "[1, 2]",
        "null",
        "[" * 50_000,
        json.dumps({name: value for name, value in whole.items() if name != "bleu"}),
        *(json.dumps({**whole, **other}) for other in ({"hypothesis": 3}, {"bleu": float("nan")}, {"chrf": 10**400})),
        json.dumps({**whole, "hypothesis": "x" * 100_000}),
    ]
    with (tmp_path / "experiment_0" / TRANSLATIONS).open("a", encoding="utf-8") as file:
        file.write("\n".join(damaged))
    table = translations_table(tmp_path)
    assert [row[1] for row in table.rows] == [4, 3, 2, 1]
    shown = [str(row[5]) for row in reversed(table.rows)]
    assert shown[1] == "a [2J b c"
    assert shown[2] == "ü" * (LONGEST - 1) + "…"
    assert all(text.isprintable() for text in shown)
    assert "![" not in table.as_markdown() and "<script" not in table.as_markdown()


@pytest.mark.parametrize("quality", [(0.3, float("nan"), 0.7605), (float("inf"), 1e300), (0.7605,), ()])
def test_odd_logs_make_a_page(quality: tuple[float, ...], tmp_path: Path) -> None:
    texts = [resnet_v07(minutes, quality=quality) for minutes in (1e-6, 40.0, 1e7)]
    page = write_files(build_report([write_set(tmp_path / "odd", texts)]), tmp_path / "out")[0].read_text("utf-8")
    assert not re.search(r'[" ](?:nan|inf)[" ]', page)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EncoreError, match="cannot be written") as refused:
        write_files(Report(), tmp_path / "file" / "report")
    assert refused.value.exit_code is ExitCode.FAILED


@pytest.mark.slow
def test_public_sets_make_one_page(public_logs: Path, tmp_path: Path) -> None:
    files = write_files(build_report([public_logs / "v0.7" / "NVIDIA"], baseline="dgx1_ngc20.06_pytorch"), tmp_path)
    assert files[0].stat().st_size < 1_000_000
    text = files[1].read_text("utf-8")
    assert text.count("**same runs**") >= 14
