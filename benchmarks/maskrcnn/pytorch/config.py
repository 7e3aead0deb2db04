"""Hyperparameters of Mask R-CNN in PyTorch: one flat, frozen dataclass; standard library only.

The defaults are common to NVIDIA's submissions of v0.5 to v0.7 (maskrcnn_benchmark/config/defaults.py and
e2e_mask_rcnn_R_50_FPN_1x.yaml), or defined here. "Epoch": a pass over the training images with objects; "step": an
update; "RoI": a proposed box for the heads.
"""

from dataclasses import dataclass
from typing import Dict, Literal, Tuple

from benchmarks.common.config_checks import above_zero, at_least, fraction, precision_on_cpu, reject_if


@dataclass(frozen=True)
class Config:
    """Everything that train.py needs to know, except where the data and the results are."""

    # The run
    device: Literal["gpu", "cpu"] = "gpu"  # a rank uses one GPU, or a part of the CPU cores
    seed: int = 0  # for initial weights, image order, sampled anchors and RoIs; new for every experiment
    round: Literal["v0.5", "v0.6", "v0.7"] = "v0.7"  # MLPerf round, which determines the log format
    box_target: float = 0.377  # AP of boxes at which the run stops, with mask_target
    mask_target: float = 0.339  # AP of masks
    epochs: int = 26  # maximum number of epochs
    stop_at_target: bool = True  # false trains all epochs

    # The backbone (ResNet, He et al. 2016; FPN, Lin et al. 2017)
    backbone: str = ""  # file with weights: R-50.pkl of Detectron, or a state_dict with torchvision's names; "": none
    stages: Tuple[int, ...] = (3, 4, 6, 3)  # bottleneck blocks of the stages 2 to 5
    stem_width: int = 64  # channels of the first convolution; stage 2 has four times as many, later stages double it
    frozen_stages: int = 2  # of 5 (the first is the stem), counted from the input, that are not trained
    stride_in_1x1: bool = True  # of bottlenecks, as R-50.pkl; false: in the 3x3, as torchvision's weights
    fpn_width: int = 256  # channels of the pyramid levels
    precision: Literal["fp16", "bf16", "tf32", "fp32"] = "fp16"  # of activations; weights and optimizer stay in fp32

    # The region proposals (Ren et al. 2015)
    anchor_sizes: Tuple[int, ...] = (32, 64, 128, 256, 512)  # pixels, by level of strides 4 to 64
    anchor_ratios: Tuple[float, ...] = (0.5, 1.0, 2.0)  # height to width
    rpn_fg_iou: float = 0.7  # IoU from which an anchor is an object
    rpn_bg_iou: float = 0.3  # IoU below which it is background
    anchors_per_image: int = 256  # that the loss samples
    rpn_fg_fraction: float = 0.5  # maximum fraction of objects in them
    rpn_pre_nms_top_n: int = 2000  # anchors per level and image before NMS
    rpn_pre_nms_top_n_test: int = 1000  # the same in evaluation
    rpn_post_nms_top_n: int = 2000  # after NMS, over all levels and all images of a rank's batch
    rpn_post_nms_top_n_test: int = 1000  # over all levels, per image
    rpn_nms_iou: float = 0.7  # IoU above which the lower score is suppressed

    # The heads (He et al. 2017, arXiv 1703.06870)
    roi_fg_iou: float = 0.5  # IoU from which a RoI is an object
    rois_per_image: int = 512  # that the losses sample
    roi_fg_fraction: float = 0.25  # maximum fraction of objects in them
    box_width: int = 1024  # of the two layers of the box head
    mask_width: int = 256  # channels of the mask head
    mask_layers: int = 4  # convolutions of the mask head
    score_threshold: float = 0.05  # minimum score of detections
    nms_iou: float = 0.5  # IoU threshold of NMS within a class
    detections: int = 100  # maximum number per image

    # The corners of boxes
    inclusive_corners: bool = True  # where boxes are resized, pooled and drawn they end at their last pixel, as
    # submitted; false: behind it

    # The loss
    loss_scale: float = 65536.0  # for fp16: first factor on the loss; halved where gradients overflow
    loss_scale_interval: int = 1000  # steps without overflow after which it is doubled

    # The optimizer
    batch_size: int = 4  # images per rank and step
    optimizer: Literal["sgd"] = "sgd"  # with momentum
    optimizer_kernel: Literal["auto", "fused", "plain"] = "auto"  # auto: measured before the first step
    bucket_mb: int = 25  # megabytes of gradients per all-reduce, overlapped with the backward pass; 0: one, after it
    gradient_compression: Literal["none", "fp16", "bf16"] = "none"  # type in which gradients travel
    learning_rate: float = 0.02  # base value, after warm-up, for the global batch; biases have twice as much
    momentum: float = 0.9  # of SGD
    weight_decay: float = 0.0001  # not of biases
    gradient_clip: float = 0.0  # maximum norm of all gradients; 0: not clipped, as submitted
    warmup_steps: int = 500  # linear, see warmup_factor
    warmup_factor: float = 0.0  # increase of the rates per step; 0: from a third of the base rates
    decay_steps: Tuple[int, ...] = (60000, 80000)  # steps at which the rate is multiplied by decay_factor
    decay_factor: float = 0.1  # factor on the rate at decay_steps

    # The input
    short_side: int = 800  # pixels of the shorter edge after resizing
    long_side: int = 1333  # unless the longer one would exceed this
    bucket_step: int = 128  # the longer edge is padded to a multiple: few shapes, compiled or captured only one time
    pixel_mean: Tuple[float, ...] = (102.9801, 115.9465, 122.7717)  # of the channels, in 0..255
    pixel_std: Tuple[float, ...] = (1.0, 1.0, 1.0)  # divisor after the subtraction
    bgr: bool = True  # order of the channels, as R-50.pkl has it
    flip: float = 0.5  # fraction of images that are mirrored
    objects: int = 100  # maximum number per image; COCO's images have up to 93 besides crowds
    threads: int = 4  # that decode images, per rank
    prefetch: int = 4  # batches read ahead; 0 reads in the loop

    # How it is computed
    kernels: Literal["auto", "plain", "triton", "torchvision"] = "auto"  # auto: measured before the first step
    compile: Literal["auto", "none", "default", "max-autotune-no-cudagraphs"] = "auto"  # backbone, pyramid and heads
    cuda_graph: Literal["auto", True, False] = "auto"  # replay the full step as one graph for each padded shape
    # "auto" is default and true with device=gpu, as far as the installed PyTorch and the kernels allow it.
    warm_up_steps: int = 2  # on noise, before the clock, by shape on a GPU: compiles, captures; 0: none

    # Evaluation
    eval_batch_size: int = 8  # images per rank
    eval_workers: int = 2  # processes that evaluate detections during training
    concurrent_evaluation: bool = True  # continue training during evaluations; false: wait, as v0.5

    # Reports
    log_interval: int = 20  # steps per record in the metrics stream
    checkpoint_interval: int = 0  # epochs between checkpoints; 0: only on a signal

    @property
    def targets(self) -> Dict[str, float]:
        return {"box_ap": self.box_target, "mask_ap": self.mask_target}

    @property
    def edge(self) -> float:
        """1 for boxes that end at the centre of the last pixel when resized, pooled and rasterized, else 0."""
        return 1.0 if self.inclusive_corners else 0.0

    def __post_init__(self) -> None:
        precision_on_cpu(self, "fp32", "bf16", "fp16")
        at_least(self, 1, "batch_size", "eval_batch_size", "epochs", "log_interval", "stem_width", "fpn_width")
        at_least(self, 1, "box_width", "mask_width", "mask_layers", "rpn_pre_nms_top_n", "rpn_post_nms_top_n")
        at_least(self, 1, "rpn_pre_nms_top_n_test", "rpn_post_nms_top_n_test", "anchors_per_image", "rois_per_image")
        at_least(self, 1, "objects", "detections", "threads", "eval_workers", "loss_scale_interval")
        at_least(self, 0, "frozen_stages", "warmup_steps", "warm_up_steps", "prefetch", "checkpoint_interval")
        at_least(self, 0, "bucket_mb", "warmup_factor", "weight_decay", "gradient_clip")
        at_least(self, 32, "short_side", "bucket_step")
        above_zero(self, "learning_rate", "loss_scale", "decay_factor")
        fraction(self, "box_target", "mask_target", "rpn_fg_iou", "rpn_fg_fraction", "roi_fg_iou", "roi_fg_fraction")
        fraction(self, "rpn_nms_iou", "nms_iou")
        reject_if(
            ("stages needs the blocks of four stages, each at least 1", len(self.stages) != 4 or min(self.stages) < 1),
            ("anchor_sizes needs one size for each of five levels", len(self.anchor_sizes) != 5),
            ("rpn_bg_iou must not be above rpn_fg_iou", self.rpn_bg_iou > self.rpn_fg_iou),
            ("pixel_mean and pixel_std need three values", len(self.pixel_mean) != 3 or len(self.pixel_std) != 3),
            ("long_side must not be below short_side", self.long_side < self.short_side),
            ("bucket_step must be a multiple of 32, the stride of the fifth stage", self.bucket_step % 32 != 0),
            ("flip must be in 0..1", not 0 <= self.flip <= 1),
            ("frozen_stages must be at most 5", self.frozen_stages > 5),
            (
                "warmup_steps times warmup_factor must not be above learning_rate: the first rate would be negative",
                self.warmup_steps * self.warmup_factor > self.learning_rate * (1 + 1e-9),
            ),
            ("decay_steps must rise", list(self.decay_steps) != sorted(self.decay_steps)),
            ("cuda_graph needs device=gpu", self.device == "cpu" and self.cuda_graph is True),
            (
                "a CUDA graph reads its rate from the device: set optimizer_kernel=auto or cuda_graph=false",
                self.cuda_graph is True and self.optimizer_kernel == "plain",
            ),
            (
                "device=cpu runs no Triton kernels: set kernels=auto or kernels=plain",
                self.device == "cpu" and self.kernels == "triton",
            ),
        )
