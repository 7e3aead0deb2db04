"""Compares the networks of Llama and gpt-oss with Hugging Face's in float64, with the same random weights by name.

    pip install transformers==4.57.1 peft==0.21.2             # next to torch 2.13.0, in the Python that runs this
    PYTHONPATH=. python tools/parity.py llama|lora|gpt-oss    # from the checkout; seconds on a CPU

Of each case it prints the largest difference of the logits, of the mean loss, and of a parameter's gradients relative
to the largest of them. Exit code 1: one is above 1e-10. transformers computes norms, a softmax and its loss in float32:
its norms and that softmax are replaced by the same in float64, and its loss is torch's cross-entropy of its logits.
Rotary frequencies are fp32 in both: equal at these sizes, while at others some differ by a rounding, about 1e-7.

By its file and not by ``-m``: tools/__init__.py needs Typer, which no framework's environment has.
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
    from benchmarks.llama.pytorch.network import Network, published_name
    from benchmarks.llama.shapes import Scaling, Shape
except ImportError as error:  # --help needs none of them
    ABSENT = str(error)

LIMIT = 1e-10
VOCABULARY, BATCH, LENGTH, WINDOW = 61, 3, 24, 9


def norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def softmax(values: torch.Tensor, dim: int, dtype: Any = None) -> torch.Tensor:
    return values.softmax(dim)


def drawn(network: Network) -> Network:
    # In fp32, since a file of adapters has that; gates are large enough for gpt-oss's limit.
    for name, each in network.to_empty(device="cpu").named_parameters():
        torch.nn.init.normal_(each, std=1.0 if "gate_up" in name else 0.3)
    return network.double()


def published(kind: Any, configuration: Any, ours: Network, **more: Any) -> Any:
    # Hugging Face's network with the weights of ours, and 0 for the biases that only theirs has
    shape = ours.shape
    theirs = kind(configuration(
        vocab_size=shape.vocabulary, num_hidden_layers=shape.layers, hidden_size=shape.width, head_dim=shape.size,
        num_attention_heads=shape.heads, num_key_value_heads=shape.key_value_heads, intermediate_size=shape.inner_width,
        rope_theta=shape.rope_base, rms_norm_eps=shape.epsilon, attn_implementation="eager", use_cache=False, **more,
    )).double()  # fmt: skip
    biases = {name: torch.zeros_like(each) for name, each in theirs.state_dict().items() if name.endswith("bias")}
    weights = {published_name(name): each for name, each in ours.state_dict().items() if "_lora." not in name}
    theirs.load_state_dict({**biases, **weights})
    return theirs


def gradient(theirs: Any, name: str) -> torch.Tensor:
    return theirs.get_parameter(published_name(name)).grad


class Case(NamedTuple):
    title: str
    ours: Network
    theirs: Any
    length: int = LENGTH
    gradient: Callable[[Any, str], torch.Tensor] = gradient  # of theirs, by our name of a parameter


def llama() -> Iterator[Case]:
    # With a context of 64 some of a head's frequencies are divided, some are kept, and some are between.
    scaled = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    for scaling, rope in ((Scaling(), None), (Scaling(8.0, 1.0, 4.0, 64), {"rope_type": "llama3", **scaled})):
        ours = drawn(Network(Shape(VOCABULARY, 3, 64, 4, 2, 96, 500000.0, scaling, 1e-5)))
        theirs = published(LlamaForCausalLM, LlamaConfig, ours, rope_scaling=rope)
        yield Case(f"llama {'with' if rope else 'without'} scaling", ours, theirs)


def gpt_oss() -> Iterator[Case]:
    shape = Shape(VOCABULARY, 3, 64, 4, 2, 40, 150000.0, Scaling(), 1e-5, 24, 5, 2, "gpt_oss", WINDOW, sinks=True)
    more = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.chosen, "sliding_window": WINDOW}
    for length in (WINDOW - 1, WINDOW, WINDOW + 1, LENGTH):
        ours = drawn(Network(shape))
        theirs = published(GptOssForCausalLM, GptOssConfig, ours, rope_scaling=None, attention_bias=False, **more)
        yield Case(f"gpt-oss, window of {WINDOW}, {length} positions", ours, theirs, length)


def adapter_gradient(theirs: Any, name: str) -> torch.Tensor:
    # peft has a copy of the first matrix for each product: the gradient of the one that they share is the sum.
    place, matrix = name.split("_lora.")  # layers.0.self_attn.qkv and up.2.weight, for example
    stem, products = place.rsplit(".", 1)
    kind = "A" if matrix.startswith("down") else "B"
    chosen = products if kind == "A" else products[int(matrix.split(".")[1])]
    names = [f"{adapters.PREFIX}.{stem}.{each}_proj.lora_{kind}.default.weight" for each in chosen]
    return torch.stack([theirs.get_parameter(each).grad for each in names]).sum(0)


def lora() -> Iterator[Case]:
    rule = adapters.Rule(16, 32, 0.0, 0)
    network = Network(Shape(VOCABULARY, 3, 64, 4, 2, 96, 10000.0, Scaling(), 1e-5))
    adapters.add(network, rule, 0)
    ours = drawn(network)
    with TemporaryDirectory() as folder:
        trained = {name: each.detach() for name, each in adapters.trained(ours).items()}
        adapters.save(Path(folder), trained, rule, fused=False, base="")
        theirs = published(LlamaForCausalLM, LlamaConfig, ours)
        theirs = PeftModel.from_pretrained(theirs, folder, is_trainable=True).double()
    yield Case("lora read by peft, on q, k, v and o", ours, theirs, gradient=adapter_gradient)


CASES = {"llama": llama, "lora": lora, "gpt-oss": gpt_oss}


def differences(case: Case) -> dict[str, float]:
    tokens = torch.randint(VOCABULARY, (BATCH, case.length + 1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    logits = case.theirs(inputs).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected.backward()
    loss = case.ours(inputs, labels) / labels.numel()
    loss.backward()
    pairs = [(case.gradient(case.theirs, name), each.grad) for name, each in adapters.trained(case.ours).items()]
    # torch's maximum, as Python's passes over NaN.
    gradients = torch.stack([(own - their).abs().max() / their.abs().max() for their, own in pairs]).max()
    with torch.no_grad():
        logits = (case.ours(inputs) - logits).abs().max()
    return {"logits": logits.item(), "loss": (loss - expected).abs().item(), "gradients": gradients.item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=CASES)
    network = parser.parse_args().network
    if ABSENT:
        sys.exit(f"error: {ABSENT}: next to torch, pip install transformers==4.57.1 peft==0.21.2; set PYTHONPATH=.")
    print(", ".join(f"{each} {version(each)}" for each in ("torch", "transformers", "peft")))
    LlamaRMSNorm.forward = GptOssRMSNorm.forward = norm
    functional.softmax = softmax
    torch.manual_seed(0)
    far = []
    for case in CASES[network]():
        found = differences(case)
        print(f"{case.title}: {', '.join(f'{name} {value:.1e}' for name, value in found.items())}", flush=True)
        far += [] if all(value <= LIMIT for value in found.values()) else [case.title]
    if far:
        sys.exit(f"error: a difference is above {LIMIT:.0e}: {'; '.join(far)}")


if __name__ == "__main__":
    main()
