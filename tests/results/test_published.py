"""Published results, descriptions of systems, digests of submitted logs, printed studies and tables of measurements."""

import csv
import json
import lzma
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from encore.errors import EncoreError
from encore.lab.scaling.printed_tables import MICROWAY, Span, checks, rounding_range, tables
from encore.results.compare.compare import SAME_RUNS, Verdict, compare
from encore.results.compare.digest import main, thin_losses
from encore.results.compare.run_set import RunSet, digests, load_run_set, load_run_sets, submission
from encore.results.published import published, systems
from encore.results.published.published import load_figures, load_published, load_studies, select, system_of
from encore.results.published.systems import cells_at, described, family, from_description, model_of, rounds_system
from encore.results.report.figures import all_figures
from encore.results.report.measurements import (
    Measurement,
    all_tables,
    measurement_of,
    relative_to,
    study_measurements,
)
from encore.results.rules import ROUNDS
from encore.results.table import Table
from tests.command_line import output_of
from tests.results.result_logs import resnet_v07, write_files, write_set

Record = Callable[[str, object], None]

# Valid JSON, log lines with Python dictionaries in them, a comma too many; not described; chips, and cores
SYSTEMS = (
    "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet", "v0.7/NVIDIA/dgxa100_n96_ngc20.06_mxnet", "v0.6/NVIDIA/dgx1_ngc19.05_mxnet",
    "v0.7/DellEMC/C4140", "v0.7/DellEMC/2xC4140", "v0.7/DellEMC/4xC4140", "v0.7/Alibaba/v100-1280",
    "v0.7/Alibaba/a100-8", "v3.0/Dell/4xXE8545x4A100-SXM-80GB", "v0.6/Google/tpu-v3-1024",
    "v0.5/nvidia/dgx2h_multi_ngc18.11_mxnet",
)  # fmt: skip
COMMANDS = (
    "--benchmark resnet --round 0.7 --submitter nvidia", "--benchmark resnet --round v0.7 --submitter NVIDIA --csv",
    "--system dgxa100_ngc20 --benchmark mask --json",
    "--accelerator h200 --division closed --sort minutes --round v5.0",
    "--accelerator a100 --round v0.7 --sort accelerators", "--system XE9680 --round v4.0 --sort name",
    "--division open --round v0.7", "--system nothing", "--table --round v0.6", "--table --round v0.6 --markdown",
    "--table --round v0.6 --csv", "--table --round v0.7 --submitter NVIDIA",
)  # fmt: skip


def test_published_results_and_studies(recorded: Record) -> None:
    cells, studies = load_published(), load_studies()
    by_name = {cell.name: {**cell.as_json(), "accelerators": cell.hardware.accelerators} for cell in cells}
    dell = map(measurement_of, map(submission, select(cells, benchmark="resnet", round_="v0.7", submitter="DellEMC")))
    recorded("published.json", {
        "rows": len(cells),
        "counts": Counter(f"{cell.round} {cell.division} {cell.availability}" for cell in cells),
        "scaled": Counter((cell.scaling_factor or 0) > 1.01 for cell in cells),
        "without a benchmark": [cell.name for cell in cells if cell.benchmark is None],
        "without a score": [cell.name for cell in cells if cell.score_minutes is None],
        "not described": sorted({cell.name for cell in cells if not cell.hardware.described}),
        "systems": [by_name[name] for name in SYSTEMS],
        "Dell v0.7": [[row.label, row.system, row.gpus] for row in dell],
        "TPUs v0.5": {
            cell.system: cell.hardware.accelerators
            for cell in select(cells, round_="v0.5")
            if "_v2." in cell.system or "_v3." in cell.system
        },
        "read off its name": vars(system_of("v4.0", "nobody", "dgxh100_n96_pytorch")),
        "studies": [vars(study) for study in studies],
        "figures": Counter(f"{figure.source} {figure.relation}" for figure in load_figures()),
    })  # fmt: skip


