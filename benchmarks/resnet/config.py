"""Hyperparameters of ResNet for all frameworks; standard library only.

config.py of an implementation adds fields of its framework and restricts unsupported values. The host side loads
both files to check a configuration before a run, the training code to run it. Values come from ``systems/*.toml``
and the command line; the defaults are common to NVIDIA's submissions of v0.6 and v0.7 (arguments in their logs), or
defined here. "Epoch": a pass over the training images; "step": an update of the weights.
"""

from dataclasses import dataclass
from typing import Dict, List, Literal, Tuple

from benchmarks.common.config_checks import Manifest, Mismatch, above_zero, at_least, fraction, reject_if


@dataclass(frozen=True)
class Hyperparameters:
    # The run
    device: Literal["gpu", "cpu"] = "gpu"  # a rank uses one GPU, or a part of the CPU cores
    seed: int = 0  # for initial weights, image order and crops; new for every experiment
    round: Literal["v0.5", "v0.6", "v0.7"] = "v0.7"  # MLPerf round, which determines the log format
    quality_target: float = 0.759  # top-1 accuracy (0 to 1) at which the run stops
    epochs: int = 90  # maximum number of epochs

    # The network
    depth: Literal[18, 34, 50, 101, 152] = 50  # layers with weights; 50 is MLPerf's
    num_classes: int = 1000  # labels in the data set
    layout: Literal["NHWC", "NCHW"] = "NHWC"  # memory order of the axes; tensor cores need NHWC
    precision: Literal["fp16", "bf16", "tf32", "fp32"] = "fp16"  # of products; weights and statistics stay fp32
    pad_channels: bool = True  # add an empty fourth colour channel, which NHWC fp16 convolutions like
    zero_init_residual: bool = False  # initialize the last gamma of a block with 0 (arXiv 1706.02677, 5.1)
    batch_norm_momentum: float = 0.9  # weight of the old running statistics in a step
    batch_norm_epsilon: float = 1e-5  # added to the variance

    # The loss
    label_smoothing: float = 0.1  # probability mass given evenly to all classes, 0 to 1
    loss_scale: float = 128.0  # factor on a rank's mean loss; batch_size makes it the sum, as in NVIDIA's submissions

    # The optimizer
    batch_size: int = 208  # images per rank and step
    accumulation_steps: int = 1  # micro-batches of batch_size / accumulation_steps images per step
    optimizer: Literal["sgd", "lars"] = "lars"  # sgd has momentum; lars is arXiv 1708.03888
    learning_rate: float = 7.4  # base value, after warm-up, for the global batch
    end_learning_rate: float = 0.0001  # value at the end of the pow2 schedule
    schedule: Literal["pow2", "step"] = "pow2"  # polynomial of power 2, or drops at decay_epochs
    warmup_epochs: float = 5.0  # linear up to the base value
    decay_epochs: Tuple[int, ...] = ()  # for "step": the learning rate drops after these epochs
    decay_factor: float = 0.1  # for "step": factor on the learning rate
    momentum: float = 0.9  # of both optimizers; lars corrects it where the learning rate changes
    weight_decay: float = 5e-5  # L2 penalty added to the gradient
    no_weight_decay: Tuple[str, ...] = ("gamma", "beta")  # parameters without it, by ending; with lars as submitted
    lars_eta: float = 0.001  # trust coefficient
    lars_epsilon: float = 0.0  # added to the denominator of the trust ratio

    # Ranks
    warm_up_steps: int = 3  # on noise, before the clock: compiles, chooses kernels, opens connections; 0 does none

    # Evaluation
    eval_period: int = 4  # epochs between evaluations
    eval_offset: int = 0  # evaluates after the epochs e, counted from 0, with e % eval_period == eval_offset
    eval_batch_size: int = 0  # images per rank; 0 means batch_size

    # The input
    image_size: int = 224  # pixels, after the crop
    eval_resize: int = 256  # pixels of the short edge before the centre crop of image_size
    antialias: bool = False  # antialias when downscaling; DALI's default since 1.16, thus submitted since v3.0
    crop_area: Tuple[float, ...] = (0.05, 1.0)  # minimum and maximum area of a training crop, as fractions
    crop_ratio: Tuple[float, ...] = (0.75, 1.3333333333333333)  # width / height of training crops
    mirror: bool = True  # flip half of the training images horizontally
    # DALI: "submitted" is a flag of NVIDIA's common/dali.py, with values in config_*.sh (v0.5 to v4.0).
    dali_threads: int = 3  # CPU threads per rank that decode and augment; submitted: dali-threads, 3, on H100 6 to 8
    dali_prefetch: int = 3  # batches kept ready; submitted: dali-prefetch-queue, 2 to 5
    dali_shuffle_buffer: int = 4096  # records in the shuffle buffer
    dali_decoder_cache_mb: int = 0  # GPU memory for decoded images; 0: decode only crops
    dali_hw_decoder_load: float = 0.0  # fraction of images for the JPEG unit; submitted: A100 0 to 0.7, H100 0.99
    dali_nvjpeg_padding_mb: int = 256  # nvJPEG's buffers, per thread 1 on the GPU, 2 pinned; v0.5 on DGX-1: 64
    dali_preallocate_width: int = 5980  # pixels for which the JPEG unit has memory; submitted since v2.1
    dali_preallocate_height: int = 6430  # pixels, the same; together ImageNet's largest image
    dali_decoder_hint: int = 0  # bytes per decoded image reserved at the start; submitted since v2.1: 1315942
    dali_crop_hint: int = 0  # bytes per resized crop; submitted since v2.1: 165581
    dali_normalize_hint: int = 0  # bytes per normalized image; submitted since v2.1: 441549
    dali_temp_hint: int = 0  # bytes per batch for resizing's intermediate image; submitted: 871491 x batch_size
    dali_pinned_mb: int = 0  # pinned memory reserved at the start, per rank; v4.0: 20480
    dali_mmap: bool = True  # map the record file; off is better on network file systems

    # Reports
    log_interval: int = 20  # steps per record in the metrics stream
    checkpoint_interval: int = 4  # epochs between checkpoints; 0: only on a signal

    @property
    def targets(self) -> Dict[str, float]:
        """Targets by the names in benchmark.toml."""
        return {"accuracy": self.quality_target}

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "accumulation_steps", "epochs", "log_interval", "dali_threads", "dali_prefetch")
        at_least(self, 0, "eval_batch_size", "warm_up_steps", "dali_decoder_cache_mb", "dali_nvjpeg_padding_mb")
        at_least(self, 0, "dali_pinned_mb", "dali_decoder_hint", "dali_crop_hint", "dali_normalize_hint")
        at_least(self, 0, "dali_temp_hint", "dali_preallocate_width", "dali_preallocate_height", "dali_hw_decoder_load")
        at_least(self, 2, "num_classes")
        above_zero(self, "learning_rate")
        at_least(self, 16, "image_size")
        fraction(self, "quality_target")
        reject_if(
            ("dali_decoder_cache_mb needs device=gpu", self.device == "cpu" and self.dali_decoder_cache_mb > 0),
            ("dali_hw_decoder_load must be in 0..1", self.dali_hw_decoder_load > 1),
            (
                f"batch_size={self.batch_size} must be a multiple of accumulation_steps={self.accumulation_steps}",
                self.batch_size % self.accumulation_steps != 0,
            ),
            ("schedule=step needs decay_epochs", self.schedule == "step" and not self.decay_epochs),
            ("eval_offset must be in 0..eval_period-1", not 0 <= self.eval_offset < self.eval_period),
            (
                f"warmup_epochs={self.warmup_epochs:g} must be in 0..epochs={self.epochs}: set warmup_epochs",
                not 0 <= self.warmup_epochs <= self.epochs,
            ),
            ("label_smoothing must be in 0..1", not 0 <= self.label_smoothing < 1),
            ("eval_resize must not be smaller than image_size", self.eval_resize < self.image_size),
            ("crop_area needs two values, smallest first, in 0..1", not _is_range(self.crop_area, 1.0)),
            ("crop_ratio needs two values, smallest first", not _is_range(self.crop_ratio, 1e9)),
        )

    @staticmethod
    def data_settings(manifest: Manifest) -> Dict[str, int]:
        """Return the values that the data set determines unless they are set."""
        return {"num_classes": len(manifest["classes"])}

    def mismatches(self, manifest: Manifest, ranks: int, memory: float) -> List[Mismatch]:
        """Return why the ranks cannot train on a data set."""
        classes = len(manifest["classes"])
        if classes == self.num_classes:
            return []
        hint = f"set num_classes={classes}, or give a data set of {self.num_classes} classes"
        return [(f"{classes} classes", f"num_classes={self.num_classes}", hint)]


def _is_range(values: Tuple[float, ...], largest: float) -> bool:
    return len(values) == 2 and 0 < values[0] <= values[1] <= largest
