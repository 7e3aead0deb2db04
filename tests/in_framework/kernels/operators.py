"""The Triton kernels in Triton's interpreter on the CPU, and the choice between them and the plain path."""

import itertools
from pathlib import Path

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from benchmarks.common.checks import compare_kernels
from benchmarks.common.run import choices
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels, networks
from benchmarks.dlrm import blocks
from benchmarks.dlrm.pytorch import config as dlrm_config
from benchmarks.dlrm.pytorch import operators
from benchmarks.dlrm.pytorch.data import Batch
from benchmarks.dlrm.pytorch.model import Training
from benchmarks.gnmt.pytorch import attention
from benchmarks.gnmt.pytorch import config as gnmt_config
from benchmarks.gnmt.pytorch import operators as gnmt_operators
from benchmarks.gnmt.pytorch.model import GNMT
from benchmarks.resnet.architecture import input_shape
from benchmarks.resnet.pytorch import config as resnet_config
from benchmarks.resnet.pytorch import model as resnet_model
from benchmarks.resnet.pytorch import operators as resnet_operators
from benchmarks.transformer.pytorch import config as transformer_config
from benchmarks.transformer.pytorch.model import Network as Transformer
from benchmarks.transformer.pytorch.model import Norm
from benchmarks.translation.pytorch import kernels as translation_kernels
from benchmarks.translation.pytorch import operators as translation_operators
from benchmarks.translation.pytorch.batches import synthetic_batch
from tests.in_framework.waves import waves

CPU = Ranks(0, 1, 0, 1, torch.device("cpu"))
SIZES = {name: operator.small[0] for name, operator in operators.OPERATORS.items()}


def test_values_and_gradients_are_those_of_the_plain_path():
    rows = compare_kernels.compare_all(CPU.context)
    written = {path.parts[-3] for path in Path("benchmarks").glob("*/pytorch/kernels.py")}
    assert {row["operator"].split()[0] for row in rows} == written
    assert {row["type"] for row in rows} == {"float32", "float16", "bfloat16"}
    assert [row for row in rows if not row["error"] <= row["tolerance"] <= 0.03] == []


def dlrm_step(name):
    """Weights and tables after a step with int32 indices, and the scores after it."""
    config = dlrm_config.Config(
        device="cpu", precision="fp32", cuda_graph=False, bottom_mlp=(16, 8), top_mlp=(12, 1), batch_size=8,
        seed=5, kernels=name,
    )  # fmt: skip
    sizes = tuple(3 + table % 5 for table in range(blocks.TABLES))
    training = Training(config, sizes, CPU)
    numbers = torch.Generator().manual_seed(1)
    indices = torch.stack([torch.randint(0, size, (8,), generator=numbers) for size in sizes])
    batch = Batch(torch.rand(8, blocks.NUMBERS, generator=numbers), torch.arange(8) % 2 / 1.0, indices.int())
    training.forward(batch).backward()
    training.update(torch.tensor(0.5))
    assert set(training.state_dict()["kernels"].values()) == {name}
    return [training.weights, training.tables.weight, training.scores(batch)]


def resnet_gradients(name):
    """Gradients and running statistics of ResNet-18, which has blocks with and without a projection."""
    config = resnet_config.Config(
        device="cpu", precision="fp32", depth=18, layout="NHWC", batch_size=2, image_size=64, num_classes=5,
        kernels=name, compile="none", cuda_graph=False,
    )  # fmt: skip
    network = resnet_model.to_device(resnet_model.build(config), config, CPU.context)
    resnet_model.set_operators(network, resnet_operators.choose(config, CPU))
    images = torch.rand(input_shape(config), generator=torch.Generator().manual_seed(1)).permute(0, 3, 1, 2)
    network(images).square().sum().backward()
    gradients = [parameter.grad for parameter in network.parameters()]
    return [*gradients, *networks.statistics(network), network.eval()(images)]