def test_published_command(recorded: Record) -> None:
    # Tables by submitter are continued below each other if they are wider than a terminal
    outputs = [output_of("published", *line.split(), width=80 if "--table" in line else 130) for line in COMMANDS]
    recorded("published.txt", "\n".join(f"$ {line}\n{output}" for line, output in zip(COMMANDS, outputs, strict=True)))


# --- systems ----------------------------------------------------------------------------------------------


TPU = {"num_nodes": 64, "accelerator": "tpuv2-512", "num_accelerators": 512}


@pytest.mark.parametrize(
    ("description", "nodes", "accelerators"),
    [
        *(
            ({"accelerators_per_node": "4", key: "2"}, 2, 8)
            for key in ("number of nodes", "Number-of-Nodes", " number_of_nodes ")
        ),
        ({"nodes": [TPU]}, 64, 512),  # A pod is one entry
        ({"nodes": [{**TPU, "accelerator": "Tesla V100"}]}, 64, 64 * 512),
    ],
)
def test_nodes_and_accelerators_of_a_description(description: dict[str, Any], nodes: int, accelerators: int) -> None:
    system = from_description(description)
    assert (system.nodes, system.accelerators) == (nodes, accelerators)


TEXT = json.dumps(
    {
        "system_name": "2xC4140",
        "number of nodes": "2",
        "accelerators_per_node": 4,
        "accelerator_model_name": "Nvidia Tesla V100-SXM2-32GB",
        "framework": "NGC MXNet 20.06",
        "other_software_stack": [{"cuda_version": "11.0", "nccl_version": "2.7.5"}],
    },
    indent=1,
)
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


@pytest.mark.parametrize("name", BROKEN)
def test_invalid_json_is_read_tolerantly(name: str, tmp_path: Path) -> None:
    system = described(write_files(tmp_path, {"2xC4140.json": BROKEN[name]}) / "2xC4140.json")
    is_invalid = name not in ("BOM", "control characters")
    values = (system.described, system.accelerators, system.accelerator, system.software["nccl_version"])
    assert values == (True, 8, "Nvidia Tesla V100-SXM2-32GB", "2.7.5")
    assert ("read tolerantly" in system.caveat) is is_invalid


def test_log_lines_as_descriptions_of_v06(tmp_path: Path) -> None:
    nodes = {"num_nodes": "4", "cpu": "2x Xeon 8174", "accelerator": "Tesla V100-SXM3-32GB-H", "num_accelerators": "16"}
    entry = {
        "framework": "PyTorch 19.05",
        "os": "Ubuntu",
        "libraries": "{'nccl_version': '2.4.6'}",
        "nodes": str(nodes),
    }
    lines = {"org": "NVIDIA", "status": "onprem", "entry": str(entry), "poc_name": "a person"}
    text = "".join(f"{key}: {json.dumps({'value': value})}\n" for key, value in lines.items())
    system = described(write_files(tmp_path, {"dgx2h_n4.json": text}) / "dgx2h_n4.json")
    counts = (system.nodes, system.accelerators, system.cpus_per_node)
    assert (*counts, system.status, system.software) == (4, 64, 2, "onprem", {"nccl_version": "2.4.6"})
    assert "person" not in repr(system)


