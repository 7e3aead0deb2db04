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
    # Arguments of each operator by its name, as DALI prints them.
    definition = getattr(inputs, f"_{split}")
    graph = definition(config, Path("/data"), Ranks(3, 8, 3, 8, None), batch_size=8, num_threads=3, device_id=3)
    graph._build_graph()
    found = {}
    for each in graph._ops:
        text = str(each.spec)
        found[text.split()[2].rstrip(":")] = dict(re.findall(r"^    (\w+): (.*)$", text.split("Arguments:")[1], re.M))
    found["outputs"] = [output.device for output in graph._graph_outputs]
    return found


def decoder_of(config, split):
    (decoder,) = (arguments for name, arguments in operators(config, split).items() if name.startswith("decoders"))
    return decoder


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("config", [PLAIN, CACHED], ids=["plain", "cached"])
def test_decoders_get_what_the_submissions_gave_them(config, split):
    # As common/dali.py of NVIDIA's v0.6, v0.7 and v2.1 submissions of ResNet in MXNet.
    decoder, cached = decoder_of(config, split), config is CACHED
    assert (decoder["device"], decoder["affine"]) == ("mixed", "False")
    assert decoder["device_memory_padding"] == decoder["host_memory_padding"] == str(64 * 2**20)
    assert float(decoder["hw_decoder_load"]) == 0.5
    assert (decoder["preallocate_width_hint"], decoder["preallocate_height_hint"]) == (
        "0" if cached else "5980",
        "6430",
    )
    cache = {name: value for name, value in decoder.items() if name.startswith(("cache", "bytes_per_sample"))}
    wanted = {"cache_size": "6144", "cache_type": "threshold", "cache_threshold": "0"}
    assert cache == ({**wanted, "bytes_per_sample_hint": "[1315942, ]"} if cached else {})


@pytest.mark.parametrize("split", SPLITS)
def test_decoder_of_a_newer_dali_gets_no_hint_of_its_outputs(monkeypatch, split):
    # nvImageCodec's decoder ends when its outputs are allocated already; all else is as for an old one.
    old = operators(CACHED, split)
    # DALI 2.2's decoder has arguments that older ones lack; all else of it is the installed one's.
    names = [*backend.GetSchema("decoders__Image").GetArgumentNames(), "adjust_orientation", "dtype"]
    schema = SimpleNamespace(GetArgumentNames=lambda: names)
    monkeypatch.setattr(inputs, "backend", SimpleNamespace(GetSchema=lambda name: schema))
    new = operators(CACHED, split)
    del old["decoders__Image"]["bytes_per_sample_hint"]
    assert new == old


@pytest.mark.parametrize("split", SPLITS)
def test_a_decoder_cache_keeps_to_its_shard(split):
    # Else a rank has other images in each epoch, and the cache hardly ever hits.
    plain, cached = (operators(config, split)["readers__MXNet"] for config in (PLAIN, CACHED))
    caching = {"stick_to_shard", "skip_cached_images", "lazy_init"}
    assert [cached.get(name) for name in caching] == ["True"] * 3
    assert (cached["shard_id"], cached["num_shards"], cached["dont_use_mmap"]) == ("3", "8", "True")
    assert caching & set(plain) == ({"stick_to_shard"} if split == "evaluation" else set())
    assert plain.get("pad_last_batch") == ("True" if split == "evaluation" else None)


@pytest.mark.parametrize(("split", "operator"), [("training", "RandomResizedCrop"), ("evaluation", "Resize")])
def test_crops_get_their_hints_and_labels_are_on_the_gpu(split, operator):
    found = operators(CACHED, split)
    crop, normalize = found[operator], found["CropMirrorNormalize"]
    assert (crop["device"], normalize["device"]) == ("gpu", "gpu")
    assert (crop["bytes_per_sample_hint"], crop["temp_buffer_hint"]) == ("[165581, ]", "355568328")
    assert normalize["bytes_per_sample_hint"] == "[441549, ]"
    assert found["outputs"] == operators(PLAIN, split)["outputs"] == ["gpu", "gpu"]


def test_resizing_smooths_only_where_it_was_submitted(monkeypatch):
    # DALI did so by its triangular filter alone until 1.16, which made it the default of the linear one.
    for config, smooth in ((PLAIN, "False"), (CACHED, "True")):
        every = [each for split in SPLITS for each in operators(config, split).items()]
        assert [arguments["antialias"] for name, arguments in every if "Resize" in name] == [smooth] * 2
    old = SimpleNamespace(GetArgumentNames=lambda: ["resize_x", "min_filter"])
    monkeypatch.setattr(dali, "backend", SimpleNamespace(GetSchema=lambda name: old))
    assert [dali.resampling(smooth) for smooth in (False, True)] == [{}, {"min_filter": types.INTERP_TRIANGULAR}]