def gnmt_gradients(name):
    """Loss of a small GNMT on sentences of several lengths, and all gradients."""
    config = gnmt_config.Config(device="cpu", precision="fp32", width=16, layers=2, dropout=0.0, initial_weights=0.6)
    torch.manual_seed(0)
    network = GNMT(config, 37)
    network.decoder.attention.weigh = kernels.implementation(gnmt_operators.OPERATORS["attention"], name)
    batch = synthetic_batch(37, 3, 9, CPU)._replace(source_lengths=torch.tensor([9, 2, 6]))
    loss = network.loss_sum(batch)
    loss.backward()
    return [loss, *(parameter.grad for parameter in network.parameters())]


def transformer_gradients(name, **changes):
    """Loss of a small Transformer on packed rows, and all gradients."""
    config = transformer_config.Config(
        device="cpu", precision="fp32", width=16, heads=2, inner_width=24, layers=2,
        **{"dropout": 0.0, "attention_dropout": 0.0, "relu_dropout": 0.0, **changes},
    )  # fmt: skip
    torch.manual_seed(0)
    network = Transformer(config, 37)
    for module in network.modules():
        if isinstance(module, Norm):
            module.compute_add_norm = kernels.implementation(translation_operators.OPERATORS["join"], name)
    batch = synthetic_batch(37, 3, 9, CPU)
    loss = network.loss_sum(batch)
    loss.backward()
    return [loss, *(parameter.grad for parameter in network.parameters())]


def test_dropout_of_a_kernel_and_the_mask_of_its_gradient():
    join = kernels.implementation(translation_operators.OPERATORS["join"], "triton")
    ones = torch.ones(60, 64, requires_grad=True)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second = (join(torch.zeros(60, 64), ones, torch.ones(64), torch.zeros(64), 1e-5, 0.1)[0] for _ in range(2))
    assert first.unique().tolist() == pytest.approx([0, 1 / 0.9])
    mask, other = (first > 0).float(), (second > 0).float()
    for values, share in (
        (mask, 0.9),
        (mask * other, 0.81),
        (mask[1:] * mask[:-1], 0.81),
        (mask[:, 1:] * mask[:, :-1], 0.81),
    ):
        # Four standard deviations for this number of values: neighbours and other seeds are independent.
        assert float(values.mean()) == pytest.approx(share, abs=4 * (share * (1 - share) / values.numel()) ** 0.5)
    (gradient,) = torch.autograd.grad(first.sum(), ones)
    assert torch.equal(gradient, first.detach())
    torch.set_rng_state(state)
    again, _ = join(torch.zeros(60, 64), ones, torch.ones(64), torch.zeros(64), 1e-5, 0.1)
    assert torch.equal(again, first), "the generator's state, which is in a checkpoint, decides the mask"


def tensors(*shapes):
    return [torch.from_numpy(2 * waves(*shape, phase=phase)).float() for phase, shape in enumerate(shapes)]


def errors(results):
    # Largest difference between a kernel's results and those in float64, as a fraction of the largest value
    ours, theirs = ([value.detach().double() for value in values] for values in results)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("used", [(True, True), (False, True), (True, False)])
def test_norm_of_a_sum_with_more_rows_than_programs(monkeypatch, used):
    # The interpreter is slow: fewer programs instead of more rows
    monkeypatch.setattr(translation_kernels, "PROGRAMS", 32)
    *values, upstream = tensors((69, 40), (69, 40), (40,), (40,), (2, 69, 40))
    results = []
    for name, dtype in (("triton", torch.float32), ("plain", torch.float64)):
        inputs = [value.to(dtype).requires_grad_() for value in values]
        outputs = kernels.implementation(translation_operators.OPERATORS["join"], name)(*inputs, 1e-5, 0.0)
        total = sum((out * up).sum() for out, up, is_used in zip(outputs, upstream, used, strict=True) if is_used)
        results.append([*outputs, *torch.autograd.grad(total, inputs, materialize_grads=True)])
    assert errors(results) <= 2e-6


