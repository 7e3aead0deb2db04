"""A run's precision and parallelism, under the log keys that MLPerf requires since v6.1.

Keys and values follow mlperf-logging 4.1.68 (compliance_checker/training_6.1.0/common.yaml). They are derived from
the configuration and the device, so that nobody has to declare them.
"""

import re
from typing import Any, Dict, Mapping, Optional

WORDS = {"fp32": "fp32", "tf32": "tf32", "fp16": "fp16", "bf16": "bfloat16"}
PARALLELISM = ("tensor_parallelism", "pipeline_parallelism", "context_parallelism", "expert_parallelism")
_FIRST_ROUND = (6, 1)


def log_keys(config: Any, choices: Mapping[str, Any]) -> Dict[str, Any]:
    """Return a run's log keys; ``choices``: Run.choices, which includes TF32 of the device. None: unknown.

    Without attention, the attention precision equals the linear layers', as in NVIDIA's dlrm_dcnv2 logs of v6.0.
    Those logs also have 1 for each parallelism although the embedding tables are split over the GPUs, as in DLRM
    here: table placement is none of the four kinds. A configuration without a parallelism key is data-parallel.
    """
    kind = _compute_precision(config, choices.get("tf32"))
    return {
        "lowest_numerical_precision_in_linear": "fp8" if gemm_precision(config) == "fp8" else kind,
        "lowest_numerical_precision_in_attn": kind,
        "lowest_numerical_precision_in_comm": _communication_precision(config),
        **{name: getattr(config, name, 1) for name in PARALLELISM},
        # In the unit of the log's global_batch_size: samples, or tokens.
        "micro_batch_size": getattr(config, "micro_batch_size", config.batch_size // _accumulation_steps(config)),
        "config_filename": "config.json",
    }


def gemm_precision(config: Any) -> str:
    """Return the GEMM precision: fp8, or ``precision``. The MFU uses the peak of this precision."""
    return "fp8" if getattr(config, "fp8", "none") != "none" else getattr(config, "precision", "fp32")


def required_by(round_name: str) -> bool:
    """Return whether the round requires these keys; "published" is not a round."""
    match = re.fullmatch(r"v(\d+)\.(\d+)", round_name)
    return match is not None and (int(match.group(1)), int(match.group(2))) >= _FIRST_ROUND


# Precision of the linear layers. On GPUs, TF32 depends on the device; MXNet does not report it.
def _compute_precision(config: Any, tf32: Any) -> Optional[str]:
    if config.precision not in ("fp32", "tf32"):
        return WORDS[config.precision]
    if tf32 is None and config.device == "gpu":
        return None
    return "tf32" if (any(tf32.values()) if isinstance(tf32, Mapping) else tf32) else "fp32"


# Precision of the gradients in communication: fp32, the type of the weights, unless configured otherwise.
def _communication_precision(config: Any) -> str:
    kind = getattr(config, "communicates", getattr(config, "gradient_compression", "none"))
    return "fp32" if kind in ("none", "tf32") else WORDS[kind]


def _accumulation_steps(config: Any) -> int:
    return int(getattr(config, "accumulation_steps", getattr(config, "accumulation", 1)))
