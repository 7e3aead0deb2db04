"""`encore selftest`: crashes, hangs and limits of a check, its table and exit codes, and real checks on a CPU."""

import io
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from encore import catalogue, job, paths
from encore.cli import selftest as command_line
from encore.cli.app import app
from encore.errors import EncoreError
from encore.machine import links, node
from encore.run import planning, published_speed
from encore.run import selftest as selftests
from encore.run.selftest import Completed, Request, Row, execute, full_system, make_env, result_row
from tests.conftest import Encore, in_process
from tests.machine.machines import gpus_of
from tests.results.result_logs import write_files

EMPTY = Row(name="ncf", check="device", result="SKIPPED", found="")


H200, H100 = (replace(node.this_node(), gpus=gpus_of(sample)) for sample in ("h200", "h100"))  # With eight GPUs


def check_program(program: str, folder: Path, seconds: float) -> Row:
    command = job.Command(argv=(sys.executable, "-c", program), environment={}, working_directory=paths.ROOT)
    return result_row(execute(command, folder, seconds), folder, seconds, EMPTY)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_every_implementation_has_a_full_system(device: Literal["cpu", "gpu"]) -> None:
    request = Request(device=device, python=Path(sys.executable))
    systems = {name: full_system(request, choice, H200) for name, choice in catalogue.choices().items()}
    assert [name for name, system in systems.items() if system.kind == "small"] == []


@pytest.mark.parametrize(
    ("name", "machine", "system"),
    [
        ("llama31-8b", H200, "h200-141gb"),
        ("llama31-8b", H100, "h100-80gb"),
        ("llama2-70b-lora", H100, "eos"),
        ("gpt-oss-20b", H200, "h200-141gb"),
    ],
)
def test_system_of_another_round_replaces_one_that_the_newest_lacks(name: str, machine: node.Node, system: str) -> None:
    choice = catalogue.choose(name)
    assert planning.choose_system(choice, 8, machine, None, None).system == system
    with pytest.raises(EncoreError, match=r"no system of .* in round v6\.1"):
        planning.choose_system(choice, 8, machine, None, "v6.1")


@pytest.mark.parametrize(
    ("program", "result", "text", "lines"),
    [
        ('print(\'hello\'); print(\'{"result": "OK", "found": "all"}\')', "OK", "all", ()),
        ("import os, sys; print('x', file=sys.stderr); os.kill(os.getpid(), 6)", "FAIL", "signal 6", ("x",)),
        ("print('x'); raise SystemExit(3)", "FAIL", "exit code 3", ("x",)),
        ("print('x'); print('[1, 2]')", "FAIL", "exit code 0", ("x", "[1, 2]")),
    ],
)
def test_result_is_the_last_line_and_a_crash_fails(
    tmp_path: Path, program: str, result: str, text: str, lines: tuple[str, ...]
) -> None:
    text = text if result == "OK" else f"ended with {text} and without a result"
    assert check_program(program, tmp_path, 600) == replace(EMPTY, result=result, found=text, lines=lines)


@pytest.mark.slow
def test_hanging_check_ends_with_all_its_processes(tmp_path: Path) -> None:
    write_files(tmp_path, {"resume-1/output.txt": "step 1\n"})
    sleep = f"import time; time.sleep(9999)  # {tmp_path}"
    row = check_program(f"import subprocess, sys\nsubprocess.call([sys.executable, '-c', {sleep!r}])", tmp_path, 2)
    assert (row.result, row.found, row.lines) == ("FAIL", "no result after 2 s", ("step 1",))
    assert not [child for child in psutil.Process().children(recursive=True) if sleep in child.cmdline()]


def rows_of(benchmark: str, folder: Path, *names: str, time_limit: float = 600.0) -> list[Row]:
    request = Request(python=Path(sys.executable), time_limit=time_limit)
    test = selftests.Selftest(request, folder, H200, lambda text: None)
    place = make_env(request, catalogue.choose(benchmark), node.this_node(), folder)
    return list(test.run([(replace(place, gpus=1), name) for name in names], lambda name, check: None))


