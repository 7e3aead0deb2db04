"""Hyperparameters of Llama 3.1 8B's pretraining in PyTorch: one flat, frozen dataclass; standard library only.

The host side loads this file to check a configuration before anything starts, the training code to run it. Defaults
are those of the reference (mlcommons/training, small_llm_pretraining/nemo/pretrain_llama31.py, and what it calls:
NeMo's Llama31Config8B and distributed_fused_adam_with_cosine_annealing), ours where those say nothing. "Sample" is a
sequence, "step" one update of the weights.
"""

from dataclasses import dataclass
from typing import List, Literal

from benchmarks.common.config_checks import Manifest, Misfit, above_zero, at_least, precision_on_cpu, reject_if
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
    # Everything that train.py needs to know, except where the data and the results are.

    # The run
    device: Literal["gpu", "cpu"] = "gpu"  # one rank drives one GPU, or its share of the CPU's cores
    seed: int = 0  # initializes the weights and shuffles the samples; a new one for each experiment
    round: Literal["v5.1", "v6.0", "v6.1"] = "v6.1"  # of MLPerf, in whose dialect the log is
    quality_target: float = 3.3  # log perplexity on the evaluation set, or below, at which the run stops
    epochs: int = 1  # a run is one epoch of as many samples as max_samples and max_steps allow
    max_steps: int = 1200000  # at which the learning rate is end_learning_rate
    max_samples: int = 1000000000  # at most; a run also ends after max_steps

    # The network (Grattafiori et al. 2024, arXiv 2407.21783, 8B)
    sequence_length: int = 8192  # tokens of a sample
    layers: int = 32  # each an attention and a feed-forward network
    width: int = 4096  # of the embeddings and of what layers exchange
    heads: int = 32  # of queries in each attention
    key_value_heads: int = 8  # of keys and values, each shared by as many queries' heads
    inner_width: int = 14336  # of the feed-forward networks
    rope_base: float = 500000.0  # of the rotary positions' wavelengths
    rope_factor: float = 8.0  # by which the slow frequencies are divided, as Llama 3.1 does; 1: none
    rope_low_frequency: float = 1.0  # turns within rope_context below which a frequency is a slow one
    rope_high_frequency: float = 4.0  # turns above which a frequency stays
    rope_context: int = 8192  # positions of the network before the scaling
    norm_epsilon: float = 1e-5  # of RMSNorm
    vocabulary_multiple: int = 128  # the vocabulary is padded to a multiple of this
    initial_weights: float = 0.02  # standard deviation; what layers add has it / (2 * layers) ** 0.5
    precision: Literal["bf16", "tf32", "fp32"] = "bf16"  # of GEMMs and activations; weights and AdamW stay in fp32

    # The input
    batch_size: int = 4  # samples per rank and step; a group that splits a sample has those of its ranks
    micro_batch: int = 1  # samples that a group computes at once, at most
    prefetch: int = 4  # batches built ahead by threads

    # The optimizer
    optimizer: Literal["adamw"] = "adamw"  # Loshchilov and Hutter 2019, arXiv 1711.05101
    learning_rate: float = 5e-4  # after the warm-up
    end_learning_rate: float = 5e-5  # at max_steps
    warmup_steps: int = 512  # linear
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    epsilon: float = 1e-5  # added to the root of the second moment
    weight_decay: float = 0.1  # of all weights but those of the norms
    gradient_clip: float = 1.0  # largest norm of the whole gradient

    # How it is split over the ranks: by samples and, with the weights, gradients and AdamW's state, by FSDP
    tensor_parallelism: int = 1  # ranks that share the GEMMs of a sample, and by positions what is between them
    context_parallelism: int = 1  # ranks that share the positions of a sample
    gradient_reduction: Literal["fp32", "bf16"] = "fp32"  # type in which gradients are summed over the ranks

    # Evaluation
    eval_interval_samples: int = 12288  # samples trained on between two
    eval_samples: int = 1024  # first samples of the evaluation set
    eval_shuffle: bool = False  # in the order of GPTDataset, as submitted; else the first eval_samples
    eval_batch_size: int = 1  # samples that a group evaluates at once

    # How it runs
    recompute: bool = False  # the activations within a layer in the backward pass
    recompute_layers: int = 0  # with recompute=false: number of layers, from the first on, that do it
    loss_rows: int = 2048  # positions whose logits exist at a time; 0: all of a micro-batch
    compile: bool = False  # on a GPU: torch.compile of each layer and the loss
    fp8: Literal["none", "scaled_mm", "scaled_mm_head"] = "none"  # GEMMs in FP8: of the layers, or also of the LM head
    warm_up_steps: int = 2  # on synthetic data, before the clock; 0 does none
    log_interval: int = 10  # steps per record in the metrics stream, and between looks for a signal
    checkpoint_interval: int = 0  # evaluations between checkpoints; 0 keeps none but on a signal
    async_checkpoints: bool = True  # written while training continues, from a copy in main memory

    def shape(self, vocabulary: int) -> Shape:
        scaling = Scaling(self.rope_factor, self.rope_low_frequency, self.rope_high_frequency, self.rope_context)
        return Shape(
            vocabulary,
            self.layers,
            self.width,
            self.heads,
            self.key_value_heads,
            self.inner_width,
            self.rope_base,
            scaling,
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

    # -- memory: a model by formula, which a test compares with what PyTorch keeps ---------------------------

    def kept(self) -> int:
        """Return the bytes that a layer keeps of a position for the backward pass.

        Inputs of both norms and of the GEMMs behind them, queries, keys and values, what attention found (which the
        next GEMM reads), the gate before and behind its function, what it multiplies, and the product. In FP8 each GEMM
        keeps a copy of its input, of a byte a value. A compiler computes the gate's function again, and casts once.
        """
        width, keys, inner = self.width, self.shape(1).keys, self.inner_width * (3 if self.compile else 4)
        if self.fp8 == "none":
            return memory.size_of(self) * (6 * width + 2 * keys + inner)
        values = 4 * width + 2 * keys + inner - self.inner_width
        return memory.size_of(self) * values + (3 if self.compile else 6) * width + self.inner_width

    def needed_memory(self, vocabulary: int, ranks: int) -> float:
        """Return the bytes that a rank needs: weights, AdamW's state, gradients, activations, logits."""
        weights = memory.weights_of(self, vocabulary)
        count = weights.layer * self.layers + weights.outside
        parameters = memory.Parameters(12 * count, 4 * count)  # in fp32: weights and both moments, gradients
        return memory.needed(self, vocabulary, ranks, parameters, self.kept())

    def mismatches(self, manifest: Manifest, ranks: int, available: float) -> List[Misfit]:
        """Return why the data set, the number of ranks or the memory (bytes per rank) does not fit."""
        mismatches = rank_mismatches(self, ranks) + text_mismatches(self, manifest)
        return mismatches + memory.mismatches(
            self, self.needed_memory(manifest["facts"]["vocabulary"], ranks), available
        )
