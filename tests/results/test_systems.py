"""System descriptions: keys and syntax as submitters have them, and accelerators distinguished."""

import json
from pathlib import Path

import pytest

from encore.results.published.published import load_published, select
from encore.results.published.systems import described, family, from_description, model_of, rounds_system
from encore.results.report.measurements import of_published

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


def broken(how: str) -> str:
    text = json.dumps(VALID, indent=1)
    return {
        "BOM": "\ufeff" + text,
        "trailing commas": text.replace("}", ",}").replace('"2.7.5"\n', '"2.7.5",\n')[:-2] + ",\n}",
        "comments": text.replace("{", "{ // the machine\n", 1),
        "single quotes": text.replace('"', "'"),
        "control characters": text.replace("NGC MXNet", "NGC\tMXNet\x01"),
        "unquoted keys": text.replace('"accelerators_per_node"', "accelerators_per_node"),
        "no last bracket": text.rstrip("}\n "),
        "two spaces for a comma": text.replace('4,\n "acc', '4\n "acc'),
    }[how]


@pytest.mark.parametrize(
    "how",
    ["BOM", "trailing commas", "comments", "single quotes", "control characters", "unquoted keys", "no last bracket",
     "two spaces for a comma"],
)  # fmt: skip
def test_json_that_is_not_quite_valid_is_read(how: str, tmp_path: Path) -> None:
    path = tmp_path / "2xC4140.json"
    path.write_text(broken(how), encoding="utf-8")
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
