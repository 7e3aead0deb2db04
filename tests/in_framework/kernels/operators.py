"""The Triton kernels in Triton's interpreter on the CPU, and the choice between them and the plain path."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from triton.runtime import interpreter

from benchmarks.common.checks import compare_kernels
from benchmarks.common.run import choices
from benchmarks.common.torch import kernels
from benchmarks.detection.pytorch import kernels as detection_kernels
from benchmarks.dlrm.pytorch import operators
from benchmarks.gnmt.pytorch import operators as gnmt_operators
from benchmarks.language.pytorch import kernels as language_kernels
from benchmarks.language.pytorch import low_precision
from benchmarks.language.pytorch import operators as language_operators
from benchmarks.maskrcnn.pytorch import operators as maskrcnn_operators
from benchmarks.resnet.pytorch import config as resnet_config
from benchmarks.resnet.pytorch import kernels as norm_kernels
from benchmarks.resnet.pytorch import model as resnet
from benchmarks.resnet.pytorch import operators as resnet_operators
from benchmarks.translation.pytorch import kernels as translation_kernels
from benchmarks.translation.pytorch import operators as translation_operators
from tests.in_framework.torch_checks import CPU
from tests.in_framework.waves import waves

SIZES = {name: operator.small[0] for name, operator in operators.OPERATORS.items()}


def test_values_and_gradients_are_those_of_the_plain_path(monkeypatch):
    monkeypatch.setattr(translation_kernels, "PROGRAMS", 2)  # so that a program has several rows of a norm
    rows = compare_kernels.compare_all(CPU.context)
    written = {path.parts[-3] for path in Path("benchmarks").glob("*/pytorch/kernels.py")}
    assert {row["operator"].split()[0] for row in rows} == written
    assert {row["type"] for row in rows} == {"float32", "float16", "bfloat16"}
    assert [row for row in rows if not row["error"] <= row["tolerance"] <= 0.03] == []


def test_dropout_of_a_kernel_and_the_mask_of_its_gradient():
    join = kernels.implementation(translation_operators.OPERATORS["join"], "triton")
    ones = torch.ones(60, 64, requires_grad=True)
    given = (torch.zeros(60, 64), ones, torch.ones(64), torch.zeros(64), 1e-5, 0.1)
    state = torch.manual_seed(3).get_state()
    first, second = (join(*given)[0] for _ in range(2))
    assert first.unique().tolist() == pytest.approx([0, 1 / 0.9])
    mask, other = first > 0, second > 0
    for values in (mask & other, mask[1:] & mask[:-1], mask[:, 1:] & mask[:, :-1]):
        # Neighbours and other seeds are independent: four standard deviations of this number of values.
        assert float(values.float().mean()) == pytest.approx(0.81, abs=4 * (0.81 * 0.19 / values.numel()) ** 0.5)
    assert torch.equal(*torch.autograd.grad(first.sum(), ones), first.detach())
    torch.set_rng_state(state)
    assert torch.equal(join(*given)[0], first), "the generator's state, which is in a checkpoint, decides the mask"


def test_attention_of_gnmt_with_saturated_tanh_and_a_gradient_that_is_nan():
    shapes = ((3, 5, 24), (3, 19, 24), (24,), (3, 5, 19))
    *values, upstream = (torch.from_numpy(2 * waves(*shape, phase=phase)) for phase, shape in enumerate(shapes))
    values[0][0, 0], values[1][1, 3] = 200.0, -1e30
    with_nan = upstream.index_put([torch.tensor(2), torch.tensor(4), torch.tensor(0)], torch.tensor(torch.nan).double())
    padding = torch.arange(19) >= torch.tensor([19, 17, 1]).unsqueeze(1)
    results = []
    for name, dtype in (("triton", torch.float32), ("plain", torch.float64)):
        inputs = [value.to(dtype).requires_grad_() for value in values]
        weights = kernels.implementation(gnmt_operators.OPERATORS["attention"], name)(*inputs, padding)
        gradients = torch.autograd.grad(weights, inputs, upstream.to(dtype), retain_graph=True)
        spoiled = torch.autograd.grad(weights, inputs, with_nan.to(dtype))
        results.append([weights, *gradients, spoiled[0][:2], *(gradient.isnan().any() for gradient in spoiled)])
    for kernel, plain in zip(*results, strict=True):
        torch.testing.assert_close(kernel.double(), plain.double(), rtol=1e-5, atol=1e-5)
    assert all(results[0][-3:]), "NaN reaches the gradients of all inputs"


def test_roi_align_of_boxes_outside_the_image_and_of_extreme_shapes():
    corners = ((-40, -30, -10, -5), (-20, -20, 90, 90), (55, 55, 63, 63), (0, 0, 64, 2), (0, 0, 2, 64), (9, 9, 9, 9))
    boxes, images = torch.tensor(corners, dtype=torch.float64), torch.zeros(len(corners), dtype=torch.int64)
    levels = [torch.from_numpy(waves(1, 16, 16 >> level, 16 >> level)) for level in range(4)]
    upstream = torch.from_numpy(waves(len(corners), 16, 7, 7))
    results = []
    for name, dtype in (("triton", torch.float32), ("plain", torch.float64)):
        inputs = [level.to(dtype).requires_grad_() for level in levels]
        align = kernels.implementation(maskrcnn_operators.OPERATORS["roi_align"], name)
        pooled = align(inputs, boxes.to(dtype), images, 7)
        results.append([pooled, *torch.autograd.grad(pooled, inputs, upstream.to(dtype))])
    for kernel, plain in zip(*results, strict=True):
        torch.testing.assert_close(kernel.double(), plain, rtol=1e-5, atol=1e-5)


def choose(name, saved=None, **changes):
    return kernels.choose({**operators.OPERATORS, **changes}, name, CPU, torch.float32, SIZES, saved)


def broken_update(*arguments):
    raise OverflowError("out of resource: shared memory")


def test_a_wrong_or_failing_kernel_is_not_chosen(monkeypatch, capsys):
    changed = {}
    for name, function in (("gather", lambda *given: operators.gather(*given) * 1.001), ("update", broken_update)):
        monkeypatch.setattr(operators, f"bad_{name}", function, raising=False)
        changed[name] = operators.OPERATORS[name]._replace(triton=f"benchmarks.dlrm.pytorch.operators:bad_{name}")
    # Each measurement finds less than the one before: Triton, the second of two, is the faster one.
    count = itertools.count(1)
    monkeypatch.setattr(kernels, "seconds", lambda call: (call(), 1 / next(count))[1])
    assert choose("auto", **changed) == {"interaction": "triton", "gather": "plain", "update": "plain"}
    reported = capsys.readouterr().err
    assert "triton ArithmeticError: wrong by 0.00" in reported
    assert "triton OverflowError: out of resource: shared memory" in reported


def test_the_faster_implementation_is_chosen_unless_one_is_set(monkeypatch, capsys):
    plain, triton = (dict.fromkeys(operators.OPERATORS, kind) for kind in ("plain", "triton"))
    # Interpreted kernels are a thousand times slower.
    assert [choose("auto"), choose("triton")] == [plain, triton]
    assert capsys.readouterr().err.count(" ms") == 2 * len(plain)
    saved = {**triton, "gather": "plain"}
    assert choose("auto", saved) == saved
    monkeypatch.delenv("TRITON_INTERPRET")
    assert choose("auto") == plain
    with pytest.raises(choices.UnavailableError, match="Triton compiles for GPUs only; use kernels=auto"):
        choose("triton")


# -- ResNet's batch-norm with ReLU as operators that torch.compile leaves as they are ------------------------


RESNET = resnet_config.Config(
    device="cpu", precision="fp32", layout="NHWC", depth=18, compile="none", cuda_graph=False, seed=3, batch_size=4,
    image_size=32, num_classes=10,
)  # fmt: skip


def pass_of(chosen, wrap=lambda module: module):
    """Loss, gradients and statistics of one pass."""
    network = resnet.to_device(resnet.build(RESNET), RESNET, CPU.context)
    resnet.set_operators(network, chosen)
    images = torch.randn(4, 4, 32, 32, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    loss = resnet.smoothed_loss(wrap(network)(images), torch.arange(4), 0.1)
    return [loss.detach(), *torch.autograd.grad(loss, list(network.parameters())), *network.buffers()]


def test_a_compiled_network_has_the_kernels_inside_one_graph():
    fused = resnet_operators.OperatorSet({"norm relu": "triton"}, norm_kernels.norm_relu)
    plain, eager = pass_of(resnet_operators.PLAIN), pass_of(fused)
    compiled = pass_of(fused, lambda network: torch.compile(network, backend="aot_eager", fullgraph=True))
    assert all(map(torch.equal, compiled, eager)), "what is around the kernels is the same"
    for ours, theirs in zip(compiled, plain, strict=True):
        assert (ours - theirs).abs().max() <= 2e-4 * theirs.abs().max().clamp_min(1e-3)


# -- FP8 copies: the bits of PyTorch's casts, alone and in linear layers --------------------------------------

E4M3, E5M2, ONE = torch.float8_e4m3fn, torch.float8_e5m2, torch.ones(())


@pytest.fixture(autouse=True)
def round_as_hardware(monkeypatch):
    """Triton's interpreter rounds ties away from zero and loses carries in FP8; hardware rounds to even as PyTorch."""
    convert, formats = interpreter._convert_float, {"fp8e4nv": E4M3, "fp8e5": E5M2}

    def rounded(values, before, after, mode):
        if after.name not in formats:
            return convert(values, before, after, mode)
        return torch.from_numpy(values.copy()).to(formats[after.name]).view(torch.uint8).numpy().reshape(values.shape)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def bits(copies):
    return [copy.view(torch.uint8) for copy in copies]