@pytest.mark.parametrize(
    ("name", "short", "model"),
    [
        ("Nvidia Tesla V100-SXM2-32GB", "V100", "V100-SXM2"),
        ("Tesla V100-SXM3-32GB-H", "V100", "V100-SXM3"),
        ("Nvidia Tesla V100S-PCIe-32GB", "V100S", "V100S-PCIe"),
        ("NVIDIA A100-SXM4-80GB (400W)", "A100", "A100-SXM"),
        ("NVIDIA A100 - PCIe - 80 GB", "A100", "A100-PCIe"),
        ("NVIDIA H200-NVL-141GB", "H200", "H200-NVL"),
        ("Intel(R) Gaudi(R) 2 AI Accelerator", "GAUDI2", "GAUDI2"),
        ("TPU-v5p", "TPUV5P", "TPUV5P"),
        ("NVIDIA A10G", "A10G", "A10G"),
        ("TPU-trillium", "TRILLIUM", "TRILLIUM"),
        ("AMD Radeon RX 7900 XTX", "RX7900XTX", "RX7900XTX"),
        (None, None, None),
    ],
)
def test_family_and_model_of_accelerators(name: str | None, short: str | None, model: str | None) -> None:
    assert (family(name), model_of(name)) == (short, model)


@pytest.mark.parametrize(
    ("platform", "nodes", "per_node"),
    [
        ("1xMI300X", 1, None), ("8xMI300X", 8, None), ("2xMI300Xx8", 2, 8), ("1x8xMI300X", 1, 8),
        ("4xXE8545x4A100-SXM-80GB", 4, 4), ("2xNVIDIA DGX A100", 2, 8),
    ],
)  # fmt: skip
def test_nodes_and_accelerators_of_a_platform(platform: str, nodes: int, per_node: int | None, tmp_path: Path) -> None:
    system = rounds_system(tmp_path, None, platform)
    assert (system.nodes, system.accelerators_per_node, bool(system.accelerator)) == (nodes, per_node, True)


# --- digests ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_published_scores_follow_from_the_digests_of_the_logs() -> None:
    cells = {(cell.name, cell.benchmark): cell for cell in load_published()}
    sides = {(side.label, side.benchmark): side for round_ in ROUNDS for side in digests(round_)}
    # Alibaba's logs have times in their own format; their scores are not official
    ours, theirs = ({name for name in part if "/Alibaba/" not in name[0]} for part in (sides, cells))
    assert (Counter(cells[name].round for name in theirs - ours), ours - theirs) == ({"v6.0": 33}, set())
    different = []
    for name, side in ((name, sides[name]) for name in sides.keys() & cells.keys()):
        minutes, score = cells[name].score_minutes, side.score.estimate if side.score else None
        if name not in ours:
            assert minutes is None or score == pytest.approx(minutes, rel=0.05), name
        elif (score if side.score_is_official else None) != pytest.approx(minutes, abs=0.001):
            different.append(name)
        if score is not None and side.score_is_official:
            seconds = sum(side.phases.get(phase, 0.0) for phase in ("start_s", "train_s", "evaluate_s"))
            # Some of the logs of the tpu-v4-128 have no length
            has_length = side.lengths and side.per_length and name[0] != "v0.7/Google/tpu-v4-128-TF"
            product = side.lengths.estimate * side.per_length.estimate if has_length else score
            assert (seconds, product) == (pytest.approx(score * 60, rel=2e-5), pytest.approx(score, rel=1e-6)), name
    # The sixth log of Azure's Mask R-CNN was not available
    assert different == [("v1.1/Azure/nd96amsr_a100_v4_ngc21.09_pytorch", "maskrcnn")]


NAMES = ("round", "benchmark", "length_unit", "runs", "converged", "required", "missing", "division", "targets")


def values_of(side: RunSet) -> tuple[list[Any], list[float]]:
    # Values that must be equal, and rounded numbers
    samples = [sample for sample in (side.score, side.lengths, side.per_length) if sample]
    curves = [values for curve in side.curves for values in (curve.minutes, *curve.values.values())]
    return [
        *(getattr(side, name) for name in NAMES), json.dumps(side.hyperparameters, sort_keys=True), sorted(side.phases),
        [(sample.count, sample.trimmed) for sample in samples], [[*curve.values] for curve in side.curves],
        [len(values) for values in curves],
    ], [
        *(value for values in curves for value in values),
        *(value for sample in samples for value in (sample.estimate, sample.spread or 0.0)),
        *(side.phases[name] for name in sorted(side.phases)),
    ]  # fmt: skip


