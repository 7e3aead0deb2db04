"""Training code, one framework per implementation. It runs without the ``encore`` package."""

import os

# NGC's PyTorch images set it to 1, which makes TF32 of fp32. PyTorch reads it when it is imported, which is after this;
# the configuration's precision decides then (frameworks/pytorch.py).
os.environ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "0"
