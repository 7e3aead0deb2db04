"""Toy data set: docstrings of Python's standard library; the first paragraph summarizes the rest (PEP 257).

The base is trained here on the plain docstrings of every second module. Fine-tuning and evaluation use the other
modules, as texts with summaries. The base has therefore seen the vocabulary, but neither the task nor these modules.
"""

import sysconfig
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

import numpy as np

from benchmarks.common.data.progress import Progress
from benchmarks.language import python_text
from benchmarks.llama import safetensors

NAME = "python-summaries"
LENGTH = 256  # tokens per sample
ENTRIES = 1024  # of the tokenizer
HELD_OUT = 20  # one in HELD_OUT fine-tuning modules is used for evaluation
LONGEST = 200  # characters of the first paragraph that is a summary
# As in systems/cpu_v6.1.toml
SIZES: Dict[str, Any] = {"layers": 3, "width": 96, "heads": 4, "key_value_heads": 2, "inner_width": 256}
STEPS, BATCH = 120, 8
RATE, WARMUP = 4e-3, 20
SPREAD = 0.06  # of the initial weights

Pair = Tuple[str, str]  # (text, summary)


class Texts(NamedTuple):
    base: List[str]  # full docstrings
    train: List[Pair]
    test: List[Pair]
    made: str


def texts() -> Texts:
    """Return the texts of this Python without duplicates."""
    root = Path(sysconfig.get_paths()["stdlib"])
    collected, seen_keys = Texts([], [], [], f"docstrings of the modules of {root.name}"), set()
    for number, path in enumerate(sorted(python_text.modules(root))):
        for text in python_text.docstrings(path):
            paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]
            if len(paragraphs) < 2 or len(paragraphs[0]) > LONGEST or text in seen_keys:
                continue
            seen_keys.add(text)
            if number % 2 == 0:
                collected.base.append("\n".join(paragraphs))
                continue
            part = collected.test if number // 2 % HELD_OUT == 0 else collected.train
            part.append((" ".join(paragraphs[1:]), paragraphs[0]))
    return collected


def train_base(ids: np.ndarray, entries: int, path: Path, progress: Progress) -> Dict[str, Any]:
    """Train the base on a token stream and write it with Hugging Face's names; return the result for the manifest."""
    import torch  # only for the toy data set: raw data are prepared without PyTorch

    from benchmarks.llama.pytorch.network import Network, hf_name
    from benchmarks.llama.pytorch.parallel import initialize
    from benchmarks.llama.shapes import Scaling, Shape

    torch.set_num_threads(1)  # threads would wait for each other on a busy machine
    shape = Shape(vocabulary=entries, rope_base=10000.0, scaling=Scaling(), epsilon=1e-5, **SIZES)
    with torch.device("meta"):
        network = Network(shape)
    initialize(network, SPREAD, 1, torch.device("cpu"))
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS, pct_start=WARMUP / STEPS)
    random, losses = np.random.RandomState(1), []
    for step in range(STEPS):
        begins = random.randint(len(ids) - LENGTH - 1, size=BATCH)
        rows = torch.from_numpy(np.stack([ids[start : start + LENGTH + 1] for start in begins]))
        loss = network(rows[:, :-1], rows[:, 1:]) / (BATCH * LENGTH)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        progress.update("base", step + 1, STEPS, unit="steps")
    weights = {hf_name(name): parameter.detach().numpy() for name, parameter in network.named_parameters()}
    safetensors.write(path, weights)
    return {
        "base_parameters": sum(parameter.size for parameter in weights.values()),
        "base_loss": round(np.mean(losses[-20:]), 3),
    }
