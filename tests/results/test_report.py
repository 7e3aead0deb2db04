"""Reports: the written files, pictures of detections and games, and the page in headless Chromium without a network."""

import base64
import io
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from encore import __version__
from encore.errors import EncoreError, ExitCode
from encore.lab.scaling.printed_tables import MICROWAY, findings
from encore.lab.scaling.printed_tables import tables as study_tables
from encore.results.compare.compare import Factor, compare
from encore.results.compare.run_set import load_run_set
from encore.results.report.report import Report, build_report, render, section, tone
from encore.results.report.report import write_files as write_report
from encore.results.report.samples_view import (
    DETECTIONS,
    TEXTS,
    TRANSLATIONS,
    board_svg,
    game_of,
    generation_plots,
    generations_of,
    generations_table,
    image_svg,
    images_of,
    last_moves,
    select_for_report,
    texts_table,
    translations_table,
)
from encore.results.table import Table
from tests.command_line import run_encore
from tests.results.result_logs import START_MS, a100_texts, dell_texts, resnet_v07, write_files, write_set

A100 = "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet"
MARKUP = '</td><script>document.title="taken"</script>|<b>'


def write_sets(folder: Path) -> list[Path]:
    # One DGX A100, and two DGX A100 with markup in a hyperparameter and in translations
    values = {"submission_org": "NVIDIA", "global_batch_size": 1664}
    two = {"submission_platform": "2xNVIDIA DGX A100", "opt_name": MARKUP}
    sets = {"$one$": a100_texts(39.6, spread=0.3, **values), "two": a100_texts(23.1, spread=0.3, **values, **two)}
    translated = translations((MARKUP, 7.5), ("word " * 400, 3.25), ("x" * 5000, 99.0))
    write_files(folder / "two", {f"experiment_0/{TRANSLATIONS}": translated})
    return [write_set(folder / name, texts) for name, texts in sets.items()]


def translations(*sentences: tuple[str, float]) -> list[Any]:
    # Translations of one evaluation; chrF rises with the number of the sentence
    return [
        {"epoch": 3, "index": n, "source": "s", "hypothesis": text, "reference": f"| {text}", "bleu": bleu, "chrf": n}
        for n, (text, bleu) in enumerate(sentences)
    ]


# --- the page in Chromium ---------------------------------------------------------------------------------

OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    studied = [*study_tables(), findings()]
    report = build_report(write_sets(folder / "runs"), study=MICROWAY, studied=studied, baseline="$one$")
    return write_report(report, folder / "out")[0]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no Chromium: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = program
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.arguments.extend(OPTIONS)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


@pytest.fixture
def browser(chromium: Any, page: Path) -> Any:
    # Chromium with the page and without what an earlier test emulated
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.get(page.as_uri())
    return chromium


PLOTS = """return [...document.querySelectorAll('figure svg[role=img]')].map(s =>
    [s.querySelector('path') !== null, s.getBoundingClientRect().height, s.getAttribute('aria-label')])"""
REQUESTS = "return performance.getEntriesByType('resource').map(e => e.name).filter(name => !name.startsWith('data:'))"
DUPLICATE_IDS = """const ids = [...document.querySelectorAll('[id]')].map(e => e.id)
    return ids.filter((id, place) => ids.indexOf(id) !== place)"""
WIDTH_AND_CUT_NAMES = """return [document.scrollingElement.scrollWidth,
    [...document.querySelectorAll('#summary .name, article h2')].filter(
        e => e.scrollWidth > e.clientWidth || getComputedStyle(e).textOverflow === 'ellipsis').length]"""


