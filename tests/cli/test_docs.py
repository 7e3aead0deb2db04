"""The documentation is tried: its commands, generated tables, links, options and quoted messages."""

import ast
import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from encore import catalogue, configuration, paths
from encore.cli import documentation
from encore.cli.app import app
from encore.errors import EncoreError, ExitCode
from encore.machine import node, telemetry
from encore.run import passport as passports
from encore.run import planning, run_folder, runner
from tests.results.result_logs import resnet_v07

PAGES = documentation.pages(paths.ROOT)
# What may follow three backticks: another word for a shell would hide commands from this test.
LANGUAGES = {"", "bash", "json", "python", "text", "toml"}
# A block without a language holds commands if it begins with one of these.
PROGRAMS = ("encore", "./run.sh", "make", "python", "horovodrun")
# Options of other people's programs that the pages mention.
FOREIGN_OPTIONS = {
    "--bind-to", "--check-build", "--container-env", "--container-image", "--container-mounts", "--delay-allreduce",
    "--gloo", "--gpus", "--mpi", "--no-deps", "--nv", "--shm-size", "--signal", "--strict",
}  # fmt: skip
# Messages of other people's programs, and of slurm/run.sub, that the troubleshooting page quotes.
FOREIGN_MESSAGES = {"GPU is not enabled", "cannot find the checkout on"}


@dataclass(frozen=True)
class Line:
    """A line of a block in a page."""

    page: Path
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(paths.ROOT)}:{self.number}: {self.text}"


def blocks(page: Path) -> Iterator[tuple[str, list[Line]]]:
    language: str | None = None
    lines: list[Line] = []
    for number, text in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if text.strip().startswith("```"):
            if language is None:
                language, lines = text.strip()[3:], []
            else:
                yield language, lines
                language = None
        elif language is not None:
            lines.append(Line(page, number, text))
    assert language is None, f"{page}: a block is not closed"


