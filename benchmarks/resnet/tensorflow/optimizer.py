"""SGD with momentum and LARS as defined in benchmarks/common/run/optimizers.py, for use in a tf.function."""

from dataclasses import dataclass
from typing import Dict, Sequence

import tensorflow as tf

from benchmarks.common.run.optimizers import UNSCALED, has_suffix, weight_decay_of
from benchmarks.resnet.tensorflow.config import Config


@dataclass(frozen=True)
class Optimizer:
    """Trained variables and momenta by name."""

    config: Config
    variables: Dict[str, tf.Variable]
    momenta: Dict[str, tf.Variable]

    def step(self, gradients: Sequence[tf.Tensor], rate: tf.Tensor) -> None:
        """One update with gradients of config.loss_scale times the loss, in the order of ``variables``."""
        for (name, variable), gradient in zip(self.variables.items(), gradients):
            if self.config.loss_scale != 1.0:
                gradient = gradient / self.config.loss_scale
            decay = weight_decay_of(name, self.config)
            scaled = self.config.optimizer == "lars" and not has_suffix(name, UNSCALED)
            factor = self._lars_factor(variable, gradient, decay) if scaled else 1.0
            if decay:
                gradient = gradient + decay * variable
            # Either b <- momentum b + g, w <- w - rate b in one kernel, where v = -rate b has the corrected momentum,
            # or v <- momentum v - rate g, w <- w + v
            update = tf.raw_ops.ResourceApplyMomentum if scaled else tf.raw_ops.ResourceApplyKerasMomentum
            update(
                var=variable.handle,
                accum=self.momenta[name].handle,
                lr=rate,
                grad=gradient * factor if scaled else gradient,
                momentum=self.config.momentum,
            )

    def reported(self, loss: tf.Tensor) -> tf.Tensor:
        """Return ``loss``, or NaN if the step produced a gamma that is not finite.

        On CPUs without XLA TensorFlow's ReLU maps NaN to 0: after an overflow in a convolution's gradient the loss
        would stay at the logarithm of the number of classes. The gradient of gamma in the following batch-norm is
        NaN, however.
        """
        gammas = tf.concat([gamma for name, gamma in self.variables.items() if name.endswith("gamma")], axis=0)
        return tf.where(tf.math.is_finite(tf.reduce_sum(gammas)), loss, float("nan"))

    def _lars_factor(self, weight: tf.Variable, gradient: tf.Tensor, decay: float) -> tf.Tensor:
        weight_norm, gradient_norm = tf.norm(weight), tf.norm(gradient)
        denominator = gradient_norm + decay * weight_norm + self.config.lars_epsilon
        factor = self.config.lars_eta * weight_norm / denominator
        return tf.where((weight_norm > 0.0) & (gradient_norm > 0.0), factor, 1.0)


def build(variables: Dict[str, tf.Variable], config: Config) -> Optimizer:
    momenta = {name: tf.Variable(tf.zeros_like(variable)) for name, variable in variables.items()}
    return Optimizer(config, variables, momenta)
