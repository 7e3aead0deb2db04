"""Compare the networks of Llama and gpt-oss with Hugging Face's in float64, using the same random weights.

    pip install transformers==4.57.1 peft==0.21.2             # into the Python that runs this, with torch 2.13.0
    PYTHONPATH=. python tools/parity.py llama|lora|gpt-oss    # in the checkout; seconds on a CPU

Prints the largest difference of logits and mean loss for each case, and of the gradients relative to the largest
gradient of a parameter. Exit code 1: a difference exceeds 1e-10. transformers computes norms, a softmax and its loss
in float32: norms and softmax are replaced by float64 versions, and the loss by torch's cross-entropy of its logits.
Rotary frequencies are fp32 in both: equal at these sizes, while other sizes have rounding differences of about 1e-7.

Run the file, not ``-m tools.parity``: tools/__init__.py needs Typer, which the framework environments do not have.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ABSENT = ""
try:
    import torch
    from peft import PeftModel
    from torch.nn import functional
    from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from benchmarks.llama.pytorch import adapters
    from benchmarks.llama.pytorch.network import Network, hf_name
    from benchmarks.llama.shapes import Scaling, Shape
except ImportError as error:  # not needed for --help
    ABSENT = str(error)

LIMIT = 1e-10
VOCABULARY, BATCH, LENGTH, WINDOW = 61, 3, 24, 9


def norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def softmax(values: torch.Tensor, dim: int, dtype: Any = None) -> torch.Tensor:
    return values.softmax(dim)


def initialize(network: Network) -> Network:
    # In fp32, since a file of adapters has that; gates are large enough for gpt-oss's limit.
    for name, parameter in network.to_empty(device="cpu").named_parameters():
        torch.nn.init.normal_(parameter, std=1.0 if "gate_up" in name else 0.3)
    return network.double()


def load_reference(kind: Any, configuration: Any, network: Network, **options: Any) -> Any:
    # Hugging Face's network with the weights of ours, and 0 for the biases that only theirs has
    shape = network.shape
    reference = kind(configuration(
        vocab_size=shape.vocabulary, num_hidden_layers=shape.layers, hidden_size=shape.width, head_dim=shape.size,
        num_attention_heads=shape.heads, num_key_value_heads=shape.key_value_heads, intermediate_size=shape.inner_width,
        rope_theta=shape.rope_base, rms_norm_eps=shape.epsilon, attn_implementation="eager", use_cache=False, **options,
    )).double()  # fmt: skip
    biases = {
        name: torch.zeros_like(tensor) for name, tensor in reference.state_dict().items() if name.endswith("bias")
    }
    weights = {hf_name(name): tensor for name, tensor in network.state_dict().items() if "_lora." not in name}
    reference.load_state_dict({**biases, **weights})
    return reference


def gradient(reference: Any, name: str) -> torch.Tensor:
    return reference.get_parameter(hf_name(name)).grad


class Case(NamedTuple):
    title: str
    network: Network
    reference: Any
    length: int = LENGTH
    gradient: Callable[[Any, str], torch.Tensor] = gradient  # of the reference, by our parameter name


def llama() -> Iterator[Case]:
    # With a context of 64, some head frequencies are divided, some are unchanged, and some are interpolated.
    scaled = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    for scaling, rope in ((Scaling(), None), (Scaling(8.0, 1.0, 4.0, 64), {"rope_type": "llama3", **scaled})):
        network = initialize(Network(Shape(VOCABULARY, 3, 64, 4, 2, 96, 500000.0, scaling, 1e-5)))
        reference = load_reference(LlamaForCausalLM, LlamaConfig, network, rope_scaling=rope)
        yield Case(f"llama {'with' if rope else 'without'} scaling", network, reference)


def gpt_oss() -> Iterator[Case]:
    shape = Shape(VOCABULARY, 3, 64, 4, 2, 40, 150000.0, Scaling(), 1e-5, 24, 5, 2, "gpt_oss", WINDOW, sinks=True)
    options = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.chosen, "sliding_window": WINDOW}
    for length in (WINDOW - 1, WINDOW, WINDOW + 1, LENGTH):
        network = initialize(Network(shape))
        reference = load_reference(
            GptOssForCausalLM, GptOssConfig, network, rope_scaling=None, attention_bias=False, **options
        )
        yield Case(f"gpt-oss, window of {WINDOW}, {length} positions", network, reference, length)


def adapter_gradient(reference: Any, name: str) -> torch.Tensor:
    # peft has one copy of the first matrix per projection: the shared matrix's gradient is the sum over the copies.
    prefix, matrix = name.split("_lora.")  # layers.0.self_attn.qkv and up.2.weight, for example
    stem, products = prefix.rsplit(".", 1)
    kind = "A" if matrix.startswith("down") else "B"
    selected = products if kind == "A" else products[int(matrix.split(".")[1])]
    names = [f"{adapters.PREFIX}.{stem}.{item}_proj.lora_{kind}.default.weight" for item in selected]
    return torch.stack([reference.get_parameter(item).grad for item in names]).sum(0)


def lora() -> Iterator[Case]:
    rule = adapters.Rule(16, 32, 0.0, 0)
    network = Network(Shape(VOCABULARY, 3, 64, 4, 2, 96, 10000.0, Scaling(), 1e-5))
    adapters.add(network, rule, 0)
    adapted = initialize(network)
    with TemporaryDirectory() as folder:
        adapter_weights = {name: parameter.detach() for name, parameter in adapters.trained(adapted).items()}
        adapters.save(Path(folder), adapter_weights, rule, fused=False, base="")
        reference = load_reference(LlamaForCausalLM, LlamaConfig, adapted)
        reference = PeftModel.from_pretrained(reference, folder, is_trainable=True).double()
    yield Case("lora read by peft, on q, k, v and o", adapted, reference, gradient=adapter_gradient)


CASES = {"llama": llama, "lora": lora, "gpt-oss": gpt_oss}


def differences(case: Case) -> dict[str, float]:
    tokens = torch.randint(VOCABULARY, (BATCH, case.length + 1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    logits = case.reference(inputs).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected.backward()
    loss = case.network(inputs, labels) / labels.numel()
    loss.backward()
    pairs = [
        (case.gradient(case.reference, name), parameter.grad)
        for name, parameter in adapters.trained(case.network).items()
    ]
    # torch's maximum, as Python's passes over NaN.
    gradients = torch.stack(
        [
            (actual - expected_gradient).abs().max() / expected_gradient.abs().max()
            for expected_gradient, actual in pairs
        ]
    ).max()
    with torch.no_grad():
        logits = (case.network(inputs) - logits).abs().max()
    return {"logits": logits.item(), "loss": (loss - expected).abs().item(), "gradients": gradients.item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=CASES)
    network = parser.parse_args().network
    if ABSENT:
        sys.exit(f"error: {ABSENT}: next to torch, pip install transformers==4.57.1 peft==0.21.2; set PYTHONPATH=.")
    print(", ".join(f"{package} {version(package)}" for package in ("torch", "transformers", "peft")))
    LlamaRMSNorm.forward = GptOssRMSNorm.forward = norm
    functional.softmax = softmax
    torch.manual_seed(0)
    far = []
    for case in CASES[network]():
        results = differences(case)
        print(f"{case.title}: {', '.join(f'{name} {value:.1e}' for name, value in results.items())}", flush=True)
        far += [] if all(value <= LIMIT for value in results.values()) else [case.title]
    if far:
        sys.exit(f"error: a difference is above {LIMIT:.0e}: {'; '.join(far)}")


if __name__ == "__main__":
    main()