def prose(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@cache
def commands() -> list[Line]:
    found: dict[str, Line] = {}
    for page in PAGES:
        for language, lines in blocks(page):
            first = next((line.text.split()[0] for line in lines if line.text.strip()), "")
            if language != "bash" and not (language == "" and first in PROGRAMS):
                continue
            begun = ""
            for line in lines:
                begun += line.text.strip()
                if begun.endswith("\\"):
                    begun = begun[:-1] + " "
                    continue
                if shlex.split(begun, comments=True):
                    found.setdefault(begun, Line(page, line.number, begun))
                begun = ""
    return list(found.values())


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    # The pages are tried as on a machine without GPUs, wherever the test runs
    monkeypatch.setattr(node, "gpus", lambda: ())


# -- how each kind of command is tried ------------------------------------------------------------------


@dataclass(frozen=True)
class Ground:
    """Real folders for the placeholders of the pages."""

    folder: Path
    run: Path

    def put(self, word: str) -> str:
        known = {"DIR": self.folder / "DIR", "OUT": self.folder / "OUT", "FOLDER": self.folder / "OUT"}
        known |= {"RUN": self.run, "results/<run>": self.run, "training_results_v0.7": self.run.parent}
        for placeholder, path in known.items():
            if word == placeholder or word.startswith(f"{placeholder}/"):
                target = path if placeholder == "training_results_v0.7" else f"{path}{word[len(placeholder) :]}"
                return str(target)
        return word


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    # A run folder with five logs, made without training, and empty folders
    folder = tmp_path_factory.mktemp("docs")
    for name in ("DIR", "OUT"):
        (folder / name).mkdir()
    passport = {"benchmark": "resnet", "round": "v0.7"}
    run = run_folder.create(folder / "results", "resnet-mxnet-cpu", lambda path: passport, {}, {}, list(range(5)))
    for experiment in run.experiments():
        log = resnet_v07(40 + experiment.number, start_ms=1_592_669_288_183 + 10**7 * experiment.number)
        experiment.log.write_text(log, encoding="utf-8")
        experiment.publish_log()
        experiment.metrics.write_text('{"kind": "end", "time": 0, "outcome": "reached"}\n', encoding="utf-8")
        experiment.set_state(run_folder.ExperimentState(status="reached"))
    return Ground(folder, run.path)


def invoked(words: list[str], allowed: tuple[int, ...] = (0,)) -> str:
    done = CliRunner().invoke(app, words[1:], env={"COLUMNS": "120"}, prog_name="encore")
    if isinstance(done.exception, EncoreError):
        pytest.fail(str(done.exception))
    assert done.exit_code in allowed, done.output
    return done.stdout


def run_it(words: list[str], ground: Ground) -> str:
    return invoked(words)


def write_it(words: list[str], ground: Ground) -> str:
    # Write what follows -o to a folder of the test's own
    folder = tempfile.mkdtemp(dir=ground.folder)
    return invoked([*words[: words.index("-o") + 1], f"{folder}/out", *words[words.index("-o") + 2 :]])


def run_doctor(words: list[str], ground: Ground) -> str:
    return invoked(words, (0, 2))


def dry_run(words: list[str], ground: Ground) -> str:
    return invoked(words if "--dry-run" in words else [*words, "--dry-run"])


def dry_run_sh(words: list[str], ground: Ground) -> str:
    return dry_run(["encore", "run", *words[1:]], ground)


def parse_it(words: list[str], ground: Ground) -> str:
    command, rest = subcommand(words)
    command.make_context("encore", rest)
    return ""


def sbatch_it(words: list[str], ground: Ground) -> str:
    # Try the static script's options by ``encore submit``, which takes the same: those of ``encore run``
    place = words.index("slurm/run.sub")
    nodes = words[words.index("-N") + 1]
    gpus = [word for word in words[:place] if word.startswith("--gpus-per-node=")]
    return invoked(["encore", "submit", *words[place + 1 :], "--nodes", nodes, *gpus, "--dry-run"])


def make_it(words: list[str], ground: Ground) -> str:
    return executed(["make", "-n", *words[1:]], paths.ROOT)


def execute(words: list[str], ground: Ground) -> str:
    return executed([(sys.executable if words[0] == "python" else words[0]), *words[1:]], ground.folder)


def executed(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_tables(words: list[str], ground: Ground) -> str:
    documentation.main(write=False)
    return ""


def find_paths(words: list[str], ground: Ground) -> str:
    for word in words[3:]:
        assert word.startswith("-") or (paths.ROOT / word).exists(), f"there is no {word}"
    return ""


def find_module(words: list[str], ground: Ground) -> str:
    module = words[words.index("-m") + 1]
    named = paths.ROOT / Path(*module.split("."))
    path = named / "__main__.py" if named.is_dir() else named.with_suffix(".py")
    assert path.is_file(), f"there is no module {module}"
    if module.endswith(".prepare"):
        executed([sys.executable, *words[1:], "--check-options"], paths.ROOT)
        return ""
    text = path.read_text(encoding="utf-8")
    # train.py, bench.py and prepare.py share their command lines.
    if "benchmarks.common.run.run import" in text:
        text += (paths.BENCHMARKS / "common" / "run" / "configuration.py").read_text(encoding="utf-8")
    for shared in re.findall(
        r"^from benchmarks\.common(?:\.\w+)? import (\w+)|^from benchmarks\.common\.run\.(run) ", text, re.M
    ):
        for found in paths.BENCHMARKS.glob(f"common/**/{shared[0] or shared[1]}.py"):
            text += found.read_text(encoding="utf-8")
    for word in words[words.index("-m") + 2 :]:
        assert not word.startswith("--") or f'"{word}"' in text, f"{module} has no option {word}"
    return ""


def find_client(words: list[str], ground: Ground) -> str:
    text = (paths.BENCHMARKS / "common" / "serving" / "client.py").read_text(encoding="utf-8")
    for word in words[2:]:
        assert not word.startswith("--") or f'"{word}"' in text, f"client.py has no option {word}"
    return ""


Try = Callable[[list[str], Ground], str]
# How each kind of command is tried, the first that fits. Nobody adds a command that is not tried.
KINDS: tuple[tuple[str, Try], ...] = (
    (r"\./run\.sh \w", dry_run_sh),
    (r"encore run --resume RUN$", parse_it),
    (r"encore run \w", dry_run),
    (r"encore sweep --resume RUN$", parse_it),
    (r"encore sweep \w", dry_run),
    (r"encore study .*--dry-run", dry_run),
    (r"encore study \w", parse_it),
    (r"encore plan .* -o ", write_it),
    (r"encore submit --resume RUN", parse_it),
    (r"encore submit \w", dry_run),
    (r"sbatch -N \d+ .*slurm/run\.sub \w", sbatch_it),
    (r"encore data prepare \w", dry_run),
    (r"encore data verify \w", parse_it),
    (r"encore data verify$", run_it),
    (r"encore bench \w", parse_it),
    (r"encore selftest\b", parse_it),
    (r"encore status", run_it),
    (r"encore (follow|cancel|play)\b", parse_it),
    (r"encore doctor", run_doctor),
    (r"encore images list$", run_it),
    (r"encore images convert \w", dry_run),
    (r"encore images \w", parse_it),
    (r"encore report .*--detections", parse_it),
    (r"encore (report|archive) .*-o ", write_it),
    (r"encore (reproduce|export) ", parse_it),
    (r"encore (list|show|plan|published|score|check|audit|compare|report|--version)\b", run_it),
    (r"encore serve ", parse_it),
    (r"python DIR/triton/client\.py ", find_client),
    (r"make [\w-]+", make_it),
    (r"python -m encore\.cli\.documentation --(check|write)$", check_tables),
    (r"python -m pytest ", find_paths),
    (r"python -m (benchmarks|tests|tools)\.", find_module),
    (r"horovodrun -np \d+ python -m benchmarks\.", find_module),
    (r"python -m json\.tool RUN/", execute),
    (r"python -c ", execute),
    (r"tail -n \d+ RUN/", execute),
    (r"source \.venv/bin/activate$", find_paths),
)


@pytest.mark.parametrize("command", commands(), ids=str)
def test_command(command: Line, ground: Ground) -> None:
    # What it reads may be what another command writes; the tests run in any order, and in several processes.
    for other in commands():
        words = shlex.split(other.text, comments=True)
        if ">" in words and words[-1] in command.text and other != command:
            try_command(other, ground)
    try_command(command, ground)


def try_command(command: Line, ground: Ground) -> None:
    text = re.sub(r"^\.venv/bin/", "", command.text)
    try_it = next((how for pattern, how in KINDS if re.match(pattern, text_of(text))), None)
    assert try_it is not None, f"{command}: no kind of command; say in KINDS how it is tried"
    words = shlex.split(text, comments=True)
    words, target = (words[:-2], words[-1]) if ">" in words else (words, None)
    output = try_it([ground.put(word) for word in words], ground)
    if target is not None:
        (ground.folder / target).write_text(output, encoding="utf-8")


def text_of(text: str) -> str:
    return shlex.join(shlex.split(text, comments=True)) if "#" in text else text


def test_every_page_has_blocks_of_known_languages() -> None:
    assert {language for page in PAGES for language, _ in blocks(page)} <= LANGUAGES


def test_run_sh_hands_everything_to_encore(tmp_path: Path) -> None:
    shutil.copy(paths.ROOT / "run.sh", tmp_path)
    program = tmp_path / ".venv" / "bin" / "encore"
    program.parent.mkdir(parents=True)
    for path, text in ((tmp_path / "setup.sh", ""), (program, 'printf "%s|" "$@"\n')):
        path.write_text(f"#!/bin/sh\n{text}", encoding="utf-8")
        path.chmod(0o755)
    printed = executed([str(tmp_path / "run.sh"), "resnet", "2", "--set", "a=b c"], tmp_path)
    assert printed == "run|resnet|2|--set|a=b c|"


# -- generated tables -----------------------------------------------------------------------------------


def test_generated_tables_are_fresh() -> None:
    stale = [str(page.relative_to(paths.ROOT)) for page in documentation.stale(paths.ROOT)]
    assert not stale, f"stale tables in {', '.join(stale)}; hint: make docs"


def rows_below(heading: str) -> list[list[str]]:
    text = (paths.ROOT / "docs" / "selftest.md").read_text(encoding="utf-8").partition(f"\n{heading}\n")[2]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table, heading
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[0].splitlines()]


def test_the_selftests_page_agrees_with_the_programs() -> None:
    # Every check is explained, and a figure's cell says "–" where the implementation has no such check alone
    explained = {name for row in rows_below("## The checks") for name in re.findall(r"`([^`]+)`", row[0])}
    listed = documentation.checks()
    keys = {name.partition("=")[0] for names in listed.values() for name in names}
    families = {name.partition("=")[0] for name in explained}
    assert keys <= families, "explain each check, or each key that is varied"
    columns = ("ncf", "dlrm", "gnmt", "transformer", "resnet-pytorch", "ssd", "maskrcnn")
    head, _, *rows = rows_below("## On an H200")
    assert len(head) == len(columns) + 1
    for check, *cells in rows:
        name = re.findall(r"`([^`]+)`", check)[0]
        has_none = {column for column, cell in zip(columns, cells, strict=True) if cell == "–"}
        assert has_none == {column for column in columns if name not in listed[column]}, name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<!-- generated: targets resnet -->\n", "has no <!-- end -->"),
        ("<!-- generated: sytems resnet -->\n<!-- end -->\n", "unknown generated table 'sytems'"),
        ("<!-- generated: systems resnt -->\n<!-- end -->\n", "unknown benchmark 'resnt'"),
    ],
)
def test_a_wrong_marker_is_reported(text: str, expected: str) -> None:
    with pytest.raises(EncoreError, match=re.escape(expected)):
        documentation.renewed(text, Path("page.md"))


