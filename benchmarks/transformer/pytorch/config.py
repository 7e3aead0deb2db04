"""Hyperparameters of the Transformer in PyTorch: one flat, frozen dataclass; standard library only.

The host side loads this file to check a configuration before anything starts, the training code to run it.
Values come from ``systems/*.toml`` and the command line; the defaults are those that NVIDIA's v0.6 and v0.7 submissions
have in common (run_training.sh; architecture transformer_wmt_en_de_big_t2t of fairseq/models/transformer.py), and ours
where those say nothing. "Epoch" is one pass over the training pairs, "step" one update of the weights, "position" a
place of a padded batch.
"""

from dataclasses import dataclass
from typing import Dict, List, Literal

from benchmarks.common.config_checks import Manifest, Misfit, above_zero, at_least, reject_if, too_few


@dataclass(frozen=True)
class Config:
    # Everything that train.py needs to know, except where the data and the results are.

    # The run
    device: Literal["gpu", "cpu"] = "gpu"  # one rank drives one GPU, or its share of the CPU's cores
    seed: int = 0  # draws weights, dropout and the order of the batches; a new one for each experiment
    round: Literal["v0.5", "v0.6", "v0.7"] = "v0.7"  # of MLPerf, in whose dialect the log is
    quality_target: float = 25.0  # BLEU, 0..100, at which the run stops
    epochs: int = 30  # at most
    stop_at_target: bool = True  # false trains all epochs and takes the best of them

    # The network (Vaswani et al. 2017, arXiv 1706.03762, "big")
    layers: int = 6  # of the encoder, and as many of the decoder
    width: int = 1024  # of the embeddings and of what layers exchange
    heads: int = 16  # of each attention
    inner_width: int = 4096  # of the feed-forward layers
    norm: Literal["pre", "post"] = "pre"  # layer norm before each block and at the end, or behind each residual sum
    attention_bias: bool = False  # biases of the attentions' projections; the feed-forward layers always have them
    vocabulary_multiple: int = 8  # the vocabulary is padded to a multiple of this; nothing translates to the padding
    precision: Literal["fp16", "bf16", "tf32", "fp32"] = "fp16"  # of activations; weights and Adam stay in fp32

    # Regularisation and the loss
    dropout: float = 0.1  # of embeddings and of each block's output
    attention_dropout: float = 0.1  # of the attentions' weights
    relu_dropout: float = 0.1  # inside the feed-forward layers
    label_smoothing: float = 0.1  # share of the probability that all entries of the vocabulary have together
    loss_scale: float = 128.0  # for fp16: the first factor on the loss, halved by an overflow
    loss_scale_window: int = 2000  # steps without an overflow after which loss_scale is doubled
    loss_chunk: int = 0  # positions whose logits exist at a time; 0: as many as the device is fastest with

    # The input
    batch_size: int = 10240  # positions per rank and step: sentences times the longest of them, on the longer side
    max_length: int = 64  # tokens, end included; pairs with a longer side are not trained on
    length_multiple: int = 2  # lengths of batches are multiples of this
    packed: bool = True  # compute no padding but in the attentions, in batches that have a tenth or more of it
    prefetch: int = 4  # batches built ahead by a thread

    # The optimizer
    optimizer: Literal["adam"] = "adam"  # Kingma and Ba 2015
    optimizer_kernel: Literal["auto", "apex", "fused", "plain"] = "auto"  # auto: measured before the first step
    split_optimizer: bool = False  # each rank updates its share of the weights, the others get them from it
    bucket_mb: int = 25  # megabytes of gradients in an all-reduce, begun in the backward pass; 0: one, after it
    gradient_compression: Literal["none", "fp16", "bf16"] = "none"  # type in which gradients travel
    learning_rate: float = 1.976e-3  # at the end of the warm-up; then by the inverse square root of the step
    warmup_steps: int = 1000  # linear from 0
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.98  # decay of the second moment
    epsilon: float = 1e-9  # added to the root of the second moment
    gradient_clip: float = 0.0  # largest norm of the whole gradient; 0: any

    # Evaluation
    beam: int = 4  # hypotheses of a sentence that are kept
    length_penalty: float = 0.6  # scores are divided by ((constant + length) / (constant + 1)) to this power
    length_constant: float = 5.0  # constant in it (arXiv 1609.08144, equation 14); 0: the length itself, as v0.5
    longest_factor: float = 1.0  # a translation ends after longest_factor times its source's tokens ...
    longest_offset: int = 50  # ... plus these
    eval_batch_size: int = 128  # sentences per rank that are translated at once
    bleu: Literal["submitted", "plain"] = "submitted"  # scored as in its round, or of text, cut at white space

    # How it runs
    kernels: Literal["auto", "plain", "triton", "apex"] = "auto"  # of loss and norms; auto: measured at the start
    attention: Literal["auto", "fused", "plain"] = "auto"  # fused: PyTorch's own, which auto takes where it exists
    compile: bool = False  # on a GPU: torch.compile, for lengths that vary
    warm_up_steps: int = 3  # on synthetic data, before the clock; 0 does none
    log_interval: int = 100  # steps per record in the metrics stream, and between looks for a signal
    checkpoint_interval: int = 0  # epochs between checkpoints; 0 keeps none but on a signal

    @property
    def targets(self) -> Dict[str, float]:
        # Target of each quality, by the names of benchmark.toml.
        return {"bleu": self.quality_target}

    def __post_init__(self) -> None:
        at_least(self, 1, "layers", "width", "heads", "inner_width", "vocabulary_multiple", "batch_size")
        at_least(self, 1, "max_length", "length_multiple", "warmup_steps", "beam", "eval_batch_size", "epochs")
        at_least(self, 1, "log_interval", "loss_scale_window", "longest_offset")
        at_least(self, 0, "loss_chunk", "prefetch", "warm_up_steps", "checkpoint_interval", "gradient_clip")
        at_least(self, 0, "bucket_mb", "length_penalty", "length_constant", "longest_factor")
        above_zero(self, "quality_target", "learning_rate", "epsilon", "loss_scale")
        reject_if(
            ("device=cpu has no tf32: set precision=fp32", self.device == "cpu" and self.precision == "tf32"),
            (
                "device=cpu has no apex: set optimizer_kernel=auto",
                self.device == "cpu" and self.optimizer_kernel == "apex",
            ),
            ("device=cpu does not support compile: set compile=false", self.device == "cpu" and self.compile),
            (
                f"width={self.width} must be a multiple of 2 * heads={2 * self.heads}",
                self.width % (2 * self.heads) != 0,
            ),
            (
                f"batch_size={self.batch_size} must hold a pair of max_length={self.max_length}",
                self.batch_size < self.max_length,
            ),
            ("quality_target is BLEU in 0..100", self.quality_target > 100),
            ("beta1 and beta2 must be in 0..1", not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1)),
            *(
                (f"{name} must be at least 0 and below 1", not 0 <= getattr(self, name) < 1)
                for name in ("dropout", "attention_dropout", "relu_dropout", "label_smoothing")
            ),
        )

    def mismatches(self, manifest: Manifest, ranks: int, memory: float) -> List[Misfit]:
        """Return why the ranks cannot train on a data set: each takes a batch of at least one pair."""
        return too_few(manifest, "pairs", ranks)
