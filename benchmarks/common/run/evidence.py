"""What a run computes and sends in, and how it is split over its ranks, by the keys that MLPerf asks for since v6.1.

The keys and their words are those of mlperf-logging 4.1.68 (compliance_checker/training_6.1.0/common.yaml). They are
derived from the configuration that is run and from the arithmetic of its device, so that nobody has to declare them.
"""

import re
from typing import Any, Dict, Mapping, Optional

WORDS = {"fp32": "fp32", "tf32": "tf32", "fp16": "fp16", "bf16": "bfloat16"}
PARALLELISM = ("tensor_parallelism", "pipeline_parallelism", "context_parallelism", "expert_parallelism")
_FIRST_ROUND = (6, 1)


def log_keys(config: Any, choices: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the keys of a run; ``choices`` are Run's, with the arithmetic of the device; None is not known.

    A network without attention has the precision of its linear layers there, as NVIDIA's logs of dlrm_dcnv2 in v6.0
    have it. They log 1 for each parallelism, too, though their tables are split over the GPUs as DLRM's are here: none
    of the four is that. What a configuration has no key of is data-parallel.
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
    """Return in what a configuration's GEMMs are computed: fp8, or its ``precision``; MFU has that peak below it."""
    return "fp8" if getattr(config, "fp8", "none") != "none" else getattr(config, "precision", "fp32")


def required_by(round_name: str) -> bool:
    """Return whether the round's rules ask for the keys in the log; "published" is no round."""
    match = re.fullmatch(r"v(\d+)\.(\d+)", round_name)
    return match is not None and (int(match.group(1)), int(match.group(2))) >= _FIRST_ROUND


# Word of the linear layers: where fp32 is TF32, the device says; MXNet does not say it of a GPU.
def _compute_precision(config: Any, tf32: Any) -> Optional[str]:
    if config.precision not in ("fp32", "tf32"):
        return WORDS[config.precision]
    if tf32 is None and config.device == "gpu":
        return None
    return "tf32" if (any(tf32.values()) if isinstance(tf32, Mapping) else tf32) else "fp32"


# Word of the gradients on the wire, which have the weights' type, fp32, unless the configuration says otherwise.
def _communication_precision(config: Any) -> str:
    kind = getattr(config, "communicates", getattr(config, "gradient_compression", "none"))
    return "fp32" if kind in ("none", "tf32") else WORDS[kind]


def _accumulation_steps(config: Any) -> int:
    return int(getattr(config, "accumulation_steps", getattr(config, "accumulation", 1)))
