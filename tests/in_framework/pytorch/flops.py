"""Formulas of model FLOPs next to the operations that PyTorch counts in a step of each network."""

import pytest
import torch

from benchmarks.bert.pytorch import model as bert
from benchmarks.bert.pytorch.config import Config as BertConfig
from benchmarks.bert_squad.pytorch import model as squad
from benchmarks.bert_squad.pytorch.config import Config as SquadConfig
from benchmarks.common.checks import step_cost
from benchmarks.dlrm import flops as of_dlrm
from benchmarks.dlrm.pytorch.bench import PlainNetwork as Dlrm
from benchmarks.dlrm.pytorch.config import Config as DlrmConfig
from benchmarks.gnmt import flops as of_gnmt
from benchmarks.gnmt.pytorch import attention
from benchmarks.gnmt.pytorch import model as gnmt
from benchmarks.gnmt.pytorch.config import Config as GnmtConfig
from benchmarks.language import flops as of_bert
from benchmarks.language.pytorch.encoder import Rows, shape_of
from benchmarks.llama import flops as of_llama
from benchmarks.llama.pytorch import adapters
from benchmarks.llama.pytorch.network import Network as Llama
from benchmarks.llama2_70b_lora.pytorch.config import Config as LoraConfig
from benchmarks.llama2_70b_lora.pytorch.model import rule_of
from benchmarks.llama31_8b.pytorch.config import Config as LlamaConfig
from benchmarks.maskrcnn import flops as of_maskrcnn
from benchmarks.maskrcnn.pytorch import model as maskrcnn
from benchmarks.maskrcnn.pytorch.config import Config as MaskRCNNConfig
from benchmarks.ncf import flops as of_ncf
from benchmarks.ncf.pytorch.config import Config as NcfConfig
from benchmarks.ncf.pytorch.model import NeuMF
from benchmarks.resnet import flops as of_resnet
from benchmarks.resnet.pytorch import model as resnet
from benchmarks.resnet.pytorch.config import Config as ResNetConfig
from benchmarks.ssd import flops as of_ssd
from benchmarks.ssd.pytorch import model as ssd
from benchmarks.ssd.pytorch import norms
from benchmarks.ssd.pytorch.config import Config as SsdConfig
from benchmarks.transformer import flops as of_transformer
from benchmarks.transformer.pytorch import model as transformer
from benchmarks.transformer.pytorch.config import Config as TransformerConfig

CPU = torch.device("cpu")
PLAIN = {"device": "cpu", "precision": "fp32"}
EAGER = {**PLAIN, "compile": "none", "cuda_graph": False, "pad_channels": False, "layout": "NCHW"}


def counted(forward):
    """Operations of a forward and a backward pass, none of which is of an unknown number."""
    cost = step_cost.count(lambda: forward().sum().backward())
    assert cost.uncounted == ()
    return cost.flops


@pytest.mark.parametrize(("depth", "size"), [(18, 32), (50, 224), (50, 97)])
def test_resnet(depth, size):
    config = ResNetConfig(**EAGER, kernels="plain", depth=depth, image_size=size)
    with torch.device("meta"):
        network, images = resnet.build(config), torch.empty(2, 3, size, size)
        assert counted(lambda: network(images)) == 2 * of_resnet.training_flops(config)


@pytest.mark.parametrize(("size", "width"), [(300, 64), (128, 16)])
def test_ssd(size, width):
    config = SsdConfig(**EAGER, image_size=size, width=width)
    network = ssd.SSD(config, 81, norms.norm_of(None, CPU)).to("meta")
    images = torch.empty(2, 3, size, size, device="meta")
    assert counted(lambda: network(images)) == 2 * of_ssd.training_flops(config, 81)


def test_gradients_have_the_size_that_the_model_of_their_sum_takes():
    """The parameters in measured.toml, with the vocabulary and the classes of the submissions."""

    def trained(network):
        return sum(each.numel() for each in network.parameters() if each.requires_grad)

    assert trained(resnet.build(ResNetConfig(**EAGER))) == 25_557_032
    assert trained(ssd.SSD(SsdConfig(**EAGER), 81, norms.norm_of(None, CPU))) == 19_972_534
    with torch.device("meta"):
        assert trained(bert.Network(shape_of(BertConfig(**PLAIN), 30528), "padded")) == 336_232_258


@pytest.mark.parametrize(("frozen", "in_1x1"), [(2, True), (0, False), (4, True)])
def test_maskrcnn(frozen, in_1x1):
    """Backbone, pyramid, proposals, and both heads on all slots; the mask of a RoI's own class alone."""
    config = MaskRCNNConfig(**PLAIN, compile="none", cuda_graph=False, kernels="plain", stages=(2, 1, 2, 1),
                            stem_width=16, fpn_width=24, box_width=40, mask_width=8, mask_layers=2, rois_per_image=12,
                            frozen_stages=frozen, stride_in_1x1=in_1x1)  # fmt: skip
    classes, (height, width) = 5, (128, 192)  # the fifth level has whole sides
    with torch.device("meta"):
        network, images = maskrcnn.MaskRCNN(config, classes), torch.empty(2, 3, height, width)
        boxes = torch.empty(2 * 12, 24, 7, 7, requires_grad=True)
        masks = torch.empty(2 * 3, 24, 14, 14, requires_grad=True)
        labels = torch.zeros(len(masks), dtype=torch.int64)

    def forward():
        levels, scored = network(images)
        found = [*levels, *scored.scores, *scored.offsets, *network.boxes(boxes), network.masks(masks, labels)]
        return torch.stack([each.sum() for each in found])

    assert counted(forward) == 2 * of_maskrcnn.training_flops(config, classes, height, width)


