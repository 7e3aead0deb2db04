"""`encore selftest`: processes that crash or hang, the limits, the table, exit codes; and checks for real on a CPU."""

import io
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

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
from encore.run.selftest import Ended, Place, Request, Row, execute, full_system, judged, make_place
from tests.conftest import Encore, in_process

EMPTY = Row(name="ncf", check="device", result="SKIPPED", found="")


WITHOUT = ("ended with ", " and without a result")


def place_of(name: str, folder: Path, gpus: int) -> Place:
    request = Request(device="gpu" if gpus else "cpu", python=Path(sys.executable))
    return replace(make_place(request, catalogue.choose(name), node.this_node(), folder), gpus=gpus)


def gpu_of(capability: str | None) -> node.Gpu:
    return node.Gpu(index=0, name="NVIDIA H200", memory_gib=139.8, driver="580", compute_capability=capability)


def python(program: str) -> job.Command:
    return job.Command(argv=(sys.executable, "-c", program), environment={}, working_directory=paths.ROOT)


@pytest.mark.parametrize(
    ("program", "result", "found", "lines"),
    [
        ('print(\'hello\'); print(\'{"result": "OK", "found": "all"}\')', "OK", "all", ()),
        (
            "import os, sys; print('x', file=sys.stderr); os.kill(os.getpid(), 6)",
            "FAIL",
            f"{WITHOUT[0]}signal 6",
            ("x",),
        ),
        ("print('x'); raise SystemExit(3)", "FAIL", f"{WITHOUT[0]}exit code 3", ("x",)),
        ("print('x'); print('[1, 2]')", "FAIL", f"{WITHOUT[0]}exit code 0", ("x", "[1, 2]")),
    ],
)
def test_an_answer_is_the_last_line_and_a_crash_a_failed_check(
    tmp_path: Path, program: str, result: str, found: str, lines: tuple[str, ...]
) -> None:
    row = judged(execute(python(program), tmp_path, 60), tmp_path, 60, EMPTY)
    found += WITHOUT[1] if result == "FAIL" else ""
    assert row == replace(EMPTY, result=result, found=found, lines=lines)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_every_implementation_has_a_full_system(device: Literal["cpu", "gpu"]) -> None:
    machine = replace(node.this_node(), gpus=(gpu_of("9.0"),) * 8)
    request = Request(device=device, python=Path(sys.executable))
    found = {name: full_system(request, choice, machine) for name, choice in catalogue.choices().items()}
    assert {name: each.kind for name, each in found.items() if each.kind == "small"} == (
        {"gpt-oss-20b": "small"} if device == "cpu" else {}
    )


@pytest.mark.parametrize(
    ("name", "gpu", "memory", "system"),
    [
        ("llama31-8b", "NVIDIA H200", 139.8, "h200-141gb"),
        ("llama31-8b", "NVIDIA H100 80GB HBM3", 79.6, "reference_h100"),
        ("llama2-70b-lora", "NVIDIA H100 80GB HBM3", 79.6, "eos"),
        ("gpt-oss-20b", "NVIDIA H200", 139.8, "reference_b200"),
    ],
)
def test_where_the_newest_round_has_no_system_another_one_is_near(
    name: str, gpu: str, memory: float, system: str
) -> None:
    gpus = tuple(replace(gpu_of("9.0"), name=gpu, memory_gib=memory) for _ in range(8))
    machine = replace(node.this_node(), gpus=gpus)
    assert planning.choose_system(catalogue.choose(name), 8, machine, None, None).system == system
    with pytest.raises(EncoreError, match=r"no system of .* in round v6\.1"):
        planning.choose_system(catalogue.choose(name), 8, machine, None, "v6.1")


@pytest.mark.slow
def test_a_hang_ends_with_all_its_processes(tmp_path: Path) -> None:
    trained = "import time; print('step 1', flush=True); time.sleep(9999)"
    (tmp_path / "resume-1").mkdir()
    program = (
        f"import subprocess, sys; out = open({str(tmp_path / 'resume-1' / 'output.txt')!r}, 'wb')\n"
        f"subprocess.call([sys.executable, '-c', {trained!r}], stdout=out)"
    )
    limit = 10  # for two processes to start on a busy machine
    row = judged(execute(python(program), tmp_path, limit), tmp_path, limit, EMPTY)
    assert (row.result, row.found, row.lines) == ("FAIL", "no result after 10 s", ("step 1",))
    assert not [each for each in psutil.Process().children(recursive=True) if trained in each.cmdline()]


