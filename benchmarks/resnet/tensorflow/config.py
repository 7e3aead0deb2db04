"""Configuration of ResNet in TensorFlow, in addition to the common hyperparameters; standard library only."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.common.config_checks import at_least, precision_on_cpu
from benchmarks.resnet.config import Hyperparameters


@dataclass(frozen=True)
class Config(Hyperparameters):
    layout: Literal["NHWC"] = "NHWC"  # order of the axes; TensorFlow's CPU kernels know no other
    xla: Literal["auto", True, False] = "auto"  # compile forward, backward and update; auto: with device=gpu
    gradient_groups: int = 0  # number of fused all-reduces; 0: Horovod decides by size

    @property
    def compiles(self) -> bool:
        """Whether XLA compiles the code between collectives; on a CPU it is slower than TensorFlow's kernels."""
        return self.device == "gpu" if self.xla == "auto" else self.xla

    def __post_init__(self) -> None:
        super().__post_init__()
        precision_on_cpu(self, "fp32", "bf16")
        at_least(self, 0, "gradient_groups")
