"""Published results and the figures of the studies."""

import csv
import json
import lzma
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.results.compare.compare import compare_with
from encore.results.compare.digest import main
from encore.results.compare.explain import explain
from encore.results.compare.nearest import AS_GIVEN
from encore.results.compare.sides import Side, digests, load_side, load_sides, submission
from encore.results.published import published
from encore.results.published.published import load_figures, load_published, load_studies, select, system_of
from encore.results.published.systems import cells_at, described, family, from_description, model_of, rounds_system
from encore.results.report.measurements import of_published
from encore.results.rules import ROUNDS
from tests.results.result_logs import resnet_v07, write_set

# Valid JSON, log lines with Python dictionaries in them, a comma too many; described nowhere; chips, and cores.
SYSTEMS = (
    "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet", "v0.7/NVIDIA/dgxa100_n96_ngc20.06_mxnet", "v0.6/NVIDIA/dgx1_ngc19.05_mxnet",
    "v0.7/DellEMC/C4140", "v0.7/DellEMC/2xC4140", "v0.7/DellEMC/4xC4140", "v0.7/Alibaba/v100-1280",
    "v0.7/Alibaba/a100-8", "v3.0/Dell/4xXE8545x4A100-SXM-80GB", "v0.6/Google/tpu-v3-1024",
    "v0.5/nvidia/dgx2h_multi_ngc18.11_mxnet",
)  # fmt: skip


def test_published_results_and_studies(recorded: Callable[[str, object], None]) -> None:
    results, studies = load_published(), load_studies()
    by_name = {each.name: {**each.as_json(), "accelerators": each.hardware.accelerators} for each in results}
    counts = Counter(f"{each.round} {each.division} {each.availability}" for each in results)
    recorded("published.json", {
        "rows": len(results), "counts": counts,
        "scaled": Counter((each.scaling_factor or 0) > 1.01 for each in results),
        "without a benchmark": [each.name for each in results if each.benchmark is None],
        "without a score": [each.name for each in results if each.score_minutes is None],
        "not described": sorted({each.name for each in results if not each.hardware.described}),
        "systems": [by_name[name] for name in SYSTEMS],
        "read off its name": vars(system_of("v4.0", "nobody", "dgxh100_n96_pytorch")),
        "studies": [vars(each) for each in studies], "figures": Counter(each.source for each in load_figures()),
    })  # fmt: skip
    assert {each.relation for each in load_figures()} <= {"=", "~", "<", ">", "<=", ">="}


