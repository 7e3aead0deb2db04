"""What logs of v6.0 and later declare: invented false declarations, 22 of them, are found, and true ones are not."""

import gzip
import json
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common.run import evidence
from encore.results.audit import declarations, judge, kernels
from encore.results.audit.judge import audit_path
from tests.results.result_logs import flux1_v61, write_set

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
RULES = {rule.name for rule in judge.RULES if rule.name.startswith("declared_")} | {
    "missing_config",
    "unreadable_profile",
}


def trace(path: Path, events: list[tuple[str, str]], **arguments: Any) -> None:
    found = [{"ph": "X", "name": name, "cat": kind, "args": arguments} for name, kind in events]
    path.write_text(json.dumps({"traceEvents": found}))


# Findings about what three logs declare, in a submission on one H100 server, or as a run of Encore's own.
def found(
    root: Path,
    accelerator: str = "NVIDIA H100-SXM5-80GB",
    nodes: int = 1,
    text: str = SCRIPT,
    own: bool = False,
    profile: tuple[str, bytes] | None = None,
    **changed: object,
) -> set[str]:
    folder = root / "results" / "1xH100" / "flux1"
    system = {"number_of_nodes": str(nodes), "accelerators_per_node": "8", "accelerator_model_name": accelerator}
    write_set(folder, [flux1_v61(40.0 + n, seed=n, **changed) for n in range(3)])
    if own:
        evidence = {LINEAR: "fp8", ATTN: "bfloat16", COMM: "bfloat16", "micro_batch_size": 64, "tensor_parallelism": 1}
        (folder / "run.json").write_text(json.dumps({"evidence": dict.fromkeys("012", evidence)}))
        (folder / "config_1x8x64.sh").write_text("")
        (folder / "system.json").write_text(json.dumps(system))
        trace(folder / "profile_step.json", TRACE)
    else:
        script = root / "benchmarks" / "flux1" / "implementations" / "1xH100" / "config_1x8x64.sh"
        for path, content in ((root / "systems" / "1xH100.json", json.dumps(system)), (script, text)):
            path.parent.mkdir(parents=True)
            path.write_text(content)
    if profile is not None:
        (folder / profile[0]).write_bytes(profile[1])
    (audit,) = audit_path(folder)
    return {finding.rule for finding in audit.findings} & RULES


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
    ("unreadable_profile", {"own": True, "profile": ("profile.json", b"[")}),
]


@pytest.mark.parametrize(("rule", "changed"), CASES)
def test_a_false_declaration_is_found(rule: str, changed: dict[str, Any], tmp_path: Path) -> None:
    assert rule in found(tmp_path, **changed)


@pytest.mark.parametrize(
    "changed",
    [
        *({}, {"own": True}, {"accelerator": "MI355X", LINEAR: "fp8"}, {"accelerator": ""}, {ATTN: {}, COMM: ["fp8"]}),
        {"own": True, "profile": ("profile.txt", b"[")},
    ],
)
def test_a_true_declaration_is_not(changed: dict[str, Any], tmp_path: Path) -> None:
    assert found(tmp_path, **changed) == set()


# What genuine logs of v6.0 declare: AMD's llama31_8b and flux1, Krai's llama2_70b_lora; the last line is invented.
@pytest.mark.parametrize(
    ("accelerator", "nodes", "text", "batch", "micro", "steps", "linear"),
    [
        ("AMD Instinct MI350X 288GB HBM3e", 1, "export MBS=2\nexport FP8=True\nexport FP4=True\n", 32, 2, 2, "mxfp4"),
        ("AMD Instinct MI325X 256GB HBM3e", 8, 'export MBS=32\nexport FP8_RECIPE="delayed"\n', 2048, 32, 1, "fp8"),
        ("AMD Instinct MI300X", 1, "", 8, 1, 1, "fp8"),
        ("NVIDIA Blackwell Ultra GPU (GB300)", 64, "export MICRO_BATCH_SIZE=1\n", 512, 1, 1, "nvfp4"),
    ],
)
def test_genuine_declarations_are_not(
    accelerator: str, nodes: int, text: str, batch: int, micro: int, steps: int, linear: str, tmp_path: Path
) -> None:
    declared = {"global_batch_size": batch, "micro_batch_size": micro, "gradient_accumulation_steps": steps}
    assert found(tmp_path, accelerator, nodes, text, **declared, **{LINEAR: linear}) == set()


def test_genuine_logs_of_v6_have_no_finding(tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).parents[1] / "golden" / "results" / "v6.0.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    audits = audit_path(tmp_path)
    assert len([run for audit in audits for run in audit.score.runs if declarations.declared(run)]) == 10
    assert {finding.rule for audit in audits for finding in audit.findings} & RULES == set()


def test_every_rule_has_a_case_and_a_log_that_declares_nothing_none(tmp_path: Path) -> None:
    assert {rule for rule, _ in CASES} == RULES
    nothing = dict.fromkeys((LINEAR, ATTN, COMM, "micro_batch_size", "config_filename", "tensor_parallelism"))
    assert found(tmp_path, own=True, **nothing) == set()


def test_recorded_names_of_kernels_have_their_precision(recorded: Any) -> None:
    rows = kernels.table()["kernel"]
    assert all(row["source"] and row["names"] for row in rows)
    words = {name: [part, *sorted(found)] for row in rows for name in row["names"]
             for part, found in [kernels.of_kernel(name)]}  # fmt: skip
    assert all(len(each) > 1 for each in words.values())
    recorded("audits/kernel-precisions.json", words)


def test_profiles_of_torch_and_nsys(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    trace(path, [("aten::mm", "cpu_op"), ("aten::_scaled_dot_product_flash_attention_for_cpu", "cpu_op")],
          **{"Input type": ["c10::BFloat16", "long int"]})  # fmt: skip
    assert {part: sorted(seen.lowest) for part, seen in kernels.read_profile(path).items()} == {
        "linear": ["bfloat16"], "attn": ["bfloat16"],
    }  # fmt: skip
    nsys = tmp_path / "profile.csv"
    header = '"Time (%)","Total Time (ns)","Instances","Name"'
    nsys.write_text(
        f'Processing [x.sqlite]\n{header}\n100.0,9,1,"ampere_sgemm_64x32_sliced1x4_tn"\n1,1,1,"some_gemm"\n'
    )
    (seen,) = kernels.read_profile(nsys).values()
    assert (seen.lowest, seen.unknown) == ({"fp32"}, "some_gemm")
    # What is lower may be behind a name that is not known; what is higher is not.
    assert [seen.contradicts(word) for word in ("fp64", "fp32", "fp8", "odd")] == [True, False, False, False]
    path.write_text('{"traceEvents": [{"ph": "X", "name": "aten::mm", "args": null}]}')
    assert kernels.read_profile(path) == {}


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
def test_a_damaged_profile_is_refused_by_its_name(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^{name} is no profile: "):
        kernels.read_profile(tmp_path / name)


def test_a_profile_is_read_once_for_a_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(declarations, "read_profile", lambda path: read.append(path) or {})
    assert found(tmp_path, own=True) == set()
    assert len(read) == 1


def test_runs_derive_the_keys_that_the_audit_reads() -> None:
    config = SimpleNamespace(precision="bf16", device="gpu", batch_size=8)
    assert [*evidence.of(config, {})] == [*declarations.KEYS, "config_filename"]