def test_attention_with_saturated_tanh_and_gradients_that_are_nan():
    kernel = kernels.implementation(gnmt_operators.OPERATORS["attention"], "triton")
    queries, keys, vector, upstream = tensors((3, 5, 24), (3, 19, 24), (24,), (3, 5, 19))
    queries[0, 0] = 200.0
    keys[1, 3] = -1e30
    padding = torch.arange(19) >= torch.tensor([19, 17, 1]).unsqueeze(1)
    with_nan = upstream.clone()
    with_nan[2, 4, 0] = float("nan")
    results = []
    for weigh, dtype in ((kernel, torch.float32), (attention.plain, torch.float64)):
        inputs = [value.to(dtype).requires_grad_() for value in (queries, keys, vector)]
        weights = weigh(*inputs, padding)
        results.append([weights, *torch.autograd.grad(weights, inputs, upstream.to(dtype), retain_graph=True)])
        gradients = torch.autograd.grad(weights, inputs, with_nan.to(dtype))
        assert all(gradient.isnan().any() for gradient in gradients) and not gradients[0][:2].isnan().any()
    assert errors(results) < 1e-6


@pytest.mark.parametrize("step", [dlrm_step, resnet_gradients, gnmt_gradients, transformer_gradients])
def test_networks_with_the_kernels_train_as_without(monkeypatch, step):
    launch, launches = GridExecutor.__call__, []

    def counted(*given, **options):
        launches.append(given)
        return launch(*given, **options)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    ours = step("triton")
    assert launches, "kernels run where they are asked for"
    launches.clear()
    theirs = step("plain")
    assert not launches, "and nowhere else"
    # The errors of single precision add up over several layers.
    assert max(float((a.detach() - b.detach()).norm() / b.detach().norm()) for a, b in zip(ours, theirs)) < 1e-4


def choose(name, saved=None, **changes):
    return kernels.choose({**operators.OPERATORS, **changes}, name, CPU, torch.float32, SIZES, saved)


def wrong_gather(weight, rows, dtype):
    return operators.gather(weight, rows, dtype) * 1.001


def broken_update(*arguments):
    raise OverflowError("out of resource: shared memory")


def test_a_wrong_or_failing_kernel_is_not_chosen(monkeypatch, capsys):
    monkeypatch.setattr(operators, "wrong_gather", wrong_gather, raising=False)
    monkeypatch.setattr(operators, "broken_update", broken_update, raising=False)
    module = "benchmarks.dlrm.pytorch.operators"
    wrong = operators.OPERATORS["gather"]._replace(triton=f"{module}:wrong_gather")
    broken = operators.OPERATORS["update"]._replace(triton=f"{module}:broken_update")
    # Each measurement finds less than the one before: Triton, the second of two, is the faster one.
    count = itertools.count(1)
    monkeypatch.setattr(kernels, "seconds", lambda call: (call(), 1 / next(count))[1])
    chosen = choose("auto", gather=wrong, update=broken)
    assert chosen == {"interaction": "triton", "gather": "plain", "update": "plain"}
    reported = capsys.readouterr().err
    assert "triton ArithmeticError: wrong by 0.00" in reported
    assert "triton OverflowError: out of resource: shared memory" in reported


def test_the_faster_implementation_is_chosen_unless_one_is_set(monkeypatch, capsys):
    plain, triton = (dict.fromkeys(operators.OPERATORS, kind) for kind in ("plain", "triton"))
    # Interpreted kernels are a thousand times slower.
    assert choose("auto") == plain
    assert capsys.readouterr().err.count(" ms") == 2 * len(plain)
    assert choose("triton") == triton
    saved = {**triton, "gather": "plain"}
    assert choose("auto", saved) == saved
    capsys.readouterr()
    monkeypatch.delenv("TRITON_INTERPRET")
    assert choose("auto") == plain
    assert capsys.readouterr().err == ""
    with pytest.raises(choices.UnavailableError, match="Triton compiles for GPUs only; use kernels=auto"):
        choose("triton")
