"""Hyperparameters of SSD in PyTorch: one flat, frozen dataclass; standard library only.

The defaults are from NVIDIA's submission of v0.7 on a DGX-1 (config_DGX1.sh, run_and_time.sh and the defaults of
parse_config.py), or defined here. "Epoch": a pass over the training images with objects; "step": an update of the
weights.
"""

from dataclasses import dataclass
from typing import Dict, List, Literal, Tuple

from benchmarks.common.config_checks import (
    Manifest,
    Mismatch,
    above_zero,
    at_least,
    fraction,
    precision_on_cpu,
    reject_if,
)

FIRST_STRIDE = 8  # pixels between positions of the first map
HALVED = 4  # maps computed with stride 2 from the previous map, including the first; later maps lose a border of 1
# Aspect ratios of the default boxes by feature map, in addition to 1; also inverted
RATIOS = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))


def map_sizes(image_size: int) -> List[int]:
    """Return the positions per edge of the feature maps: up to six maps with at least one position."""
    sizes = [-(-image_size // FIRST_STRIDE)]
    while len(sizes) < len(RATIOS):
        last = sizes[-1]
        following = -(-last // 2) if len(sizes) < HALVED else last - 2
        if following < 1:
            break
        sizes.append(following)
    return sizes


@dataclass(frozen=True)
class Config:
    """Everything that train.py needs to know, except where the data and the results are."""

    # The run
    device: Literal["gpu", "cpu"] = "gpu"  # a rank uses one GPU, or a part of the CPU cores
    seed: int = 0  # for initial weights, image order, crops, flips and colours; new for every experiment
    round: Literal["v0.5", "v0.6", "v0.7"] = "v0.7"  # MLPerf round, which determines the log format
    quality_target: float = 0.23  # mAP of boxes (0 to 1) at which the run stops
    epochs: int = 80  # maximum number of epochs
    stop_at_target: bool = True  # false trains all epochs; the best evaluation counts

    # The network
    backbone: str = ""  # file with ResNet-34's weights in torchvision's names, in the data folder or anywhere; "": none
    image_size: int = 300  # pixels per edge
    width: int = 64  # channels of the first backbone stage; other widths are multiples
    blocks: Tuple[int, ...] = (3, 4, 6)  # residual blocks of the three stages; ResNet-34 has these
    box_scales: Tuple[float, ...] = (0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05)  # by map, and one more
    layout: Literal["NHWC", "NCHW"] = "NHWC"  # memory order of the axes; tensor cores need NHWC
    pad_channels: bool = True  # pad colours to four and outputs to multiples of 8, for NHWC fp16
    precision: Literal["fp16", "bf16", "tf32", "fp32"] = "fp16"  # of products; weights and statistics stay fp32
    bn_group: int = 1  # ranks that share batch-norm statistics

    # The optimizer
    batch_size: int = 120  # images per rank and step
    optimizer: Literal["sgd"] = "sgd"  # with momentum
    optimizer_kernel: Literal["auto", "apex", "fused", "plain"] = "auto"  # auto: the fastest that is there
    bucket_mb: int = 25  # megabytes of gradients per all-reduce, overlapped with the backward pass; 0: one, after it
    gradient_compression: Literal["none", "fp16", "bf16"] = "none"  # type in which gradients travel
    learning_rate: float = 0.00292  # for 32 images; the base value for the global batch is a multiple of 0.0025
    warmup_steps: int = 650  # linear, from 0 with warmup_factor 0
    warmup_factor: int = 0  # the rules' parameter: the first step has 1 - 2**-factor of the base value
    decay_epochs: Tuple[int, ...] = (44, 55)  # the learning rate drops after these epochs
    decay_steps: Tuple[int, ...] = ()  # instead: steps of 32 images after which it drops, as v0.5 and v0.6
    decay_factor: float = 0.1  # factor on the learning rate
    momentum: float = 0.9  # of SGD
    weight_decay: float = 1.6e-4  # L2 penalty added to the gradient of all weights
    loss_scale: float = 128.0  # constant factor on the loss for fp16, as submitted

    # Evaluation
    eval_epochs: Tuple[int, ...] = (40, 50, 55, 60, 65, 70, 75, 80)  # evaluates after these epochs
    eval_steps: Tuple[int, ...] = ()  # instead: steps of 32 images after which it evaluates, as v0.5 and v0.6
    eval_batch_size: int = 160  # images per rank
    average_statistics: bool = True  # of batch-norm over all ranks before an evaluation; false: local
    concurrent_evaluation: bool = True  # continue training during evaluations; false: wait, as v0.5 and v0.6
    score_threshold: float = 0.05  # probability above which a box is a detection
    nms_threshold: float = 0.5  # intersection over union above which the box with the lower score is removed
    detections: int = 200  # maximum number per image, and per class before NMS

    # The input
    crop: bool = True  # random crops of training images, by overlap with objects
    colour: bool = True  # twist saturation, contrast, brightness and hue of training images at random
    flip: bool = True  # flip half of the training images horizontally
    antialias: bool = True  # when downscaling training images; v0.5 did not
    decoder: Literal["cpu", "gpu"] = "gpu"  # for training images with device=gpu; submitted: use-nvjpeg
    dali_threads: int = 4  # CPU threads per rank; submitted: num-workers
    dali_prefetch: int = 2  # batches kept ready
    dali_batches: int = 1  # batches per DALI output; submitted: input-batch-multiplier
    dali_decoder_cache_mb: int = 0  # GPU memory for decoded images; 0: decode only crops
    dali_hw_decoder_load: float = 0.0  # fraction of images for the GPU's JPEG unit

    # How it is computed
    compile: Literal["auto", "none", "default", "max-autotune-no-cudagraphs"] = "auto"  # mode of torch.compile
    cuda_graph: Literal["auto", True, False] = "auto"  # capture and replay the full step as one graph
    # "auto": default and true with device=gpu, if supported by PyTorch, otherwise none and false.
    warm_up_steps: int = 3  # on noise, before the clock: compiles, chooses kernels, opens connections; 0 does none

    # Reports
    log_interval: int = 20  # steps per record in the metrics stream
    checkpoint_interval: int = 0  # epochs between checkpoints; 0: only on a signal

    @property
    def targets(self) -> Dict[str, float]:
        return {"map": self.quality_target}

    def __post_init__(self) -> None:
        precision_on_cpu(self, "fp32", "bf16", "fp16")
        at_least(self, 1, "epochs", "width", "bn_group", "batch_size", "eval_batch_size", "detections", "log_interval")
        at_least(self, 1, "dali_threads", "dali_prefetch", "dali_batches")
        at_least(self, 0, "bucket_mb", "warmup_steps", "warmup_factor", "momentum", "weight_decay", "warm_up_steps")
        at_least(self, 0, "checkpoint_interval", "dali_decoder_cache_mb", "dali_hw_decoder_load")
        at_least(self, 32, "image_size")
        above_zero(self, "learning_rate", "decay_factor", "loss_scale", "score_threshold")
        fraction(self, "quality_target", "nms_threshold")
        maps = len(map_sizes(self.image_size))
        reject_if(
            (
                f"image_size={self.image_size} has {maps} feature maps: box_scales needs at least {maps + 1} numbers",
                len(self.box_scales) <= maps,
            ),
            ("blocks needs three numbers, each at least 1", len(self.blocks) != 3 or min(self.blocks) < 1),
            (
                "box_scales must be positive and increasing",
                sorted({0.0, *self.box_scales})[1:] != list(self.box_scales),
            ),
            ("eval_epochs must be at least 1", min((*self.eval_epochs, 1)) < 1),
            (
                "eval_steps needs concurrent_evaluation=false: an epoch of the log ends after its evaluations",
                bool(self.eval_steps) and self.concurrent_evaluation,
            ),
            ("dali_hw_decoder_load must be in 0..1", self.dali_hw_decoder_load > 1),
            ("dali_decoder_cache_mb needs decoder=gpu", self.dali_decoder_cache_mb > 0 and self.decoder == "cpu"),
            ("cuda_graph needs device=gpu", self.device == "cpu" and self.cuda_graph is True),
            (
                "a CUDA graph has no apex: set optimizer_kernel=auto or cuda_graph=false",
                self.cuda_graph is True and self.optimizer_kernel == "apex",
            ),
            (
                "device=cpu has no apex: set optimizer_kernel=auto",
                self.device == "cpu" and self.optimizer_kernel == "apex",
            ),
        )

    def mismatches(self, manifest: Manifest, ranks: int, memory: float) -> List[Mismatch]:
        hint = "set bn_group=1, or take another number of ranks"
        wrong = ranks % self.bn_group != 0
        return [(f"bn_group={self.bn_group} with {ranks} ranks", f"a divisor of {ranks}", hint)] * wrong
