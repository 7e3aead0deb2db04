"""Export gpt-oss-20b for a server: next-token logits with a KV cache.

$ python -m benchmarks.gpt_oss_20b.pytorch.export --experiment RUN/experiment_0 --data DATA -o DIR
"""

from functools import partial
from pathlib import Path
from typing import Any, Mapping

from benchmarks.common.export import export
from benchmarks.common.export.export import Subject
from benchmarks.common.export.torch import TOOLS
from benchmarks.gpt_oss_20b.pytorch.config import Config
from benchmarks.llama.pytorch.experts import by_all
from benchmarks.llama.pytorch.serving import pretrained


def prepare(config: Config, saved: Mapping[str, Any], folder: Path) -> Subject:
    subject = pretrained(config, saved, folder)
    for layer in subject.model.network.layers:
        # No format has a grouped GEMM.
        layer.mlp.forward = partial(by_all, layer.mlp)
    return subject


if __name__ == "__main__":
    export.main(__doc__, Config, TOOLS, prepare)
