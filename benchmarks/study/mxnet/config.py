"""Configuration of one measurement; standard library only. The study sets every field, there are no defaults."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.common.config_checks import above_zero, precision_on_cpu, reject_if


@dataclass(frozen=True)
class Config:
    network: Literal["lenet", "alexnet", "googlenet", "inception-v3", "resnet-110"]
    image: int  # image height and width in pixels
    classes: int  # outputs of the network
    # A key-value store in one process for all devices (local: gradients meet on the host; device: on the devices;
    # nccl), or Horovod with one process a device.
    way: Literal["local", "device", "nccl", "horovod"]
    ranks: int  # devices
    batch_size: int  # samples per step and device
    precision: Literal["fp32", "fp16"]  # fp16: products and gradients, updates stay fp32
    device: Literal["gpu", "cpu"]  # on a CPU, ranks are contexts or processes that share the cores
    records: str  # RecordIO file (.rec) with images; empty: one synthetic batch, repeated
    blocks: int  # timed blocks of steps; each gives one value of seconds per step
    block_seconds: float  # minimum duration of a block, which has at least one step
    learning_rate: float  # of stochastic gradient descent
    momentum: float  # of stochastic gradient descent
    dropout: float  # AlexNet's dropout rate; 0 to compare the parameters of two communication methods
    largest_batch: bool  # do not time; double the batch from batch_size on until one no longer fits
    memory_limit_mib: int  # on a CPU, resident memory that counts as out of memory; a GPU reports it
    seed: int  # for parameters and synthetic images

    def __post_init__(self) -> None:
        above_zero(self, "image", "classes", "ranks", "batch_size", "blocks", "block_seconds", "memory_limit_mib")
        above_zero(self, "learning_rate")
        precision_on_cpu(self, "fp32")
        reject_if(
            ("way=nccl needs GPUs: on a CPU set way=local or way=horovod", (self.device, self.way) == ("cpu", "nccl"))
        )
