"""SGD with momentum, and LARS without GPU synchronization, as in the ResNet submissions.

LARS of MXNet 1.9.1 identifies batch-norm and bias parameters by names that Gluon does not use, and corrects the
momentum only for the first four tensors. This version uses MXNet's fused multi-tensor operators.
"""

from typing import Any, List, Tuple

import mxnet as mx
from mxnet.gluon.parameter import ParameterDict

from benchmarks.common.frameworks.mxnet import hvd
from benchmarks.common.run.optimizers import UNSCALED, has_suffix
from benchmarks.resnet.mxnet.config import Config

# Maximum number of tensors per call of the fused update (kMaxNumWeights in MXNet's preloaded_multi_sgd)
TENSORS_PER_CALL = 45


@mx.optimizer.Optimizer.register
class FusedLARS(mx.optimizer.Optimizer):
    """Layer-wise adaptive rate scaling as benchmarks/common/run/optimizers.py defines it."""

    def __init__(self, momentum: float, eta: float, epsilon: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.momentum, self.eta, self.epsilon = momentum, eta, epsilon
        self.corrected_momentum = momentum
        self.aggregate_num = 1 << 20  # all tensors in one call of update

    def set_learning_rate(self, lr: float) -> None:
        """Set the rate of the next step, and multiply the momentum of scaled tensors by rate / last rate."""
        self.corrected_momentum = self.momentum * lr / self.lr
        super().set_learning_rate(lr)

    def create_state(self, index: int, weight: mx.nd.NDArray) -> mx.nd.NDArray:
        return mx.nd.zeros(weight.shape, weight.context, dtype=weight.dtype)

    def create_state_multi_precision(self, index: int, weight: mx.nd.NDArray) -> Any:
        if self.multi_precision and weight.dtype.__name__ == "float16":
            master = weight.astype("float32")
            return (self.create_state(index, master), master)
        return self.create_state(index, weight)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Update tensors with the same dtype; called once per dtype: batch-norm is fp32 if other weights are fp16."""
        self._update_count(index)
        tensors = list(zip(index, weight, grad, state))
        for scaled in (True, False):
            selected = [item for item in tensors if has_suffix(self.param_dict[item[0]].name, UNSCALED) != scaled]
            if selected:
                indices, weights, gradients, states = map(list, zip(*selected))
                self._update(indices, weights, gradients, states, scaled)

    update = update_multi_precision

    def _update(self, indices: List[int], weights: Any, gradients: Any, states: Any, scaled: bool) -> None:
        rates, decays = self._rates(indices, weights, gradients, scaled)
        momentum = self.corrected_momentum if scaled else self.momentum
        shuffle_key = isinstance(states[0], tuple)
        operator = mx.nd.preloaded_multi_mp_sgd_mom_update if shuffle_key else mx.nd.preloaded_multi_sgd_mom_update
        for start in range(0, len(weights), TENSORS_PER_CALL):
            part = slice(start, start + TENSORS_PER_CALL)
            arrays: List[Any] = []
            for weight, gradient, state in zip(weights[part], gradients[part], states[part]):
                arrays += [weight, gradient, *(state if shuffle_key else (state,))]
            operator(
                *arrays,
                rates[part],
                decays[part],
                out=weights[part],
                num_weights=len(weights[part]),
                momentum=momentum,
                rescale_grad=self.rescale_grad,
            )

    # Learning rate and weight decay by tensor, on the device
    def _rates(self, indices: List[int], weights: Any, gradients: Any, scaled: bool) -> Tuple[Any, Any]:
        context, count = weights[0].context, len(weights)
        rates = mx.nd.array(self._get_lrs(indices), ctx=context, dtype="float32")
        decays = mx.nd.array(self._get_wds(indices), ctx=context, dtype="float32")
        if scaled:
            mx.nd.multi_lars(
                rates,
                mx.nd.multi_sum_sq(*weights, num_arrays=count),
                mx.nd.multi_sum_sq(*gradients, num_arrays=count),
                decays,
                eta=self.eta,
                eps=self.epsilon,
                rescale_grad=self.rescale_grad,
                out=rates,
            )
        return rates, decays


def _optimizer(config: Config) -> mx.optimizer.Optimizer:
    multi_precision = config.precision == "fp16"
    common = {"learning_rate": config.learning_rate, "wd": config.weight_decay, "multi_precision": multi_precision}
    if config.optimizer == "sgd":
        sgd = mx.optimizer.SGD(momentum=config.momentum, **common)
        if config.device == "cpu":
            # The multi-tensor operator iterates over the elements of the largest tensor for all tensors: on a CPU it is
            # slower than one call per tensor.
            sgd.aggregate_num = 1
        return sgd
    return FusedLARS(momentum=config.momentum, eta=config.lars_eta, epsilon=config.lars_epsilon, **common)


def build_trainer(parameters: ParameterDict, config: Config) -> hvd.DistributedTrainer:
    """Return Horovod's trainer for ``parameters``, which averages gradients over all ranks in every step."""
    for name, parameter in parameters.items():
        parameter.wd_mult = 0.0 if has_suffix(name, config.no_weight_decay) else 1.0
    return hvd.DistributedTrainer(parameters, _optimizer(config), num_groups=config.gradient_groups)
