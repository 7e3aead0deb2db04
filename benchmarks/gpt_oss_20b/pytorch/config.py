"""Hyperparameters of gpt-oss-20b's pretraining in PyTorch: one flat, frozen dataclass; standard library only.

The host side loads this file to check a configuration before anything starts, the training code to run it. Defaults
are those of the reference (mlcommons/training, small_llm_moe_pretraining/primus, conf/gpt_oss_20B-pretrain-nvidia.yaml
on Primus's gpt_oss_20B.yaml, with config_B200_1x8x1.sh), ours where those say nothing. "Sample" is a sequence, "step"
one update of the weights.
"""

from dataclasses import dataclass
from typing import List, Literal

from benchmarks.common.config_checks import Manifest, Misfit, above_zero, at_least, precision_on_cpu, reject_if
from benchmarks.llama import memory
from benchmarks.llama.config_checks import Derived, problems, text_mismatches
from benchmarks.llama.shapes import Scaling, Shape


@dataclass(frozen=True)
class Config(Derived):
    # Everything that train.py needs to know, except where the data and the results are.

    # The run
    device: Literal["gpu", "cpu"] = "gpu"  # one rank drives one GPU, or its share of the CPU's cores
    seed: int = 0  # initializes the weights and shuffles the samples; a new one for each experiment
    round: Literal["v6.0", "v6.1"] = "v6.1"  # of MLPerf, in whose dialect the log is
    quality_target: float = 3.34  # log perplexity on the evaluation set, or below, at which the run stops
    epochs: int = 1  # a run is one epoch of as many samples as max_samples and max_steps allow
    max_steps: int = 1200000  # the learning rate is end_learning_rate from warmup_steps before it on
    max_samples: int = 1000000000  # at most; a run also ends after max_steps

    # The network (OpenAI 2025, arXiv 2508.10925, 20B)
    sequence_length: int = 8192  # tokens of a sample
    layers: int = 24  # each an attention and a mixture of experts
    width: int = 2880  # of the embeddings and of what layers exchange
    heads: int = 64  # of queries in each attention
    key_value_heads: int = 8  # of keys and values, each shared by as many queries' heads
    head_size: int = 64  # values of a head
    window: int = 129  # positions that every second layer attends to, from the first one on; 0: all
    sinks: bool = False  # in the attentions' softmax a logit more, learnt by each head; NVIDIA's v6.0 has them
    qk_norm: bool = True  # RMSNorm of each head's queries and keys; NVIDIA's v6.0 has none
    experts: int = 32  # of a layer
    chosen_experts: int = 4  # of a token
    router_dtype: Literal["fp32", "bf16"] = "bf16"  # of the router's GEMM; fp32 in AMD's file of the reference
    inner_width: int = 2880  # of an expert
    gate: Literal["silu", "gpt_oss"] = "silu"  # of the experts: SwiGLU, or gpt-oss's own, which NVIDIA's v6.0 has
    rope_base: float = 150000.0  # of the rotary positions' wavelengths
    norm_epsilon: float = 1e-6  # of RMSNorm
    vocabulary_multiple: int = 128  # the vocabulary is padded to a multiple of this
    initial_weights: float = 0.008  # standard deviation; what layers add has it / (2 * layers) ** 0.5
    precision: Literal["bf16", "tf32", "fp32"] = "bf16"  # of GEMMs and activations; weights and AdamW stay in fp32

    # The input
    batch_size: int = 2  # samples per rank and step
    micro_batch: int = 2  # samples that a rank computes at once, at most
    prefetch: int = 4  # batches built ahead by threads

    # The optimizer
    optimizer: Literal["adamw"] = "adamw"  # Loshchilov and Hutter 2019, arXiv 1711.05101
    learning_rate: float = 4e-4  # after the warm-up
    end_learning_rate: float = 4e-5  # at max_steps
    warmup_steps: int = 128  # linear
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    epsilon: float = 1e-5  # added to the root of the second moment
    weight_decay: float = 0.1  # of all weights but those of the norms, and sinks
    gradient_clip: float = 1.0  # largest norm of the whole gradient

    # How it is split over the ranks: by samples and, with the weights, gradients and AdamW's state, by FSDP
    expert_parallelism: int = 8  # ranks that share the experts of each layer, to which the tokens travel
    gradient_reduction: Literal["fp32", "bf16"] = "fp32"  # type in which gradients are summed over the ranks

    # Evaluation
    eval_interval_samples: int = 12288  # samples trained on between two
    eval_samples: int = 1024  # first samples of the evaluation set
    eval_shuffle: bool = False  # in the order of GPTDataset, as the reference has it; else the first
    eval_batch_size: int = 1  # samples that a rank evaluates at once

    # How it runs
    recompute: bool = False  # the activations within a layer in the backward pass
    recompute_layers: int = 0  # with recompute=false: number of layers, from the first on, that do it
    loss_rows: int = 2048  # positions whose logits exist at a time; 0: all of a micro-batch
    compile: bool = False  # on a GPU: torch.compile of attention, the experts' gate and the loss
    warm_up_steps: int = 2  # on synthetic data, before the clock; 0 does none
    log_interval: int = 10  # steps per record in the metrics stream, and between looks for a signal
    checkpoint_interval: int = 0  # evaluations between checkpoints; 0 keeps none but on a signal
    async_checkpoints: bool = True  # written while training continues, from a copy in main memory

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

    # -- memory: a model by formula, which a test compares with what PyTorch keeps ---------------------------

    def kept(self) -> int:
        """Return the bytes that a layer keeps of a position for the backward pass.

        Inputs of both norms and of the first GEMMs, queries and keys (also before their norms), values, what attention
        found, which the next GEMM reads; of each chosen expert its input in its own order, gate and up, the gate behind
        its function, the product, what it found, in its order and in that of the positions.
        """
        shape = self.shape(1)
        attention = 4 * self.width + (3 if self.qk_norm else 2) * (shape.queries + shape.keys)
        return memory.size_of(self) * (attention + self.chosen_experts * (3 * self.width + 4 * self.inner_width))

    def needed_memory(self, vocabulary: int, ranks: int) -> float:
        """Return the bytes that a rank needs: weights, AdamW's state, gradients, activations, logits."""
        weights = memory.weights_of(self, vocabulary)
        count = weights.layer * self.layers + weights.outside
        parameters = memory.Parameters(12 * count, 4 * count)  # in fp32: weights and both moments, gradients
        return memory.needed(self, vocabulary, ranks, parameters, self.kept(), self.expert_parallelism)

    def mismatches(self, manifest: Manifest, ranks: int, available: float) -> List[Misfit]:
        """Return why the data set, the number of ranks or the memory (bytes per rank) does not fit."""
        mismatches = text_mismatches(self, manifest)
        copies, beyond = divmod(ranks, self.expert_parallelism)
        if beyond:
            hint = "take other ranks, or set this key"
            together = f"a multiple of the {self.expert_parallelism} that share the experts (expert_parallelism)"
            mismatches.append((f"{ranks} ranks", together, hint))
        elif self.expert_parallelism > 1 and (self.width % copies or self.inner_width % copies):
            expected = f"width={self.width} and inner_width={self.inner_width} to be multiples of the copies"
            mismatches.append((f"{copies} copies of each expert", expected, "set a higher expert_parallelism"))
        return mismatches + memory.mismatches(
            self, self.needed_memory(manifest["facts"]["vocabulary"], ranks), available
        )