def test_descriptions_of_checkouts_are_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Callable[[str, object], None], capsys: Any
) -> None:
    description = {"number_of_nodes": "2", "accelerators_per_node": "8", "accelerator_model_name": "A100"}
    write_files(tmp_path, {
        "training_results_v0.7/Lab/systems/box.json": description,
        "training_results_v0.7/Lab/systems/a_multi_b.json": description,
        "training_results_v0.7/Lab/systems/damaged.json": "{",
        "training_results_v0.7/Lab/results/box.json": description,
        "training_results_v0.5/results/v0.5.0/nvidia/dgx2_ngc18.11_pytorch/entry.json": {
            "nodes": [{"num_nodes": "4", "cpu": "2x Xeon", "num_accelerators": "16"}], "interconnect": "IB",
        },
        "other/Lab/systems/box.json": description,
        "data/systems/none": "",
    })  # fmt: skip
    monkeypatch.setattr(systems, "DATA", tmp_path / "data")
    systems._main(tmp_path)
    written = {path.name: json.loads(path.read_text("utf-8")) for path in sorted((tmp_path / "data").rglob("*.json"))}
    recorded("systems.json", {**written, "printed": capsys.readouterr().err})


def test_losses_are_thinned_to_48_means() -> None:
    samples = [float(number) for number in range(1, 50)]
    means = [0.66667, *(number + 0.5 for number in range(3, 48, 2)), 49]
    assert thin_losses([(samples, [1 / 3, 1.0, *samples[2:]])]) == [([*range(2, 49, 2), 49], means)]
    assert thin_losses([(samples[1:], samples[1:])]) == [(samples[1:], samples[1:])]


def test_digest_of_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Callable[[str, object], None]
) -> None:
    # A result repository with two systems, and a log that is no submission
    root = tmp_path / "training_results_v0.7"
    texts = [resnet_v07(40.0 + number, seed=number % 4) for number in range(5)]
    for place, logs in (
        ("Ours/results/box/resnet", texts),
        ("Ours/results/other_box/resnet", [*texts[:4], resnet_v07(44.0, quality=(0.3, 0.75), status="aborted")]),
        ("Theirs/benchmarks/resnet/results/box", texts[:1]),
    ):
        write_set(root / place, logs)
    assert [main([str(root), "-o", str(tmp_path / name)]) for name in "ab"] == [0, 0]
    written, again = ((tmp_path / name / "digests" / "v0.7.jsonl.xz").read_bytes() for name in "ab")
    assert written == again
    rows = csv.DictReader((tmp_path / "a" / "published.csv").read_text().splitlines())
    ours = [row for row in rows if row["submitter"] == "Ours"]
    recorded("digest.json", [*map(json.loads, lzma.decompress(written).splitlines()), *ours])
    # Other tests use the cached digests of the public sets
    with monkeypatch.context() as patch:
        patch.setattr(published, "DIGESTS", tmp_path / "a" / "digests")
        published.lines_of.cache_clear()
        sides = {side.label.rpartition("/")[2]: side for side in digests("v0.7")}
    published.lines_of.cache_clear()
    for name in ("box", "other_box"):
        identity, numbers = values_of(load_run_set(root / "Ours" / "results" / name / "resnet"))
        assert values_of(sides[name]) == (identity, pytest.approx(numbers, rel=1e-5, abs=4e-4))


