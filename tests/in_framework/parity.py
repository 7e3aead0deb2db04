"""What each framework computes of the same weights, batches, gradients and rates: python parity.py FRAMEWORK FILE DATA.

parity_FRAMEWORK.py has its functions; FILE gets the results by name (.npz).
"""

import dataclasses
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from benchmarks.resnet import architecture, inputs, schedule

OPTIMIZER_RATES = (0.1, 0.2, 0.3, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.01)
LOSSES = 15  # Steps: the second epoch begins at step 12


def config_of(part, **changes):
    # The configuration of all comparisons but for ``changes``: ResNet-18 on small images, fp32, on the CPU.
    layout = {"layout": "NHWC" if "tensorflow" in part.__name__ else "NCHW"}
    values = dict(
        device="cpu", precision="fp32", pad_channels=False, depth=18, num_classes=10, image_size=64, eval_resize=64,
        batch_size=16, loss_scale=1.0, label_smoothing=0.1, dali_threads=1, optimizer="sgd", learning_rate=0.1,
        weight_decay=1e-4, schedule="pow2", epochs=12, warmup_epochs=2.0, seed=3, warm_up_steps=0, **layout,
    )  # fmt: skip
    return dataclasses.replace(part.Config(), **{**values, **changes})


def made_weights(config):
    # Weights and statistics that are not those of a fresh network, but of a size that trains. The last gamma of a block
    # is small: a deep network without that amplifies rounding until no two frameworks agree on a gradient, nor either
    # of them with float64.
    generator = np.random.RandomState(11)
    last = "norm2" if config.depth < 50 else "norm3"
    arrays = {}
    for name, shape in architecture.shapes(config).items():
        noise = generator.standard_normal(shape).astype("float32")
        layer, part = name.split(".")[-2:]
        if part == "weight":
            scale = 0.01 if layer == "dense" else np.sqrt(2.0 / np.prod(shape[1:]))
            arrays[name] = noise * np.float32(scale)
        else:
            centre = {"gamma": 0.2 if layer == last else 1.0, "variance": 1.0}.get(part, 0.0)
            arrays[name] = np.float32(centre) * (1 + 0.1 * noise) + np.float32(0 if centre else 0.1) * noise
    return arrays


def made_batch(config):
    # Images (N, C, H, W) and labels (N,).
    generator = np.random.RandomState(12)
    shape = (config.batch_size, 3, config.image_size, config.image_size)
    return generator.standard_normal(shape).astype("float32"), generator.randint(0, config.num_classes, shape[0])


def made_gradients(config):
    # Gradients of each step for the optimizers; a new generator, so that every framework draws the same.
    generator = np.random.default_rng(13)
    shapes = architecture.shapes(config)
    for _ in OPTIMIZER_RATES:
        yield {name: generator.standard_normal(shapes[name], "float32") for name in architecture.trained_names(config)}


def rates(config):
    # Learning rates of two epochs of 24 steps: with warm-up, of both schedules.
    stepwise = dataclasses.replace(config, schedule="step", decay_epochs=(1, 2), warmup_epochs=0.5)
    return [schedule.learning_rate(chosen, step, 24) for chosen in (config, stepwise) for step in range(48)]


def networks(part, ranks):
    # Logits, loss and gradients of two networks.
    found = {}
    for depth in (18, 50):
        config = config_of(part, depth=depth)
        training, batch = (
            part.training_with(config, made_weights(config), ranks),
            part.batch_of(config, *made_batch(config)),
        )
        found[f"logits {depth}"] = part.logits(training, batch[0])
        found[f"loss {depth}"], gradients = part.loss_and_gradients(training, *batch)
        found.update({f"gradient {depth} {name}": gradients[name] for name in architecture.trained_names(config)})
    return found


def optimizers(part, ranks):
    # Weights after some steps of both optimizers
    found = {}
    for name, without in (("sgd", ("beta", "bias")), ("lars", ("gamma", "beta"))):
        # Strong enough that every term of the formula can be seen in the result.
        strong = {"weight_decay": 0.01, "lars_eta": 0.1, "lars_epsilon": 1e-3}
        config = config_of(part, optimizer=name, no_weight_decay=without, **strong)
        training = part.training_with(config, made_weights(config), ranks)
        weights = part.optimized(training, list(made_gradients(config)), OPTIMIZER_RATES)
        found.update({f"{name} {tensor}": weights[tensor] for tensor in architecture.trained_names(config)})
    return found


def trained(part, ranks, data):
    # Losses on the same batches. A small rate: at a large one every rounding grows from step to step, and no two
    # machines agree for long.
    config = config_of(part, image_size=32, eval_resize=32, batch_size=64, dali_shuffle_buffer=1024, learning_rate=0.02)
    training = part.training_with(config, made_weights(config), ranks)
    batches = inputs.training_input(part.tensors, config, data, ranks)
    losses, first = [], None
    for rate in rates(config)[:LOSSES]:
        images, labels = batches.next()
        first = part.in_numpy(images).copy() if first is None else first
        losses.append(part.in_numpy(part.train_step(training, images, labels, rate)).reshape(()))
    first = first.transpose(0, 3, 1, 2) if config.layout == "NHWC" else first
    return {"first images": first, "losses": np.array(losses), "rates": np.array(rates(config))}


def main(name, path, data):
    part = importlib.import_module(f"tests.in_framework.parity_{name}")
    ranks = part.framework.start(SimpleNamespace(device="cpu", precision="fp32"))
    found = {**networks(part, ranks), **optimizers(part, ranks)}
    np.savez(path, **{key: part.in_numpy(tensor) for key, tensor in found.items()}, **trained(part, ranks, Path(data)))
    part.framework.finish()


main(*sys.argv[1:])
