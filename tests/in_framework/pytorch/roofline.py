"""Operations and bytes of a step against published counts, measured peaks, and tables of kernels."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.bert.pytorch import model as bert
from benchmarks.bert.pytorch.config import Config as BertConfig
from benchmarks.common.checks import kernel_table, measured_peaks, step_cost
from benchmarks.language.pytorch.encoder import Rows, shape_of
from benchmarks.resnet.pytorch import model as resnet
from benchmarks.resnet.pytorch.config import Config as ResNetConfig

CPU = torch.device("cpu")
LENGTH, VOCABULARY, WIDTH = 512, 30528, 1024


def test_forward_pass_of_an_image_has_the_published_operations():
    # 4.1 G multiply-adds at 224 x 224 (He et al. 2015 count 3.8 G with the stride in the first of three layers)
    plain = {"kernels": "plain", "compile": "none", "cuda_graph": False, "pad_channels": False, "layout": "NCHW"}
    with torch.device("meta"):
        network = resnet.build(ResNetConfig(device="cpu", precision="fp32", **plain))
        images = torch.empty(2, 3, 224, 224)
        cost = step_cost.count(lambda: network(images))
    assert (cost.flops / 2, cost.uncounted) == (pytest.approx(8.2e9, rel=0.02), ())


def test_step_on_text_has_six_operations_a_parameter_and_token():
    # BERT-Large, 24 layers of 12 x width^2 weights: 6 x parameters x tokens, the head on masked words only, and the
    # products of attention
    tokens, masked = 2 * LENGTH, 2 * LENGTH // 7
    with torch.device("meta"):
        config = BertConfig(device="cpu", precision="fp32", dropout=0.0, attention_dropout=0.0)
        network = bert.Network(shape_of(config, VOCABULARY), "grouped")
        row = torch.zeros(tokens, dtype=torch.int64)
    # Lengths are read, so they are on the CPU; index_select by offsets wants both on one device.
    rows = Rows(row, row, row, torch.arange(0, tokens + 1, LENGTH, dtype=torch.int32), LENGTH)
    network.encoder.first = lambda hidden, rows: hidden[::LENGTH]
    positions = torch.zeros(masked, dtype=torch.int64, device="meta")
    cost = step_cost.count(lambda: sum(out.float().sum() for out in network(rows, positions)).backward())
    head = 6 * ((WIDTH**2 + VOCABULARY * WIDTH) * masked + 2 * WIDTH**2)
    layers = 24 * (6 * 12 * WIDTH**2 + 12 * WIDTH * LENGTH)
    assert (cost.flops, cost.uncounted) == (pytest.approx(layers * tokens + head, rel=0.02), ())


def small_step():
    weight = torch.rand(128, 128, requires_grad=True)
    inputs = torch.rand(64, 128)
    return lambda: torch.nn.functional.layer_norm(torch.relu(inputs @ weight), (128,)).sum().backward()


def test_bytes_are_what_operators_read_and_write():
    # A product of (64, 128) by (128, 128) reads 24,576 values and writes 8,192; its gradient of the weight as many.
    cost = step_cost.count(small_step())
    assert tuple(cost.by_class["matrix products"]) == (2 * 2 * 64 * 128 * 128, 4 * (24_576 + 8_192) * 2)
    assert sum(moved for _, moved in cost.by_class.values()) == cost.moved


def test_peaks_are_measured():
    peaks = measured_peaks.bytes_per_second(CPU, elements=1 << 16, seconds=0.01)
    assert sorted(peaks) == ["copy", "triad"]
    assert min(*peaks.values(), measured_peaks.flops_per_second(CPU, "fp32", n=256, seconds=0.01)) > 1e8


def test_shares_of_the_classes_add_up():
    table = kernel_table.measure(small_step(), CPU)
    assert sum(table["classes"].values()) == pytest.approx(1.0)
    assert sum(row["seconds"] for row in table["kernels"]) == pytest.approx(table["busy_seconds"])
    (product,) = (row for row in table["kernels"] if row["name"] == "aten::mm")
    assert (product["calls"], product["class"]) == (2, "matrix products")


def test_kernels_are_classified_by_their_names():
    # The first ones are kernels that the study prints.
    names = json.loads(Path("tests/samples/kernel_names.json").read_text(encoding="utf-8"))
    assert {name: kernel_table.class_of(name) for name in names} == names


def test_a_trace_has_the_types_of_the_inputs(tmp_path):
    # A profile on a CPU, as `encore audit` reads it: a step in bf16, the weight in fp32
    weight, inputs = torch.rand(64, 64, requires_grad=True), torch.rand(32, 64)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            (inputs @ weight).sum().backward()

    kernel_table.measure(step, CPU, trace=tmp_path / "profile.json")
    events = json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"))["traceEvents"]
    types = {
        tuple(event["args"]["Input type"]) for event in events if event["name"] == "aten::mm" and event["ph"] == "X"
    }
    assert types == {("c10::BFloat16", "c10::BFloat16")}