def test_two_sets_of_a_benchmark_without_implementation(tmp_path: Path) -> None:
    values = {"submission_benchmark": "gpt3", "gradient_accumulation_steps": 1, "quality": (2.8, 2.68)}
    ours, theirs = (
        write_set(
            tmp_path / str(factor),
            [
                resnet_v07(64 * factor + n, start_ms=1_683_000_012_345 + round(10 * n), **values)
                for n in (0.1, 0.2, 0.3)
            ],
        )
        for factor in (1.3, 1.0)
    )
    result = json.loads(output_of("compare", ours, theirs, "--json"))
    ratios = pytest.approx([1.3, 1.3, 1.0], rel=2e-3)
    assert (result["benchmark"], [factor["ratio"] for factor in result["factors"]]) == ("gpt3", ratios)
    # Nothing but the reason, unless it is requested
    foreign = write_set(tmp_path / "foreign", ["\0:::MLLOG {" * 1000])
    outputs = [output_of("compare", ours, foreign, *options) for options in ((), ("--all",))]
    texts = ("not comparable", "no difference", "--all prints the figures and the differences\n")
    assert [[text in output for text in texts] for output in outputs] == [[True, False, True], [True, True, False]]


# --- printed studies and measurements ---------------------------------------------------------------------


def plain(tables: Iterable[Table]) -> dict[str, object]:
    return {table.title: [table.columns, table.note, *table.rows] for table in tables}


def test_tables_of_the_study_and_printed_figures(recorded: Record) -> None:
    results = checks()
    figure = next(figure for figure in load_figures() if figure.printed == "4.080")
    recorded("study.json", {
        "tables": plain(tables()),
        "printed": [table["title"] for table in json.loads(output_of("report", "--study", MICROWAY, "--json"))],
        "not following": [
            [check.source, check.place, check.what, check.printed, check.computed, check.note]
            for check in results
            if not check.follows
        ],
        "with a note": [check.what for check in results if check.note],
        "checked": len(results),
        "span of 4.080": vars(rounding_range(figure)),
    })  # fmt: skip
    assert [Span(low=1, high=2).overlaps(Span(low=low, high=3)) for low in (2, 2.1)] == [True, False]


def measurement(benchmark: str, gpus: int, minutes: float, **values: Any) -> Measurement:
    defaults = {"label": f"{benchmark} on {gpus}", "system": "V100", "epochs": 10.0, "minutes_per_epoch": minutes / 10}
    return Measurement(benchmark=benchmark, gpus=gpus, minutes=minutes, **{**defaults, **values})


def test_tables_and_figures_of_measurements(recorded: Record) -> None:
    # Speed-up, efficiency, a baseline, releases and precisions; published cells; figures of the study
    rows = [
        measurement("resnet", 1, 100.0),
        measurement("resnet", 8, 20.0, batch=512.0),
        measurement("ssd", 4, 7.0),
        measurement("bert", 8, 21.0, release="20.03", precision="fp16", label="base"),
        measurement("bert", 8, 10.0, release="20.06", precision="fp16", label="new"),
        measurement("ncf", 1, 30.0, precision="fp32"),
        measurement("ncf", 1, 10.0, precision="fp16"),
    ]
    cells = select(load_published(), benchmark="gnmt", submitter="NVIDIA", system="dgx1_ngc")
    figures = all_figures(study_measurements(MICROWAY), "resnet, 1 GPUs")
    recorded("measurements.json", {
        "made": plain(all_tables(rows, "BASE")),
        "published": plain(all_tables([measurement_of(submission(cell)) for cell in cells])),
        "figures": {plot.key: [plot.title, len(plot.table.rows)] for plot in (*figures, *all_figures(rows, "base"))},
    })  # fmt: skip
    recorded("figures.svg", "\n".join(plot.svg for plot in (*figures[1:3], *all_figures(rows, "base")[-1:])))
    assert "var(--series-1" in figures[0].standalone_svg()


