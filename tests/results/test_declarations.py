"""Declarations in logs of v6.0 and later: 22 false ones are reported, and true ones are not."""

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
from tests import bombs
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


def write_trace(path: Path, events: list[tuple[str, str]], **arguments: Any) -> None:
    lines = [{"ph": "X", "name": name, "cat": kind, "args": arguments} for name, kind in events]
    path.write_text(json.dumps({"traceEvents": lines}))


# Rules that report three logs, as a submission on one H100 server or as a run of Encore.
def reported_rules(
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
        write_trace(folder / "profile_step.json", TRACE)
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
def test_false_declarations_are_reported(rule: str, changed: dict[str, Any], tmp_path: Path) -> None:
    assert rule in reported_rules(tmp_path, **changed)


# The last four are declarations of genuine logs of v6.0, AMD's llama31_8b and flux1 and Krai's llama2_70b_lora, and one
# that is synthetic.
@pytest.mark.parametrize(
    "changed",
    [
        {}, {"own": True}, {"accelerator": "MI355X", LINEAR: "fp8"}, {"accelerator": ""}, {ATTN: {}, COMM: ["fp8"]},
        {"own": True, "profile": ("profile.txt", b"[")},
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
    assert reported_rules(tmp_path, **changed) == set()
    assert len(reads) <= 1, "a profile is read once for a set"


def test_genuine_logs_of_v60_have_no_finding(tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).parents[1] / "golden" / "results" / "v6.0.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    audits = audit_path(tmp_path)
    assert len([run for audit in audits for run in audit.score.runs if declarations.declared(run)]) == 10
    assert {finding.rule for audit in audits for finding in audit.findings} & RULES == set()
    assert {rule for rule, _ in CASES} == RULES


def test_precision_of_recorded_kernel_names(recorded: Any) -> None:
    rows = kernels.table()["kernel"]
    assert all(row["source"] and row["names"] for row in rows)
    parts = {name: kernels.of_kernel(name) for row in rows for name in row["names"]}
    recorded("kernel_precisions.json", {name: [part, *sorted(words)] for name, (part, words) in parts.items()})


def test_profiles_of_torch_and_nsys(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_trace(path, [("aten::mm", "cpu_op"), ("aten::_scaled_dot_product_flash_attention_for_cpu", "cpu_op")],
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
def test_damaged_profiles_are_rejected(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^{name} is no profile: "):
        kernels.read_profile(tmp_path / name)


def test_profile_bomb_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "p.json.gz").write_bytes(bombs.compressed(b" "))
    with bombs.is_fast(), pytest.raises(ValueError, match=r"p\.json\.gz is no profile: its content has more than"):
        kernels.read_profile(tmp_path / "p.json.gz")


def test_runs_derive_the_keys_that_the_audit_reads() -> None:
    config = SimpleNamespace(precision="bf16", device="gpu", batch_size=8)
    assert [*evidence.of(config, {})] == [*declarations.KEYS, "config_filename"]
