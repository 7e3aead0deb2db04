"""Projection of a submitted system from one GPU: model, calibration, and encore bench --project."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from encore.errors import EncoreError
from encore.lab.scaling import projection
from encore.lab.scaling.overlap import Links
from encore.machine.node import Gpu
from encore.results.published.published import System
from encore.run import planning, programs
from tests import json_schemas
from tests.command_line import output_of

RECORD = ("bench", "resnet-pytorch", "--system", "h200", "--project")
TOY = {"title": "a toy", "is_part": False, "unit": "samples", "measured": {"synthetic": {"median": 40.0}}}


def projected(*words: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(output_of(*words, "--json"))
    json_schemas.validate("projection", result)
    return result


def submitted(benchmark: str, system: str) -> projection.SubmittedSystem:
    return projection.open_system(planning.Request(name=benchmark, gpus=1, system=system))


def a_gpu(name: str, gib: float) -> Gpu:
    return Gpu(index=0, name=name, memory_gib=gib, driver="580", compute_capability=None)


@pytest.mark.slow
def test_recorded_speed_of_an_h200_next_to_the_record(recorded: Callable[[str, object], None]) -> None:
    # benchmarks/resnet/measured.toml
    result = projected(*RECORD, "--measured", "7493/s")
    recorded("projection.json", {**result, "printed": output_of(*RECORD, "--measured", "7493/s").splitlines()})
    needed = projected(*RECORD, "--measured", f"{result['needed_samples_per_second']}/s")
    # Seconds per step of 400 samples
    seconds = projected(*RECORD, "--measured", str(400 / 7493))
    assert (needed["ratio"], seconds["minutes"]) == pytest.approx((1, result["minutes"]))


def test_ranks_that_share_samples() -> None:
    words = ("bench", "llama2-70b-lora", "--system", "h200", "--project", "--measured", "3")
    result, eos = projected(*words), submitted("llama2-70b-lora", "eos").share.activation_bytes
    # 80 layers, 2 samples, 4,096 tokens per rank, keys and values of 1,024 in 2 bytes, gathered twice, scattered once
    gathered, reduced = 80 * 2 * 4096 * 2 * 1024 * 2 * 3, 80 * 4 * 4 * 8192 * 8192 * 2 * 2 * 3 / 4
    assert (result["activation_bytes"], eos) == (gathered, reduced)
    assert (result["parallelism"], result["samples_per_gpu"]) == ({"context_parallelism": 2}, 1)
    assert "context 2" in output_of(*words)


NO_RECORD = "a CPU measurement is not a projection of a GPU record: 40.0 samples/s of a toy"


# The system, its batch, and the device, speed and note of the projection. A CPU is measured and not projected.
@pytest.mark.parametrize(
    ("gpus", "request_", "result"),
    [
        ((), (None, ()), (None, None, NO_RECORD)),
        ((a_gpu("NVIDIA H200", 140.4),), ("h200", ("batch_size=400",)), ("NVIDIA H200", 40, "")),
    ],
)
def test_device_of_this_machine_is_measured(
    gpus: tuple[Gpu, ...], request_: tuple[object, ...], result: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Mock(return_value={**TOY, "device": "gpu" if gpus else "cpu"})
    monkeypatch.setattr(programs, "measure", measure)
    monkeypatch.setattr("encore.machine.node.gpus", lambda: gpus)
    values = projected(*RECORD)
    assert (values["device"] if gpus else None, values["samples_per_second"], values["note"]) == result
    assert (measure.call_args.args[0].system, measure.call_args.args[0].settings) == request_
    assert ("is not a projection of a GPU record" in output_of(*RECORD)) == (not gpus)


def test_layers_of_a_language_model_count_by_their_flops() -> None:
    small, note = a_gpu("NVIDIA L4", 24.0), "measured on NVIDIA L4, submitted on NVIDIA H100-SXM5-80GB"
    llama, resnet = submitted("llama31-8b", "hpf_n8"), submitted("resnet-pytorch", "h200")
    measured = {"real": {"median": 1.0, "flops_per_second": 421.6e12}}
    part = {**TOY, "unit": "tokens", "device": "gpu", "measured": measured}
    assert llama.read_bench(part, [small]) == projection.Measured(1.0, "NVIDIA L4", note)
    with pytest.raises(EncoreError, match="the speed of gnmt is in tokens/s"):
        submitted("gnmt", "dgxa100").read_bench(part, [small])
    assert llama.settings_for([small], ["compile=true"]) == ("compile=true", "batch_size=1")
    # The bench divides the samples that four ranks share
    assert submitted("llama2-70b-lora", "eos").settings_for([small], []) == ("batch_size=4",)
    assert resnet.settings_for([small], ["batch_size=64"]) == ("batch_size=64",)
    with pytest.raises(EncoreError, match="less memory than NVIDIA H200-SXM5-141GB: a batch of 400 may not fit"):
        resnet.settings_for([small], [])


def test_a_submission_without_published_result() -> None:
    system = submitted("resnet", "h200").configuration.system
    with pytest.raises(EncoreError, match=r"no published result of resnet for v4\.0/NVIDIA/none"):
        projection.published_result(system.model_copy(update={"submission": "none"}), "resnet")


@pytest.mark.parametrize(
    ("benchmark", "system", "result"),
    [
        ("resnet", "dgx2_n32", "v0.5/nvidia/dgx2h_multi_ngc18.11_mxnet"),
        ("ssd", "dgx2_n30", "v0.6/NVIDIA/dgx2h_n30_ngc19.05_pytorch"),  # trains on half of the GPUs described
        ("resnet-pytorch", "dgxh100", "v4.0/NVIDIA/eos_ngc24.04_mxnet"),
    ],
)
def test_published_result_of_a_system(benchmark: str, system: str, result: str) -> None:
    round_ = result.partition("/")[0] if benchmark != "resnet-pytorch" else None
    request = planning.Request(name=benchmark, gpus=1, system=system, round=round_)
    assert projection.open_system(request).cell.name == result


def test_links_of_a_system_description() -> None:
    hardware = System(described=True, accelerator="NVIDIA A100-SXM4-80GB", network="Storage: 2x IB, Compute: 4x IB HDR")
    (links, sources), unknown = (
        projection.links_of(replace(hardware, network=text), 8) for text in (hardware.network, None)
    )
    assert links == Links(intra_node_rate=300e9, inter_node_rate=12.5e9)
    assert "ConnectX-6" in sources["network"] and "assumed, one per GPU" in unknown[1]["network"]
    assert projection.links_of(replace(hardware, accelerator="tpu-v3"), 8) is None
    # 51 MB, 7/8 of them twice over 300 GB/s
    seconds = [projection.communication_seconds("resnet", 8, 1, between) for between in (None, links)]
    assert seconds == pytest.approx([0, 25_557_032 * 2 * 1.75 / 300e9])


@pytest.mark.parametrize(
    ("accelerator", "gigabytes"),
    [
        ("NVIDIA Blackwell Ultra GPU (GB300)", 900),
        ("NVIDIA Hopper GPU (GH200)", 450),
        ("NVIDIA H200-NVL-141GB", 63),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 63),
        ("NVIDIA A100-PCIe-80GB", 31.5),
        ("AMD Instinct MI325X 256GB HBM3e", 448),
    ],
)
def test_bandwidth_within_a_node(accelerator: str, gigabytes: float) -> None:
    assert projection.links_of(System(described=True, accelerator=accelerator), 8)[0].intra_node_rate == gigabytes * 1e9
