"""Hyperparameters of Llama 3.1 8B's pretraining in PyTorch: one flat, frozen dataclass; standard library only.

The host loads this file to check a configuration, the training code to use it. Defaults are those of the reference
(mlcommons/training, small_llm_pretraining/nemo/pretrain_llama31.py, NeMo's Llama31Config8B and
distributed_fused_adam_with_cosine_annealing). A sample is a sequence.
"""

from dataclasses import dataclass
from typing import List, Literal

from benchmarks.common.config_checks import Manifest, Mismatch, above_zero, at_least, precision_on_cpu, reject_if
from benchmarks.llama import memory
from benchmarks.llama.config_checks import (
    Derived,
    problems,
    problems_of_fp8,
    rank_mismatches,
    text_mismatches,
)
from benchmarks.llama.shapes import Scaling, Shape


@dataclass(frozen=True)
class Config(Derived):
    # All parameters of train.py except its folders.

    # Run
    device: Literal["gpu", "cpu"] = "gpu"  # a rank uses one GPU, or a part of the CPU cores
    seed: int = 0  # for initial weights and sample order; new for every experiment
    round: Literal["v5.1", "v6.0", "v6.1"] = "v6.1"  # MLPerf round, which determines the log format
    quality_target: float = 3.3  # log perplexity at or below which the run stops
    epochs: int = 1  # always 1; max_samples and max_steps set the length
    max_steps: int = 1200000  # end of the decay and latest end of the run
    max_samples: int = 1000000000  # maximum number of training samples

    # Network (Grattafiori et al. 2024, arXiv 2407.21783, 8B)
    sequence_length: int = 8192  # tokens per sample
    layers: int = 32  # Transformer layers
    width: int = 4096  # hidden size
    heads: int = 32  # query heads
    key_value_heads: int = 8  # key and value heads (grouped-query attention)
    inner_width: int = 14336  # intermediate size of the MLP
    rope_base: float = 500000.0  # base of the rotary embedding
    rope_factor: float = 8.0  # frequency scaling of Llama 3.1: divisor of low frequencies; 1: none
    rope_low_frequency: float = 1.0  # frequencies with fewer turns within rope_context are low
    rope_high_frequency: float = 4.0  # frequencies with more turns are not scaled
    rope_context: int = 8192  # context length before the scaling
    norm_epsilon: float = 1e-5  # epsilon of RMSNorm
    vocabulary_multiple: int = 128  # pad the vocabulary to a multiple of this
    initial_weights: float = 0.02  # standard deviation; of output projections, divided by (2 * layers) ** 0.5
    precision: Literal["bf16", "tf32", "fp32"] = "bf16"  # of GEMMs and activations; weights and AdamW stay in fp32

    # Input
    batch_size: int = 4  # samples per step of a data-parallel rank: a rank, or the ranks that share samples
    micro_batch: int = 1  # maximum samples per micro-batch of a tensor- or context-parallel group
    prefetch: int = 4  # batches prefetched by threads

    # Optimizer
    optimizer: Literal["adamw"] = "adamw"  # Loshchilov and Hutter 2019, arXiv 1711.05101
    learning_rate: float = 5e-4  # after the warm-up
    end_learning_rate: float = 5e-5  # at max_steps
    warmup_steps: int = 512  # linear
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    epsilon: float = 1e-5  # added to the root of the second moment
    weight_decay: float = 0.1  # of all parameters except norms
    gradient_clip: float = 1.0  # maximum gradient norm

    # Parallelism, besides data parallelism with FSDP
    tensor_parallelism: int = 1  # tensor-parallel ranks, with sequence parallelism
    context_parallelism: int = 1  # context-parallel ranks
    gradient_reduction: Literal["fp32", "bf16"] = "fp32"  # dtype of the reduce-scatter

    # Evaluation
    eval_interval_samples: int = 12288  # training samples between evaluations
    eval_samples: int = 1024  # number of evaluation samples
    eval_shuffle: bool = False  # samples in GPTDataset's order, as submitted; false: the first eval_samples
    eval_batch_size: int = 1  # samples per tensor- or context-parallel group

    # Execution
    recompute: bool = False  # activation checkpointing of every layer
    recompute_layers: int = 0  # with recompute=false: number of first layers with activation checkpointing
    loss_rows: int = 2048  # positions per chunk of logits; 0: all of a micro-batch
    attention: Literal["auto", "default", "cudnn"] = "auto"  # kernel; auto: cuDNN's if faster than the default
    compile: bool = False  # torch.compile of each layer and the loss; GPU only
    fp8: Literal["none", "scaled_mm", "scaled_mm_head"] = "none"  # FP8 GEMMs in the layers, or also in the LM head
    warm_up_steps: int = 2  # steps on synthetic data before run_start
    log_interval: int = 10  # steps per record of metrics.jsonl, and between checks for signals
    checkpoint_interval: int = 0  # evaluations between checkpoints; 0: only on a signal
    async_checkpoints: bool = True  # write checkpoints from a copy in main memory while training continues

    def shape(self, vocabulary: int) -> Shape:
        return Shape(
            vocabulary,
            self.layers,
            self.width,
            self.heads,
            self.key_value_heads,
            self.inner_width,
            self.rope_base,
            Scaling(self.rope_factor, self.rope_low_frequency, self.rope_high_frequency, self.rope_context),
            self.norm_epsilon,
        )

    def __post_init__(self) -> None:
        precision_on_cpu(self, "fp32", "bf16")
        at_least(self, 1, "max_steps", "max_samples", "layers", "width", "heads", "key_value_heads", "inner_width")
        at_least(self, 1, "rope_factor", "rope_context", "vocabulary_multiple", "batch_size", "micro_batch")
        at_least(self, 1, "tensor_parallelism", "context_parallelism", "eval_interval_samples", "eval_samples")
        at_least(self, 1, "eval_batch_size", "log_interval")
        at_least(self, 2, "sequence_length")
        at_least(self, 0, "prefetch", "warmup_steps", "end_learning_rate", "weight_decay", "loss_rows", "warm_up_steps")
        at_least(self, 0, "recompute_layers", "checkpoint_interval", "rope_low_frequency")
        above_zero(self, "learning_rate", "epsilon", "norm_epsilon", "gradient_clip", "quality_target", "rope_base")
        above_zero(self, "initial_weights")
        reject_if(
            (f"recompute_layers must be at most layers={self.layers}", self.recompute_layers > self.layers),
            ("epochs must be 1: set max_samples or max_steps to train longer", self.epochs != 1),
            ("device=cpu does not support compile: set compile=false", self.device == "cpu" and self.compile),
            (
                "rope_high_frequency must be above rope_low_frequency",
                self.rope_high_frequency <= self.rope_low_frequency,
            ),
            *problems(self),
            *problems_of_fp8(self),
        )

    # -- memory; a test compares the formulas with PyTorch's saved tensors ---------------------------

    def activation_bytes(self) -> int:
        """Return the bytes of activations per layer and position for the backward pass.

        Inputs and outputs of both norms, queries, keys, values, the attention output, gate, silu(gate), up and their
        product. FP8 GEMMs save their inputs in one byte per value. torch.compile recomputes silu and shares casts.
        """
        width, keys, inner = self.width, self.shape(1).keys, self.inner_width * (3 if self.compile else 4)
        if self.fp8 == "none":
            return memory.size_of(self) * (6 * width + 2 * keys + inner)
        values = 4 * width + 2 * keys + inner - self.inner_width
        return memory.size_of(self) * values + (3 if self.compile else 6) * width + self.inner_width

    def needed_memory(self, vocabulary: int, ranks: int) -> float:
        """Return the bytes per rank: weights, AdamW's state, gradients, activations, logits."""
        weights = memory.weights_of(self, vocabulary)
        count = weights.layer * self.layers + weights.outside
        return memory.needed(
            self,
            vocabulary,
            ranks,
            state=12 * count,  # fp32: weights and moments
            gradients=4 * count,
            activation_bytes=self.activation_bytes(),
        )

    def mismatches(self, manifest: Manifest, ranks: int, available: float) -> List[Mismatch]:
        """Check the data set, the number of ranks and the memory (bytes per rank)."""
        mismatches = rank_mismatches(self, ranks) + text_mismatches(self, manifest)
        return mismatches + memory.mismatches(
            self, self.needed_memory(manifest["facts"]["vocabulary"], ranks), available
        )
