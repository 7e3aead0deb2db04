"""Compares the networks of Llama and gpt-oss with Hugging Face's in float64, with the same random weights by name.

    pip install transformers==4.57.1 peft==0.21.2             # next to torch 2.13.0, in the Python that runs this
    PYTHONPATH=. python tools/parity.py llama|lora|gpt-oss    # from the checkout; seconds on a CPU

Of each case it prints the largest difference of the logits, of the mean loss, and of a parameter's gradients relative
to the largest of them. Exit code 1: one is above 1e-10. transformers computes norms, a softmax and its loss in float32:
its norms and that softmax are replaced by the same in float64, and its loss is torch's cross-entropy of its logits.
What peft reads is what ``adapters.save`` wrote: of q, k and v, and of their fused product as MLPerf's Llama 2 has it.

By its file and not by ``-m``: tools/__init__.py needs Typer, which no framework's environment has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
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


class Case(NamedTuple):
    title: str
    ours: Network
    theirs: Any
    gradient: Callable[[str], torch.Tensor]  # theirs, by our name of the parameter
    length: int = LENGTH


def norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def softmax(values: torch.Tensor, dim: int, dtype: Any = None) -> torch.Tensor:
    return values.softmax(dim)


def drawn(shape: Shape, rule: adapters.Rule | None = None) -> Network:
    network = Network(shape)
    if rule:
        adapters.add(network, rule, 0)
    for each in network.to_empty(device="cpu").parameters():
        torch.nn.init.normal_(each, std=0.3)
    # Drawn in fp32, since files of adapters have that.
    return network.double()


def published(kind: Any, configuration: Any, ours: Network, **more: Any) -> Any:
    # Hugging Face's network with the weights of ours, and 0 for the biases that only theirs has
    shape = ours.shape
    theirs = kind(configuration(
        vocab_size=shape.vocabulary, num_hidden_layers=shape.layers, hidden_size=shape.width, head_dim=shape.size,
        num_attention_heads=shape.heads, num_key_value_heads=shape.key_value_heads, intermediate_size=shape.inner_width,
        rope_theta=shape.rope_base, rms_norm_eps=shape.epsilon, attn_implementation="eager", use_cache=False, **more,
    )).double().train()  # fmt: skip
    biases = {name: torch.zeros_like(each) for name, each in theirs.state_dict().items() if name.endswith("bias")}
    weights = {published_name(name): each for name, each in ours.state_dict().items() if "_lora." not in name}
    theirs.load_state_dict({**biases, **weights})
    return theirs


def same_gradient(theirs: Any, name: str) -> torch.Tensor:
    return theirs.get_parameter(published_name(name)).grad


def llama() -> Iterator[Case]:
    # With a context of 64 some of a head's frequencies are divided, some are kept, and one is between.
    scaled = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    for scaling, rope in ((Scaling(), None), (Scaling(8.0, 1.0, 4.0, 64), {"rope_type": "llama3", **scaled})):
        ours = drawn(Shape(VOCABULARY, 3, 64, 4, 2, 96, 500000.0, scaling, 1e-5))
        theirs = published(LlamaForCausalLM, LlamaConfig, ours, rope_scaling=rope)
        yield Case(f"llama {'with' if rope else 'without'} scaling", ours, theirs, partial(same_gradient, theirs))


def gpt_oss() -> Iterator[Case]:
    shape = Shape(VOCABULARY, 3, 64, 4, 2, 40, 150000.0, Scaling(), 1e-5, 24, 5, 2, "gpt_oss", WINDOW, sinks=True)
    more = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.chosen, "sliding_window": WINDOW}
    for length in (WINDOW - 1, WINDOW, WINDOW + 1, LENGTH):
        ours = drawn(shape)
        theirs = published(GptOssForCausalLM, GptOssConfig, ours, rope_scaling=None, attention_bias=False, **more)
        title = f"gpt-oss, window of {WINDOW}, {length} positions"
        yield Case(title, ours, theirs, partial(same_gradient, theirs), length)


def fuse(attention: Any) -> None:
    # Give an attention one product of its input, of whose rows queries, keys and values are parts
    weights, end = [attention.get_parameter(f"{each}_proj.weight") for each in "qkv"], 0
    attention.qkv_proj = torch.nn.Linear(weights[0].shape[1], sum(map(len, weights)), bias=False).double()
    attention.qkv_proj.load_state_dict({"weight": torch.cat(weights)})
    for each, weight in zip("qkv", weights, strict=True):
        begin, end = end, end + len(weight)
        delattr(attention, f"{each}_proj")
        # The product is looked up at each call, for peft puts its own in that place.
        setattr(attention, f"{each}_proj", lambda hidden, rows=slice(begin, end): attention.qkv_proj(hidden)[..., rows])


def adapter_gradient(theirs: Any, shape: Shape, products: list[str], name: str) -> torch.Tensor:
    # name: layers.0.self_attn.qkv_lora.up.2.weight, for example
    stem, _, which = name.partition("_lora.")
    place, kind = stem.rsplit(".", 1)
    matrix = "A" if which.startswith("down") else "B"
    every = [
        theirs.get_parameter(f"{adapters.PREFIX}.{place}.{each}_proj.lora_{matrix}.default.weight").grad
        for each in (products if kind == "qkv" else ["o"])
    ]
    if matrix == "A":
        # Each product has a copy of the first matrix: the gradient of the one that they share is the sum.
        return torch.stack(every).sum(0)
    rows = (shape.queries, shape.keys, shape.keys) if kind == "qkv" else (shape.width,)
    return torch.cat(every).split(rows)[int(which.split(".")[1])]


def lora() -> Iterator[Case]:
    shape, rule = Shape(VOCABULARY, 3, 64, 4, 2, 96, 10000.0, Scaling(), 1e-5), adapters.Rule(16, 32, 0.0, 0)
    for products in (["q", "k", "v"], ["qkv"]):
        ours, fused = drawn(shape, rule), len(products) == 1
        theirs = published(LlamaForCausalLM, LlamaConfig, ours)
        for layer in theirs.model.layers if fused else ():
            fuse(layer.self_attn)
        with TemporaryDirectory() as folder:
            trained = {name: each.detach() for name, each in adapters.trained(ours).items()}
            adapters.save(Path(folder), trained, rule, fused, base="")
            theirs = PeftModel.from_pretrained(theirs, folder, is_trainable=True).double().train()
        gradient = partial(adapter_gradient, theirs, shape, products)
        yield Case(f"lora, adapters of {', '.join([*products, 'o'])}", ours, theirs, gradient)


CASES = {"llama": llama, "lora": lora, "gpt-oss": gpt_oss}


def differences(case: Case) -> dict[str, float]:
    tokens = torch.randint(VOCABULARY, (BATCH, case.length + 1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    logits = case.theirs(inputs).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected.backward()
    loss = case.ours(inputs, labels) / labels.numel()
    loss.backward()
    pairs = [(case.gradient(name), each.grad) for name, each in adapters.trained(case.ours).items()]
    # torch's maximum and not Python's, which passes over NaN.
    gradients = torch.stack([(own - their).abs().max() / their.abs().max() for their, own in pairs]).max()
    with torch.no_grad():
        found = {"logits": (case.ours(inputs) - logits).abs().max(), "loss": (loss - expected).abs()}
    return {name: each.item() for name, each in {**found, "gradients": gradients}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=CASES)
    network = parser.parse_args().network
    if ABSENT:
        sys.exit(f"error: {ABSENT}: in a Python with torch: pip install transformers==4.57.1 peft==0.21.2")
    print(", ".join(f"{each} {version(each)}" for each in ("torch", "transformers", "peft")))
    LlamaRMSNorm.forward = GptOssRMSNorm.forward = norm
    functional.softmax = softmax
    torch.manual_seed(0)
    far = []
    for case in CASES[network]():
        found = differences(case)
        print(f"{case.title}: {', '.join(f'{name} {value:.1e}' for name, value in found.items())}", flush=True)
        far += [f"{case.title}: {name}" for name, value in found.items() if not value <= LIMIT]
    if far:
        sys.exit(f"error: above {LIMIT:.0e}: {'; '.join(far)}")


if __name__ == "__main__":
    main()
