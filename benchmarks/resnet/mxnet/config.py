"""Configuration of ResNet in MXNet, in addition to the common hyperparameters; standard library only."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.common.config_checks import precision_on_cpu, reject_if
from benchmarks.resnet.config import Hyperparameters


@dataclass(frozen=True)
class Config(Hyperparameters):
    precision: Literal["fp16", "fp32"] = "fp16"  # fp16 uses fp32 master weights and batch-norm statistics
    gradient_groups: int = 0  # number of fused all-reduces; 0: Horovod decides by size

    @property
    def communicates(self) -> str:
        """Type of gradients in communication: the type of the weights, cast by Gluon."""
        return self.precision

    def __post_init__(self) -> None:
        super().__post_init__()
        precision_on_cpu(self, "fp32")
        problem = "device=cpu has no NHWC convolution in MXNet: set layout=NCHW"
        reject_if(
            (problem, self.device == "cpu" and self.layout == "NHWC"),
            (
                "MXNet's step has no accumulation: set accumulation_steps=1 and a smaller batch_size",
                self.accumulation_steps > 1,
            ),
        )
