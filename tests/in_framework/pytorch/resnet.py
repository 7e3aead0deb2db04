"""ResNet in PyTorch: network, precisions, warm-up, micro-batches, capture, missing features, memory."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import choices
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import capabilities
from benchmarks.resnet import architecture, memory
from benchmarks.resnet.pytorch import model, optimizer, train
from benchmarks.resnet.pytorch.config import Config
from tests.in_framework import resnet
from tests.in_framework.torch_checks import CPU, saved_bytes

GPU = Ranks(0, 1, 0, 1, torch.device("cuda", 0))
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def built(**changes):
    return train.build(resnet.config_of(Config, learning_rate=0.1, **changes), CPU, {})


def batch_of(count=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    images = torch.rand((count, 3, 32, 32), generator=generator)
    return images.to(dtype), torch.randint(0, 10, (count,), generator=generator)


def losses_of(trained, rates=(0.1, 0.05, 0.2, 0.2)):
    # Losses of steps on one batch, at rates that change.
    return [train.train_step(trained, *batch_of(), rate).item() for rate in rates]


def test_steps_in_bf16_are_near_those_in_fp32():
    plain, rounded = (losses_of(built(precision=precision), (0.01, 0.01)) for precision in ("fp32", "bf16"))
    assert plain != rounded == pytest.approx(plain, rel=0.05)


def test_a_warm_up_leaves_no_trace():
    options = {"optimizer": "lars", "loss_scale": 128.0}
    bare = built(**options)
    torch.manual_seed(5)
    warm = train.warm_up(bare._replace(config=dataclasses.replace(bare.config, warm_up_steps=3)), CPU)
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(5))
    momenta = [state["momentum_buffer"] for state in warm.optimizer.state.values()]
    assert momenta and not any(momentum.any() for momentum in momenta)
    assert losses_of(warm) == losses_of(built(**options))
    tensors = [*warm.network.state_dict().values(), *momenta]
    before = [tensor.clone() for tensor in tensors]
    train.warm_up(warm, CPU)
    assert all(map(torch.equal, tensors, before)) and warm.network.training


def test_micro_batches_have_the_gradients_of_the_batch():
    results = []
    for training in (built(accumulation_steps=steps, loss_scale=128.0) for steps in (1, 4)):
        training.network.eval()  # batch norm by its running statistics
        loss = train.forward_backward(training, *batch_of())
        results.append(torch.cat([loss[None], *(p.grad.flatten() for p in training.network.parameters())]))
    assert (results[1] - results[0]).norm() < 1e-5 * results[0].norm()


@pytest.mark.parametrize("steps", [1, 4])
def test_all_micro_batches_send_their_gradients_once(steps):
    trained, sent = built(bucket_mb=1000, accumulation_steps=steps), []
    wrapped = train.wrap_ddp(trained.network, trained.config, CPU)
    wrapped.register_comm_hook(None, lambda _, bucket: sent.append(bucket.index()) or allreduce_hook(None, bucket))
    losses_of(trained._replace(parallel=wrapped), [0.1])
    assert sent == [0]


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_a_capturable_optimizer_and_its_checkpoint(name):
    # It is what a graph captures; a checkpoint of a captured run resumes.
    tensors = built(optimizer=name)
    tensors.optimizer.make_capturable(CPU.context)
    losses = losses_of(tensors, (0.1, 0.05))
    resumed = optimizer.build(tensors.network, tensors.config)
    resumed.load_state_dict(tensors.optimizer.state_dict())
    resumed.make_capturable(CPU.context)
    losses += losses_of(tensors._replace(optimizer=resumed), (0.2, 0.2))
    assert losses == pytest.approx(losses_of(built(optimizer=name)), rel=1e-6)


@pytest.mark.parametrize(
    ("precision", "scale", "dtype"), [("fp32", float("inf"), torch.float32), ("fp16", 2.0**40, torch.float16)]
)
def test_an_overflow_ends_the_run(precision, scale, dtype):
    # Its device is a GPU by the configuration, which refuses fp16 elsewhere; the tensors are on the CPU.
    trained = built(layout="NHWC")
    options = {"device": "gpu", "compile": "none", "cuda_graph": False, "precision": precision, "loss_scale": scale}
    config = dataclasses.replace(trained.config, **options)
    trained = trained._replace(config=config, optimizer=optimizer.build(trained.network, config))
    losses = (train.train_step(trained, *batch_of(dtype=dtype), 0.1) for _ in range(10))
    # The overflow of the first step is in the second one's loss, which is read two steps later.
    assert resnet.end_of_overflow(pytorch, CPU, losses) == (4, "the loss is not finite at step 2: found nan")


def test_auto_uses_what_the_installed_pytorch_has(monkeypatch, capsys):
    config = dataclasses.replace(resnet.config_of(Config), device="gpu")
    full = dataclasses.replace(config, compile="default", cuda_graph=True)
    monkeypatch.setattr(capabilities, "LACKS", dict.fromkeys(("compile", "cuda_graph"), lambda device: None))
    assert capabilities.resolve(config, GPU) == capabilities.resolve(full, GPU) == full
    lacks = {"compile": lambda device: "no compiler", "cuda_graph": lambda device: "no graphs"}
    monkeypatch.setattr(capabilities, "LACKS", lacks)
    assert capabilities.resolve(config, GPU) == dataclasses.replace(config, compile="none", cuda_graph=False)
    words = "compile=none, which is slower: no compiler\ncuda_graph=false, which is slower: no graphs\n"
    assert capsys.readouterr().err == words
    with pytest.raises(choices.UnavailableError, match=r"compile=default: no compiler\s.*set compile=none"):
        capabilities.resolve(full, GPU)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("depth", [18, 50])
def test_activations_in_the_memory_model(depth, precision):
    # Without the weights themselves; bf16 has copies of those.
    config = resnet.config_of(Config, depth=depth, precision=precision, image_size=64, eval_resize=64)
    network = model.build(config)

    def forward():
        with pytorch.autocast(CPU.context, precision):
            outputs = network(torch.rand(architecture.input_shape(config)))
        model.smoothed_loss(outputs, torch.zeros(8, dtype=torch.long), 0.1)

    size, need = saved_bytes(forward, network.state_dict().values()), memory.needed(config, "pytorch")
    assert need.activations + need.weights - 4 * memory.parameters(config) == pytest.approx(size, rel=0.02)
