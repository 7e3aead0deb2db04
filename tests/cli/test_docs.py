"""The documentation is tested: its commands, generated tables, links, options and quoted messages."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jq
import pytest
import typer

from encore import catalogue, paths
from encore.cli import documentation
from encore.cli.app import app
from encore.errors import EncoreError, ExitCode
from encore.machine import node
from encore.run import run_folder
from tests.command_line import output_of, run_encore
from tests.results.result_logs import resnet_v07, write_files

PAGES = {path: path.read_text(encoding="utf-8") for path in documentation.pages(paths.ROOT)}
PROSE = {path: re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE) for path, text in PAGES.items()}
DOCS = paths.ROOT / "docs"
# Languages of fenced blocks. Another name of the shell would hide commands from this test.
LANGUAGES = {"", "bash", "json", "python", "text", "toml"}
# A block without a language contains commands if it starts with one of these programs.
PROGRAMS = ("encore", "./run.sh", "make", "python", "horovodrun")
# Options of third-party programs.
FOREIGN_OPTIONS = {
    "--bind-to", "--check-build", "--container-env", "--container-image", "--container-mounts", "--delay-allreduce",
    "--gloo", "--gpus", "--mpi", "--no-deps", "--nv", "--shm-size", "--signal", "--strict",
}  # fmt: skip
# Pattern of a command and the method that tests it; the first match counts. Every command must match one.
METHODS = (
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
    (r"(source \.venv/bin/activate|\./setup\.sh)$", "paths"),
)


# Golden file of each command whose output is compared: one per kind of output that no other golden file has.
GOLDEN = {
    "encore archive RUN -o submission --submitter MyLab": "archive.txt",
    "encore audit RUN": "audit.txt",
    "encore check RUN": "check.txt",
    "encore check 'results/<run>' --ruleset 0.7.0 --json": "check.json",
    "encore compare RUN": "compare.txt",
    "encore compare 'results/<run>' --all": "compare_all.txt",
    "encore compare 'results/<run>' RUN": "compare_runs.txt",
    "encore data get llama2-70b-lora DIR --variant f16": "data_get.txt",
    "encore data prepare ncf --help": "data_prepare_help.txt",
    "encore data prepare resnet DIR -o OUT --runtime docker": "data_prepare_docker.txt",
    "encore list": "list.txt",
    "encore list resnet": "list_systems.txt",
    "encore list --studies": "list_studies.txt",
    "encore plan 16 resnet ssd ncf": "plan.txt",
    "encore plan 64 resnet=5 ssd=5 --curves v0.7/NVIDIA/dgxa100": "plan_curves.txt",
    "encore plan 8 resnet maskrcnn=2 ncf=20 -o sharing": "plan_files.txt",
    "encore published --benchmark llama2_70b_lora --accelerator b200 --division closed --sort minutes": "published.txt",
    "encore report RUN -o report": "report_files.txt",
    "encore report --study microway-dgx1-scaling": "report_study.txt",
    "encore report training_results_v0.7 --published v0.7/NVIDIA/dgx --baseline v0.7/NVIDIA/dgx1_ngc20.06_mxnet": (
        "report.txt"
    ),
    "./run.sh resnet 2": "run.txt",
    "encore run gpt-oss-20b 8 --system reference_b200 --data OUT --runs 10 --dry-run": "run_study.txt",
    "encore run minigo 8 --system dgxa100 --data OUT --runs 10 --dry-run": "run_submitted.txt",
    "./run.sh resnet 8 --system dgxa100 --data OUT --runtime docker --dry-run": "run_docker.txt",
    "encore score RUN": "score.txt",
    "encore score 'results/<run>' --json": "score.json",
    "encore score training_results_v0.7 --csv '>' scores.csv": "score.csv",
    "encore show maskrcnn --system dgxa100": "show.txt",
    "encore show minigo --system dgx1_n3": "show_environment.txt",
    "encore show resnet --system dgxa100 4 --set epochs=45 --json": "show.json",
    "encore study run multi-gpu --small --dry-run": "study.txt",
    "encore submit resnet --nodes 2 --array 0-4 --dry-run": "submit_array.txt",
    "encore submit resnet --nodes 2 --data DIR --require-target --dry-run": "submit_target.txt",
    "encore submit resnet-pytorch 16 --kubernetes --nodes 2 --system dgxa100 --volume /shared=shared --dry-run": (
        "submit_kubernetes.txt"
    ),
    "encore sweep resnet --gpus-per-node 4,8 --weak --precision fp32,fp16 --system dgx1 --data /data/imagenet "
    "--predict 16,32": "sweep_weak.txt",
    "encore sweep resnet --gpus-per-node 8 --nodes 1,2,4 --submit --system dgxa100 --data /data/imagenet": (
        "sweep_submit.txt"
    ),
}
MAX_OUTPUT = 20_000  # Characters of an output that are compared
# Values of an output that depend on the machine, the time or the caller, and table rules, which are as wide as paths
MACHINE = "cores|disk|docker|enroot|GPUs|Horovod|image|launcher|open files|podman|runtime|shared memory"
VARIABLE_PARTS = (
    (r"/\S*/cluster0/", "/"),
    (r"\b\d{8}T\d{6}Z", "TIME"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "TIME"),
    (r"(\d\.\d{6})\d+", r"\1"),
    (rf"(?m)^(OK|WARN|FAIL) +({MACHINE}):.*\n", ""),
    (r"(?m)^ *the run would be rejected.*\n", ""),
    (r"\b(HOME|LANG|LOGNAME|PATH|USER)=\S+ ", ""),
    (r'"(HOME|LANG|PATH|TMPDIR|OMP_NUM_THREADS)": ".*",?\n', ""),
    (r"-x (LANG|TMPDIR) ", ""),
    (r"OMP_NUM_THREADS=\d+", "OMP_NUM_THREADS"),
    (r"(_IFNAME==?|_NET_DEVICES=|_if_include[ =])[^-\s]\S*", r"\1INTERFACE"),
    (r"put \S+ first", "put HOST first"),
    (r"(--name \S+-)[0-9a-f]{8}", r"\1HASH"),
    (r"--user \d+:\d+", "--user"),
    (r"(runAsUser|runAsGroup|fsGroup): \d+", r"\1"),
    (r'"seed": \d+', '"seed"'),
    # Only for a caller who is not root
    (r"(?m)^ *(runAsNonRoot: true|capabilities:|drop:|- ALL)\n", ""),
    (r"(name: (?:LOGNAME|OMP_NUM_THREADS|USER)\n *value:) .*", r"\1"),
    (r"(torchinductor|triton)_\d+", r"\1"),
    (r"[ \t]+", " "),
    (r"─+", "─"),
)


# Page and line, language and text of every fenced block.
BLOCKS = [
    (f"{page.relative_to(paths.ROOT)}:{1 + text.count(chr(10), 0, match.start())}", match[1], match[2])
    for page, text in PAGES.items()
    for match in re.finditer(r"^ *```(\w*)$\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
]


def commands() -> dict[str, str]:
    # Return the commands of all pages, each with its first occurrence; a backslash continues a line
    occurrences: dict[str, str] = {}
    for source, language, text in BLOCKS:
        if language == "bash" or (language == "" and text.split()[:1] and text.split()[0] in PROGRAMS):
            for line in re.sub(r"\\\n\s*", " ", text).splitlines():
                if arguments := shlex.split(line, comments=True):
                    command = re.sub(r"^\.venv/bin/", "", shlex.join(arguments))
                    occurrences.setdefault(command, f"{source}: {line.strip()}")
    return occurrences


COMMANDS = commands()
ENCORE = typer.main.get_command(app)
WRITERS = [command for command in COMMANDS if " '>' " in command]


@pytest.fixture(autouse=True)
def new_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    # A machine without GPUs, data and results
    monkeypatch.setattr(node, "gpus", lambda: ())
    monkeypatch.setattr(paths, "default_data", lambda name: Path("/encore/data", name))
    monkeypatch.setattr(paths, "default_results", lambda: Path("/encore/results"))
    monkeypatch.delenv("TMPDIR", raising=False)


@pytest.fixture(scope="session")
def placeholders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    # Folders for the placeholders of the pages; RUN is a run folder with five logs, created without training
    folder = write_files(tmp_path_factory.mktemp("docs"), {"DIR/.keep": "", "OUT/.keep": ""})
    passport = {"benchmark": "resnet", "round": "v0.7", "submission": {"text": "a text"}, "deviations": []}
    run = run_folder.create(folder / "results", "resnet-mxnet-cpu", lambda path: passport, {}, {}, list(range(5)))
    end = {"kind": "end", "time": 0, "outcome": "reached"}
    for experiment in run.experiments():
        log = resnet_v07(40 + experiment.number, start_ms=1_592_669_288_183 + 10**7 * experiment.number)
        write_files(experiment.folder, {experiment.log.name: log, experiment.metrics.name: [end]})
        experiment.publish_log()
        experiment.set_state(run_folder.ExperimentState(status="reached"))
    folders = {"": folder, "DIR": folder / "DIR", "OUT": folder / "OUT", "FOLDER": folder / "OUT", "RUN": run.path}
    return {**folders, "results/<run>": run.path, "training_results_v0.7": run.path.parent}


def substitute(word: str, placeholders: dict[str, Path]) -> str:
    for placeholder, path in placeholders.items():
        if placeholder and (word == placeholder or word.startswith(f"{placeholder}/")):
            return str(path) if placeholder == "training_results_v0.7" else f"{path}{word[len(placeholder) :]}"
    return word


def invoke(words: list[str]) -> str:
    # Return the output of ``encore``, run in this process
    result = run_encore(*words[1:], width=300, prog_name="encore")
    assert result.exit_code in ((0, 2) if words[1] == "doctor" else (0,)), f"{result.output}{result.exception}"
    return result.stdout


def execute(command: list[str], folder: Path, **variables: str) -> str:
    environment = {**os.environ, **variables}
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run_by(method: str, words: list[str], folder: Path) -> str:
    # Return the output of a command, or of its dry run; empty if only its arguments are checked
    if method == "write":
        output, written = words.index("-o") + 1, Path(tempfile.mkdtemp(dir=folder))
        invoke([*words[:output], f"{written}/out", *words[output + 1 :]])
        files = sorted(file for kind in ("csv", "md") for file in written.rglob(f"*.{kind}"))
        return "\n".join(f"{file.name}\n{file.read_text(encoding='utf-8')}" for file in files)
    if method == "sbatch":
        # ``encore submit`` takes the options of the static script, which are those of ``encore run``.
        script = words.index("slurm/run.sub")
        options = [word for word in words[:script] if re.match("--(gpus-per-node|array)=", word)]
        words = ["encore", "submit", *words[script + 1 :], "--nodes", words[words.index("-N") + 1], *options]
    if method == "run.sh":
        words = ["encore", "run", *words[1:]]
    if method in ("run", "dry run", "run.sh", "sbatch"):
        return invoke(words if method == "run" or "--dry-run" in words else [*words, "--dry-run"])
    if method == "make":
        return execute(["make", "-n", *words[1:]], paths.ROOT)
    if method == "execute":
        return execute([sys.executable if words[0] == "python" else words[0], *words[1:]], folder)
    if method == "jq":
        return query(words[-2], Path(words[-1]).read_text(encoding="utf-8"))
    check_arguments(method, words)
    return ""


def check_arguments(method: str, words: list[str]) -> None:
    if method == "parse":
        command, arguments = subcommand(words)
        command.make_context("encore", arguments)
    elif method == "paths":
        assert [word for word in words[3:] if not word.startswith("-") and not (paths.ROOT / word).exists()] == []
    elif ".prepare" in " ".join(words):
        execute([sys.executable, *words[1:], "--check-options"], paths.ROOT)
    else:
        tool = words[2].startswith("tools.")
        known = execute([sys.executable, *words[1:3], "--help"], paths.ROOT).split() if tool else option_literals()
        assert {word for word in words if word.startswith("--")} <= {*known}


@cache
def option_literals() -> set[str]:
    # Return the options of the benchmarks' programs, which need a framework to run
    files = [*paths.BENCHMARKS.rglob("*.py"), Path(documentation.__file__)]
    return {name for file in files for name in re.findall(r'"(--[a-z-]+)"', file.read_text(encoding="utf-8"))}


def query(program: str, text: str) -> str:
    # Return the output of ``jq -r``
    values = jq.compile(program).input_text(text)
    return "".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values)


def normalize(text: str, placeholders: dict[str, Path]) -> str:
    for name, path in sorted(placeholders.items(), key=lambda item: -len(str(item[1]))):
        text = text.replace(str(path), name or "FOLDER")
    text = text.replace(str(paths.ROOT), "CHECKOUT")
    for pattern, replacement in VARIABLE_PARTS:
        text = re.sub(pattern, replacement, text)
    return text[:MAX_OUTPUT]


def run_command(command: str, placeholders: dict[str, Path]) -> str:
    method = next((method for pattern, method in METHODS if re.match(pattern, command)), None)
    assert method is not None, f"{COMMANDS[command]}: add the command to METHODS"
    arguments, _, target = command.partition(" '>' ")
    arguments, _, program = arguments.partition(" '|' ")
    words = [substitute(word, placeholders) for word in shlex.split(arguments)]
    output = run_by(method, words, placeholders[""])
    if program:
        # The output of a dry run is not that of the command.
        output = query(shlex.split(program)[-1], output) if method != "dry run" or "--dry-run" in words else ""
    if target:
        (placeholders[""] / target).write_text(output, encoding="utf-8")
    return output


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=COMMANDS.get)
def test_command(command: str, placeholders: dict[str, Path], recorded: Callable[[str, Any], None]) -> None:
    # Tests run in any order and in several processes: write the file that the command reads.
    for writer in WRITERS:
        if writer != command and shlex.split(writer)[-1] in command:
            run_command(writer, placeholders)
    output = run_command(command, placeholders)
    if command in GOLDEN:
        recorded(GOLDEN[command], normalize(output, placeholders))


def test_golden_files_belong_to_commands_of_the_pages() -> None:
    files = {path.name for path in (paths.ROOT / "tests" / "golden" / "cli").iterdir()}
    assert (set(GOLDEN) - set(COMMANDS), set(GOLDEN.values())) == (set(), files)


SCRIPTS = [text for source, _, text in BLOCKS if "scripting.md" in source and "import " in text]


@pytest.mark.slow
@pytest.mark.parametrize("text", SCRIPTS)
def test_python_programs_of_the_scripting_page_run(text: str, placeholders: dict[str, Path]) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program = text.replace('"RUN"', repr(str(placeholders["RUN"])))
    execute([sys.executable, "-c", program], placeholders[""], PATH=path)


def test_blocks_are_closed_and_have_a_known_language() -> None:
    unclosed = [page for page, text in PROSE.items() if re.search(r"^ *```", text, re.MULTILINE)]
    assert (unclosed, {language for _, language, _ in BLOCKS} - LANGUAGES) == ([], set())


def test_run_sh_passes_its_arguments_to_encore(tmp_path: Path) -> None:
    scripts = {"setup.sh": "#!/bin/sh\n", ".venv/bin/encore": '#!/bin/sh\nprintf "%s|" "$@"\n'}
    for name in scripts:
        (write_files(tmp_path, scripts) / name).chmod(0o755)
    script = shutil.copy(paths.ROOT / "run.sh", tmp_path)
    assert execute([script, "resnet", "2", "--set", "a=b c"], tmp_path) == "run|resnet|2|--set|a=b c|"


# -- generated tables -----------------------------------------------------------------------------------


def test_readme_is_short() -> None:
    assert len(PAGES[paths.ROOT / "README.md"].split()) <= 900


def test_generated_tables_are_fresh() -> None:
    stale = [str(page.relative_to(paths.ROOT)) for page in documentation.stale(paths.ROOT)]
    assert not stale, f"stale tables in {', '.join(stale)}; hint: make docs"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- generated: targets resnet -->\n", "does not have an <!-- end -->"),
        ("<!-- generated: sytems resnet -->\n<!-- end -->\n", "unknown generated table 'sytems'"),
        ("<!-- generated: systems resnt -->\n<!-- end -->\n", "unknown benchmark 'resnt'"),
    ],
)
def test_wrong_markers_are_reported(text: str, message: str) -> None:
    with pytest.raises(EncoreError, match=re.escape(message)):
        documentation.renewed(text, Path("page.md"))


def test_stale_table_is_reported_and_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path, {"README.md": "before\n<!-- generated: targets resnet -->\nold\n<!-- end -->\nafter\n"})
    choice = catalogue.choose("resnet")
    for name, value in (
        ("paths.ROOT", tmp_path), ("catalogue.choose", lambda name: choice), ("schemas.files", dict),
    ):  # fmt: skip
        monkeypatch.setattr(f"encore.cli.documentation.{name}", value)
    with pytest.raises(typer.Exit) as caught:
        documentation.main(write=False)
    assert (caught.value.exit_code, "README.md: stale" in capsys.readouterr().out) == (ExitCode.FAILED, True)
    documentation.main(write=True)
    documentation.main(write=False)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == (
        "before\n<!-- generated: targets resnet -->\n\n| round | target, top-1 accuracy | runs of a score |\n"
        "| --- | --- | --- |\n| v0.5 | 0.749 | 5 |\n| v0.6 | 0.759 | 5 |\n| v0.7 | 0.759 | 5 |\n\n<!-- end -->\nafter\n"
    )


# -- links, options, messages ---------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", PROSE[page], flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_have_targets() -> None:
    for page, text in PROSE.items():
        for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text):
            name, _, anchor = link.partition("#")
            target = ((page.parent / name) if name else page).resolve()
            assert target.exists() and target.is_relative_to(paths.ROOT), f"{page.name}: {link} does not exist"
            assert not anchor or anchor in anchors(target), f"{page.name}: {name} has no heading for #{anchor}"


@cache  # Commands import their modules on first use
def children(command: Any) -> dict[str, Any]:
    names = command.list_commands(None) if hasattr(command, "list_commands") else ()
    return {name: command.get_command(None, name) for name in names}


def subcommand(words: list[str]) -> tuple[Any, list[str]]:
    # Return the command object of a command line, and its arguments
    command, arguments = ENCORE, words[1:]
    while arguments and arguments[0] in children(command):
        command, arguments = children(command)[arguments[0]], arguments[1:]
    return command, arguments


def leaf_commands(command: Any, name: str = "encore") -> dict[str, Any]:
    # Return all commands that are no groups, by their full names
    below = [leaf_commands(child, f"{name} {word}") for word, child in children(command).items()]
    return {key: leaf for leaves in below for key, leaf in leaves.items()} or {name: command}


def options_of(command: Any) -> set[str]:
    parameters = [*command.params, *(option for leaf in leaf_commands(command).values() for option in leaf.params)]
    return {"--help"}.union(*([*option.opts, *option.secondary_opts] for option in parameters))


def test_options_exist() -> None:
    known = options_of(ENCORE) | option_literals() | FOREIGN_OPTIONS
    codes = {
        code for page, text in PROSE.items() if page.name != "CHANGELOG.md" for code in re.findall(r"`([^`\n]+)`", text)
    }
    for code in codes:
        command = subcommand(code.split())[0] if re.match("encore [^-]", code) else None
        assert command is not ENCORE, f"no command `{code}`"
        options = set(re.findall(r"(?:^|(?<=[\s\"'(]))--[a-z][a-z0-9-]*", code))
        assert options <= (options_of(command) if command else known), f"`{code}`: unknown option"


# -- contents of single pages ---------------------------------------------------------------------------


def test_exit_codes_page_lists_every_code() -> None:
    text = PAGES[DOCS / "exit-codes.md"]
    assert [code for code in ExitCode if f"| {int(code)} | `{code.name}` |" not in text] == []


def test_commands_have_valid_examples() -> None:
    for name, command in leaf_commands(ENCORE).items():
        lines = [line.strip() for line in (command.epilog or "").splitlines()]
        examples = [re.split(r"\s{3,}", line)[0] for line in lines if line.startswith(name)]
        assert examples, f"{name} --help has no example"
        for example in examples:
            command.make_context(name, shlex.split(example.partition(" > ")[0])[len(name.split()) :])


def test_help_is_complete_at_80_columns() -> None:
    groups = {"encore": ENCORE} | {f"encore {name}": child for name, child in children(ENCORE).items()}
    for name, command in (groups | leaf_commands(ENCORE)).items():
        output = output_of(*name.split()[1:], "-h", width=80).partition("\nExamples:\n")[0]
        options = {
            option for param in command.params if not param.hidden for option in param.opts + param.secondary_opts
        }
        words = {"-h", "--help", *(option for option in options if option.startswith("-"))}
        assert words <= {*re.split(r"[\s,/]+", output)}, name
        assert [line for line in output.splitlines() if len(line) > 80 or "…" in line or "<bool>" in line] == []
