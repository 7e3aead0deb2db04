"""Hyperparameters of gpt-oss-20b's pretraining in PyTorch: one flat, frozen dataclass; standard library only.

The host loads this file to check a configuration, the training code to use it. Defaults are those of the reference
(mlcommons/training, small_llm_moe_pretraining/primus: conf/gpt_oss_20B-pretrain-nvidia.yaml, Primus's gpt_oss_20B.yaml
and config_B200_1x8x1.sh). A sample is a sequence.
"""

from dataclasses import dataclass
from typing import List, Literal

from benchmarks.common.config_checks import Manifest, Mismatch, above_zero, at_least, precision_on_cpu, reject_if
from benchmarks.llama import memory
from benchmarks.llama.config_checks import Derived, problems, text_mismatches
from benchmarks.llama.shapes import Scaling, Shape


@dataclass(frozen=True)
class Config(Derived):
    # All parameters of train.py except its folders.

    # Run
    device: Literal["gpu", "cpu"] = "gpu"  # a rank uses one GPU, or a part of the CPU cores
    seed: int = 0  # for initial weights and sample order; new for every experiment
    round: Literal["v6.0", "v6.1"] = "v6.1"  # MLPerf round, which determines the log format
    quality_target: float = 3.34  # log perplexity at or below which the run stops
    epochs: int = 1  # always 1; max_samples and max_steps set the length
    max_steps: int = 1200000  # the decay ends warmup_steps before this step
    max_samples: int = 1000000000  # maximum number of training samples

    # Network (OpenAI 2025, arXiv 2508.10925, 20B)
    sequence_length: int = 8192  # tokens per sample
    layers: int = 24  # Transformer layers
    width: int = 2880  # hidden size
    heads: int = 64  # query heads
    key_value_heads: int = 8  # key and value heads (grouped-query attention)
    head_size: int = 64  # size of a head
    window: int = 129  # sliding window of layers 0, 2, 4, ...; 0: full attention
    sinks: bool = False  # attention sinks: a learned logit per head in the softmax; used in NVIDIA's v6.0
    qk_norm: bool = True  # RMSNorm of queries and keys per head; not used in NVIDIA's v6.0
    experts: int = 32  # experts per layer
    chosen_experts: int = 4  # experts per token
    router_dtype: Literal["fp32", "bf16"] = "bf16"  # dtype of the router's GEMM; fp32 in AMD's configuration
    inner_width: int = 2880  # intermediate size of an expert
    gate: Literal["silu", "gpt_oss"] = "silu"  # SwiGLU, or the clamped variant of gpt-oss, used in NVIDIA's v6.0
    rope_base: float = 150000.0  # base of the rotary embedding
    norm_epsilon: float = 1e-6  # epsilon of RMSNorm
    vocabulary_multiple: int = 128  # pad the vocabulary to a multiple of this
    initial_weights: float = 0.008  # standard deviation; of output projections, divided by (2 * layers) ** 0.5
    precision: Literal["bf16", "tf32", "fp32"] = "bf16"  # of GEMMs and activations; weights and AdamW stay in fp32

    # Input
    eod_mask_loss: bool = True  # exclude labels after end-of-document tokens, as in the reference; not in NVIDIA's v6.0
    batch_size: int = 2  # samples per rank and step
    micro_batch: int = 2  # maximum samples per micro-batch
    prefetch: int = 4  # batches prefetched by threads

    # Optimizer
    optimizer: Literal["adamw"] = "adamw"  # Loshchilov and Hutter 2019, arXiv 1711.05101
    learning_rate: float = 4e-4  # after the warm-up
    end_learning_rate: float = 4e-5  # at max_steps
    warmup_steps: int = 128  # linear
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    epsilon: float = 1e-5  # added to the root of the second moment
    weight_decay: float = 0.1  # of all parameters except norms and sinks
    gradient_clip: float = 1.0  # maximum gradient norm

    # Parallelism, besides data parallelism with FSDP
    expert_parallelism: int = 8  # ranks that share the experts of a layer
    gradient_reduction: Literal["fp32", "bf16"] = "fp32"  # dtype of the reduce-scatter

    # Evaluation
    eval_interval_samples: int = 12288  # training samples between evaluations
    eval_samples: int = 1024  # number of evaluation samples
    eval_shuffle: bool = False  # samples in GPTDataset's order, as in the reference; false: the first eval_samples
    eval_batch_size: int = 1  # samples per rank

    # Execution
    recompute: bool = False  # activation checkpointing of every layer
    recompute_layers: int = 0  # with recompute=false: number of first layers with activation checkpointing
    loss_rows: int = 2048  # positions per chunk of logits; 0: all of a micro-batch
    compile: bool = False  # torch.compile of attention, the experts' gate and the loss; GPU only
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
            Scaling(),
            self.norm_epsilon,
            self.head_size,
            self.experts,
            self.chosen_experts,
            self.gate,
            self.window,
            self.qk_norm,
            self.router_dtype,
            self.sinks,
        )

    def __post_init__(self) -> None:
        precision_on_cpu(self, "fp32", "bf16")
        at_least(self, 1, "max_steps", "max_samples", "layers", "width", "heads", "key_value_heads", "inner_width")
        at_least(self, 1, "head_size", "experts", "chosen_experts", "vocabulary_multiple", "batch_size", "micro_batch")
        at_least(self, 1, "expert_parallelism", "eval_interval_samples", "eval_samples", "eval_batch_size")
        at_least(self, 1, "log_interval")
        at_least(self, 2, "sequence_length")
        at_least(self, 0, "prefetch", "warmup_steps", "end_learning_rate", "weight_decay", "loss_rows", "warm_up_steps")
        at_least(self, 0, "recompute_layers", "checkpoint_interval", "window")
        above_zero(self, "learning_rate", "epsilon", "norm_epsilon", "gradient_clip", "quality_target", "rope_base")
        above_zero(self, "initial_weights")
        reject_if(
            (f"recompute_layers must be at most layers={self.layers}", self.recompute_layers > self.layers),
            ("epochs must be 1: set max_samples or max_steps to train longer", self.epochs != 1),
            (
                f"chosen_experts={self.chosen_experts} must be at most experts={self.experts}",
                self.chosen_experts > self.experts,
            ),
            (
                f"expert_parallelism={self.expert_parallelism} must divide experts={self.experts}",
                self.experts % self.expert_parallelism != 0,
            ),
            (
                f"grouped GEMMs need width={self.width} and inner_width={self.inner_width} to be multiples of 8",
                self.width % 8 != 0 or self.inner_width % 8 != 0,
            ),
            ("device=cpu does not support compile: set compile=false", self.device == "cpu" and self.compile),
            *problems(self),
        )

    # -- memory; a test compares the formulas with PyTorch's saved tensors ---------------------------

    def activation_bytes(self) -> int:
        """Return the bytes of activations per layer and position for the backward pass.

        Inputs and outputs of both norms, queries and keys (also before qk_norm), values and the attention output; per
        chosen expert: permuted input, gate, up, activation, product, and the output before and after unpermuting.
        """
        shape = self.shape(1)
        attention = 4 * self.width + (3 if self.qk_norm else 2) * (shape.queries + shape.keys)
        return memory.size_of(self) * (attention + self.chosen_experts * (3 * self.width + 4 * self.inner_width))

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
            share_of=self.expert_parallelism,
        )

    def mismatches(self, manifest: Manifest, ranks: int, available: float) -> List[Mismatch]:
        """Check the data set, the number of ranks and the memory (bytes per rank)."""
        mismatches = text_mismatches(self, manifest)
        copies, remainder = divmod(ranks, self.expert_parallelism)
        if remainder:
            hint = "use another number of ranks, or set expert_parallelism"
            mismatches.append((f"{ranks} ranks", f"a multiple of expert_parallelism={self.expert_parallelism}", hint))
        elif self.expert_parallelism > 1 and (self.width % copies or self.inner_width % copies):
            expected = f"width={self.width} and inner_width={self.inner_width} to be multiples of the copies"
            mismatches.append((f"{copies} copies of each expert", expected, "set a higher expert_parallelism"))
        return mismatches + memory.mismatches(
            self, self.needed_memory(manifest["facts"]["vocabulary"], ranks), available
        )
