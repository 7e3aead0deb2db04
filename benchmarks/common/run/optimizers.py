"""Reference definition of SGD with momentum and LARS for all frameworks.

With gradient g averaged over the global batch, weight w, momentum buffer v (initially 0), decay d, learning rate r,
and r' the rate of the previous step:

    v <- m * v - rate * (g + d * w)
    w <- w + v

SGD (mx.optimizer.SGD of the v0.5 submissions, and of v0.7 on up to 16 GPUs) has rate = r and m = momentum: a change
of the learning rate does not rescale earlier gradients. LARS (You, Gitman and Ginsburg 2017, arXiv 1708.03888,
algorithm 1) is SGDwFASTLARS of NVIDIA's submissions since v0.6 (resnet/implementations/mxnet/common/fit.py).
UNSCALED tensors have the same rate and m as with SGD; for all others

    rate = r * eta * |w| / (|g| + d * |w| + epsilon),    or r where |w| or |g| is 0;
    m = momentum * r / r'    (Goyal et al. 2017, arXiv 1706.02677, section 3, "momentum correction").

SGDwFASTLARS corrects the momentum only in the first call per step. MXNet calls an optimizer with up to
MXNET_OPTIMIZER_AGGREGATION_SIZE tensors with the same type. All submissions set 54, and ResNet-50 has 54 scaled
tensors, which come first. SGDwFASTLARSV2 (v2.1, common/optimizer.py) does the same for any number.

Weight decay is never applied to beta. It is applied to gamma with SGD (Optimizer.set_wd_mult of MXNet), and to the
bias of the last layer with LARS (set_wd_mult in fit.py): see each system's no_weight_decay.
"""

from typing import Any, Sequence

# Name suffixes of parameters that LARS updates like SGD: batch norm and biases
UNSCALED = ("gamma", "beta", "bias")


def has_suffix(name: str, suffixes: Sequence[str]) -> bool:
    return name.endswith(tuple(suffixes))


def weight_decay_of(name: str, config: Any) -> float:
    return 0.0 if has_suffix(name, config.no_weight_decay) else float(config.weight_decay)
