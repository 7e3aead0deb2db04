"""Export Llama 3.1 8B for a server: next-token logits with a KV cache.

$ python -m benchmarks.llama31_8b.pytorch.export --experiment RUN/experiment_0 --data DATA -o DIR
"""

from benchmarks.common.export import export
from benchmarks.common.export.torch import TOOLS
from benchmarks.llama.pytorch.serving import pretrained
from benchmarks.llama31_8b.pytorch.config import Config

if __name__ == "__main__":
    export.main(__doc__, Config, TOOLS, pretrained)