def rows_of(length, sequences):
    row = torch.zeros(length * sequences, dtype=torch.int64)
    return Rows(row, row, row, torch.arange(0, len(row) + 1, length, dtype=torch.int32), length)


def test_bert():
    """Lengths are alike: nothing is padded, and attention alone does more, its scores again in the backward pass."""
    config = BertConfig(**PLAIN, layers=2, width=64, heads=2, inner_width=96, dropout=0.0, attention_dropout=0.0)
    network, length, sequences, masked = bert.Network(shape_of(config, 128), "padded"), 48, 3, torch.arange(9)

    def forward():
        words, follows = network(rows_of(length, sequences), masked)
        return words.sum() + follows.sum()

    again = config.layers * sequences * 2 * length * length * config.width
    assert counted(forward) - again == of_bert.pretraining_flops(config, 128, [length] * sequences, len(masked))


def test_squad():
    config = SquadConfig(**PLAIN, layers=2, width=64, heads=2, inner_width=96, dropout=0.0, attention_dropout=0.0)
    network, length, sequences = squad.Network(config, 128, "padded"), 48, 3
    again = config.layers * sequences * 2 * length * length * config.width
    assert counted(lambda: network(rows_of(length, sequences))) - again == of_bert.answering_flops(
        config, [length] * sequences
    )


def test_llama():
    """A causal attention is counted whole by PyTorch and by half here; its scores are computed again for backward."""
    config = LlamaConfig(**PLAIN, layers=3, width=64, heads=4, key_value_heads=2, inner_width=96)
    network, length = Llama(config.shape(128)), 48
    tokens = torch.zeros(2, length, dtype=torch.int64)
    product = 2 * length * length * config.width
    more = config.layers * (3 * product + product)
    expected = 2 * (of_llama.training_flops(config, 128, length) + more)
    assert counted(lambda: network(tokens, tokens)) == expected


def test_lora():
    """As above; the frozen weights have no gradient."""
    config = LoraConfig(**PLAIN, layers=3, width=64, heads=4, key_value_heads=2, inner_width=96, lora_rank=4)
    network, length = Llama(config.shape(128)), 48
    adapters.add(network, rule_of(config), 0)
    network.to_empty(device=CPU)
    tokens = torch.zeros(2, length, dtype=torch.int64)
    more = config.layers * 4 * 2 * length * length * config.width
    expected = 2 * (of_llama.adapter_flops(config, 128, length) + more)
    assert counted(lambda: network(tokens, tokens)) == expected


def test_llama_has_the_parameters_of_8b():
    with torch.device("meta"):
        network = Llama(LlamaConfig().shape(128256))
    assert sum(each.numel() for each in network.parameters()) == 8_030_261_248


def test_transformer():
    config = TransformerConfig(**PLAIN, layers=2, width=64, heads=2, inner_width=96, attention="plain")
    network = transformer.Network(config, 128)
    source, target = torch.full((3, 11), 5), torch.full((3, 7), 5)
    found = counted(lambda: network(source, target) @ network.table.weight.t())
    assert found == of_transformer.training_flops(config, 128, 3, 11, 7)


def test_gnmt():
    """On the meta device an LSTM is its products. Its first state has no gradient, and a vector's product no count."""
    config = GnmtConfig(**PLAIN, layers=3, width=32)
    network = gnmt.GNMT(config, 64).to("meta")
    network.decoder.attention.weigh = attention.plain
    source, target = (torch.zeros(3, length, dtype=torch.int64, device="meta") for length in (11, 7))
    lengths = torch.zeros(3, dtype=torch.int64, device="meta")
    found = counted(lambda: network.classifier(network(source, lengths, target)))
    states = (2 * config.layers + 1) * 2 * 3 * config.width * 4 * config.width
    vector = 3 * 2 * 3 * 11 * 7 * config.width
    assert found + states + vector == of_gnmt.training_flops(config, 64, 3, 11, 7)


def test_ncf():
    config = NcfConfig(**PLAIN, factors=8, layers=(16, 12, 6))
    network = NeuMF(20, 30, config.factors, config.layers, by_tables=False)
    ids = torch.zeros(10, dtype=torch.int64)
    assert counted(lambda: network(ids, ids)) == 10 * of_ncf.training_flops(config)


def test_dlrm():
    """The top MLP's input is filled up to a multiple of eight values, here by one."""
    config = DlrmConfig(**PLAIN, cuda_graph=False, bottom_mlp=(16, 8), top_mlp=(12, 1))
    network = Dlrm(config, [5] * 26)
    numbers, indices = torch.rand(10, 13), torch.zeros(26, 10, dtype=torch.int64)
    assert network.padding == 1
    padding = 10 * 3 * 2 * config.top_mlp[0]
    assert counted(lambda: network(numbers, indices)) - padding == 10 * of_dlrm.training_flops(config, 26)