def test_a_stale_table_is_named_then_written_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- generated: targets resnet -->\nold\n<!-- end -->\nafter\n", encoding="utf-8")
    choice = catalogue.choose("resnet")
    monkeypatch.setattr(documentation.paths, "ROOT", tmp_path)
    monkeypatch.setattr(documentation.catalogue, "choose", lambda name: choice)
    with pytest.raises(typer.Exit) as ended:
        documentation.main(write=False)
    assert (ended.value.exit_code, "README.md: stale" in capsys.readouterr().out) == (ExitCode.FAILED, True)
    documentation.main(write=True)
    documentation.main(write=False)
    assert page.read_text(encoding="utf-8") == (
        "before\n<!-- generated: targets resnet -->\n\n| round | target, top-1 accuracy | runs of a score |\n"
        "| --- | --- | --- |\n| v0.5 | 0.749 | 5 |\n| v0.6 | 0.759 | 5 |\n| v0.7 | 0.759 | 5 |\n\n<!-- end -->\nafter\n"
    )


# -- links, options, messages ---------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", prose(page)):
        name, _, anchor = link.partition("#")
        target = ((page.parent / name) if name else page).resolve()
        assert target.exists() and target.is_relative_to(paths.ROOT), f"{page.name}: there is no {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {name} has no heading for #{anchor}"