COMMANDS = (
    "--benchmark resnet --round 0.7 --submitter nvidia", "--benchmark resnet --round v0.7 --submitter NVIDIA --csv",
    "--system dgxa100_ngc20 --benchmark mask --json",
    "--accelerator h200 --division closed --sort minutes --round v5.0",
    "--accelerator a100 --round v0.7 --sort accelerators", "--system XE9680 --round v4.0 --sort name",
    "--division open --round v0.7", "--system nothing", "--table --round v0.6", "--table --round v0.6 --markdown",
    "--table --round v0.6 --csv", "--table --round v0.7 --submitter nvidia",
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_command(number: int, recorded: Callable[[str, object], None]) -> None:
    done = CliRunner().invoke(app, ["published", *COMMANDS[number].split()], env={"COLUMNS": "130"})
    recorded(f"published/{number}.txt", f"{COMMANDS[number]}\n{done.stdout}")


# The digests are made from the logs. Alibaba's of v0.6 and v0.7 have times of a format of their own.
@pytest.mark.slow
def test_every_score_is_the_one_that_the_programs_own_scoring_gives() -> None:
    published = {
        (f"{each.round}/{each.submitter}/{each.system}", each.benchmark): each.score_minutes
        for each in load_published()
        if each.submitter != "Alibaba"
    }
    made = {
        (side.label, side.benchmark): side.score.estimate if side.score and side.score_is_official else None
        for round_ in ROUNDS
        for side in digests(round_)
        if "/Alibaba/" not in side.label
    }
    assert published.keys() == made.keys()
    # Of v1.1 Azure's Mask R-CNN a sixth log was not available.
    apart = [key for key in made if made[key] != pytest.approx(published[key], abs=0.001)]
    assert apart == [("v1.1/Azure/nd96amsr_a100_v4_ngc21.09_pytorch", "maskrcnn")]


VALID = {
    "system_name": "2xC4140",
    "number of nodes": "2",
    "accelerators_per_node": 4,
    "accelerator_model_name": "Nvidia Tesla V100-SXM2-32GB",
    "framework": "NGC MXNet 20.06",
    "other_software_stack": [{"cuda_version": "11.0", "nccl_version": "2.7.5"}],
}


@pytest.mark.parametrize("key", ["number of nodes", "number_of_nodes", "Number-of-Nodes", " number_of_nodes "])
def test_keys_are_read_however_they_are_spelled(key: str) -> None:
    system = from_description({"accelerators_per_node": "4", key: "2"})
    assert (system.nodes, system.accelerators) == (2, 8)


TEXT = json.dumps(VALID, indent=1)
BROKEN = {
    "BOM": "\ufeff" + TEXT,
    "trailing commas": TEXT.replace("}", ",}").replace('"2.7.5"\n', '"2.7.5",\n')[:-2] + ",\n}",
    "comments": TEXT.replace("{", "{ // the machine\n", 1),
    "single quotes": TEXT.replace('"', "'"),
    "control characters": TEXT.replace("NGC MXNet", "NGC\tMXNet\x01"),
    "unquoted keys": TEXT.replace('"accelerators_per_node"', "accelerators_per_node"),
    "no last bracket": TEXT.rstrip("}\n "),
    "two spaces for a comma": TEXT.replace('4,\n "acc', '4\n "acc'),
}


@pytest.mark.parametrize("how", BROKEN)
def test_json_that_is_not_quite_valid_is_read(how: str, tmp_path: Path) -> None:
    path = tmp_path / "2xC4140.json"
    path.write_text(BROKEN[how], encoding="utf-8")
    system = described(path)
    assert (system.described, system.accelerators, system.accelerator) == (True, 8, "Nvidia Tesla V100-SXM2-32GB")
    assert system.software["nccl_version"] == "2.7.5"
    assert ("read tolerantly" in system.caveat) is (how not in ("BOM", "control characters"))


def test_the_log_lines_that_nvidia_took_for_descriptions_in_v06(tmp_path: Path) -> None:
    nodes = {"num_nodes": "4", "cpu": "2x Xeon 8174", "accelerator": "Tesla V100-SXM3-32GB-H", "num_accelerators": "16"}
    entry = {
        "framework": "PyTorch 19.05",
        "os": "Ubuntu",
        "libraries": "{'nccl_version': '2.4.6'}",
        "nodes": str(nodes),
    }
    path = tmp_path / "dgx2h_n4.json"
    lines = {"org": "NVIDIA", "status": "onprem", "entry": str(entry), "poc_name": "a person"}
    path.write_text("".join(f"{key}: {json.dumps({'value': value})}\n" for key, value in lines.items()))
    system = described(path)
    assert (system.nodes, system.accelerators, system.cpus_per_node, system.status) == (4, 64, 2, "onprem")
    assert system.software == {"nccl_version": "2.4.6"}
    assert "person" not in repr(system)


@pytest.mark.parametrize(
    ("name", "short", "model"),
    [
        ("Nvidia Tesla V100-SXM2-32GB", "V100", "V100-SXM2"),
        ("Tesla V100-SXM3-32GB-H", "V100", "V100-SXM3"),
        ("Nvidia Tesla V100S-PCIe-32GB", "V100S", "V100S-PCIe"),
        ("NVIDIA A100-SXM-80GB", "A100", "A100-SXM"),
        ("NVIDIA A100-SXM4-80GB (400W)", "A100", "A100-SXM"),
        ("NVIDIA A100 - PCIe - 80 GB", "A100", "A100-PCIe"),
        ("NVIDIA H200-NVL-141GB", "H200", "H200-NVL"),
        ("Intel(R) Gaudi(R) 2 AI Accelerator", "GAUDI2", "GAUDI2"),
        ("TPU-v5p", "TPUV5P", "TPUV5P"),
        ("TPU-v5e", "TPUV5E", "TPUV5E"),
        ("NVIDIA A10G", "A10G", "A10G"),
        ("TPU-trillium", "TRILLIUM", "TRILLIUM"),
        ("AMD Radeon RX 7900 XTX", "RX7900XTX", "RX7900XTX"),
        (None, None, None),
    ],
)
def test_accelerators_are_distinguished(name: str | None, short: str | None, model: str | None) -> None:
    assert (family(name), model_of(name)) == (short, model)


def test_dells_systems_of_v07_are_two_kinds_of_their_true_sizes() -> None:
    cells = select(load_published(), benchmark="resnet", round_="v0.7", submitter="DellEMC")
    measured = {cell.system: of_published(cell) for cell in cells}
    assert {name: each.gpus for name, each in measured.items()} == {"C4140": 4, "DSS8440": 8} | {
        name: gpus for name, gpus in (("2xC4140", 8), ("4xC4140", 16)) if name in measured
    }
    assert measured["C4140"].system != measured["DSS8440"].system


def test_a_tpu_of_v05_has_the_cores_of_its_name() -> None:
    cells = [cell for cell in select(load_published(), round_="v0.5") if "_v2." in cell.system or "_v3." in cell.system]
    assert {cell.system.rpartition("_")[2] for cell in cells} == {"v2.8", "v2.512", "v3.8", "v3.32", "v3.512"}
    assert [cell.hardware.accelerators for cell in cells] == [int(cell.system.rpartition(".")[2]) for cell in cells]
    node = {"num_nodes": 64, "accelerator": "tpuv2-512", "num_accelerators": 512}
    assert from_description({"nodes": [node]}).accelerators == 512
    assert from_description({"nodes": [{**node, "accelerator": "Tesla V100"}]}).accelerators == 64 * 512


@pytest.mark.parametrize(
    ("platform", "nodes", "each"),
    [
        ("1xMI300X", 1, None),
        ("8xMI300X", 8, None),
        ("2xMI300Xx8", 2, 8),
        ("1x8xMI300X", 1, 8),
        ("4xXE8545x4A100-SXM-80GB", 4, 4),
        ("2xNVIDIA DGX A100", 2, 8),
    ],
)
def test_a_platforms_number_in_front_is_of_nodes(platform: str, nodes: int, each: int | None, tmp_path: Path) -> None:
    found = rounds_system(tmp_path, None, platform)
    assert (found.nodes, found.accelerators_per_node) == (nodes, each)
    assert found.accelerator


# A result repository with two systems, and a log that is nobody's submission.
def _checkout(folder: Path) -> Path:
    submitter = folder / "training_results_v0.7" / "Ours"
    texts = [resnet_v07(40.0 + number, seed=number % 4) for number in range(5)]
    write_set(submitter / "results" / "box" / "resnet", texts)
    missed = resnet_v07(44.0, quality=(0.3, 0.75), status="aborted")
    write_set(submitter / "results" / "other_box" / "resnet", [*texts[:4], missed])
    write_set(submitter / "benchmarks" / "resnet" / "results" / "box", texts[:1])
    return submitter.parent


NAMES = ("round", "benchmark", "length_unit", "runs", "converged", "required", "missing", "division", "targets")


# The two have the same figures, to what a digest keeps of them.
def _assert_same(kept: Side, read: Side) -> None:
    assert [getattr(kept, name) for name in NAMES] == [getattr(read, name) for name in NAMES]
    for ours, theirs in ((kept.score, read.score), (kept.lengths, read.lengths), (kept.per_length, read.per_length)):
        assert (ours and (ours.count, ours.trimmed)) == (theirs and (theirs.count, theirs.trimmed))
        if ours and theirs:
            assert ours.estimate == pytest.approx(theirs.estimate, rel=1e-6)
            assert (ours.spread or 0.0) == pytest.approx(theirs.spread or 0.0, rel=1e-4, abs=1e-5 * ours.estimate)
    assert kept.phases == pytest.approx(read.phases, rel=1e-5)
    mine, others = ([(curve.minutes, *curve.values.values()) for curve in side.curves] for side in (kept, read))
    assert [list(curve.values) for curve in kept.curves] == [list(curve.values) for curve in read.curves]
    assert [pytest.approx(each, rel=1e-5) for curve in mine for each in curve] == [e for curve in others for e in curve]
    assert kept.hyperparameters == json.loads(json.dumps(read.hyperparameters))


def test_digest_is_the_side_of_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = _checkout(tmp_path)
    assert main([str(root), "-o", str(tmp_path / "a")]) == 0
    assert "left out: Ours/benchmarks/resnet/results/box: not the logs of a submission" in capfd.readouterr().err
    # The audit of a side keeps the public sets that it finds, for all tests after this one.
    with monkeypatch.context() as patched:
        patched.setattr(published, "DIGESTS", tmp_path / "a" / "digests")
        published.lines_of.cache_clear()
        sides = {side.label: side for side in digests("v0.7")}
    published.lines_of.cache_clear()
    first, second = (tmp_path / name / "digests" / "v0.7.jsonl.xz" for name in ("a", "b"))
    assert main([str(root), "-o", str(tmp_path / "b")]) == 0
    assert first.read_bytes() == second.read_bytes()
    assert json.loads(lzma.decompress(first.read_bytes()).splitlines()[1])["seeds"] == [0, 1, 2, 3, 0]
    assert list(sides) == ["v0.7/Ours/box", "v0.7/Ours/other_box"]
    with (tmp_path / "a" / "published.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["submitter"] == "Ours"]
    assert [(row["system"], row["runs"], row["converged"], row["score_minutes"]) for row in rows] == [
        ("box", "5", "5", "42.0000"),
        ("other_box", "5", "4", "42.0000"),
    ]
    for name, side in sides.items():
        _assert_same(side, load_side(root / "Ours" / "results" / name.rpartition("/")[2] / "resnet"))


@pytest.mark.slow
@pytest.mark.parametrize("round_", sorted(file.name.partition(".jsonl")[0] for file in published.DIGESTS.iterdir()))
def test_the_phases_and_lengths_of_a_digest_make_its_score(round_: str) -> None:
    published.lines_of.cache_clear()
    started = time.process_time()
    lines = published.lines_of(round_)
    assert time.process_time() - started < 0.2
    sides = {(side.label, side.benchmark): side for side in digests(round_)}
    assert len(sides) == len(lines) - 1 == json.loads(lines[0])["sets"]
    for cell in load_published():
        if cell.round == round_ and cell.submitter == "Alibaba" and cell.score_minutes is not None:
            score = sides[cell.name, cell.benchmark].score
            assert score is not None and score.estimate == pytest.approx(cell.score_minutes, rel=0.05), cell.name
    for side in sides.values():
        if side.score is None or not side.score_is_official:
            continue
        on_the_clock = sum(side.phases.get(name, 0.0) for name in ("start_s", "train_s", "evaluate_s"))
        assert on_the_clock == pytest.approx(side.score.estimate * 60, rel=2e-5), side.label
        # The length of some of those runs is not in their logs.
        if side.lengths is not None and side.per_length is not None and side.label != "v0.7/Google/tpu-v4-128-TF":
            product = side.lengths.estimate * side.per_length.estimate
            assert product == pytest.approx(side.score.estimate, rel=1e-6), side.label


@pytest.mark.slow
def test_digests_are_what_the_logs_say(public_logs: Path) -> None:
    sides = {(side.label, side.benchmark): side for round_ in ROUNDS[:3] for side in digests(round_)}
    same = 0
    for read in load_sides(public_logs):
        cell = cells_at(read.folder or public_logs, read.round, read.benchmark)[0]
        kept = sides[cell.name, read.benchmark]
        if kept.runs == read.runs:
            _assert_same(kept, read)
            same += 1
    assert same == 47


# --- every round and benchmark --------------------------------------------------------------------------------


# A set of v3.0 of a benchmark that Encore cannot train.
def _gpt3(folder: Path, longer: float = 1.0) -> Path:
    options = {"submission_benchmark": "gpt3", "gradient_accumulation_steps": 1}
    texts = [
        resnet_v07(minutes * longer, quality=(2.8, 2.68), start_ms=1_683_000_012_345 + number, **options)
        for number, minutes in enumerate((64.1, 64.3, 64.2))
    ]
    return write_set(folder, texts)


def test_two_sets_of_any_benchmark_are_compared(tmp_path: Path) -> None:
    ours, theirs = _gpt3(tmp_path / "ours", 1.3), _gpt3(tmp_path / "theirs")
    found = json.loads(CliRunner().invoke(app, ["compare", str(ours), str(theirs), "--json"]).stdout)
    assert found["benchmark"] == "gpt3" and found["verdict"] != "not comparable", found["reasons"]
    assert [factor["ratio"] for factor in found["factors"]] == pytest.approx([1.3, 1.3, 1.0], rel=1e-3)
    assert found["factors"][0]["interval"] is not None
    junk = write_set(tmp_path / "junk", ["\0:::MLLOG {" * 1000])
    result = CliRunner().invoke(app, ["compare", str(ours), str(junk)])
    assert result.exit_code == 0 and "not comparable" in result.stdout


# V1.0 and later had a score alone: no interval, no confidence, nothing to explain.
def test_a_submission_of_a_late_round_has_spread_phases_system_and_curves() -> None:
    cells = {cell.name: cell for cell in select(load_published(), benchmark="bert", round_="v4.1")}
    ours, theirs = (
        submission(cells[f"v4.1/NVIDIA/{name}"]) for name in ("eos_ngc23.04_pytorch", "eos_n8_ngc23.04_pytorch")
    )
    assert len(ours.curves) == ours.runs == 10
    assert compare_with(ours, theirs, AS_GIVEN).score.interval
    assert {"phases", "hyperparameters"} <= {each.area for each in explain(ours, theirs).differences}
