"""Kernel time per step by class, from torch.profiler.

    from benchmarks.common.checks.kernel_table import measure
    for row in measure(step, device)["kernels"][:10]:
        print(row["class"], row["share"], row["name"])

On a GPU, a row is a kernel or copy; on a CPU, an operator without its nested operators.
"""

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch.profiler import ProfilerActivity, profile

# Class, and a pattern for the names of its kernels and operators, case-insensitive; the first match counts.
CLASSES: Tuple[Tuple[str, str], ...] = (
    ("communication", r"nccl|all_?reduce|all_?gather|all_?to_?all|reduce_?scatter|c10d|gloo"),
    ("attention", r"flash|fmha|scaled_dot_product|attention"),
    ("convolutions", r"conv|s\d+cudnn|wgrad|dgrad|winograd|implicit_?gemm|im2col|fprop"),
    (
        "normalisation",
        r"batch_?norm|layer_?norm|group_?norm|rms_?norm|\bbn_|_bn_|::norm|\bnorm_|\bjoin_(for|back)ward|welford",
    ),
    (
        "matrix products",
        r"gemm|cutlass|xmma|::(add)?(b)?mm\b|baddbmm|::linear|matmul|nvjet|cublas|rnn|lstm|splitk"
        r"|\binteraction_(for|back)ward",
    ),
    (
        "copies",
        r"memcpy|memset|copy|clone|contiguous|nchwtonhwc|nhwctonchw|transpose|catarray|::cat\b|::stack|_to\b"
        r"|\bcast_tile",
    ),
    (
        "boxes and masks",
        r"\bnms|roi_?align|\balign_(for|back)ward|match_boxes|overlap_bits|\bgreedy\b|best_overlaps|draw_masks",
    ),
    (
        "indexing",
        r"embedding|compute_grad_weight|index|gather|scatter|sort|topk|nonzero|masked_select|unique|searchsorted|radix"
        r"|scan|\bdraw_samples",
    ),
    (
        "elementwise",
        r"elementwise|vectorized|triton_|\bgelu_|smoothed_rows|reduce|pointwise|foreach|multi_tensor|::(add|sub|mul|div|neg|exp|log|sqrt|rsqrt"
        r"|addcmul|addcdiv|lerp|relu|gelu|tanh|sigmoid|silu|threshold_backward|hardtanh|where|clamp(_min|_max)?|log_sigmoid_(for|back)ward|maximum|minimum|fill"
        r"|zeros?|new_zeros|new_ones|ones|full|zeros_like|ones_like|slice_backward|select_backward|sum|mean|max|min|std|var|pow|abs|sign|bernoulli|dropout|native_dropout|softmax|_softmax|_log_softmax"
        r"|log_softmax|_softmax_backward_data|_log_softmax_backward_data|nll_loss\w*|max_pool2d\w*|avg_pool2d\w*"
        r"|mean_backward|eq|ne|lt|le|gt|ge|bitwise_\w+|logical_\w+|masked_fill|uniform|normal|random|smooth_l1_loss\w*"
        r"|binary_cross_entropy\w*|gelu_backward|tanh_backward|sigmoid_backward|_fused_\w+)_?\b|softmax|dropout|loss|pool",
    ),
)
OTHER = "other"
_MOST = 200  # kernels that are listed, by time; the classes sum over all


_OPERATOR = re.compile(r"[a-z]\w*::\w+$")


def class_of(name: str) -> str:
    """Return the class for a GPU kernel or an operator such as ``aten::mm``."""
    return next((title for title, pattern in CLASSES if re.search(pattern, name.lower())), OTHER)


def measure(
    step: Callable[[], Any], device: torch.device, steps: int = 3, trace: Optional[Path] = None
) -> Dict[str, Any]:
    """Profile ``steps`` calls; return seconds and busy time fraction for each class and the longest kernels.

    ``busy_seconds``: kernel time per step, on a GPU summed over all streams, so that it may exceed the step time.
    ``trace``: file for the profiler trace, with input shapes.
    """
    # Suppress the profiler's own messages.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=kinds, record_shapes=trace is not None) as profiler:
        for _ in range(steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return table(_by_kernel(profiler, device), steps)


def table(kernels: Dict[str, Tuple[float, int]], steps: int = 1) -> Dict[str, Any]:
    total = sum(seconds for seconds, _ in kernels.values()) or 1.0
    rows: List[Dict[str, Any]] = [
        {
            "name": name,
            "class": class_of(name),
            "seconds": seconds / steps,
            "calls": calls / steps,
            "share": seconds / total,
        }
        for name, (seconds, calls) in sorted(kernels.items(), key=lambda item: -item[1][0])
    ]
    classes: Dict[str, float] = {title: 0.0 for title, _ in (*CLASSES, (OTHER, ""))}
    for row in rows:
        classes[row["class"]] += row["share"]
    shares = {title: share for title, share in classes.items() if share > 0}
    return {"busy_seconds": total / steps, "classes": shares, "kernels": rows[:_MOST]}


def _by_kernel(profiler: Any, device: torch.device) -> Dict[str, Tuple[float, int]]:
    totals: Dict[str, Tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    if device.type == "cuda":
        for event in profiler.events():
            # Annotations on the device's timeline (record_function, ProfilerStep) contain kernels.
            is_annotation = getattr(event, "is_user_annotation", False) or event.name.startswith("ProfilerStep")
            if event.device_type == torch.autograd.DeviceType.CUDA and not is_annotation:
                seconds, calls = totals[event.name]
                totals[event.name] = (seconds + event.time_range.elapsed_us() / 1e6, calls + 1)
        return dict(totals)
    for event in profiler.key_averages():
        # Rows of the autograd engine contain the time between operators.
        if event.self_cpu_time_total > 0 and _OPERATOR.match(event.key):
            totals[event.key] = (event.self_cpu_time_total / 1e6, event.count)
    return dict(totals)