def test_figure_of_one_quality_over_one_unit(tmp_path: Path, recorded: Record) -> None:
    # Loss over epochs, over samples, and over neither in one log; accuracy after two epochs
    loss = [
        resnet_v07(60.0 + n, quality=(2.8, 2.68), start_ms=1_683_000_000_000, submission_benchmark="gpt3")
        for n in (1, 2)
    ]
    by_samples = [re.sub(r'"epoch_num": (\d+)', r'"samples_count": \g<1>000', text) for text in loss]
    sets = {
        "a": loss, "b": by_samples, "c": [by_samples[0], loss[1].replace('"epoch_num"', '"other"')],
        "d": [resnet_v07()], "e": [resnet_v07(24.0 + n, submission_platform="2xNVIDIA DGX A100") for n in (0, 1)],
    }  # fmt: skip
    for name, texts in sets.items():
        write_set(tmp_path / name, texts)
    rows = [measurement_of(side) for side in load_run_sets(tmp_path)]
    recorded("qualities.json", {
        "measured": [{**vars(row), "curves": [vars(curve) for curve in row.curves]} for row in rows],
        "figures": plain(plot.table for plot in all_figures(rows)), "tables": plain(all_tables(rows)),
    })  # fmt: skip


def test_unknown_baseline_is_an_error_with_a_suggestion() -> None:
    name, part = "v0.7/NVIDIA/dgx1_ngc20.06_mxnet", "v0.7/NVIDIA"
    add = f"hint: add the published system: --published {name} --baseline {name}"
    for label, baseline, hint in (
        ("base", "bas", "did you mean 'base'"),
        ("base", name, add),
        ("base", "DGX1_ngc20.06_mxnet", add),
        ("v0.7/NVIDIA/dgxa100_ngc20.06_mxnet", name, f"--published {part} --baseline {name}"),
    ):
        with pytest.raises(EncoreError, match=hint):
            relative_to([measurement("resnet", 8, 100.0, label=label)], baseline)
    assert f"Score relative to {name}" in output_of("report", "--published", part, "--baseline", name)


def test_table_as_markdown_and_csv() -> None:
    # Text cells are no formulas in CSV
    cells = ("x|y", "=1+1", "+cmd", "-a", "@a", "\t=1", "-1.5", "+2", "a=b")
    table = Table(
        title="t", columns=("a", "b"), rows=(("z", None), *((cell, 1.5) for cell in cells)), formats={"b": ".3f"}
    )
    assert table.as_markdown().splitlines()[:4] == ["| a | b |", "|---|---:|", "| z |  |", "| x/y | 1.500 |"]
    escaped = ("x|y", "'=1+1", "'+cmd", "'-a", "'@a", "'\t=1", "-1.5", "+2", "a=b")
    assert table.as_csv() == "a,b\nz,\n" + "".join(f"{cell},1.5\n" for cell in escaped)


# --- the archive of public logs ---------------------------------------------------------------------------

# It is not part of the checkout
SHARED = Path(os.environ.get("ENCORE_SHARED", Path(__file__).parents[3] / "shared"))
ARCHIVE = SHARED / "mlperf" / "logs.tar.xz"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not ARCHIVE.is_file(), reason="no archive of public logs: set ENCORE_SHARED")
def test_public_sets_have_their_published_score_and_digest(tmp_path: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    published = {(cell.name, cell.benchmark): cell for cell in load_published()}
    kept = {(side.label, side.benchmark): side for round_ in ROUNDS[:3] for side in digests(round_)}
    complete = 0
    for side in load_run_sets(tmp_path):
        name, result = (cells_at(side.folder, side.round, side.benchmark)[0].name, side.benchmark), compare(side)
        assert result.baseline.label == name[0]
        # Of five sets the archive has one log
        if side.runs == kept[name].runs:
            complete += 1
            score = pytest.approx(published[name].score_minutes, abs=0.001)
            assert (result.verdict, result.reasons[0], side.score.estimate) == (Verdict.SAME_RUNS, SAME_RUNS, score)
            assert kept[name].phases == pytest.approx(side.phases, rel=1e-5), name
            assert [factor.ratio for factor in result.factors] == pytest.approx([1.0] * len(result.factors), abs=5e-4)
    assert complete == 47
