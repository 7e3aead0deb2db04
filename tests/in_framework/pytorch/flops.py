"""Model FLOPs compared with the operations that PyTorch counts in a step; bytes, measured peaks, tables of kernels."""

import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.bert.pytorch import model as bert
from benchmarks.bert.pytorch.config import Config as BertConfig
from benchmarks.bert_squad.pytorch import model as squad
from benchmarks.bert_squad.pytorch.config import Config as SquadConfig
from benchmarks.common.checks import kernel_table, measured_peaks, roofline, step_cost
from benchmarks.dlrm.pytorch.bench import PlainNetwork as Dlrm
from benchmarks.dlrm.pytorch.config import Config as DlrmConfig
from benchmarks.gnmt.pytorch import attention
from benchmarks.language import flops as bert_flops
from benchmarks.language.pytorch.encoder import Rows, shape_of
from benchmarks.llama import flops as llama_flops
from benchmarks.llama.pytorch import adapters
from benchmarks.llama.pytorch.network import Network as Llama
from benchmarks.llama2_70b_lora.pytorch.config import Config as LoraConfig
from benchmarks.llama2_70b_lora.pytorch.model import rule_of
from benchmarks.llama31_8b.pytorch.config import Config as LlamaConfig
from benchmarks.ssd.pytorch import norms

CPU = torch.device("cpu")
PLAIN = {"device": "cpu", "precision": "fp32"}
EAGER = {**PLAIN, "compile": "none", "cuda_graph": False, "pad_channels": False, "layout": "NCHW"}


BERT = {**PLAIN, "layers": 2, "width": 64, "heads": 2, "inner_width": 96, "dropout": 0.0, "attention_dropout": 0.0}
LLAMA = {**PLAIN, "layers": 3, "width": 64, "heads": 4, "key_value_heads": 2, "inner_width": 96}


def parts_of(benchmark, **settings):
    # Return a configuration, and the modules of the network and of its FLOPs
    parts = (f"benchmarks.{benchmark}.{part}" for part in ("pytorch.config", "pytorch.model", "flops"))
    config, *modules = map(importlib.import_module, parts)
    return config.Config(**settings), *modules


def count_flops(forward):
    # Count a forward and a backward pass; every operator must be known
    cost = step_cost.count(lambda: forward().sum().backward())
    assert cost.uncounted == ()
    return cost.flops


# The formula counts full kernels; below 64 pixels, the last stage uses only their center (model.Convolution).
@pytest.mark.parametrize(("depth", "size"), [(18, 64), (50, 224), (50, 97)])
def test_resnet(depth, size):
    config, model, flops = parts_of("resnet", **EAGER, kernels="plain", depth=depth, image_size=size)
    with torch.device("meta"):
        network, images = model.build(config), torch.empty(2, 3, size, size)
        assert count_flops(lambda: network(images)) == 2 * flops.training_flops(config)


@pytest.mark.parametrize(("size", "width"), [(300, 64), (128, 16)])
def test_ssd(size, width):
    config, model, flops = parts_of("ssd", **EAGER, image_size=size, width=width)
    network = model.SSD(config, 81, norms.norm_of(None, CPU)).to("meta")
    images = torch.empty(2, 3, size, size, device="meta")
    assert count_flops(lambda: network(images)) == 2 * flops.training_flops(config, 81)


@pytest.mark.parametrize(("frozen", "in_1x1"), [(2, True), (0, False), (4, True)])
def test_maskrcnn(frozen, in_1x1):
    """Backbone, pyramid, proposals, and both heads on all slots; only the mask of a RoI's class."""
    config, model, flops = parts_of(
        "maskrcnn", **PLAIN, compile="none", cuda_graph=False, kernels="plain", stages=(2, 1, 2, 1), stem_width=16,
        fpn_width=24, box_width=40, mask_width=8, mask_layers=2, rois_per_image=12, frozen_stages=frozen,
        stride_in_1x1=in_1x1,
    )  # fmt: skip
    classes, (height, width) = 5, (128, 192)  # so that the fifth level has integer sizes
    with torch.device("meta"):
        network, images = model.MaskRCNN(config, classes), torch.empty(2, 3, height, width)
        boxes = torch.empty(2 * 12, 24, 7, 7, requires_grad=True)
        masks = torch.empty(2 * 3, 24, 14, 14, requires_grad=True)
        labels = torch.zeros(len(masks), dtype=torch.int64)

    def forward():
        levels, proposals = network(images)
        outputs = [*levels, *proposals.scores, *proposals.offsets, *network.boxes(boxes), network.masks(masks, labels)]
        return torch.stack([output.sum() for output in outputs])

    assert count_flops(forward) == 2 * flops.training_flops(config, classes, height, width)


def test_bert_and_squad():
    """Without padding. Attention computes its scores again in the backward pass, which the formulas leave out."""
    length, sequences, masked = 48, 3, torch.arange(9)
    config, squad_config = BertConfig(**BERT), SquadConfig(**BERT)
    network, squad_network = bert.Network(shape_of(config, 128), "padded"), squad.Network(squad_config, 128, "padded")
    row = torch.zeros(length * sequences, dtype=torch.int64)
    recomputed = config.layers * sequences * 2 * length**2 * config.width
    rows = Rows(row, row, row, torch.arange(0, len(row) + 1, length, dtype=torch.int32), length)
    counted = count_flops(lambda: torch.cat([output.flatten() for output in network(rows, masked)]))
    assert counted - recomputed == bert_flops.pretraining_flops(config, 128, [length] * sequences, len(masked))
    counted = count_flops(lambda: squad_network(rows))
    assert counted - recomputed == bert_flops.answering_flops(squad_config, [length] * sequences)


