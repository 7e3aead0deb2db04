"""The network of gpt-oss-20b with its optimizer on this rank: Llama's, whose configuration says what its layers are."""

from benchmarks.llama31_8b.pytorch.model import Training

__all__ = ["Training"]
