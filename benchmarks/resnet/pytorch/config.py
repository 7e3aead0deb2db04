"""Configuration of ResNet in PyTorch, in addition to the common hyperparameters; standard library only."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.common.config_checks import at_least, precision_on_cpu, reject_if
from benchmarks.resnet.config import Hyperparameters


@dataclass(frozen=True)
class Config(Hyperparameters):
    bucket_mb: int = 25  # megabytes of gradients that DistributedDataParallel sums in one all-reduce
    kernels: Literal["auto", "plain", "triton"] = "auto"  # auto: measured without compile, otherwise plain
    compile: Literal["auto", "none", "default", "max-autotune-no-cudagraphs"] = "auto"  # mode of torch.compile
    cuda_graph: Literal["auto", True, False] = "auto"  # capture and replay the full step as one graph
    # "auto": default and true with device=gpu, if supported by PyTorch, otherwise none and false.

    def __post_init__(self) -> None:
        super().__post_init__()
        precision_on_cpu(self, "fp32", "bf16")
        at_least(self, 1, "bucket_mb")
        reject_if(("cuda_graph needs device=gpu", self.device == "cpu" and self.cuda_graph is True))
