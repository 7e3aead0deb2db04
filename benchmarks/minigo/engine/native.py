"""The compiled engine's functions by ctypes, which gives the interpreter lock away during each call."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_float, c_int, c_int16, c_int32, c_uint16, c_uint64, c_void_p
from typing import Any, Dict, List, Tuple

from benchmarks.minigo.engine import build


class NativeRules(ctypes.Structure):
    """options.h: Rules."""

    _fields_ = (
        ("size", c_int32),
        ("komi", c_float),
        ("superko", c_int32),
        ("pass_alive", c_int32),
        ("features", c_int32),
    )


class NativeSearch(ctypes.Structure):
    """options.h: Search."""

    _fields_ = (
        ("readouts", c_int32),
        ("parallel_leaves", c_int32),
        ("soft_pick_cutoff", c_int32),
        ("reuse_tree", c_int32),
        ("random_symmetry", c_int32),
        ("allow_pass", c_int32),
        ("target_pruning", c_int32),
        ("restrict_pass_alive_play_threshold", c_int32),
        ("fastplay_readouts", c_int32),
        ("move_limit", c_int32),
        ("cache_entries", c_int32),
        ("c_puct_init", c_float),
        ("c_puct_base", c_float),
        ("value_init_penalty", c_float),
        ("policy_softmax_temp", c_float),
        ("noise_mix", c_float),
        ("dirichlet_alpha", c_float),
        ("min_resign_threshold", c_float),
        ("max_resign_threshold", c_float),
        ("disable_resign_pct", c_float),
        ("fastplay_frequency", c_float),
    )


class NativeSummary(ctypes.Structure):
    """options.h: Summary."""

    _fields_ = (
        ("number", c_int32),
        ("plies", c_int32),
        ("outcome", c_float),
        ("margin", c_float),
        ("resigned", c_int32),
        ("resignation_allowed", c_int32),
        ("black", c_int32),
    )


_RULES, _SEARCH = POINTER(NativeRules), POINTER(NativeSearch)
_FUNCTIONS: Dict[str, Tuple[Any, List[Any]]] = {
    "minigo_position": (c_void_p, [_RULES]),
    "minigo_position_copy": (c_void_p, [c_void_p]),
    "minigo_position_free": (None, [c_void_p]),
    "minigo_position_setup": (None, [c_void_p, c_void_p, c_int]),
    "minigo_position_play": (c_int, [c_void_p, c_int]),
    "minigo_position_legal": (None, [c_void_p, c_void_p]),
    "minigo_position_stones": (None, [c_void_p, c_void_p]),
    "minigo_position_held": (None, [c_void_p, c_void_p]),
    "minigo_position_liberties": (c_int, [c_void_p, c_int]),
    "minigo_position_area": (c_int, [c_void_p, c_int]),
    "minigo_position_to_play": (c_int, [c_void_p]),
    "minigo_position_over": (c_int, [c_void_p]),
    "minigo_position_planes": (None, [c_void_p, c_void_p, c_int, c_int, c_int]),
    "minigo_study": (c_void_p, [_RULES, _SEARCH, c_uint64, c_void_p, c_int]),
    "minigo_study_free": (None, [c_void_p]),
    "minigo_study_play": (c_int, [c_void_p, c_int]),
    "minigo_study_begin": (None, [c_void_p]),
    "minigo_study_leaves": (c_int, [c_void_p, c_void_p, c_int, c_int]),
    "minigo_study_answer": (None, [c_void_p, c_void_p, c_void_p]),
    "minigo_study_choose": (c_int, [c_void_p, c_int]),
    "minigo_study_value": (c_float, [c_void_p]),
    "minigo_study_visits": (None, [c_void_p, c_void_p]),
    "minigo_pool": (c_void_p, [_RULES, _SEARCH, c_int, c_int, c_uint64, c_int, c_int, c_void_p, c_int]),
    "minigo_pool_free": (None, [c_void_p]),
    "minigo_pool_leaves": (c_int, [c_void_p, c_int, c_void_p, c_int, c_int]),
    "minigo_pool_answer": (c_int, [c_void_p, c_int, c_void_p, c_void_p]),
    "minigo_pool_take": (
        c_int,
        [c_void_p, POINTER(NativeSummary), POINTER(POINTER(c_int16)), POINTER(POINTER(c_uint16)),
         POINTER(POINTER(c_float))],
    ),
    "minigo_pool_stop": (None, [c_void_p, c_int]),
    "minigo_pool_running": (c_int, [c_void_p]),
}  # fmt: skip


@functools.lru_cache(maxsize=None)
def engine() -> Any:
    """Return the library with the types of its functions set; compiles it where needed (Problem if it cannot)."""
    loaded = ctypes.CDLL(str(build.library()))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded
