"""What each framework computes for the parity tests, in NumPy alone: weights, a batch, gradients, rates.

A program parity_FRAMEWORK.py has four functions over these, and run() makes one file of their results.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np

from benchmarks.resnet import architecture, events
from tests.in_framework import sgd_and_lars

OPTIMIZER_STEPS = 10
LOSSES = 50


def config_of(config_class, **changes):
    # The configuration of all comparisons but for ``changes``: ResNet-18 on small images, fp32, on the CPU.
    layout = {} if config_class.layout == "NHWC" and "mxnet" not in config_class.__module__ else {"layout": "NCHW"}
    values = dict(
        device="cpu", precision="fp32", pad_channels=False, depth=18, num_classes=10, image_size=64, eval_resize=64,
        batch_size=16, loss_scale=1.0, label_smoothing=0.1, dali_threads=1, optimizer="sgd", learning_rate=0.1,
        weight_decay=1e-4, schedule="pow2", epochs=12, warmup_epochs=2.0, seed=3, **layout,
    )  # fmt: skip
    return dataclasses.replace(config_class(), **{**values, **changes})


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
    for _ in range(OPTIMIZER_STEPS):
        yield {name: generator.standard_normal(shapes[name], "float32") for name in architecture.trained_names(config)}


def optimizer_config(config_class, name):
    # Strong enough that every term of the formula can be seen in the result.
    without = {"sgd": ("beta", "bias"), "lars": ("gamma", "beta")}[name]
    strong = {"weight_decay": 0.01, "lars_eta": 0.1, "lars_epsilon": 1e-3}
    return config_of(config_class, optimizer=name, no_weight_decay=without, **strong)


def rates(config):
    # Learning rates of the 50 steps of training, 24 an epoch: with warm-up, of both schedules.
    stepwise = dataclasses.replace(config, schedule="step", decay_epochs=(1, 2), warmup_epochs=0.5)
    return [events.learning_rate(chosen, step, 24) for chosen in (config, stepwise) for step in range(LOSSES)]


def run(config_class, framework: SimpleNamespace, data):
    # Everything by name, for np.savez.
    found = {}
    for depth in (18, 50):
        config = config_of(config_class, depth=depth)
        arrays, batch = made_weights(config), made_batch(config)
        found[f"logits {depth}"] = framework.logits(config, arrays, batch)
        loss, gradients = framework.loss_and_gradients(config, arrays, batch)
        found[f"loss {depth}"] = np.array(loss)
        found.update({f"gradient {depth} {name}": gradients[name] for name in architecture.trained_names(config)})
        # One ReLU that rounding puts on the other side of 0 shows in a small tensor, hardly in all together.
        found[f"gradients {depth}"] = np.concatenate(
            [gradients[name].ravel() for name in architecture.trained_names(config)]
        )
    for name in ("sgd", "lars"):
        config = optimizer_config(config_class, name)
        # Rates of a warm-up and of the decay after it.
        made, changing = list(made_gradients(config)), [sgd_and_lars.rate_at(step, 0.4, 12, 4) for step in range(1, 11)]
        arrays = made_weights(config)
        steps = framework.optimized(config, arrays, made, changing)
        start = {tensor: arrays[tensor] for tensor in architecture.trained_names(config)}
        rule = sgd_and_lars.trained(start, made, changing, config)
        found.update({f"{name} {tensor}": steps[tensor] for tensor in start})
        found[f"rule {name}"] = np.array([np.linalg.norm(steps[t] - rule[t]) / np.linalg.norm(rule[t]) for t in start])
    # A small rate: at a large one every rounding grows from step to step, and no two machines agree for long.
    config = config_of(
        config_class,
        image_size=32,
        eval_resize=32,
        batch_size=64,
        dali_shuffle_buffer=1024,
        learning_rate=0.02,
    )
    found["first images"], found["losses"] = framework.trained(
        config, made_weights(config), data, rates(config)[:LOSSES]
    )
    found["rates"] = np.array(rates(config))
    return found


def differences(found, path):
    # Worst difference of each kind from another framework's file, relative: |difference| / |other|, by norms.
    with np.load(path) as file:
        other = {name: file[name] for name in file.files}
    worst = {}
    rules = {name: float(found.pop(name).max()) for name in list(found) if name.startswith("rule")}
    for name, array in found.items():
        kind = " ".join(name.split(" ")[:2]) if name.startswith(("gradient", "first")) else name.split(" ")[0]
        scale = np.linalg.norm(other[name])
        error = float(np.linalg.norm(array - other[name]) / (scale if scale else 1.0))
        worst[kind] = max(worst.get(kind, 0.0), error)
    by_step = np.abs(found["losses"] - other["losses"]) / other["losses"]
    worst["losses by step"] = [float(value) for value in by_step]
    worst["last losses"] = [float(found["losses"][-10:].mean()), float(other["losses"][-10:].mean())]
    worst["same names"] = sorted([*found, *rules]) == sorted(other)
    worst.update(rules)
    return worst
