"""Arguments of ResNet's DALI operators on a GPU: the graphs are defined and checked, but no GPU is needed."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvidia.dali import backend, types

from benchmarks.common.data import dali
from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet import inputs
from benchmarks.resnet.config import Hyperparameters

PLAIN = Hyperparameters(dali_nvjpeg_padding_mb=64, dali_hw_decoder_load=0.5)
CACHED = replace(
    PLAIN, dali_decoder_cache_mb=6144, dali_decoder_hint=1315942, dali_crop_hint=165581, dali_normalize_hint=441549,
    dali_temp_hint=355568328, dali_preallocate_width=0, dali_mmap=False, antialias=True,
)  # fmt: skip
SPLITS = ("training", "evaluation")


def operators(config, split):
    # Arguments of each operator by its name, as DALI prints them
    definition = getattr(inputs, f"_{split}")
    graph = definition(config, Path("/data"), Ranks(3, 8, 3, 8, None), batch_size=8, num_threads=3, device_id=3)
    graph._build_graph()
    arguments = {"outputs": [output.device for output in graph._graph_outputs]}
    for operator in graph._ops:
        text = str(operator.spec)
        lines = re.findall(r"^    (\w+): (.*)$", text.split("Arguments:")[1], re.M)
        arguments[text.split()[2].rstrip(":")] = dict(lines)
    return arguments


CACHE = {
    "cache_size": "6144", "cache_type": "threshold", "cache_threshold": "0", "bytes_per_sample_hint": "[1315942, ]",
}  # fmt: skip
READER = {"stick_to_shard": "True", "skip_cached_images": "True", "lazy_init": "True", "pad_last_batch": None}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("config", [PLAIN, CACHED], ids=["plain", "cached"])
def test_decoders_and_readers_get_the_submitted_arguments(config, split):
    # As common/dali.py of NVIDIA's v0.6, v0.7 and v2.1 submissions of ResNet in MXNet
    arguments, cached = operators(config, split), config is CACHED
    (decoder,) = (values for name, values in arguments.items() if name.startswith("decoders"))
    expected = {
        "device": "mixed", "affine": "False", "device_memory_padding": "67108864", "host_memory_padding": "67108864",
        "preallocate_width_hint": "0" if cached else "5980", "preallocate_height_hint": "6430",
        **(CACHE if cached else dict.fromkeys(CACHE)),
    }  # fmt: skip
    assert {name: decoder.get(name) for name in expected} == expected
    assert float(decoder["hw_decoder_load"]) == 0.5
    # Without stick_to_shard a rank reads different images every epoch, and the cache rarely hits.
    is_evaluation, reader = split == "evaluation", arguments["readers__MXNet"]
    expected = READER if cached else {**dict.fromkeys(READER), "stick_to_shard": "True" if is_evaluation else None}
    expected = {**expected, "pad_last_batch": "True" if is_evaluation else None, "shard_id": "3", "num_shards": "8"}
    assert {name: reader.get(name) for name in expected} == expected
    assert reader.get("dont_use_mmap") == ("True" if cached else "False")


@pytest.mark.parametrize("split", SPLITS)
def test_decoder_of_a_newer_dali_gets_no_hint_for_its_outputs(monkeypatch, split):
    # nvImageCodec's decoder fails if the outputs are allocated already; the other arguments stay.
    old = operators(CACHED, split)
    # DALI 2.2's decoder has arguments that older ones lack.
    names = [*backend.GetSchema("decoders__Image").GetArgumentNames(), "adjust_orientation", "dtype"]
    schema = SimpleNamespace(GetArgumentNames=lambda: names)
    monkeypatch.setattr(inputs, "backend", SimpleNamespace(GetSchema=lambda name: schema))
    del old["decoders__Image"]["bytes_per_sample_hint"]
    assert operators(CACHED, split) == old


@pytest.mark.parametrize(("split", "operator"), [("training", "RandomResizedCrop"), ("evaluation", "Resize")])
def test_crops_get_their_hints_and_labels_are_on_the_gpu(split, operator):
    arguments = operators(CACHED, split)
    crop, normalize = arguments[operator], arguments["CropMirrorNormalize"]
    assert (crop["device"], normalize["device"]) == ("gpu", "gpu")
    assert (crop["bytes_per_sample_hint"], crop["temp_buffer_hint"]) == ("[165581, ]", "355568328")
    assert normalize["bytes_per_sample_hint"] == "[441549, ]"
    assert arguments["outputs"] == operators(PLAIN, split)["outputs"] == ["gpu", "gpu"]


def test_resizing_smooths_only_if_it_was_submitted(monkeypatch):
    # Until 1.16 DALI did so only with its triangular filter; then the linear one did by default.
    for config, smooth in ((PLAIN, "False"), (CACHED, "True")):
        crops = [values for split in SPLITS for name, values in operators(config, split).items() if "Resize" in name]
        assert [arguments["antialias"] for arguments in crops] == [smooth] * 2
    old = SimpleNamespace(GetArgumentNames=lambda: ["resize_x", "min_filter"])
    monkeypatch.setattr(dali, "backend", SimpleNamespace(GetSchema=lambda name: old))
    assert [dali.resampling(smooth) for smooth in (False, True)] == [{}, {"min_filter": types.INTERP_TRIANGULAR}]
