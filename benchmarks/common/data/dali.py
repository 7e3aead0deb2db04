"""Options that every DALI pipeline here needs, for any framework."""

import inspect
from typing import Any, Dict

from nvidia.dali import Pipeline, backend, types

# Newer releases default to an executor whose outputs lack a stream, so that copying them would block
# (benchmarks/common/torch/dali.py).
EXECUTOR = {"exec_dynamic": False} if "exec_dynamic" in inspect.signature(Pipeline.__init__).parameters else {}


def resampling(antialias: bool) -> Dict[str, Any]:
    """Return the arguments of fn.resize and fn.random_resized_crop for linear resizing.

    DALI 1.16 enabled antialiasing by default for the linear filter; before, only the triangular filter had it
    (release notes of 1.16.0, NVIDIA/DALI#4032).
    """
    if "antialias" in backend.GetSchema("Resize").GetArgumentNames():
        return {"antialias": antialias}
    return {"min_filter": types.INTERP_TRIANGULAR} if antialias else {}
