"""What DALI decodes of images of every kind, and arguments of DALI's operators on a GPU."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from nvidia import dali
from nvidia.dali import backend, types
from PIL import Image

from benchmarks.common.data import dali as common
from benchmarks.common.data import recordio
from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet import inputs, prepare
from benchmarks.resnet.config import Hyperparameters


def picture(random):
    return Image.fromarray((random.rand(6, 8, 3) * 255).astype("uint8")).resize((160, 120), Image.BICUBIC)


def test_odd_images_become_what_dali_decodes(tmp_path):
    odd, random = tmp_path / "source" / "val" / "all", np.random.RandomState(1)
    for folder in ("val/all", "val/more", "train/all", "train/more"):
        (tmp_path / "source" / folder).mkdir(parents=True)
        picture(random).save(tmp_path / "source" / folder / "00.jpg")
    image = picture(random)
    modes = {"gray.jpg": "L", "cmyk.jpg": "CMYK", "rgb.png": "RGB", "palette.gif": "P", "alpha.webp": "RGBA"}
    for name, mode, options in (
        *((name, mode, {}) for name, mode in modes.items()),
        *((f"magic{n}.jpg", "RGB", {"comment": b"x" * n + bytes.fromhex("0a23d7ce") * 3}) for n in range(4)),
        ("progressive.jpg", "RGB", {"progressive": True}),
        ("png_inside.JPEG", "RGB", {"format": "PNG"}),
        ("moving.gif", "RGB", {"save_all": True, "append_images": [picture(random)]}),
    ):
        image.convert(mode).save(odd / name, **options)
    Image.fromarray(np.asarray(image.convert("L")).astype("uint16") * 256).save(odd / "deep.png")
    assert prepare.main([str(tmp_path / "source"), "-o", str(tmp_path / "out")]) == 0
    with (tmp_path / "out" / "val.rec").open("rb") as file:
        offsets = [offset for _, offset in recordio.read_index(tmp_path / "out" / "val.idx")]
        stored = {recordio.unpack(recordio.read_record(file, offset))[1] for offset in offsets}
    kept = ("progressive.jpg", "gray.jpg", "cmyk.jpg", *(f"magic{shift}.jpg" for shift in range(4)))
    assert [name for name in kept if (odd / name).read_bytes() not in stored] == []
    names = sorted(path.name for path in odd.iterdir())

    @dali.pipeline_def(batch_size=len(names), num_threads=1, device_id=None)
    def read():
        files = {"path": [str(tmp_path / "out" / "val.rec")], "index_path": [str(tmp_path / "out" / "val.idx")]}
        return dali.fn.decoders.image(dali.fn.readers.mxnet(**files)[0], output_type=types.RGB)

    pipeline = read()
    pipeline.build()
    for name, decoded in zip(names, pipeline.run()[0]):
        original = Image.open(odd / name)
        if original.mode.startswith("I"):
            original = Image.fromarray((np.asarray(original) // 256).astype("uint8"))
        # Means of 8x8 pixels: JPEG blurs the dither of a palette, and that is no fault.
        pairs = (
            np.asarray(each.reduce(8), int) for each in (original.convert("RGB"), Image.fromarray(np.array(decoded)))
        )
        assert np.abs(np.subtract(*pairs)).mean() < 2, name


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
def test_operators_get_the_submitted_arguments(config, split):
    # As common/dali.py of NVIDIA's v0.6, v0.7 and v2.1 submissions of ResNet in MXNet
    arguments, cached, is_evaluation = operators(config, split), config is CACHED, split == "evaluation"
    (decoder,) = (values for name, values in arguments.items() if name.startswith("decoders"))
    crop = arguments["RandomResizedCrop" if cached and not is_evaluation else "Resize"]
    hints = {"bytes_per_sample_hint": "[165581, ]", "temp_buffer_hint": "355568328"} if cached else {}
    normalize_hints = {"bytes_per_sample_hint": "[441549, ]"} if cached else {}
    for found, expected in (
        (decoder, {
            "device": "mixed", "affine": "False", "device_memory_padding": "67108864",
            "host_memory_padding": "67108864", "preallocate_width_hint": "0" if cached else "5980",
            "preallocate_height_hint": "6430",
            **(CACHE if cached else dict.fromkeys(CACHE)),
        }),
        (arguments["readers__MXNet"], {
            **(READER if cached else dict.fromkeys(READER)),
            # Without stick_to_shard a rank reads different images every epoch, and the cache rarely hits.
            "stick_to_shard": "True" if cached or is_evaluation else None,
            "pad_last_batch": "True" if is_evaluation else None, "shard_id": "3", "num_shards": "8",
            "dont_use_mmap": str(cached),
        }),
        (crop, {"device": "gpu", **hints}),
        (arguments["CropMirrorNormalize"], {"device": "gpu", **normalize_hints}),
    ):  # fmt: skip
        assert {name: found.get(name) for name in expected} == expected
    assert (float(decoder["hw_decoder_load"]), arguments["outputs"]) == (0.5, ["gpu", "gpu"])


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


def test_resizing_smooths_only_if_it_was_submitted(monkeypatch):
    # Until 1.16 DALI did so only with its triangular filter; then the linear one did by default.
    for config, smooth in ((PLAIN, "False"), (CACHED, "True")):
        assert operators(config, "evaluation")["Resize"]["antialias"] == smooth
    old = SimpleNamespace(GetArgumentNames=lambda: ["resize_x", "min_filter"])
    monkeypatch.setattr(common, "backend", SimpleNamespace(GetSchema=lambda name: old))
    assert [common.resampling(smooth) for smooth in (False, True)] == [{}, {"min_filter": types.INTERP_TRIANGULAR}]