@pytest.mark.slow
def test_page_is_complete_and_readable_in_chromium(browser: Any, page: Path) -> None:
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert browser.title == "Encore report", "values of a log are text and not markup"
    assert [browser.execute_script(script) for script in (REQUESTS, DUPLICATE_IDS)] == [[], []]
    plots = [has_path and height > 50 and len(label) > 10 for has_path, height, label in browser.execute_script(PLOTS)]
    assert len(plots) >= 12 and all(plots)
    for width in (390, 1280, 1920):
        metrics = {"width": width, "height": 700, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(page.as_uri())
        needed, cut_names = browser.execute_script(WIDTH_AND_CUT_NAMES)
        assert (needed <= width, cut_names) == (True, 0), width


# Visible rows of the summary, and visible sections
VISIBLE = """return ['#summary tbody tr', 'article'].map(s => [...document.querySelectorAll(s)]
    .filter(e => e.offsetParent !== null).map(e => e.dataset.set || e.id))"""


@pytest.mark.long
@pytest.mark.slow
def test_filter_works_with_the_keyboard(browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    assert browser.execute_script(VISIBLE) == [["run-1", "run-2"], ["run-1", "run-2"]]
    field = browser.find_element("id", "filter")
    field.send_keys("RESNET two")
    assert browser.execute_script(VISIBLE) == [["run-2"], ["run-2"]]
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(Keys.DELETE, Keys.TAB, Keys.SPACE)
    assert browser.switch_to.active_element.get_attribute("aria-pressed") == "false"


# --- the files --------------------------------------------------------------------------------------------


def test_content_of_a_report(tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    folder = tmp_path / "sets"
    # Two sets of five runs, one that missed among five, a run on a CPU, a set with a factor, and translations
    rising = tuple(0.1 + 0.07 * k for k in range(9))
    missing = [resnet_v07(39.0 + n, quality=(*rising, 0.7605), start_ms=START_MS + 10**7 * n) for n in range(4)]
    write_set(folder / "missing", [*missing, resnet_v07(50.0, quality=rising, status="aborted", cache_clear=False)])
    passport = {"system": "cpu", "configuration": {"quality_target": {"value": 0.95}}, "choices": {"0": {"tf32": "on"}}}
    small = write_files(folder / "small", {
        "result_0.txt": resnet_v07(0.5, quality=(0.3, 0.8, 0.97), train_samples=1500),
        "run.json": passport,
        "system.json": {"accelerators_per_node": "0", "number_of_nodes": "1"},
        f"experiment_1/{TRANSLATIONS}": translations(*((f"satz {n}", float(n * 37 % 101)) for n in range(101))),
        f"experiment_10/{TRANSLATIONS}": translations(("of a later run", 50.0)),
    })  # fmt: skip
    write_files(write_set(folder / "official", dell_texts()), {"scaling.json": {"scaling_factor": 1.0042}})
    report = build_report([*write_sets(folder), *(folder / name for name in ("missing", "small", "official"))])
    text = render(replace(report, created="now"), "report.md.j2").replace(__version__, "VERSION")
    # The checker sorts alternative events in any order
    recorded("report.md", "\n".join(line for line in text.splitlines() if not re.search(r"_(?:start|stop) or ", line)))
    plots = [
        f"<!-- {section.title}, {plot.title}: {plot.note} -->\n{plot.svg}"
        for section in report.sections
        for plot in (*section.plots, *section.bars)
    ]
    figures = [f"<!-- {figure.key} -->\n{figure.svg}" for figure in report.figures]
    recorded("report_plots.svg", "\n".join([*plots, *figures]))
    stats = {section.title: [list(section.stats), section.tone, section.ratio] for section in report.sections}
    recorded("report_stats.json", stats)
    html = render(report, "report.html.j2")
    # The curve and the phases of a run on small data come first
    order = re.findall('<figcaption>Top-1|<figcaption>Where the|<ul class="reasons">', html[html.index('id="run-4"') :])
    assert order[:3] == ["<figcaption>Top-1", "<figcaption>Where the", '<ul class="reasons">']
    # Nothing is loaded from elsewhere
    assert {*re.findall(r'(?:src|href)="([^"#][^"]*)"|(@import|url\(|https?://)', html)} <= {("data:,", "")}
    assert build_report([small], name=A100).sections[0].against == A100
    assert "no log was checked" in str(section(compare(load_run_set(small), A100), is_selected=True))
    # Fewer epochs than theirs are not worse
    fewer = Factor(name="epochs to the target", unit="epochs", ours=38.0, theirs=41.0, ratio=38 / 41)
    assert tone("converges differently", fewer) == "plain"


def test_markdown_report_has_no_html() -> None:
    report = Report(title=MARKUP, about=MARKUP, notices=(MARKUP,), studies=(Table(title=MARKUP, columns=(), rows=()),))
    assert "&lt;script>" in render(report, "report.md.j2") and "<" not in render(report, "report.md.j2")


def test_texts_are_cut_and_damaged_lines_are_skipped(tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    # No cell has markup or control characters
    texts = {"text": "The list", "reference": " of all", "likeliest": " is a\n\u202elist " + "x" * 400, "drawn": " <b>"}
    line = {"epoch": 1, "index": 4, "source": "", "hypothesis": "", "reference": "", "bleu": 1, "chrf": 1}
    changes = [
        {"hypothesis": 3}, {"bleu": float("nan")}, {"chrf": 10**400}, {"hypothesis": "x" * 100_000}, {"bleu": None},
    ]  # fmt: skip
    translated = (f"![{MARKUP}](http://example.org)", "a\x1b[2J\u202eb\nc", "ü" * 1000, "\ufffd")
    damaged = ['{"epoch": 1, "source": "cut o\n', [1, 2], None, "[" * 50_000 + "\n", {}]
    write_files(tmp_path, {
        f"experiment_2/{TEXTS}": [texts, {}, {**texts, "text": 1}],
        f"experiment_0/{TRANSLATIONS}": [
            *translations(*((text, 1.0) for text in translated)), *damaged, *({**line, **change} for change in changes),
        ],
    })  # fmt: skip
    tables = (texts_table(tmp_path), translations_table(tmp_path))
    recorded("texts.md", "\n".join(text for table in tables for text in (table.note, table.as_markdown())))
    assert texts_table(tmp_path / "experiment_2") is None


@pytest.mark.parametrize("quality", [(0.3, float("nan"), 0.7605), (float("inf"), 1e300), (0.7605,), ()])
def test_page_has_no_numbers_that_are_not_finite(quality: tuple[float, ...], tmp_path: Path) -> None:
    texts = [resnet_v07(minutes, quality=quality) for minutes in (1e-6, 40.0, 1e7)]
    html = write_report(build_report([write_set(tmp_path / "odd", texts)]), tmp_path / "out")[0].read_text("utf-8")
    assert not re.search(r'[" ](?:nan|inf)[" ]', html)


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(EncoreError, match="cannot be written") as error:
        write_report(Report(), write_files(tmp_path, {"file": ""}) / "file" / "report")
    assert error.value.exit_code is ExitCode.FAILED


# --- pictures and games ----------------------------------------------------------------------------------

PICTURE_MARKUP = '"><script>document.title="taken"</script>\x1b[2J'
Record = Callable[[str, object], None]


def jpeg() -> str:
    Image.new("RGB", (40, 30), "gray").save(file := io.BytesIO(), "JPEG")
    return base64.b64encode(file.getvalue()).decode("ascii")


def picture(number: int, which: str = "best", **values: Any) -> dict[str, Any]:
    matched = {"score": 0.875, "matched": number % 2 == 0, "runs": [1, 2, 3, 1, 3, 2]}
    return {
        "which": which, "image": number, "file": f"{number}.jpg", "epoch": 3, "precision": 0.5, "width": 40,
        "height": 30, "jpeg": jpeg(), "found": [{"label": "cat", "box": [1, 2, 10, 20], **matched}],
        "truth": [{"label": "dog", "box": [3, 4, 10, 20], "crowd": True}], **values,
    }  # fmt: skip


def write_pictures(folder: Path, *lines: Any, experiment: int = 0) -> Path:
    return write_files(folder, {f"experiment_{experiment}/{DETECTIONS}": [*lines]})


def test_drawing_of_detections_and_objects(tmp_path: Path, recorded: Record) -> None:
    # Dashed: unmatched; dotted: a crowd. Labels are text and end with the picture
    shapes = [
        {"label": "cat", "box": [1, 2, 10, 20], "score": 0.5},
        {"label": PICTURE_MARKUP, "box": [30, 18, 9, 9], "score": 1},
    ]
    images = images_of(write_pictures(tmp_path, picture(1), picture(2, file=PICTURE_MARKUP, found=shapes)))
    assert all("\x1b" not in image.title + image.found[-1].label for image in images)
    svg = "\n".join(f"{image_svg(image)}<!-- {image.shown_size} {image.name} -->" for image in images)
    recorded("detections.svg", svg.replace(jpeg(), "JPEG"))


@pytest.mark.parametrize(
    "damaged",
    [
        "cut o", "null", "[1]", "[" * 50_000, {"jpeg": "!"}, {"width": 0},
        {"jpeg": base64.b64encode(b"<svg>").decode()}, {"height": 10**9}, {"precision": float("nan")}, {"found": None},
        {"found": [{"label": "x", "box": [1, 2, 3]}]}, {"found": [{"label": "x", "box": [1, 2, 3, 1e999]}]},
        {"truth": [3]}, {"truth": [{"label": "x", "box": "abcd"}]},
        {"truth": [{"label": "x", "box": [1, 2, 3, 4], "runs": 3}]},
    ],
    ids=range(15),
)  # fmt: skip
def test_damaged_pictures_are_skipped(tmp_path: Path, damaged: Any) -> None:
    line = f"{damaged}\n" if isinstance(damaged, str) else picture(1, **damaged)
    assert [image.image for image in images_of(write_pictures(tmp_path, line, picture(2)))] == [2]


@pytest.mark.parametrize("options", ["-o out", "--json -o out"])
def test_command_prints_and_writes_pictures(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Record
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pictures(write_set(tmp_path / "run", [resnet_v07(40.0)]), picture(1), picture(2, "worst"))
    printed = run_encore("report", "run", "--detections", *options.split(), width=100).stdout
    pictures = sorted(path.name for path in tmp_path.glob("out/*"))
    recorded(f"detections{'_json' * ('--json' in options)}.txt", "\n".join([printed, *pictures]))


def test_report_has_four_pictures_of_the_first_experiment(tmp_path: Path) -> None:
    run = write_set(tmp_path / "run", [resnet_v07(40.0)])
    worst = [picture(n, "worst") for n in range(5, 8)]
    for experiment, pictures in ((10, [picture(10)]), (2, [*map(picture, range(3)), *worst])):
        write_pictures(run, *pictures, experiment=experiment)
    chosen = select_for_report(images_of(run))
    assert [[image.image for image in images] for images in (images_of(run), chosen)] == [
        [0, 1, 2, 5, 6, 7],
        [0, 1, 5, 6],
    ]
    assert images_of(None) == images_of(tmp_path / "nothing") == []
    files = {file.name: file.read_text("utf-8") for file in write_report(build_report([run]), tmp_path / "report")}
    html = files["report.html"]
    assert (html.count('src="data:image/svg+xml;base64,'), "Detections (4)" in html) == (4, True)
    names = re.findall(r"^!\[\w+\]\((\S+)\)$", files["report.md"], re.MULTILINE)
    assert [files[name] for name in names] == [*map(image_svg, chosen)]


# Black captures the white stone in the corner A5 with B5 and A4; white plays there again and captures nothing.
GAME = {
    "generation": 2, "game": 2_000_000, "size": 5, "moves": [1, 0, 5, 25, 12, 0],
    "stones": [2, 1, *[0] * 3, 1, *[0] * 6, 1, *[0] * 12], "outcome": -1.0, "margin": -3.5, "resigned": False,
}  # fmt: skip


def generation(number: int, policy_loss: float) -> dict[str, Any]:
    return {
        "generation": number, "games": 256.0, "moves": 21.5, "black_wins": 0.5, "resigned": 0.25,
        "loss": 9.0, "policy_loss": policy_loss, "value_loss": 0.5, "positions": 4096,
    }  # fmt: skip


# A resumed run wrote the second generation again
GENERATIONS: dict[str, list[Any]] = {
    "generations": [generation(1, 3.0), generation(2, 9.0), generation(2, 2.0), {"generation": 3}, [1]],
    "evaluations": [
        {"generation": 1, "win_rate": 0.25},
        {"generation": 2, "win_rate": 0.9, "win_rate_first": 0.7},
        {"generation": 3, "win_rate": 7},
    ],
    "shown_games": [
        {**GAME, "generation": 1}, {**GAME, "margin": 0.5}, GAME, {**GAME, "generation": 3, "stones": [3] * 25},
        {**GAME, "generation": 4, "moves": [26]}, {**GAME, "generation": 5, "size": 200},
    ],
}  # fmt: skip


def test_generations_and_a_game_of_a_resumed_run(tmp_path: Path, recorded: Record) -> None:
    folder = write_set(tmp_path / "played", [resnet_v07(40.0), resnet_v07(41.0)])
    write_files(folder, {f"experiment_1/{name}.jsonl": [*lines, '{"cut off'] for name, lines in GENERATIONS.items()})
    game, table, plots = game_of(folder), generations_table(folder), generation_plots(folder)
    recorded("generations.svg", "\n".join([board_svg(game), *(plot.svg for plot in plots)]))
    about = [game.title, game.shown_size, last_moves(game)]
    recorded("generations.json", [about, table.note, table.columns, *table.rows])
    assert (generations_of(None), generations_table(tmp_path), generation_plots(tmp_path)) == (({}, {}), None, [])
    files = {file.name: file.read_text("utf-8") for file in write_report(build_report([folder]), tmp_path / "out")}
    assert [files["report.html"].count(text) > 0 for text in ("Generations (2)", game.title)] == [True, True]
    assert "game_1.svg" in files and "![the board at the end](game_1.svg)" in files["report.md"]