def bf16_waves(height, width, dtype=torch.bfloat16, phase=0):
    return torch.from_numpy(waves(height, width, phase=phase)).to(dtype)


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (131, 37), (16, 272)])
def test_copies_have_the_bits_of_the_casts(kind, dtype, shape):
    # Half of the values are too large: they saturate.
    values, scale = bf16_waves(*shape, dtype), torch.tensor(2 * torch.finfo(kind).max)
    values.view(-1)[::3] *= 1e-6  # subnormal
    copies = language_kernels.cast_copies(values, scale, kind, True, True)
    expected = (values.float() * scale).clamp(-torch.finfo(kind).max, torch.finfo(kind).max).to(kind)
    assert copies[0].dtype == kind and copies[1].shape == shape[::-1] and copies[1].is_contiguous()
    assert all(map(torch.equal, bits(copies), bits([expected, expected.t().contiguous()])))
    assert all(map(torch.equal, bits(copies), bits(language_operators.cast_copies(values, scale, kind, True, True))))


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_every_bf16_value_is_cast_as_in_pytorch(kind):
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16).view(256, 256)
    rows, columns = language_kernels.cast_copies(values, ONE, kind, True, True)
    assert rows.float()[values.isinf()].abs().unique() == torch.finfo(kind).max, "infinite values saturate"
    torch.testing.assert_close(rows.float(), columns.t().float(), rtol=0, atol=0, equal_nan=True)
    expected, _ = language_operators.cast_copies(values, ONE, kind, True, True)
    torch.testing.assert_close(rows.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def test_linear_layers_have_the_same_bits_with_the_kernel_and_with_gathered_weights(monkeypatch):
    linear = nn.Linear(64, 48).bfloat16()
    kept = low_precision.KeptLinear(linear, E4M3)

    def run(cast, stored):
        monkeypatch.setitem(language_operators.selected, "cast", cast)
        low_precision.refresh([kept])
        hidden = bf16_waves(32, 64).requires_grad_()
        output = kept.product(hidden) if stored else low_precision.gathered_product(hidden, linear.weight)
        return [output, *torch.autograd.grad(output, [hidden, linear.weight], bf16_waves(32, 48, phase=1))]

    kernel, plain = language_kernels.cast_copies, language_operators.cast_copies
    expected = run(plain, True)
    for given in ((kernel, True), (kernel, False), (plain, False)):
        assert all(map(torch.equal, run(*given), expected))


def test_kernel_is_one_operator_in_a_compiled_graph(monkeypatch):
    monkeypatch.setitem(language_operators.selected, "cast", language_kernels.cast_copies)
    weight = bf16_waves(48, 64).requires_grad_()
    torch.library.opcheck(language_kernels.cast_copies, (bf16_waves(16, 32), ONE, E4M3, True, False))
    compiled = torch.compile(low_precision.gathered_product, backend="aot_eager", fullgraph=True)
    results = []
    for product in (compiled, low_precision.gathered_product):
        hidden = bf16_waves(32, 64).requires_grad_()
        output = product(hidden, weight)
        results.append([output, *torch.autograd.grad(output.sum(), [hidden, weight])])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("channels", [16, 64, 2048])
def test_norms_launch_enough_programs_for_few_channels(channels, monkeypatch):
    launched = []
    monkeypatch.setattr(norm_kernels, "_launch", lambda kernel, shares, *tensors, **constants: launched.append(shares))
    # Pixels of a batch of 400 in the first and in the last stage; 132 SMs of an H100 with two programs each
    pixels = 400 * (56 * 56 if channels < 2048 else 7 * 7)
    norm_kernels._channel_sums(norm_kernels.norm_statistics, torch.empty(pixels, channels, device="meta"))
    assert 264 <= launched[0] * -(-channels // norm_kernels.CHANNELS) <= norm_kernels.SUMMING


class Recorder:
    """Stand-in for a kernel: records the grids and constants of its launches."""

    def __init__(self):
        self.grids, self.constants = [], set()

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *arguments, **constants: self.constants.add(tuple(constants.items()))


def test_grids_of_large_batches_fit_a_gpu(monkeypatch):
    forward = Recorder()
    monkeypatch.setattr(norm_kernels, "norm_statistics", Recorder())
    monkeypatch.setattr(norm_kernels, "norm_forward", forward)
    images = torch.empty(1024, 256, 56, 56, device="meta").to(memory_format=torch.channels_last)
    norm_kernels._forward(images, None, *torch.empty(2, 256, device="meta"), 1e-5)
    # 2 ** 31 - 1 programs along the first axis, only 65,535 along the others
    assert forward.grids == [(1024 * 56 * 56 // norm_kernels.PIXELS * 256 // norm_kernels.CHANNELS,)]


def test_groups_of_any_size_need_few_compiled_kernels(monkeypatch):
    overlap_bits, greedy = Recorder(), Recorder()
    monkeypatch.setattr(detection_kernels, "overlap_bits", overlap_bits)
    monkeypatch.setattr(detection_kernels, "greedy", greedy)
    for count in range(1, 2001):
        detection_kernels.nms_mask(torch.empty(3, count, 4), torch.ones(3, count, dtype=torch.bool), 0.5)
    # For up to 256, 512, 1,024 and 2,048 boxes
    assert (len(overlap_bits.constants), len(greedy.constants)) == (1, 4)
