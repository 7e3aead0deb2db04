"""The documentation is tried: its commands, generated tables, links, options and quoted messages."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jq
import pytest
import typer
from typer.testing import CliRunner

from encore import catalogue, configuration, paths
from encore.cli import documentation
from encore.cli.app import app
from encore.errors import EncoreError, ExitCode
from encore.machine import node
from encore.run import run_folder
from tests.results.result_logs import resnet_v07

PAGES = {path: path.read_text(encoding="utf-8") for path in documentation.pages(paths.ROOT)}
PROSE = {path: re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE) for path, text in PAGES.items()}
DOCS = paths.ROOT / "docs"
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
# How each kind of command is tried, the first that fits. Nobody adds a command that is not tried.
KINDS = (
    (r"\./run\.sh \w", "run.sh"),
    (r"encore run --resume RUN( --json)?$", "parse"),
    (r"encore run \w", "dry run"),
    (r"encore sweep --resume RUN$", "parse"),
    (r"encore sweep \w", "dry run"),
    (r"encore study .*--dry-run", "dry run"),
    (r"encore study \w", "parse"),
    (r"encore plan .* -o ", "write"),
    (r"encore submit --resume RUN", "parse"),
    (r"encore submit \w", "dry run"),
    (r"sbatch -N \d+ .*slurm/run\.sub \w", "sbatch"),
    (r"encore data get .*--(run|prepare)", "parse"),
    (r"encore data get \w", "run"),
    (r"encore data prepare \w", "dry run"),
    (r"encore data verify \w", "parse"),
    (r"encore data verify$", "run"),
    (r"encore (bench|serve|reproduce|export) \w", "parse"),
    (r"encore (selftest|follow|cancel|play)\b", "parse"),
    (r"encore doctor --nodes --hosts", "parse"),
    (r"encore (status|doctor)", "run"),
    (r"encore images list$", "run"),
    (r"encore images convert \w", "dry run"),
    (r"encore images \w", "parse"),
    (r"encore report .*--detections", "parse"),
    (r"encore (archive .* --(merge|bundle)|verify )", "parse"),
    (r"encore (report|archive) .*-o ", "write"),
    (r"encore (list|show|schema|plan|published|score|check|audit|compare|report|--version)\b", "run"),
    (r"python DIR/triton/client\.py ", "client"),
    (r"make [\w-]+", "make"),
    (r"python -m encore\.cli\.documentation --(check|write)$", "paths"),
    (r"python -m pytest ", "paths"),
    (r"python -m (benchmarks|tests|tools)\.", "module"),
    (r"horovodrun -np \d+ python -m benchmarks\.", "module"),
    (r"jq .* RUN/", "jq"),
    (r"python -m json\.tool RUN/", "execute"),
    (r"python -c ", "execute"),
    (r"tail -n \d+ RUN/", "execute"),
    (r"source \.venv/bin/activate$", "paths"),
)


def blocks() -> Iterator[tuple[str, str, str]]:
    # Page with line, language and text of every fenced block
    for page, text in PAGES.items():
        for found in re.finditer(r"^ *```(\w*)$\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
            place = f"{page.relative_to(paths.ROOT)}:{text.count(chr(10), 0, found.start()) + 1}"
            yield place, found[1], found[2]


def commands() -> dict[str, str]:
    # Every command of every page, once, with its place; a backslash joins lines
    found: dict[str, str] = {}
    for place, language, text in blocks():
        if language == "bash" or (language == "" and text.split()[:1] and text.split()[0] in PROGRAMS):
            for line in re.sub(r"\\\n\s*", " ", text).splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    found.setdefault(re.sub(r"^\.venv/bin/", "", shlex.join(words)), f"{place}: {line.strip()}")
    return found


COMMANDS = commands()
WRITERS = [each for each in COMMANDS if " '>' " in each]


@pytest.fixture(autouse=True)
def new_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    # The pages are tried as on a machine without GPUs, data and results, wherever the test runs
    monkeypatch.setattr(node, "gpus", lambda: ())
    monkeypatch.setattr(paths, "default_data", lambda name: Path("/encore/data", name))
    monkeypatch.setattr(paths, "default_results", lambda: Path("/encore/results"))
    monkeypatch.delenv("TMPDIR", raising=False)


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    # Real folders for the placeholders of the pages; one is of a run with five logs, made without training
    folder = tmp_path_factory.mktemp("docs")
    for name in ("DIR", "OUT"):
        (folder / name).mkdir()
    passport = {"benchmark": "resnet", "round": "v0.7", "submission": {"text": "a text"}, "deviations": []}
    run = run_folder.create(folder / "results", "resnet-mxnet-cpu", lambda path: passport, {}, {}, list(range(5)))
    for experiment in run.experiments():
        log = resnet_v07(40 + experiment.number, start_ms=1_592_669_288_183 + 10**7 * experiment.number)
        experiment.log.write_text(log, encoding="utf-8")
        experiment.publish_log()
        experiment.metrics.write_text('{"kind": "end", "time": 0, "outcome": "reached"}\n', encoding="utf-8")
        experiment.set_state(run_folder.ExperimentState(status="reached"))
    known = {"": folder, "DIR": folder / "DIR", "OUT": folder / "OUT", "FOLDER": folder / "OUT", "RUN": run.path}
    return {**known, "results/<run>": run.path, "training_results_v0.7": run.path.parent}


def put(word: str, ground: dict[str, Path]) -> str:
    for placeholder, path in ground.items():
        if placeholder and (word == placeholder or word.startswith(f"{placeholder}/")):
            rest = "" if placeholder == "training_results_v0.7" else word[len(placeholder) :]
            return f"{path}{rest}"
    return word


def invoked(words: list[str]) -> str:
    # The output of ``encore`` with these arguments, run in this process
    done = CliRunner().invoke(app, words[1:], env={"COLUMNS": "300"}, prog_name="encore")
    if isinstance(done.exception, EncoreError):
        pytest.fail(str(done.exception))
    assert done.exit_code in ((0, 2) if words[1] == "doctor" else (0,)), done.output
    return done.stdout


def executed(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def program_text(words: list[str]) -> str:
    # The files in which a module's options are, by its words; it needs a framework's environment, or is long
    module = words[words.index("-m") + 1]
    named = paths.ROOT / Path(*module.split("."))
    path = named / "__main__.py" if named.is_dir() else named.with_suffix(".py")
    text = path.read_text(encoding="utf-8")
    # train.py, bench.py and prepare.py share their command lines.
    shared = re.findall(r"^from benchmarks\.common(?:\.\w+)? import (\w+)", text, re.M)
    shared += ["run", "configuration"] if "benchmarks.common.run.run import" in text else []
    files = [file for name in shared for file in paths.BENCHMARKS.glob(f"common/**/{name}.py")]
    return text + "".join(file.read_text(encoding="utf-8") for file in files)


def tried(how: str, words: list[str], folder: Path) -> str:
    # The output of a command, or of what is tried in its place; empty where it would take too long to run
    if how == "run":
        return invoked(words)
    if how == "write":
        place, made = words.index("-o") + 1, tempfile.mkdtemp(dir=folder)
        invoked([*words[:place], f"{made}/out", *words[place + 1 :]])
        written = sorted(file for kind in ("csv", "md") for file in Path(made).rglob(f"*.{kind}"))
        return "\n".join(f"{file.name}\n{file.read_text(encoding='utf-8')}" for file in written)
    if how in ("dry run", "run.sh"):
        words = ["encore", "run", *words[1:]] if how == "run.sh" else words
        return invoked(words if "--dry-run" in words else [*words, "--dry-run"])
    if how == "sbatch":
        # By ``encore submit``, which takes the static script's options: those of ``encore run``.
        place = words.index("slurm/run.sub")
        gpus = [word for word in words[:place] if word.startswith("--gpus-per-node=")]
        nodes = ("--nodes", words[words.index("-N") + 1])
        return invoked(["encore", "submit", *words[place + 1 :], *nodes, *gpus, "--dry-run"])
    if how == "make":
        return executed(["make", "-n", *words[1:]], paths.ROOT)
    if how == "execute":
        return executed([sys.executable if words[0] == "python" else words[0], *words[1:]], folder)
    if how == "jq":
        return queried(jq.compile(words[-2]), Path(words[-1]).read_text(encoding="utf-8"))
    if how == "parse":
        command, rest = subcommand(words)
        command.make_context("encore", rest)
    elif how == "paths":
        assert [each for each in words[3:] if not each.startswith("-") and not (paths.ROOT / each).exists()] == []
    elif how == "module" and ".prepare" in " ".join(words):
        executed([sys.executable, *words[1:], "--check-options"], paths.ROOT)
    elif how == "module" and words[2].startswith("tools."):
        text = executed([sys.executable, *words[1:3], "--help"], paths.ROOT)
        assert [word for word in words if word.startswith("--") and f" {word} " not in text] == []
    else:
        client = paths.BENCHMARKS / "common" / "serving" / "client.py"
        text = client.read_text(encoding="utf-8") if how == "client" else program_text(words)
        assert [word for word in words if word.startswith("--") and f'"{word}"' not in text] == []
    return ""


# What is this machine's, this moment's or this caller's in an output; and how wide a table is
MACHINE = "cores|disk|docker|enroot|GPUs|Horovod|image|launcher|open files|podman|runtime|shared memory"
PASSING = (
    (r"/\S*/cluster0/", "/"),
    (r"\b\d{8}T\d{6}Z", "TIME"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "TIME"),
    (r"(\d\.\d{6})\d+", r"\1"),
    (rf"(?m)^(OK|WARN|FAIL) +({MACHINE}):.*\n", ""),
    (r"(?m)^ *the run would be refused.*\n", ""),
    (r"\b(HOME|LANG|LOGNAME|PATH|USER)=\S+ ", ""),
    (r'"(HOME|LANG|PATH|TMPDIR|OMP_NUM_THREADS)": ".*",?\n', ""),
    (r"-x (LANG|TMPDIR) ", ""),
    (r"OMP_NUM_THREADS=\d+", "OMP_NUM_THREADS"),
    (r"(--name \S+-)[0-9a-f]{8}", r"\1HASH"),
    (r"--user \d+:\d+", "--user"),
    (r"(runAsUser|runAsGroup|fsGroup): \d+", r"\1"),
    (r'"seed": \d+', '"seed"'),
    # What follows from a caller who is not root
    (r"(?m)^ *(runAsNonRoot: true|capabilities:|drop:|- ALL)\n", ""),
    (r"(name: (?:LOGNAME|OMP_NUM_THREADS|USER)\n *value:) .*", r"\1"),
    (r"(torchinductor|triton)_\d+", r"\1"),
    (r"[ \t]+", " "),
    (r"─+", "─"),
)
# What a machine has, and what other tests leave behind
UNRECORDED = (
    r"encore (status|doctor|images|data (get|verify)|schema|--version)|encore run .*--json|encore submit .*--kind "
)
MOST = 20_000  # Characters of one output


def lasting(text: str, ground: dict[str, Path]) -> str:
    for name, path in sorted(ground.items(), key=lambda each: -len(str(each[1]))):
        text = text.replace(str(path), name or "GROUND")
    text = text.replace(str(paths.ROOT), "CHECKOUT")
    for pattern, instead in PASSING:
        text = re.sub(pattern, instead, text)
    return text[:MOST]


def queried(program: Any, text: str) -> str:
    return "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in program.input_text(text))


def try_command(command: str, ground: dict[str, Path]) -> str:
    how = next((how for pattern, how in KINDS if re.match(pattern, command)), None)
    assert how is not None, f"{COMMANDS[command]}: no kind of command; say in KINDS how it is tried"
    words, _, target = command.partition(" '>' ")
    words, _, filtered = words.partition(" '|' ")
    output = tried(how, [put(word, ground) for word in shlex.split(words)], ground[""])
    if filtered:
        program = jq.compile(shlex.split(filtered)[-1])
        # A dry run prints something else than the run in whose place it is tried.
        output = "" if how == "dry run" and "--dry-run" not in words else queried(program, output)
    if target:
        (ground[""] / target).write_text(output, encoding="utf-8")
    return output if how in ("run", "write", "dry run", "run.sh", "sbatch") else ""


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=COMMANDS.get)
def test_command(command: str, ground: dict[str, Path], recorded: Callable[[str, Any], None]) -> None:
    # What it reads may be what another command writes; the tests run in any order, and in several processes.
    for writer in WRITERS:
        if writer != command and shlex.split(writer)[-1] in command:
            try_command(writer, ground)
    output = try_command(command, ground)
    if output and not re.match(UNRECORDED, command):
        recorded(f"{re.sub(r'[^a-z0-9]+', '-', command.lower())[:120]}.txt", lasting(output, ground))


@pytest.mark.slow
def test_python_of_the_scripting_page_runs(ground: dict[str, Path]) -> None:
    programs = [text for place, language, text in blocks() if language == "python" and "scripting.md" in place]
    assert programs
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for text in programs:
        command = [sys.executable, "-c", text.replace('"RUN"', repr(str(ground["RUN"])))]
        done = subprocess.run(command, cwd=ground[""], env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_every_block_is_closed_and_of_a_known_language() -> None:
    assert {language for _, language, _ in blocks()} <= LANGUAGES
    assert [page for page, text in PROSE.items() if re.search(r"^ *```", text, re.MULTILINE)] == []


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


@pytest.mark.slow
def test_generated_tables_are_fresh() -> None:
    stale = [str(page.relative_to(paths.ROOT)) for page in documentation.stale(paths.ROOT)]
    assert not stale, f"stale tables in {', '.join(stale)}; hint: make docs"


def rows_below(heading: str) -> list[list[str]]:
    table = re.search(r"(?:^\|.*\n)+", PAGES[DOCS / "selftest.md"].partition(f"\n{heading}\n")[2], re.MULTILINE)
    assert table, heading
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[0].splitlines()]


def test_the_selftests_page_agrees_with_the_programs() -> None:
    # Every check is explained, and a figure's cell says "–" where the implementation has no such check alone
    listed = documentation.checks()
    keys = {name.partition("=")[0] for names in listed.values() for name in names}
    explained = {name for row in rows_below("## The checks") for name in re.findall(r"`([^`=]+)[^`]*`", row[0])}
    assert keys <= explained, "explain each check, or each key that is varied"
    columns = ("ncf", "dlrm", "gnmt", "transformer", "resnet-pytorch", "ssd", "maskrcnn")
    _, _, *rows = rows_below("## On an H200")
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
    monkeypatch.setattr(documentation.schemas, "files", dict)
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
    headings = re.findall(r"^#+ (.+)$", PROSE[page], flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for page, text in PROSE.items():
        for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text):
            name, _, anchor = link.partition("#")
            target = ((page.parent / name) if name else page).resolve()
            assert target.exists() and target.is_relative_to(paths.ROOT), f"{page.name}: there is no {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {name} has no heading for #{anchor}"


def subcommand(words: list[str]) -> tuple[Any, list[str]]:
    # The command object that ``encore WORDS`` names, and the words behind its name
    command, rest = typer.main.get_command(app), words[1:]
    while rest and rest[0] in commands_of(command):
        command, rest = commands_of(command)[rest[0]], rest[1:]
    return command, rest


def commands_of(command: Any) -> dict[str, Any]:
    names = command.list_commands(None) if hasattr(command, "list_commands") else ()
    return {name: command.get_command(None, name) for name in names}


def leaves(command: Any, name: str = "encore") -> dict[str, Any]:
    # Every command that does something, by its whole name
    below = [leaves(each, f"{name} {word}") for word, each in commands_of(command).items()]
    return {key: each for found in below for key, each in found.items()} or {name: command}


def options_of(command: Any) -> set[str]:
    every = [parameter for each in leaves(command).values() for parameter in (*each.params, *command.params)]
    return {"--help"}.union(*([*each.opts, *each.secondary_opts] for each in every))


def test_options_exist() -> None:
    whole = typer.main.get_command(app)
    files = [*paths.BENCHMARKS.rglob("*.py"), Path(documentation.__file__)]
    written = {name for file in files for name in re.findall(r'"(--[a-z-]+)"', file.read_text(encoding="utf-8"))}
    everywhere, known = options_of(whole) | written | FOREIGN_OPTIONS, leaves(whole)
    by_name = {name: options_of(command) for name, command in known.items()}
    groups = {name.rpartition(" ")[0] for name in known} - {"encore"}
    for page, text in PROSE.items():
        for code in re.findall(r"`([^`\n]+)`", text) if page.name != "CHANGELOG.md" else ():
            words = code.split()
            name = " ".join(words[: 3 if " ".join(words[:2]) in groups else 2])
            is_ours = words[:1] == ["encore"] and len(words) > 1 and not words[1].startswith("-")
            assert not is_ours or name in by_name or name in groups, f"{page.name}: no command `{code}`"
            options = re.findall(r"(?:^|(?<=[\s\"'(]))--[a-z][a-z0-9-]*", code)
            missing = set(options) - (by_name[name] if is_ours and name in by_name else everywhere)
            assert not missing, f"{page.name}: `{code}`: there is no option {missing}"


def test_quoted_messages_are_those_of_the_code() -> None:
    files = [*paths.ROOT.glob("*.sh"), *(paths.ROOT / "encore").rglob("*.py"), *paths.BENCHMARKS.rglob("*.py")]
    whole = "\n".join(path.read_text(encoding="utf-8") for path in files)
    # As it is printed: parts of a text in one, and a mark for what is put into it.
    code, lost = re.sub(r"\{[^{}\n]*\}", "…", re.sub(r"[\"']\s*\n\s*f?[\"']", "", whole)), []
    for heading in re.findall(r"^### (.+)$", PROSE[DOCS / "troubleshooting.md"], flags=re.MULTILINE):
        for message in set(re.findall(r"`([^`]+)`", heading)) - FOREIGN_MESSAGES:
            fragments = [fragment.strip(" :,'") for fragment in message.split("…")]
            if not message.startswith("./run.sh") and not all(fragment in code for fragment in fragments):
                lost.append(message)
    assert not lost, f"troubleshooting.md quotes what no message says: {lost}"


# -- what the pages say about files and codes ------------------------------------------------------------


def test_exit_codes_page_has_every_code_and_shows_an_error_as_it_is() -> None:
    text = PAGES[DOCS / "exit-codes.md"]
    assert [code for code in ExitCode if f"| {int(code)} | `{code.name}` |" not in text] == []
    with pytest.raises(EncoreError) as shown:
        catalogue.choose("resnt")
    assert f"```text\nerror: {shown.value}\n```" in text


def test_every_benchmark_has_its_page() -> None:
    wanted = ("Target", "Data", "Commands", "Submitted results", "Measured results", "Known gaps")
    for name in catalogue.benchmarks():
        text = PAGES[paths.benchmark_folder(name) / "README.md"]
        assert [heading for heading in wanted if f"\n## {heading}\n" not in text] == [], name


def test_there_are_few_commands_and_each_has_examples_that_are_understood() -> None:
    known = leaves(typer.main.get_command(app))
    assert len(known) <= 35
    for name, command in known.items():
        lines = [line.strip() for line in (command.epilog or "").splitlines()]
        examples = [re.split(r"\s{3,}", line)[0] for line in lines if line.startswith(name)]
        assert examples, f"{name} --help has no example"
        for example in examples:
            command.make_context(name, shlex.split(example.partition(" > ")[0])[len(name.split()) :])


def test_pages_name_no_place_of_one_machine() -> None:
    assert [page for page, text in PAGES.items() if re.search(r"/(work|root|home|tmp)/", text)] == []


def test_dry_run_as_json_is_what_training_reads() -> None:
    content = json.loads(invoked(["encore", "run", "resnet", "2", "--system", "cpu", "--dry-run", "--json"]))
    assert set(content["configuration"]) == set(configuration.field_types(catalogue.choose("resnet").folder))