def subcommand(words: list[str]) -> tuple[Any, list[str]]:
    command, rest = typer.main.get_command(app), words[1:]
    while rest and rest[0] in commands_of(command):
        command, rest = commands_of(command)[rest[0]], rest[1:]
    return command, rest


def commands_of(command: Any) -> dict[str, Any]:
    names = command.list_commands(None) if hasattr(command, "list_commands") else ()
    return {name: command.get_command(None, name) for name in names}


def options_of(command: Any) -> set[str]:
    found = {"--help"}
    for parameter in command.params:
        found.update(parameter.opts, parameter.secondary_opts)
    return found.union(*map(options_of, commands_of(command).values()))


def written_options() -> set[str]:
    files = [*paths.BENCHMARKS.rglob("*.py"), Path(documentation.__file__)]
    return {name for file in files for name in re.findall(r'"(--[a-z-]+)"', file.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_options_exist(page: Path) -> None:
    everywhere = options_of(typer.main.get_command(app)) | written_options() | FOREIGN_OPTIONS
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        options = re.findall(r"(?:^|(?<=[\s\"'(]))--[a-z][a-z0-9-]*", code)
        known = everywhere
        words = code.split()
        if words[:1] == ["encore"] and len(words) > 1:
            command, rest = subcommand(words)
            below = bool(commands_of(command))
            assert not below or not rest or rest[0].startswith("-"), f"{page.name}: no command `{code}`"
            known = options_of(command)
        for option in options:
            assert option in known, f"{page.name}: `{code}`: there is no option {option}"


def test_quoted_messages_are_those_of_the_code() -> None:
    page = paths.ROOT / "docs" / "troubleshooting.md"
    code = source_text()
    lost = []
    for heading in re.findall(r"^### (.+)$", prose(page), flags=re.MULTILINE):
        for message in set(re.findall(r"`([^`]+)`", heading)) - FOREIGN_MESSAGES:
            fragments = [fragment.strip(" :,'") for fragment in message.split("…")]
            if not message.startswith("./run.sh") and not all(fragment in code for fragment in fragments):
                lost.append(message)
    assert not lost, f"{page.name} quotes what no message says: {lost}"


def source_text() -> str:
    # Every text that a Python file or a shell script of the project may print, the parts of one joined
    texts = [path.read_text(encoding="utf-8") for path in paths.ROOT.glob("*.sh")]
    for folder in (paths.ROOT / "encore", paths.BENCHMARKS):
        for path in folder.rglob("*.py"):
            for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(each, ast.JoinedStr):
                    parts = [str(p.value) if isinstance(p, ast.Constant) else "…" for p in each.values]
                    texts.append("".join(parts))
                elif isinstance(each, ast.Constant) and isinstance(each.value, str):
                    texts.append(each.value)
    return "\n".join(texts)


# -- what the pages say about files and codes ------------------------------------------------------------


def test_run_folder_page_knows_every_field() -> None:
    text = prose(paths.ROOT / "docs" / "run-folder.md")
    plan = planning.make_plan(planning.Request(name="resnet", gpus=1, system="cpu", seed=1))
    command = runner.dry_run_command(plan)
    content = passports.describe(plan.configuration, command, {}, plan.machine, [1], "host")
    known = {*content, *node.this_node().as_json(), *telemetry.sample_host()}
    known |= {field.name for field in dataclasses.fields(run_folder.ExperimentState)}
    assert sorted(name for name in known if f"`{name}`" not in text) == [], "explain them in docs/run-folder.md"


def test_exit_codes_page_has_every_code_and_shows_an_error_as_it_is() -> None:
    text = (paths.ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    assert [code for code in ExitCode if f"| {int(code)} | `{code.name}` |" not in text] == []
    with pytest.raises(EncoreError) as shown:
        catalogue.choose("resnt")
    assert f"```text\nerror: {shown.value}\n```" in text


def test_every_benchmark_has_its_page() -> None:
    wanted = ("Target", "Data", "Commands", "Submitted results", "Measured results", "Known gaps")
    for name in catalogue.benchmarks():
        text = (paths.benchmark_folder(name) / "README.md").read_text(encoding="utf-8")
        assert [heading for heading in wanted if f"\n## {heading}\n" not in text] == [], name


def leaves(command: Any, name: str = "encore") -> Iterator[tuple[str, Any]]:
    below = commands_of(command)
    for word, each in below.items():
        yield from leaves(each, f"{name} {word}")
    if not below:
        yield name, command


def test_there_are_few_commands_and_each_has_examples_that_are_understood() -> None:
    known = dict(leaves(typer.main.get_command(app)))
    assert len(known) <= 32
    for name, command in known.items():
        lines = [line.strip() for line in (command.epilog or "").splitlines()]
        examples = [re.split(r"\s{3,}", line)[0] for line in lines if line.startswith(name)]
        assert examples, f"{name} --help has no example"
        for example in examples:
            command.make_context(name, shlex.split(example.partition(" > ")[0])[len(name.split()) :])


def test_pages_name_no_place_of_one_machine() -> None:
    assert [page for page in PAGES if re.search(r"/(work|root|home|tmp)/", page.read_text(encoding="utf-8"))] == []


def test_dry_run_as_json_is_what_training_reads() -> None:
    content = json.loads(invoked(["encore", "run", "resnet", "2", "--system", "cpu", "--dry-run", "--json"]))
    assert set(content["configuration"]) == set(configuration.field_types(catalogue.choose("resnet").folder))
