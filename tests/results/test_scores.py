"""Scores and compliance: targets of mlperf-logging's rule files, archives, scaling factors, and the checker."""

import gzip
import importlib.util
import json
import logging
import math
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from mlperf_logging.benchmark_meta import get_allowed_benchmarks, get_result_file_counts
from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.rcp_checker import rcp_checker

from benchmarks.common.run import evidence
from encore import files
from encore.errors import EncoreError, ExitCode
from encore.results.audit import audit, declarations, kernels
from encore.results.audit.audit import audit_path, audit_score
from encore.results.compliance import compliance, convergence, official
from encore.results.compliance.compliance import check
from encore.results.compliance.convergence import Outcome, convergence_of
from encore.results.logs.run_log import Reason, RunLog, read_run, submitter_of
from encore.results.rules import BLEU_BENCHMARKS, ROUNDS, Target, rounds_of, rule_for, targets_of
from encore.results.scores.score import read_scaling, score_folder
from tests import bombs
from tests.command_line import error_of, output_of, run_encore
from tests.results.result_logs import START_MS, dell_texts, flux1_v61, resnet_v07, write_files, write_set

RULES = Path(str(importlib.util.find_spec("mlperf_logging").origin)).parent / "compliance_checker"


def official_targets(round_: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    # Each benchmark with the checker's test of the quality and the state that the test refers to
    for name in get_allowed_benchmarks("training", f"{round_[1:]}.0"):
        state: dict[str, Any] = {"global_batch_size": 1}
        for block in yaml.safe_load((RULES / f"training_{round_[1:]}.0" / f"closed_{name}.yaml").read_text()):
            if "target_accuracy" in str(block.get("BEGIN")):
                exec(block["BEGIN"]["CODE"], {"s": state})
            if test := block.get("KEY", {}).get("ATLEAST_ONE_CHECK"):
                yield name, test, state


def limits(target: Target, is_open: bool) -> list[float]:
    # The ends of a target's range and their neighbours. Rules of 3D U-Net and two of v6.1 have no upper end; it is 1
    values = [math.nextafter(end, side) for end in (target.value, target.limit) for side in (-math.inf, math.inf)]
    values += [target.value, (target.value + target.limit) / 2]
    return [value for value in values if math.isfinite(value) and not (is_open and value >= min(target.limit, 1.0))]


@pytest.mark.parametrize("round_", [round_ for round_ in ROUNDS if round_ >= "v0.7"])
def test_targets_and_numbers_of_runs_equal_those_of_the_rule_files(round_: str) -> None:
    checked, counts = 0, get_result_file_counts("training")
    for name, test, state in official_targets(round_):
        targets = targets_of(round_, name, 1.0)
        assert rule_for(round_, name).runs == counts[name]
        scale = 0.01 if name in BLEU_BENCHMARKS else 1.0
        middle = {target.name: (target.value + target.limit) / 2 for target in targets if target.limit < math.inf}
        for target in targets:
            for value in limits(target, is_open=test.count("<") + test.count(">") == 1):
                quality = {**middle, target.name: value}
                logged = quality["value"] * scale if "value" in quality else quality
                is_met = all(target.met_by(quality) for target in targets)
                assert is_met == bool(eval(test, {"v": {"value": logged}, "s": state})), (name, logged)
                checked += 1
    assert checked > 4 * len(get_allowed_benchmarks("training", f"{round_[1:]}.0"))


def test_benchmarks_and_targets_of_rounds() -> None:
    assert not any("v6.1" in rounds_of(name) for name in ("retinanet", "rgat", "llama31_405b", "dlrm_dcnv2"))
    bert = [rule_for("v0.7", "bert", batch).targets[0].value for batch in (None, 8191, 8192)]
    assert (bert, targets_of("v9.9", "bert"), rule_for("v9.9", "bert")) == ([0.712, 0.712, 0.706], (), None)


# --- scores -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["tar.gz", "tar.xz", "zip"])
def test_archive_is_scored_as_the_folder_in_it(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A path and a link that lead out of it are skipped, and no temporary file remains
    texts = [resnet_v07(40.0 + n, seed=n, start_ms=START_MS + 10**7 * n) for n in range(5)]
    folder = write_set(tmp_path / "round" / "Lab" / "results" / "box" / "resnet", texts)
    packed, temporary = tmp_path / f"round.{suffix}", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    if suffix == "zip":
        shutil.make_archive(str(tmp_path / "round"), "zip", tmp_path, "round")
        with zipfile.ZipFile(packed, "a") as archive:
            archive.writestr("../escaped.txt", resnet_v07())
    else:
        with tarfile.open(packed, f"w:{suffix[4:]}") as archive:
            archive.add(folder / "result_0.txt", "../escaped.txt")
            link = tarfile.TarInfo("round/Lab/results/box/resnet/result_5.txt")
            link.type, link.linkname = tarfile.SYMTYPE, str(folder / "result_0.txt")
            archive.addfile(link)
            archive.add(folder, folder.relative_to(tmp_path))
    score, expected = (json.loads(output_of("score", path, "--json")) for path in (packed, folder))
    expected["folder"] = str(packed / folder.relative_to(tmp_path))
    assert (score["score_minutes"], score, [*temporary.iterdir()]) == (42.0, expected, [])
    packed.write_bytes(packed.read_bytes()[:300])
    assert "cannot be read" in error_of("score", packed).found


TAR_KINDS = (tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME)
# Bundles, which verify reads, are tar files
BOMBS = (
    *((command, "tar.gz", kind) for command in ("score", "verify", "reproduce") for kind in TAR_KINDS),
    *((command, "zip", tarfile.REGTYPE) for command in ("score", "reproduce")),
)


@pytest.mark.parametrize(("command", "suffix", "kind"), BOMBS)
def test_archive_bomb_is_rejected(command: str, suffix: str, kind: bytes, tmp_path: Path) -> None:
    path = bombs.write(tmp_path / f"bomb.{suffix}", "round/results/box/resnet/result_0.txt", b"\n", kind)
    with bombs.is_fast():
        error = error_of(command, path)
    assert "its content has more than" in error.found and str(path) in error.found


def test_archive_with_too_many_members_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MAX_MEMBERS", 3)
    for suffix in ("tar.gz", "zip"):
        folder = write_set(tmp_path / suffix / "resnet", [resnet_v07()] * 4)
        packed = shutil.make_archive(str(tmp_path / "many"), {"tar.gz": "gztar"}.get(suffix, suffix), folder)
        with pytest.raises(EncoreError, match="more than 3 members"), files.unpacked(Path(packed), re.compile("")):
            pass


def test_missing_file_and_tree_with_a_link_to_itself(tmp_path: Path) -> None:
    (write_set(tmp_path / "resnet", [resnet_v07()] * 5) / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert (len(score_folder(tmp_path)), read_run(tmp_path / "result_0.txt").reason) == (1, Reason.UNREADABLE)


@pytest.mark.parametrize("batch", [3264, 3200, 1632, 4000, 30_000])
def test_scaling_factor_equals_that_of_the_official_checker(batch: int, tmp_path: Path) -> None:
    folder = write_set(tmp_path, dell_texts((35, 35.5, 34.5, 36, 35), batch))
    result = convergence_of(score_folder(folder)[0])
    passed, _, factor = rcp_checker.check_directory(
        str(folder), "training", "4.0.0", False, False, rcp_pass="pruned_rcps", set_scaling=True
    )
    assert (result.outcome is Outcome.PASSED, result.factor) == (passed, pytest.approx(factor, rel=1e-12))
    assert read_scaling(folder).factor == (pytest.approx(factor, rel=1e-12) if passed and factor > 1 else None)


@pytest.mark.parametrize(
    ("benchmark", "lengths", "reads"),
    [
        ("bert", [1, 0, 1e9], [False, True]),
        ("bert", [1, 2], [False]),
        ("bert", None, [False]),
        ("resnet", [1, 1], [False]),
    ],
)
def test_samples_of_bert_are_read_where_all_epochs_are_1(
    benchmark: str, lengths: list[float] | None, reads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Mock(return_value=(448, lengths, None))
    monkeypatch.setattr(rcp_checker, "get_submission_epochs", read)
    assert convergence._read_lengths(["result_0.txt"], "4.0.0", benchmark) == (448, lengths)
    assert [samples for (_, _, samples), _ in read.call_args_list] == reads


# --- the checker ------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_set(tmp_path, [resnet_v07()]) / "result_0.txt"


@pytest.mark.parametrize("ruleset", official.rulesets())
def test_every_ruleset_of_the_library_checks_a_log(ruleset: str, log: Path) -> None:
    report = check(log, ruleset)
    assert (report.ruleset, report.passed) == (ruleset, ruleset == "0.7.0")


# The checker executes code in the rule file that a value in the log leads to.
@pytest.mark.parametrize("key", ["submission_benchmark", "submission_division", "opt_name"])
def test_log_cannot_name_its_own_rule_file(key: str, log: Path, tmp_path: Path) -> None:
    code = f"- BEGIN:\n    CODE: \" open({str(tmp_path / 'proof')!r}, 'w').close() \"\n"
    write_files(tmp_path, dict.fromkeys(("evil.yaml", "evil_common.yaml"), code))
    log.write_text(resnet_v07(**{key: f"{'../' * 30}{str(tmp_path).lstrip('/')}/evil"}))
    assert (check(log, "0.7.0").passed, (tmp_path / "proof").exists()) == (False, False)


def test_numbers_of_events_and_of_damaged_events_are_limited(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compliance, "_MAX_EVENTS", 30)
    log.write_text(":::MLLOG {\n" * 40 + resnet_v07())
    lines = [finding.line for finding in check(log).findings if finding.code == "damaged_event"]
    assert lines == [*range(1, 31), 71]


def test_state_of_the_checker_is_restored(log: Path, tmp_path: Path) -> None:
    mlp_compliance.enqueued_configs.append("training_0.7.0/closed_bert.yaml")
    handlers, function = list(logging.getLogger().handlers), mlp_compliance.enqueue_config
    broken = write_set(tmp_path / "broken", [resnet_v07().replace("0.7605", '"high"')]) / "result_0.txt"
    assert [check(path).passed for path in (broken, log)] == [False, True]
    state = (mlp_compliance.enqueued_configs, mlp_compliance.enqueue_config, logging.getLogger().handlers)
    assert state == ([], function, handlers)


def test_command_line_does_not_import_the_checker() -> None:
    code = "import sys, encore.cli.run, encore.cli.results; print(*sys.modules)"
    imported = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert {"mlperf_logging", "pandas", "scipy", "numpy"}.isdisjoint(imported)


def at_times(change: Callable[[int], int]) -> str:
    return re.sub(r'"time_ms": (\d+)', lambda match: f'"time_ms": {change(int(match[1]))}', resnet_v07())


CLOCK, QUALITY = ("impossible_clock", "implausible_time"), ("nonnumeric_quality", "quality_units")


@pytest.mark.parametrize(
    ("text", "reason", "code", "rule"),
    [
        (at_times(lambda ms: ms // 1000), "not between 2017 and today", *CLOCK),
        (at_times(lambda ms: 0), "not between 2017 and today", *CLOCK),
        (at_times(lambda ms: -ms), "not between 2017 and today", *CLOCK),
        (at_times(lambda ms: ms + int(time.time() * 1000)), "in the future", *CLOCK),
        (at_times(lambda ms: ms - START_MS + 1_460_000_000_000), "before 2017", *CLOCK),
        (at_times(lambda ms: START_MS + (ms - START_MS) * 5000), "no run takes more than 60", *CLOCK),
        (at_times(lambda ms: START_MS), "run_stop is at the same time as run_start", *CLOCK),
        (at_times(lambda ms: 2 * START_MS - ms), "before run_start", *CLOCK),
        *(
            (resnet_v07(quality=(0.7605, value)), f"line 35 is {json.dumps(value)}: a number is expected", *QUALITY)
            for value in ("0.7605", "high", None, math.nan, True, {"a": 1}, [0.7605])
        ),
    ],
    ids=[
        "seconds",
        "zero",
        "negative",
        "future",
        "2016",
        "years",
        "constant",
        "backwards",
        "text",
        "word",
        "null",
        "nan",
        "true",
        "object",
        "list",
    ],
)
def test_impossible_values_are_an_error_of_score_check_and_audit(
    text: str, reason: str, code: str, rule: str, tmp_path: Path
) -> None:
    (score,) = score_folder(write_set(tmp_path, [text]))
    (run,) = score.runs
    assert (run.minutes, reason in run.explanation) == (None, True)
    commands = (["score"], ["score", "--json"], ["score", "--csv"], ["check"], ["audit"])
    assert {run_encore(*command, run.path).exit_code for command in commands} == {ExitCode.FAILED}
    found = [*check(run.path, "0.7.0").findings, *audit_score(score)]
    assert {code, rule} <= {name for item in found if item.severity == "error" for name in (item.code, item.rule)}


@pytest.mark.parametrize(
    ("names", "submitter"),
    [
        (["SUBMISSION_ORG_PLACEHOLDER", "Krai", "Krai", "Dell"], "Krai"),
        (["SUBMISSION_ORG_PLACEHOLDER", None], None),
        (["Dell", "Krai", "Krai"], "Krai"),
    ],
)
def test_submitter_is_the_one_of_most_logs(names: list[str | None], submitter: str | None) -> None:
    assert submitter_of([RunLog(path=Path("x"), org=name) for name in names]) == submitter


PRECISION = "lowest_numerical_precision_in_"
LINEAR, ATTN, COMM = (f"{PRECISION}{part}" for part in ("linear", "attn", "comm"))
SCRIPT = """export DGXNNODES=1
export MBS=64
export TENSOR_MODEL_PARALLEL=1
export CONTEXT_PARALLEL=1  # none
export FP8=True
export FP4=${FP4:-False}
source config_common.sh
"""
TRACE = [
    ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128", "kernel"),
    ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "kernel"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "kernel"),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "kernel"),
    ("aten::mm", "cpu_op"),
]
DECLARATION_RULES = {rule.name for rule in audit.RULES if rule.name.startswith("declared_")} | {
    "missing_config",
    "unreadable_profile",
}


def trace(events: list[tuple[str, str]], **arguments: Any) -> dict[str, Any]:
    return {"traceEvents": [{"ph": "X", "name": name, "cat": kind, "args": arguments} for name, kind in events]}


# Rules that report three logs, as a submission on one H100 server or as a run of Encore.
def reported_rules(
    root: Path,
    accelerator: str = "NVIDIA H100-SXM5-80GB",
    nodes: int = 1,
    text: str = SCRIPT,
    own: bool = False,
    profile: Mapping[str, bytes] = {},
    **changed: object,
) -> set[str]:
    system = {"number_of_nodes": str(nodes), "accelerators_per_node": "8", "accelerator_model_name": accelerator}
    evidence = {LINEAR: "fp8", ATTN: "bfloat16", COMM: "bfloat16", "micro_batch_size": 64, "tensor_parallelism": 1}
    folder = write_set(
        root / "results" / "1xH100" / "flux1", [flux1_v61(40.0 + n, seed=n, **changed) for n in range(3)]
    )
    if own:
        write_files(folder, {
            "run.json": {"evidence": dict.fromkeys("012", evidence)}, "config_1x8x64.sh": "", "system.json": system,
            "profile_step.json": trace(TRACE), **profile,
        })  # fmt: skip
    else:
        script = "benchmarks/flux1/implementations/1xH100/config_1x8x64.sh"
        write_files(root, {"systems/1xH100.json": system, script: text})
    return {finding.rule for audit in audit_path(folder) for finding in audit.findings} & DECLARATION_RULES


CASES: list[tuple[str, dict[str, Any]]] = [
    ("declared_batch", {"micro_batch_size": 32}),
    ("declared_batch", {"micro_batch_size": 60}),
    ("declared_batch", {"gradient_accumulation_steps": 4}),
    ("declared_batch", {"tensor_parallelism": 2}),
    ("declared_batch", {"global_batch_size": 500}),
    ("declared_parallelism", {"tensor_parallelism": 3}),
    ("declared_parallelism", {"pipeline_parallelism": 4, "context_parallelism": 4}),
    ("declared_parallelism", {"expert_parallelism": 16}),
    ("declared_parallelism", {"context_parallelism": 0}),
    ("declared_hardware", {"accelerator": "NVIDIA A100-SXM4-80GB"}),
    ("declared_hardware", {LINEAR: "nvfp4"}),
    ("declared_hardware", {ATTN: "mxfp4"}),
    ("missing_config", {"config_filename": "config_4x8x16.sh"}),
    ("declared_script", {LINEAR: "bfloat16"}),
    ("declared_script", {"context_parallelism": 8, "micro_batch_size": 512}),
    ("declared_script", {LINEAR: "fp32"}),
    ("declared_run", {"own": True, COMM: "fp32"}),
    ("declared_run", {"own": True, "micro_batch_size": 8}),
    ("declared_kernels", {"own": True, LINEAR: "bfloat16"}),
    ("declared_kernels", {"own": True, ATTN: "fp8"}),
    ("declared_kernels", {"own": True, COMM: "fp8"}),
    ("missing_config", {"own": True, "config_filename": "config_other.json"}),
    ("missing_config", {"own": True, "config_filename": "x" * 300}),
    ("declared_script", {LINEAR: ["fp8"], "context_parallelism": 8, "micro_batch_size": 512}),
    ("unreadable_profile", {"own": True, "profile": {"profile.json": b"["}}),
]


@pytest.mark.parametrize(("rule", "changed"), CASES)
def test_false_declarations_are_reported(rule: str, changed: dict[str, Any], tmp_path: Path) -> None:
    assert rule in reported_rules(tmp_path, **changed)


# The last four are declarations of genuine logs of v6.0, AMD's llama31_8b and flux1 and Krai's llama2_70b_lora, and one
# that is synthetic.
@pytest.mark.parametrize(
    "changed",
    [
        {}, {"own": True}, {"accelerator": "MI355X", LINEAR: "fp8"}, {"accelerator": ""}, {ATTN: {}, COMM: ["fp8"]},
        {"own": True, "profile": {"profile.txt": b"["}},
        {
            "own": True,
            **dict.fromkeys((LINEAR, ATTN, COMM, "micro_batch_size", "config_filename", "tensor_parallelism")),
        },
        {
            "accelerator": "AMD Instinct MI350X 288GB HBM3e",
            "text": "export MBS=2\nexport FP8=True\nexport FP4=True\n",
            "global_batch_size": 32, "micro_batch_size": 2, "gradient_accumulation_steps": 2, LINEAR: "mxfp4",
        },
        {
            "accelerator": "AMD Instinct MI325X 256GB HBM3e", "nodes": 8,
            "text": 'export MBS=32\nexport FP8_RECIPE="delayed"\n', "global_batch_size": 2048, "micro_batch_size": 32,
            LINEAR: "fp8",
        },
        {
            "accelerator": "AMD Instinct MI300X", "text": "", "global_batch_size": 8, "micro_batch_size": 1,
            LINEAR: "fp8",
        },
        {
            "accelerator": "NVIDIA Blackwell Ultra GPU (GB300)", "nodes": 64, "text": "export MICRO_BATCH_SIZE=1\n",
            "global_batch_size": 512, "micro_batch_size": 1, LINEAR: "nvfp4",
        },
    ],
)  # fmt: skip
def test_true_declarations_are_not_reported(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    monkeypatch.setattr(declarations, "read_profile", lambda path: reads.append(path) or kernels.read_profile(path))
    # A profile is read once for a set
    assert (reported_rules(tmp_path, **changed), len(reads) <= 1) == (set(), True)


def test_precision_of_recorded_kernel_names(recorded: Any) -> None:
    parts = {name: kernels.classify_kernel(name) for row in kernels.table()["kernel"] for name in row["names"]}
    recorded("kernel_precisions.json", {name: [part, *sorted(words)] for name, (part, words) in parts.items()})


def test_profiles_of_torch_and_nsys(tmp_path: Path) -> None:
    events = [("aten::mm", "cpu_op"), ("aten::_scaled_dot_product_flash_attention_for_cpu", "cpu_op")]
    header = '"Time (%)","Total Time (ns)","Instances","Name"'
    write_files(tmp_path, {
        "torch.json": trace(events, **{"Input type": ["c10::BFloat16", "long int"]}),
        "nsys.csv":
            f'Processing [x.sqlite]\n{header}\n100.0,9,1,"ampere_sgemm_64x32_sliced1x4_tn"\n1,1,1,"some_gemm"\n',
        "empty.json": {"traceEvents": [{"ph": "X", "name": "aten::mm", "args": None}]},
    })  # fmt: skip
    profiles = [kernels.read_profile(tmp_path / name) for name in ("torch.json", "empty.json", "nsys.csv")]
    assert [{part: (seen.lowest, seen.unknown) for part, seen in profile.items()} for profile in profiles] == [
        dict.fromkeys(("linear", "attn"), ({"bfloat16"}, "")), {}, {"linear": ({"fp32"}, "some_gemm")},
    ]  # fmt: skip
    # An unknown kernel may use a lower precision, not a higher one.
    contradicted = [profiles[2]["linear"].contradicts(word) for word in ("fp64", "fp32", "fp8", "odd")]
    assert contradicted == [True, False, False, False]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("p.json", each) for each in (b"", b"[]", b'{"traceEvents": [3]}', b"{}", b"\xff", b'{"a": ')),
        *(
            ("p.json.gz", each)
            for each in (b"", b"{}", gzip.compress(b"{}", mtime=0)[:9], gzip.compress(b"", mtime=0)[:10] + b"\xff" * 9)
        ),
        *(("p.csv", each) for each in (b"Name", b"Time (%),Name\n1," + b"x" * 200_000, b"Time (%),Name\n1\n")),
    ],
)
def test_damaged_profiles_are_rejected(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^{name} is not a profile: "):
        kernels.read_profile(tmp_path / name)


def test_profile_bomb_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "p.json.gz").write_bytes(bombs.compressed(b" "))
    with bombs.is_fast(), pytest.raises(ValueError, match=r"p\.json\.gz is not a profile: its content has more than"):
        kernels.read_profile(tmp_path / "p.json.gz")


def test_runs_derive_the_keys_that_the_audit_reads() -> None:
    config = SimpleNamespace(precision="bf16", device="gpu", batch_size=8)
    assert [*evidence.log_keys(config, {})] == [*declarations.KEYS, "config_filename"]