def test_the_time_limit_skips_what_is_left(tmp_path: Path) -> None:
    test = selftests.Selftest(Request(device="cpu", time_limit=1e-9), tmp_path, node.this_node(), lambda text: None)
    place: Any = type("Place", (), {"choice": catalogue.choose("ncf")})
    (row,) = test.run([(place, "device")], lambda name, check: None)
    assert (row.check, row.result, row.cut, "time limit" in row.found) == ("device", "SKIPPED", True, True)


@pytest.mark.parametrize(("results", "code"), [("OK cut", 3), ("cut", 3), ("OK FAIL cut", 1), ("OK SKIPPED", 0)])
def test_checks_that_were_cut_have_an_exit_code(results: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [replace(EMPTY, cut=True) if each == "cut" else replace(EMPTY, result=each) for each in results.split()]
    monkeypatch.setattr(command_line, "_run", lambda *given: rows)
    found = CliRunner().invoke(app, ["selftest", "ncf", "--device", "cpu", "--json"])
    assert found.exit_code == code, found.output
    printed = json.loads(found.stdout)
    assert (printed["complete"], printed["passed"]) == ("cut" not in results, "FAIL" not in results)
    assert [row["cut"] for row in printed["checks"]] == [each == "cut" for each in results.split()]


IDLE: dict[str, int | None] = {"use_percent": 0, "memory_mib": 400, "power_watts": None}
BUSY = {**IDLE, "use_percent": 97, "memory_mib": 9000}
SEEN = "a GPU was used up to 97 % with 9,000 MiB; not given by NVML: power_watts"


@pytest.mark.parametrize(
    ("states", "device", "expected"),
    [
        ([IDLE, BUSY], "gpu", f"OK 2 readings; {SEEN}"),
        ([IDLE], "gpu", "FAIL 1 readings; a GPU was used up to 0 % with 400 MiB; not given by NVML: power_watts"),
        ([IDLE], "cpu", "OK 1 readings of the machine, none of a GPU (--device cpu)"),
        (
            [{**BUSY, "use_percent": None}],
            "gpu",
            "FAIL 1 readings; a GPU was used up to 0 % with 9,000 MiB; not given by NVML: power_watts, use_percent",
        ),
        ([{}], "gpu", "FAIL 1 readings; a GPU was used up to 0 % with 0 MiB"),
        ([], "gpu", "FAIL no reading"),
    ],
)
def test_telemetry_must_have_seen_the_gpu_at_work(
    tmp_path: Path, states: list[dict[str, int | None]], device: str, expected: str
) -> None:
    (tmp_path / "telemetry").write_text("".join(json.dumps({"gpus": [each] if each else []}) + "\n" for each in states))
    row = selftests.telemetry_row(tmp_path / "telemetry", device)
    assert f"{row.result} {row.found}" == expected


@pytest.mark.parametrize(
    ("gpus", "rate", "result", "words"),
    [
        (8, 121e9, "OK", "121.00 GB/s bus bandwidth between 8 ranks; at least 120.0 by 12 NVLinks"),
        (8, 119e9, "FAIL", "119.00 GB/s"),
        (2, 1e9, "OK", "no floor known for these links"),
        (1, 0.0, "SKIPPED", "one GPU"),
        (8, None, "FAIL", "exit code 1 and without a result"),
    ],
)
def test_all_reduce_has_a_floor_by_the_links(
    gpus: int, rate: float | None, result: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On the recorded links of a DGX A100; with two of its GPUs, whose links are not known to be these
    place = place_of("dlrm", tmp_path, gpus=gpus)
    text = (paths.ROOT / "tests" / "samples" / "topology" / "dgx-a100.txt").read_text(encoding="utf-8")

    def execute(command: job.Command, work: Path, seconds: float) -> Ended:
        assert f"--nproc-per-node={gpus}" in command.argv and "benchmarks.common.checks.all_reduce" in command.argv
        if rate is None:
            return Ended(1, (), None)
        (work / "all_reduce.json").write_text(json.dumps({"rate": rate}), encoding="utf-8")
        return Ended(0, (), None)

    monkeypatch.setattr(selftests, "execute", execute)
    machine = replace(node.this_node(), gpus=(gpu_of("8.0"),) * 8)
    row = selftests.all_reduce_row(place, links.parse_topology(text), machine, 60.0, EMPTY)
    assert (row.result, words in row.found) == (result, True), row


def test_gpus_that_cuda_does_not_show_get_no_rank() -> None:
    machine = replace(node.this_node(), gpus=(gpu_of(None),) * 8)
    for chosen, count in ((None, 8), ("2,3", 2), ("", 0), ("0,", 1)):
        caller = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
        assert selftests.visible_gpus(machine, caller) == count


# Of a V100 and an A100: submissions of one give times alone, those of the other are from later GPUs
NO_SPEED_PUBLISHED = {"minigo", "gpt-oss-20b", "llama2-70b-lora", "llama31-8b"}


def test_published_speeds_have_a_source() -> None:
    for name in catalogue.benchmarks():
        path = paths.benchmark_folder(name) / "published_speed.toml"
        figures = catalogue.parse(published_speed.Figures, path).figures
        assert all(each.source and each.conditions for each in figures)
        assert {each.gpu for each in figures} >= ({"V100", "A100"} if name not in NO_SPEED_PUBLISHED else set())
    gpus = {"resnet": ("NVIDIA H200", 5500.0), "ncf": ("NVIDIA B200", 1.0)}
    assert [published_speed.next_to_published(name, *given) for name, given in gpus.items()] == [
        "; best published 7,950 (1/8 of 8 H200, MXNet, batch 400): 69%", "; nothing published for NVIDIA B200",
    ]  # fmt: skip
    assert published_speed.find("resnet", "NVIDIA GH200 480GB") is None


def rows_on_an_h200(work: Path, *names: str) -> list[Row]:
    machine = replace(node.this_node(), gpus=(gpu_of("9.0"),))
    test = selftests.Selftest(Request(), work, machine, lambda text: None)
    place = place_of("ssd", work, gpus=1)
    return list(test.run([(place, name) for name in names], lambda name, check: None))


@pytest.mark.parametrize(
    ("check", "speeds", "result", "words"),
    [
        ("bench", {"synthetic": 3000}, "OK", "measured before 3,798 (300 x 300"),
        ("bench", {"synthetic": 2600}, "FAIL", "68%, less than 70%"),
        ("bench", {"synthetic": 3000}, "OK", "; MFU 28.9% by the data sheet"),
        ("input", {"input": 2200}, "OK", "2,200 images/s of real size; the step takes 3,000: 73%; both 2,900, 20%"),
        ("input", {"input": 2000}, "FAIL", "67%, less than 70%"),
        ("input", {"real": 2200}, "FAIL", "measured before 3,243"),
        ("evaluation", {"evaluation": 5000}, "OK", "5,000 samples/s with the full network"),
        ("bench", {"synthetic": 9000}, "OK", "a part of the network, next to which nothing is published"),
    ],
)
def test_a_speed_is_compared_with_what_was_measured_before(
    check: str, speeds: dict[str, float], result: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def measure(place: Place, seconds: float, row: Row) -> dict[str, Any]:
        ran.append(place.choice.name)
        rates = {"synthetic": 3000, "real": 2900, "input": 4000, "evaluation": 1, **speeds}
        measured = {loop: {"median": rate, "flops_per_second": 95.2e9 * rate} for loop, rate in rates.items()}
        part = speeds.get("synthetic") == 9000
        result = {"title": "SSD, batch 240", "measured": measured, "input_share": 0.2, "precision": "fp16"}
        return {**result, "is_part": part}

    monkeypatch.setattr(selftests, "measure", measure)
    _, row, *_ = rows_on_an_h200(tmp_path, "evaluation", check)
    assert (row.result, words in row.found) == (result, True), row
    assert ran == ["ssd"], "bench.py runs once for all its rows"


def test_rows_of_a_bench_that_failed_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = replace(EMPTY, check="bench", result="FAIL", found="ended with exit code 1")
    monkeypatch.setattr(selftests, "measure", lambda place, seconds, row: failed)
    rows = rows_on_an_h200(tmp_path, "bench", "input")
    assert [(row.check, row.result) for row in rows] == [("bench", "FAIL"), ("input", "SKIPPED")]


def test_the_table_fits_into_eighty_columns() -> None:
    screen = Console(width=80, record=True, file=io.StringIO())
    long = "loss 0.6254 for 0.6254; epochs differ by 0.00% (limit 4.0%), first steps by 0.00% (20.0%)"
    row = Row(name="resnet-tensorflow", check="compile=max-autotune", result="SKIPPED", found=long, seconds=150.0)
    failed = Row(name="ncf", check="resume", result="FAIL", found="no result", lines=("step [1]", "\x1b[2Jbell"))
    command_line._print(screen, [row, failed], 600.0)
    printed = screen.export_text()
    assert max(map(len, printed.splitlines())) <= 80 and "  | step [1]" in printed and "\x1b" not in printed
    assert "0 OK, 1 FAIL, 1 SKIPPED in 600 s" in printed


def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "gpus", lambda: ())
    done = in_process(["python", "-m", "encore.cli.app", "selftest", "ncf"], os.environ)
    assert (done.returncode, "this machine has no GPU: nothing was checked" in done.stderr) == (2, True), done.stderr


def test_a_python_without_the_framework_is_skipped_with_the_reason(encore: Encore) -> None:
    done = encore("selftest", "ncf", "--device", "cpu", "--python", sys.executable, "--json")
    assert done.returncode == 2 and "nothing was checked" in done.stderr
    (imports,) = json.loads(done.stdout)["checks"]
    assert (imports["check"], imports["result"]) == ("imports", "SKIPPED")
    assert "No module named 'torch'" in imports["found"]


def test_checks_run_for_real_on_a_cpu(encore: Encore, pytorch_python: Path) -> None:
    wanted = ("resume", "overflow", "precision", "two ranks", "defaults on all", "all-reduce", "bench", "telemetry")
    options = [word for name in wanted for word in ("--only", name)]
    done = encore("selftest", "dlrm", "--device", "cpu", "--python", str(pytorch_python), "--json", *options, code=0)
    printed = json.loads(done.stdout)
    assert printed["passed"] and printed["device"] == "cpu"
    results = {row["check"]: row["result"] for row in printed["checks"]}
    first = ["defaults on all GPUs", "all-reduce", "bench", "overflow"]
    assert list(results)[:4] == first, "what says most comes first"
    assert results == {
        **dict.fromkeys((*first, "resume", "two ranks", "precision=bf16", "telemetry"), "OK"),
        **dict.fromkeys(("precision=fp16", "precision=tf32"), "SKIPPED"),
    }
    found = {row["check"]: row["found"] for row in printed["checks"]}
    words = {
        "resume": "epochs differ by 0.00%", "defaults on all GPUs": "2 ranks, ", "overflow": "not finite",
        "all-reduce": "GB/s bus bandwidth between 2 ranks; no floor",
    }  # fmt: skip
    assert {check: text for check, text in words.items() if text not in found[check]} == {}
    assert all(row["seconds"] >= 0 and row["lines"] == [] for row in printed["checks"])


def test_images_of_real_size_and_a_full_evaluation_on_a_cpu(encore: Encore, pytorch_python: Path) -> None:
    names = ("resnet-pytorch", "ssd", "ncf")
    # Rates are not compared here, whatever else the machine does.
    where = ("--device", "cpu", "--python", str(pytorch_python), "--check-seconds", "600", "--time-limit", "1500")
    done = encore("selftest", *names, *where, "--json", "--only", "input", "--only", "evaluation", timeout=600, code=0)
    rows = {(row["name"], row["check"]): row for row in json.loads(done.stdout)["checks"]}
    assert {key: row["result"] for key, row in rows.items()} == {
        **{(name, "input"): "OK" for name in names[:2]},
        **{(name, "evaluation"): "SKIPPED" for name in names[:2]},
        ("ncf", "evaluation"): "OK",
    }
    assert all("images/s of real size" in rows[name, "input"]["found"] for name in names[:2])
    assert rows["ssd", "evaluation"]["found"] == "a batch takes minutes on a CPU"


def test_a_failed_check_has_exit_code_1(encore: Encore, pytorch_python: Path) -> None:
    where = ("--device", "cpu", "--python", str(pytorch_python))
    done = encore("selftest", "dlrm", *where, "--only", "device", "--check-seconds", "0.5", code=1)
    assert re.search(r"(?s)no result after [01] s.*0 OK, 1 FAIL, 0 SKIPPED", done.stdout)