def test_time_limit_skips_the_remaining_checks(tmp_path: Path) -> None:
    (row,) = rows_of("ncf", tmp_path, "device", time_limit=1e-9)
    assert (row.check, row.result, row.cut, "time limit" in row.found) == ("device", "SKIPPED", True, True)


@pytest.mark.parametrize(("results", "code"), [("OK cut", 3), ("cut", 3), ("OK FAIL cut", 1), ("OK SKIPPED", 0)])
def test_exit_code_of_an_incomplete_selftest(results: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = results.split()
    rows = [replace(EMPTY, cut=True) if name == "cut" else replace(EMPTY, result=name) for name in names]
    monkeypatch.setattr(command_line, "_run", lambda *arguments: rows)
    output = CliRunner().invoke(app, ["selftest", "ncf", "--device", "cpu", "--json"])
    printed = json.loads(output.stdout)
    assert (output.exit_code, printed["complete"], printed["passed"]) == (code, "cut" not in names, "FAIL" not in names)
    assert [row["cut"] for row in printed["checks"]] == [name == "cut" for name in names]


IDLE: dict[str, int | None] = {"use_percent": 0, "memory_mib": 400, "power_watts": None}
BUSY = {**IDLE, "use_percent": 97, "memory_mib": 9000}


@pytest.mark.parametrize(
    ("states", "device", "expected"),
    [
        (
            [IDLE, BUSY],
            "gpu",
            "OK 2 readings; a GPU was used up to 97 % with 9,000 MiB; not reported by NVML: power_watts",
        ),
        ([IDLE], "gpu", "FAIL 1 readings; a GPU was used up to 0 % with 400 MiB; not reported by NVML: power_watts"),
        ([IDLE], "cpu", "OK 1 readings of the machine, none of a GPU (--device cpu)"),
        (
            [{**BUSY, "use_percent": None}],
            "gpu",
            "FAIL 1 readings; a GPU was used up to 0 % with 9,000 MiB; not reported by NVML: power_watts, use_percent",
        ),
        ([{}], "gpu", "FAIL 1 readings; a GPU was used up to 0 % with 0 MiB"),
        ([], "gpu", "FAIL no reading"),
    ],
)
def test_telemetry_check_needs_a_busy_gpu(
    tmp_path: Path, states: list[dict[str, int | None]], device: str, expected: str
) -> None:
    lines = [json.dumps({"gpus": [state] if state else []}) + "\n" for state in states]
    (tmp_path / "telemetry").write_text("".join(lines))
    row = selftests.telemetry_row(tmp_path / "telemetry", device)
    assert f"{row.result} {row.found}" == expected


@pytest.mark.parametrize(
    ("gpus", "rate", "result", "text"),
    [
        (8, 121e9, "OK", "121.00 GB/s bus bandwidth between 8 ranks; at least 120.0 by 12 NVLinks"),
        (8, 119e9, "FAIL", "119.00 GB/s"),
        (2, 1e9, "OK", "no floor known for these links"),  # which two GPUs of the machine is not known
        (1, 0.0, "SKIPPED", "one GPU"),
        (8, None, "FAIL", "exit code 1 and without a result"),
    ],
)
def test_all_reduce_has_a_minimum_from_the_links(
    gpus: int, rate: float | None, result: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = (paths.ROOT / "tests" / "samples" / "topology" / "dgx-a100.txt").read_text(encoding="utf-8")

    def run(command: job.Command, work: Path, seconds: float) -> Completed:
        assert f"--nproc-per-node={gpus}" in command.argv and "benchmarks.common.checks.all_reduce" in command.argv
        if rate is not None:
            (work / "all_reduce.json").write_text(json.dumps({"rate": rate}), encoding="utf-8")
        return Completed(int(rate is None), (), None)

    monkeypatch.setattr(selftests, "execute", run)
    place = make_env(Request(python=Path(sys.executable)), catalogue.choose("dlrm"), node.this_node(), tmp_path)
    a100 = replace(H200, gpus=gpus_of("a100"))
    row = selftests.all_reduce_row(replace(place, gpus=gpus), links.parse_topology(topology), a100, 60.0, EMPTY)
    assert (row.result, text in row.found) == (result, True), row


def test_speed_is_compared_with_the_published_one() -> None:
    cases = [("resnet", "NVIDIA H200"), ("ncf", "NVIDIA B200"), ("resnet", "NVIDIA GH200 480GB")]
    assert [published_speed.next_to_published(name, gpu, 5500.0) for name, gpu in cases] == [
        "; best published 7,950 (1/8 of 8 H200, MXNet, batch 400): 69%",
        "; nothing published for NVIDIA B200",
        "; nothing published for NVIDIA GH200 480GB",
    ]


def test_plan_has_one_all_reduce_per_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [Completed(0, (), ["overflow", "names"]), Completed(0, (), []), Completed(3, ("crash",), None)]
    no_cuda = EncoreError("no CUDA", hint="install it")
    monkeypatch.setattr(selftests, "prepare", Mock(side_effect=[None, None, None, no_cuda]))
    monkeypatch.setattr(selftests, "execute", Mock(side_effect=answers))
    request = Request(python=Path(sys.executable), benchmarks=("ssd", "dlrm", "ncf", "gnmt"))
    test = selftests.Selftest(request, tmp_path, H200, lambda text: None)
    assert [(place.choice.name, check) for place, check in test.plan()] == [
        ("ssd", "all-reduce"), ("ssd", "bench"), ("dlrm", "bench"), ("ssd", "overflow"), ("ssd", "names")
    ]  # fmt: skip
    assert [(row.name, row.result, row.found, row.lines) for row in test.skipped] == [
        ("ncf", "FAIL", "its checks cannot be listed: exit code 3", ("crash",)),
        ("gnmt", "SKIPPED", "no CUDA; hint: install it", ()),
    ]


@pytest.mark.parametrize(
    ("check", "speeds", "result", "text"),
    [
        ("bench", {"synthetic": 3000}, "OK", "measured before 3,798 (300 x 300"),
        ("bench", {"synthetic": 2600}, "FAIL", "68%, less than 70%"),
        ("bench", {"synthetic": 3000}, "OK", "; MFU 28.9% of the data sheet peak"),
        ("input", {"input": 2200}, "OK", "2,200 images/s of real size; the step takes 3,000: 73%; both 2,900, 20%"),
        ("input", {"input": 2000}, "FAIL", "67%, less than 70%"),
        ("input", {"real": 2200}, "FAIL", "measured before 3,243"),
        ("evaluation", {"evaluation": 5000}, "OK", "5,000 samples/s with the full network"),
        ("bench", {"synthetic": 9000}, "OK", "a part of the network, without published results"),
    ],
)
def test_speed_is_compared_with_the_measured_one(
    check: str, speeds: dict[str, float], result: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"synthetic": 3000, "real": 2900, "input": 4000, "evaluation": 1, **speeds}
    loops = {loop: {"median": rate, "flops_per_second": 95.2e9 * rate} for loop, rate in rates.items()}
    output = {"title": "SSD, batch 240", "measured": loops, "input_share": 0.2, "precision": "fp16"}
    benches = iter([{**output, "is_part": rates["synthetic"] == 9000}])  # bench.py runs once for all its rows
    monkeypatch.setattr(selftests, "measure", lambda place, seconds, row: next(benches))
    _, row, *_ = rows_of("ssd", tmp_path, "evaluation", check)
    assert (row.result, text in row.found) == (result, True), row
    monkeypatch.setattr(selftests, "measure", lambda place, seconds, row: replace(EMPTY, check="bench", result="FAIL"))
    rows = [(row.check, row.result) for row in rows_of("ssd", tmp_path, "bench", "input")]
    assert rows == [("bench", "FAIL"), ("input", "SKIPPED")], "checks after a failed bench are skipped"


def test_table_fits_into_eighty_columns() -> None:
    screen = Console(width=80, record=True, file=io.StringIO())
    long = "loss 0.6254 for 0.6254; epochs differ by 0.00% (limit 4.0%), first steps by 0.00% (20.0%)"
    row = Row(name="resnet-tensorflow", check="compile=max-autotune", result="SKIPPED", found=long, seconds=150.0)
    failed = replace(EMPTY, check="resume", result="FAIL", lines=("step [1]", "\x1b[2Jbell"))
    command_line._print(screen, [row, failed], 600.0)
    printed = screen.export_text()
    assert max(map(len, printed.splitlines())) <= 80 and "\x1b" not in printed
    assert re.search(r"(?s)  \| step \[1\].*0 OK, 1 FAIL, 1 SKIPPED in 600 s", printed)


def test_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "gpus", lambda: ())
    output = in_process(["python", "-m", "encore.cli.app", "selftest", "ncf"], os.environ)
    assert output.returncode == 2 and "no GPU found: no checks were run" in output.stderr


# -- real checks ----------------------------------------------------------------------------------------


def checks_on_a_cpu(encore: Encore, python: Path, *words: str) -> dict[tuple[str, str], Any]:
    output = encore("selftest", *words, "--device", "cpu", "--python", str(python), "--json", code=0)
    return {(row["name"], row["check"]): row for row in json.loads(output.stdout)["checks"]}


@pytest.mark.long
def test_checks_of_one_benchmark_pass_on_a_cpu(encore: Encore, pytorch_python: Path) -> None:
    names = ("resume", "overflow", "precision", "two ranks", "defaults on all", "all-reduce", "bench", "telemetry")
    rows = checks_on_a_cpu(encore, pytorch_python, "dlrm", *(word for name in names for word in ("--only", name)))
    assert {check: row["result"] for (_, check), row in rows.items()} == {
        **dict.fromkeys(first := ("defaults on all GPUs", "all-reduce", "bench", "overflow"), "OK"),
        **dict.fromkeys(("resume", "two ranks", "precision=bf16", "telemetry"), "OK"),
        **dict.fromkeys(("precision=fp16", "precision=tf32"), "SKIPPED"),
    }
    assert [check for _, check in rows][:4] == [*first], "the most informative checks come first"
    texts = {
        "resume": "epochs differ by 0.00%", "defaults on all GPUs": "2 ranks, ", "overflow": "not finite",
        "all-reduce": "GB/s bus bandwidth between 2 ranks; no floor",
    }  # fmt: skip
    assert [check for check, text in texts.items() if text not in rows["dlrm", check]["found"]] == []


CHECKED: list[str] = []
SECONDS = 1200.0  # Time limit; all checks must complete


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(catalogue.choices()))
def test_selftest(name: str, encore: Encore) -> None:
    python = os.environ.get("ENCORE_GPU_PYTHON")
    options = ("--python", python) if python else ("--runtime", "auto")
    result = encore("selftest", name, *options, "--time-limit", str(SECONDS), "--json", timeout=SECONDS + 300)
    if result.returncode == 2:
        pytest.skip(f"NOTHING CHECKED: {result.stderr.strip().splitlines()[-1]}")
    CHECKED.append(name)
    results = {check["check"]: check["result"] for check in json.loads(result.stdout)["checks"]}
    assert (result.returncode, results["device"], "FAIL" in results.values()) == (0, "OK", False), result.stdout


@pytest.mark.gpu
def test_at_least_one_benchmark_was_checked() -> None:
    assert CHECKED, "no image and no Python with CUDA: make build-resnet, or set ENCORE_GPU_PYTHON=FILE"
