"""Counts of known networks on the meta device, ceilings of a small product, and a table of kernels; prints JSON."""

import json
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.bert.pytorch import model as bert
from benchmarks.bert.pytorch.config import Config as BertConfig
from benchmarks.common.checks import kernel_table, measured_peaks, step_cost
from benchmarks.language.pytorch.encoder import Rows, shape_of
from benchmarks.resnet.pytorch import model as resnet
from benchmarks.resnet.pytorch.config import Config as ResNetConfig

LENGTH, SEQUENCES, VOCABULARY = 512, 2, 30528


def resnet_forward():
    plain = {"kernels": "plain", "compile": "none", "cuda_graph": False, "pad_channels": False, "layout": "NCHW"}
    config = ResNetConfig(device="cpu", precision="fp32", **plain)
    with torch.device("meta"):
        network, images = resnet.build(config), torch.empty(2, 3, 224, 224)
        return step_cost.count(lambda: network(images))


def bert_step():
    config = BertConfig(device="cpu", precision="fp32", dropout=0.0, attention_dropout=0.0)
    with torch.device("meta"):
        network = bert.Network(shape_of(config, VOCABULARY), "grouped")
        tokens = SEQUENCES * LENGTH
        row = torch.zeros(tokens, dtype=torch.int64)
    # Lengths are read, so they are there.
    offsets = torch.arange(0, tokens + 1, LENGTH, dtype=torch.int32)
    rows = Rows(row, row, row, offsets, LENGTH)
    # index_select by offsets wants both on one device.
    network.encoder.first = lambda hidden, rows: hidden[::LENGTH]
    masked = torch.zeros(SEQUENCES * LENGTH // 7, dtype=torch.int64, device="meta")

    def step():
        words, follows = network(rows, masked)
        (words.float().sum() + follows.float().sum()).backward()

    cost = step_cost.count(step)
    matrices = {name: each.numel() for name, each in network.named_parameters() if each.dim() == 2}
    layers = sum(count for name, count in matrices.items() if "layers" in name)
    return {**asdict(cost), "layers": layers, "tokens": tokens, "masked": len(masked)}


def small_step():
    weight = torch.rand(128, 128, requires_grad=True)
    inputs = torch.rand(64, 128)

    def step():
        torch.nn.functional.layer_norm(torch.relu(inputs @ weight), (128,)).sum().backward()

    return step


cpu = torch.device("cpu")
print(
    json.dumps(
        {
            "resnet": asdict(resnet_forward()),
            "bert": bert_step(),
            "small": asdict(step_cost.count(small_step())),
            "peak": measured_peaks.flops_per_second(cpu, "fp32", side=256, seconds=0.01),
            "bytes": measured_peaks.bytes_per_second(cpu, elements=1 << 16, seconds=0.01),
            "kernels": kernel_table.measure(small_step(), cpu),
            "names": {
                name: kernel_table.class_of(name)
                for name in json.loads(Path("tests/samples/kernel_names.json").read_text())
            },
        }
    )
)
