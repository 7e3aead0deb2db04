"""SGD with momentum and LARS as benchmarks/common/optimizers.py defines them, for use in a tf.function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Sequence

import tensorflow as tf

from benchmarks.common.optimizers import UNSCALED, has_suffix, weight_decay_of
from benchmarks.resnet.tensorflow.config import Config


@dataclass(frozen=True)
class Optimizer:
    """The trained variables and their momenta, both by name."""

    config: Config
    variables: Dict[str, tf.Variable]
    momenta: Dict[str, tf.Variable]

    def step(self, gradients: Sequence[tf.Tensor], rate: tf.Tensor) -> None:
        """One update with gradients of config.loss_scale times the loss, in the order of ``variables``."""
        for (name, variable), gradient in zip(self.variables.items(), gradients):
            if self.config.loss_scale != 1.0:
                gradient = gradient / self.config.loss_scale
            decay = weight_decay_of(name, self.config)
            local = rate
            if self.config.optimizer == "lars" and not has_suffix(name, UNSCALED):
                local = rate * self._lars_factor(variable, gradient, decay)
            if decay:
                gradient = gradient + decay * variable
            # v <- momentum v - rate g, w <- w + v, in one kernel.
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=variable.handle,
                accum=self.momenta[name].handle,
                lr=local,
                grad=gradient,
                momentum=self.config.momentum,
            )

    def _lars_factor(self, weight: tf.Variable, gradient: tf.Tensor, decay: float) -> tf.Tensor:
        weight_norm, gradient_norm = tf.norm(weight), tf.norm(gradient)
        denominator = gradient_norm + decay * weight_norm + self.config.lars_epsilon
        factor = self.config.lars_eta * weight_norm / denominator
        return tf.where((weight_norm > 0.0) & (gradient_norm > 0.0), factor, 1.0)


def build(variables: Dict[str, tf.Variable], config: Config) -> Optimizer:
    """The optimizer of ``config`` over ``variables``, with momenta of 0."""
    momenta = {name: tf.Variable(tf.zeros_like(variable)) for name, variable in variables.items()}
    return Optimizer(config, variables, momenta)
