"""Hyperparameters of BERT pretraining in PyTorch: one flat, frozen dataclass; standard library only.

The host side loads this file to check a configuration before anything starts, the training code to run it.
Values come from ``systems/*.toml`` and the command line; the defaults are those that NVIDIA's v0.7 submissions have in
common (run.sub, run_pretraining.py, the published bert_config.json of BERT-Large), and ours where those say nothing.
"Sample" is a pair of texts, "step" one update of the weights; a run counts samples and has one epoch, as submitted.
"""

from dataclasses import dataclass
from typing import Dict, List, Literal

from benchmarks.common.config_checks import Manifest, Misfit, above_zero, at_least, fraction, reject_if, too_few

Attention = Literal["auto", "flash", "varlen", "grouped", "padded"]


@dataclass(frozen=True)
class Config:
    # Everything that train.py needs to know, except where the data and the results are.

    # The run
    device: Literal["gpu", "cpu"] = "gpu"  # one rank drives one GPU, or its share of the CPU's cores
    seed: int = 0  # draws weights, dropout and the order of the samples; a new one for each experiment
    round: Literal["v0.7"] = "v0.7"  # of MLPerf, in whose dialect the log is
    quality_target: float = 0.712  # share of the masked words that are predicted, at which the run stops
    epochs: int = 1  # a run is one epoch of as many samples as max_samples and max_steps allow
    max_steps: int = 13700  # at which the learning rate is 0
    max_samples: int = 4500000  # at most; a run also ends after max_steps

    # The network (Devlin et al. 2018, arXiv 1810.04805, BERT-Large)
    checkpoint: str = ""  # weights to begin with: a file, or its name in the data folder; empty draws them
    layers: int = 24  # each an attention and two GEMMs
    width: int = 1024  # of the embeddings and of what layers exchange
    heads: int = 16  # of each attention
    inner_width: int = 4096  # between the two GEMMs of a layer
    positions: int = 512  # rows of the table of positions: the longest sample
    vocabulary_multiple: int = 8  # the vocabulary is padded to a multiple of this
    gelu: Literal["tanh", "erf"] = "tanh"  # tanh: the approximation of the submissions (layers/fused_gelu.py)
    dropout: float = 0.1  # of embeddings and of each block's output
    attention_dropout: float = 0.1  # of the attentions' weights
    precision: Literal["fp16", "bf16", "tf32", "fp32"] = "fp16"  # of GEMMs; weights, sums and LAMB stay in fp32

    # The loss
    masked_mean: Literal["global", "batch"] = "batch"  # mean over masked words of a step, or of a rank's part of it
    loss_scale: float = 1048576.0  # for fp16: the first factor on the loss, halved by an overflow
    loss_scale_window: int = 2000  # steps without an overflow after which loss_scale is doubled

    # The input
    batch_size: int = 32  # samples per rank and step
    accumulation: int = 1  # parts of equal size that a batch is computed in
    token_bucket: int = 512  # rows are filled up to a multiple of it, in tokens, where cuda_graph or fp8 needs it
    prefetch: int = 4  # batches built ahead by threads

    # The optimizer (You et al. 2020, arXiv 1904.00962; see benchmarks/common/torch/lamb.py)
    optimizer: Literal["lamb"] = "lamb"  # as apex's FusedLAMB computes it
    optimizer_kernel: Literal["auto", "apex", "fused", "plain"] = "auto"  # auto: measured before the first step
    split_optimizer: bool = False  # each rank updates its share of the weights, by optimizer_kernel=fused
    bucket_mb: int = 25  # megabytes of gradients in an all-reduce, begun in the backward pass; 0: one, after it
    gradient_compression: Literal["none", "fp16", "bf16"] = "none"  # type in which gradients travel
    learning_rate: float = 3.5e-4  # at step 0 of the decay, which begins there whatever the warm-up
    warmup_steps: int = 0  # linear, counted from start_warmup_step
    start_warmup_step: int = 0  # step of the run at which the warm-up began, 0 or below
    decay_power: float = 1.0  # of the polynomial
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.999  # decay of the second moment
    epsilon: float = 1e-6  # added to the root of the second moment
    weight_decay: float = 0.01  # of all tensors but biases and those of layer norms
    attention_norm_decay: bool = False  # of the scales of the attentions' layer norms too, as submitted with fused_mha
    gradient_clip: float = 1.0  # largest norm of the whole gradient; 0: any

    # Evaluation
    eval_start_samples: int = 3000000  # samples trained on before the first
    eval_interval_samples: int = 500000  # and between one and the next
    eval_batch_size: int = 16  # samples per rank

    # How it runs
    attention: Attention = "auto"  # see benchmarks/language/pytorch/attention.py
    compile: bool = False  # on a GPU: torch.compile of each layer, for rows of any length
    cuda_graph: bool = False  # on a GPU: forward and backward of a part as one graph for each length of row
    fp8: Literal["none", "scaled_mm"] = "none"  # GEMMs of the layers in FP8, see benchmarks/language/pytorch/fp8.py
    warm_up_steps: int = 3  # on synthetic data, before the clock; 0 does none
    log_interval: int = 10  # steps per record in the metrics stream, and between looks for a signal
    checkpoint_interval: int = 0  # evaluations between checkpoints; 0 keeps none but on a signal

    @property
    def fills_rows(self) -> bool:
        return self.cuda_graph or self.fp8 != "none"

    @property
    def targets(self) -> Dict[str, float]:
        # Target of each quality, by the names of benchmark.toml.
        return {"masked_accuracy": self.quality_target}

    def __post_init__(self) -> None:
        at_least(self, 1, "max_steps", "max_samples", "layers", "width", "heads", "inner_width", "positions")
        at_least(self, 1, "vocabulary_multiple", "batch_size", "accumulation", "eval_interval_samples")
        at_least(self, 1, "eval_batch_size", "log_interval", "loss_scale_window", "token_bucket")
        at_least(self, 0, "prefetch", "warmup_steps", "eval_start_samples", "warm_up_steps", "checkpoint_interval")
        at_least(self, 0, "bucket_mb", "weight_decay", "gradient_clip", "decay_power")
        above_zero(self, "learning_rate", "epsilon", "loss_scale")
        fraction(self, "quality_target")
        on_cpu = self.device == "cpu"
        reject_if(
            ("epochs must be 1: set max_samples or max_steps to train longer", self.epochs != 1),
            ("device=cpu has no tf32: set precision=fp32", on_cpu and self.precision == "tf32"),
            ("device=cpu has no apex: set optimizer_kernel=auto", on_cpu and self.optimizer_kernel == "apex"),
            (
                f"device=cpu has no {self.attention} attention: set attention=auto",
                on_cpu and self.attention in ("flash", "varlen"),
            ),
            ("device=cpu does not support compile: set compile=false", on_cpu and self.compile),
            ("device=cpu has no CUDA graphs: set cuda_graph=false", on_cpu and self.cuda_graph),
            (
                "attention=grouped reads lengths on the host, which a CUDA graph cannot: set attention=auto or "
                "cuda_graph=false",
                self.cuda_graph and self.attention == "grouped",
            ),
            (
                "attention=varlen does not support dropout: set attention_dropout=0",
                self.attention == "varlen" and self.attention_dropout > 0,
            ),
            ("fp8 requires precision=bf16 outside the GEMMs", self.fp8 != "none" and self.precision != "bf16"),
            (
                f"inner_width={self.inner_width} must be a multiple of 16 for fp8",
                self.fp8 != "none" and self.inner_width % 16 != 0,
            ),
            (f"token_bucket={self.token_bucket} must be a multiple of 16", self.token_bucket % 16 != 0),
            (
                "split_optimizer requires optimizer_kernel=fused or auto",
                self.split_optimizer and self.optimizer_kernel not in ("auto", "fused"),
            ),
            (f"width={self.width} must be a multiple of heads={self.heads}", self.width % self.heads != 0),
            (
                f"batch_size={self.batch_size} must be a multiple of accumulation={self.accumulation}",
                self.batch_size % self.accumulation != 0,
            ),
            (f"width={self.width} must be a multiple of 64: LAMB reads 64 weights at once", self.width % 64 != 0),
            ("start_warmup_step must be 0 or below", self.start_warmup_step > 0),
            ("beta1 and beta2 must be in 0..1", not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1)),
            *(
                (f"{name} must be at least 0 and below 1", not 0 <= getattr(self, name) < 1)
                for name in ("dropout", "attention_dropout")
            ),
        )

    def mismatches(self, manifest: Manifest, ranks: int, memory: float) -> List[Misfit]:
        mismatches = too_few(manifest, "samples", self.batch_size * ranks)
        length = manifest["facts"]["sequence_length"]
        if length > self.positions:
            hint = f"set positions={length}, or prepare the data with a shorter sequence"
            mismatches.append((f"samples of up to {length} tokens", f"at most positions={self.positions}", hint))
        return mismatches
