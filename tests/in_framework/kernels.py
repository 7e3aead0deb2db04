"""The Triton kernels in Triton's interpreter, and how a run chooses between them and the plain path; on the CPU."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os

import torch
from triton.runtime.interpreter import GridExecutor

from benchmarks.common.checks import compare_kernels
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels
from benchmarks.dlrm import blocks
from benchmarks.dlrm.pytorch import config as dlrm_config
from benchmarks.dlrm.pytorch import operators
from benchmarks.dlrm.pytorch.data import Batch
from benchmarks.dlrm.pytorch.model import Training
from benchmarks.ncf.pytorch import config as ncf_config
from benchmarks.ncf.pytorch import model as ncf_model
from benchmarks.ncf.pytorch import operators as ncf_operators
from benchmarks.resnet.architecture import input_shape
from benchmarks.resnet.pytorch import config as resnet_config
from benchmarks.resnet.pytorch import model as resnet_model
from benchmarks.resnet.pytorch import operators as resnet_operators

CPU = Ranks(0, 1, 0, 1, torch.device("cpu"))
SIZES = {name: operator.small[0] for name, operator in operators.OPERATORS.items()}


def choice(wanted: str, changed: dict, saved=None) -> dict:
    """What is chosen and reported where ``changed`` operators are not those of the project."""
    reported = io.StringIO()
    with contextlib.redirect_stderr(reported):
        try:
            chosen = kernels.choose({**operators.OPERATORS, **changed}, wanted, CPU, torch.float32, SIZES, saved)
        except ValueError as problem:
            chosen = {"refused": str(problem)}
    return {"chosen": chosen, "reported": reported.getvalue()}


def wrong_gather(weight, rows, dtype):
    return operators.gather(weight, rows, dtype) * 1.001


def broken_update(*arguments):
    raise OverflowError("out of resource: shared memory")


def distance(ours: list, theirs: list) -> float:
    """Largest relative distance of any two tensors."""
    return max(float((a.detach() - b.detach()).norm() / b.detach().norm()) for a, b in zip(ours, theirs))


def dlrm_step(wanted: str) -> list:
    """Weights and tables after a step, the scores after it, and what a checkpoint names."""
    config = dlrm_config.Config(
        device="cpu", precision="fp32", cuda_graph=False, bottom_mlp=(16, 8), top_mlp=(12, 1), batch_size=8,
        seed=5, kernels=wanted,
    )  # fmt: skip
    sizes = tuple(3 + table % 5 for table in range(blocks.TABLES))
    made = Training(config, sizes, CPU)
    numbers = torch.Generator().manual_seed(1)
    indices = torch.stack([torch.randint(0, size, (8,), generator=numbers) for size in sizes])
    batch = Batch(torch.rand(8, blocks.NUMBERS, generator=numbers), torch.arange(8) % 2 / 1.0, indices.int())
    made.forward(batch).backward()
    made.update(torch.tensor(0.5))
    assert set(made.content()["kernels"].values()) == {wanted}
    return [made.weights, made.tables.weight, made.scores(batch)]


def ncf_gradients(wanted: str) -> list:
    """Gradients of all parameters of NeuMF."""
    config = ncf_config.Config(
        device="cpu", precision="fp32", factors=4, layers=(12, 10, 6), batch_size=100, kernels=wanted
    )
    torch.manual_seed(3)
    network = ncf_model.build(config, 20, 10)
    network.operators = ncf_operators.choose(config, 20, 10, CPU)
    network(torch.randint(20, (100,)), torch.randint(10, (100,))).square().sum().backward()
    return [parameter.grad for parameter in network.parameters()]


def resnet_gradients(wanted: str) -> list:
    """Gradients and running statistics of ResNet-18, which has blocks with and without a projection."""
    config = resnet_config.Config(
        device="cpu", precision="fp32", depth=18, layout="NHWC", batch_size=2, image_size=64, num_classes=5,
        kernels=wanted, compile="none", cuda_graph=False,
    )  # fmt: skip
    network = resnet_model.place(resnet_model.build(config), config, CPU.context)
    resnet_model.use(network, resnet_operators.choose(config, CPU))
    images = torch.rand(input_shape(config), generator=torch.Generator().manual_seed(1)).permute(0, 3, 1, 2)
    network(images).square().sum().backward()
    gradients = [parameter.grad for parameter in network.parameters()]
    return [*gradients, *resnet_model.statistics(network), network.eval()(images)]


def compared_steps() -> dict:
    """Of each network the distance with and without kernels, and the launches of kernels in both."""
    launch, launches = GridExecutor.__call__, [0]

    def counted(executor, *arguments, **options):
        launches[0] += 1
        return launch(executor, *arguments, **options)

    GridExecutor.__call__ = counted
    found = {}
    for name, step in {"dlrm": dlrm_step, "ncf": ncf_gradients, "resnet": resnet_gradients}.items():
        launches[0] = 0
        with_kernels, of_kernels = step("triton"), launches[0]
        found[name] = {"distance": distance(with_kernels, step("plain")), "launches": [of_kernels, launches[0]]}
    GridExecutor.__call__ = launch
    return found


def main() -> None:
    found = {"whole networks": compared_steps(), "compared": compare_kernels.compared(torch.device("cpu"))}
    gather, update = operators.OPERATORS["gather"], operators.OPERATORS["update"]
    operators.wrong_gather, operators.broken_update = wrong_gather, broken_update
    wrong = gather._replace(triton="benchmarks.dlrm.pytorch.operators:wrong_gather")
    broken = update._replace(triton="benchmarks.dlrm.pytorch.operators:broken_update")
    # Each measurement finds less than the one before: Triton, the second of two, is the faster one.
    measured, count = kernels.seconds, itertools.count(1)
    kernels.seconds = lambda call: (call(), 1 / next(count))[1]
    found["faster, wrong, broken"] = choice("auto", {"gather": wrong, "update": broken})
    kernels.seconds = measured
    found["measured"] = choice("auto", {})
    found["wanted"] = choice("triton", {})
    found["saved"] = choice("auto", {}, {"interaction": "triton", "gather": "plain", "update": "triton"})
    del os.environ["TRITON_INTERPRET"]
    found["on a CPU"] = choice("auto", {})
    found["refused"] = choice("triton", {})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