def test_llama_and_lora():
    """PyTorch counts a causal attention completely, the formula half of it; the backward pass computes scores again."""
    config, lora_config, length = LlamaConfig(**LLAMA), LoraConfig(**LLAMA, lora_rank=4), 48
    tokens, extra = torch.zeros(2, length, dtype=torch.int64), config.layers * 4 * 2 * length * length * config.width
    network, lora_network = Llama(config.shape(128)), Llama(lora_config.shape(128))
    adapters.add(lora_network, rule_of(lora_config), 0)
    lora_network.to_empty(device=CPU)
    expected = 2 * (llama_flops.training_flops(config, 128, length) + extra)
    assert count_flops(lambda: network(tokens, tokens)) == expected
    expected = 2 * (llama_flops.adapter_flops(lora_config, 128, length) + extra)
    assert count_flops(lambda: lora_network(tokens, tokens)) == expected


def test_transformer():
    config, model, flops = parts_of(
        "transformer", **PLAIN, layers=2, width=64, heads=2, inner_width=96, attention="plain"
    )
    network, source, target = model.Network(config, 128), torch.full((3, 11), 5), torch.full((3, 7), 5)
    counted = count_flops(lambda: network(source, target) @ network.table.weight.t())
    assert counted == flops.training_flops(config, 128, 3, 11, 7)


def test_gnmt():
    """On the meta device an LSTM is its GEMMs. Not counted: gradients of initial states, products with a vector."""
    config, model, flops = parts_of("gnmt", **PLAIN, layers=3, width=32)
    network = model.GNMT(config, 64).to("meta")
    network.decoder.attention.weigh = attention.plain
    sentences = [torch.zeros(size, dtype=torch.int64, device="meta") for size in ((3, 11), (3,), (3, 7))]
    counted = count_flops(lambda: network.classifier(network(*sentences)))
    states = (2 * config.layers + 1) * 2 * 3 * config.width * 4 * config.width
    vector = 3 * 2 * 3 * 11 * 7 * config.width
    assert counted + states + vector == flops.training_flops(config, 64, 3, 11, 7)


def test_ncf():
    config, model, flops = parts_of("ncf", **PLAIN, factors=8, layers=(16, 12, 6))
    network = model.NeuMF(20, 30, config.factors, config.layers, by_tables=False)
    ids = torch.zeros(10, dtype=torch.int64)
    assert count_flops(lambda: network(ids, ids)) == 10 * flops.training_flops(config)


def test_dlrm():
    """The input of the top MLP is padded to a multiple of eight, here by one."""
    config, _, flops = parts_of("dlrm", **PLAIN, cuda_graph=False, bottom_mlp=(16, 8), top_mlp=(12, 1))
    network, numbers = Dlrm(config, [5] * 26), torch.rand(10, 13)
    assert network.padding == 1
    counted = count_flops(lambda: network(numbers, torch.zeros(26, 10, dtype=torch.int64)))
    assert counted - 10 * 3 * 2 * config.top_mlp[0] == 10 * flops.training_flops(config, 26)


# -- bytes, peaks and kernels -----------------------------------------------------------------------------


def small_step():
    weight, inputs = torch.rand(128, 128, requires_grad=True), torch.rand(64, 128)
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


def test_steps_are_counted_without_operators_of_unknown_count():
    counted = DlrmConfig(kernels="plain", fused_relu=False, cuda_graph=False)
    assert roofline.plain(DlrmConfig(kernels="auto", fused_relu=True, cuda_graph=True)) == counted


def test_shares_of_the_classes_add_up_and_a_trace_has_types(tmp_path):
    table = kernel_table.measure(small_step(), CPU, trace=tmp_path / "profile.json")
    assert sum(table["classes"].values()) == pytest.approx(1.0)
    assert sum(row["seconds"] for row in table["kernels"]) == pytest.approx(table["busy_seconds"])
    (product,) = (row for row in table["kernels"] if row["name"] == "aten::mm")
    assert (product["calls"], product["class"]) == (2, "matrix products")
    # `encore audit` reads the types of the inputs.
    events = json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"))["traceEvents"]
    assert ["float", "float"] in [event["args"]["Input type"] for event in events if event["name"] == "aten::mm"]


def test_kernels_are_classified_by_their_names():
    # The first ones are kernels that the study prints.
    names = json.loads(Path("tests/samples/kernel_names.json").read_text(encoding="utf-8"))
    assert {name: kernel_table.class_of(name) for name in names} == names
    sources = [path.read_text(encoding="utf-8") for path in Path("benchmarks").glob("*/pytorch/kernels.py")]
    triton = re.findall(r"^@triton\.jit.*\ndef ([a-z]\w+)\(", "\n".join(sources), re.MULTILINE)
    assert triton and [name for name in triton if kernel_table.class_of(name) == kernel_table.OTHER] == []


def test_kernels_of_a_gpu_are_counted_without_annotations():
    kinds = torch.autograd.DeviceType
    events = [
        SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(elapsed_us=lambda: 2.0), **annotation)
        for name, kind, annotation in (
            ("gemm", kinds.CUDA, {}),
            ("gemm", kinds.CUDA, {"is_user_annotation": False}),
            ("Optimizer.step#SGD.step", kinds.CUDA, {"is_user_annotation": True}),
            ("ProfilerStep*", kinds.CUDA, {}),
            ("aten::mm", kinds.CPU, {}),
        )
    ]
    profiler = SimpleNamespace(events=lambda: events)
    assert kernel_table._by_kernel(profiler, torch.device("cuda")) == {"gemm": (pytest.approx(4e-6), 2)}
