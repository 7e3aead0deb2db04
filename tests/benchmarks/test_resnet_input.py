"""ResNet's input: batches in every framework, the operators that DALI gets on a GPU, and what the input makes wait."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.run.input_wait import InputWait
from encore import catalogue, configuration
from tests.trainings import InFramework, result

FRAMEWORKS = ("mxnet", "pytorch", "tensorflow")


@pytest.fixture(scope="module", params=FRAMEWORKS)
def found(request: pytest.FixtureRequest, digits: Path) -> dict[str, Any]:
    """What the program finds in each framework."""
    inside: InFramework = request.getfixturevalue(f"in_{request.param}")
    return {"name": request.param, **result(inside("input_batches.py", request.param, str(digits)))}


def test_a_batch_is_copied_in_every_precision_and_layout(found: dict[str, Any]) -> None:
    shapes = {"NHWC 4": [8, 32, 32, 4], "NHWC 3": [8, 32, 32, 3], "NCHW 4": [8, 4, 32, 32], "NCHW 3": [8, 3, 32, 32]}
    types = {"fp16": "float16", "fp32": "float32"}
    assert len(found["batches"]) == 8
    for name, batch in found["batches"].items():
        precision, layout, channels, _ = name.split()
        assert batch == {
            "type": types[precision],
            "shape": shapes[f"{layout} {channels}"],
            "images": True,
            "labels": True,
        }, name


def test_a_gpu_has_a_step_while_the_copy_before_it_is_waited_for(found: dict[str, Any]) -> None:
    """DALI is asked for a batch after the last one is copied, and nothing waits for all that the GPU has to do."""
    assert found["drains"] == 0
    wanted = ["run", "convert", "step", "copied"] * 3 if found["name"] == "tensorflow" else []
    assert found["calls"][:11] == wanted[:11]


def queued(fetches: list[float], steps: list[float]) -> float:
    """Share of the time that a device waits which has a queue: Python fetches the next batch while a step runs."""
    fetched = done = waited = 0.0
    for fetch, step in zip(fetches, steps, strict=True):
        fetched += fetch
        waited += max(0.0, fetched - done)
        done = max(fetched, done) + step
    return waited / done


def in_turn(fetches: list[float], steps: list[float]) -> float:
    """The same where a step is done when it returns."""
    return sum(fetches) / (sum(fetches) + sum(steps))


def test_the_share_of_waiting_is_that_of_an_idle_device(found: dict[str, Any]) -> None:
    assert set(found["shares"]) == {"0.0", "0.03", "0.1"}
    kinds = {"own": queued if found["name"] == "mxnet" else in_turn, "simulated": queued}
    for seconds, tries in found["shares"].items():
        for kind, expected in kinds.items():
            # Another process may take the core between two sleeps, in one try or another: what is wrong is always so.
            off = [shares[kind].pop("share") - expected(**shares[kind]) for shares in tries]
            assert min(map(abs, off)) < 0.06, (seconds, kind, off)


def test_an_error_of_a_queued_step_ends_the_training() -> None:
    """The watch of the device may be the first to hear of it."""

    def finish() -> None:
        raise RuntimeError("out of memory")

    wait = InputWait(finish)
    with pytest.raises(RuntimeError, match="out of memory"):
        wait.fetch(lambda: None)
        wait.take()


@pytest.fixture(scope="module")
def graphs(in_mxnet: InFramework) -> Any:
    """The operators of the pipelines on a GPU."""
    return result(in_mxnet("graph_on_gpus.py"))


def test_decoders_get_what_the_submissions_gave_them(graphs: Any) -> None:
    """As common/dali.py of NVIDIA's v0.6, v0.7 and v2.1 submissions of ResNet in MXNet."""
    decoders = [
        graphs["plain"]["training"]["decoders__ImageRandomCrop"],
        graphs["plain"]["evaluation"]["decoders__Image"],
        graphs["cached"]["training"]["decoders__Image"],
        graphs["cached"]["evaluation"]["decoders__Image"],
    ]
    for decoder in decoders:
        assert (decoder["device"], decoder["affine"]) == ("mixed", "False")
        assert decoder["device_memory_padding"] == decoder["host_memory_padding"] == str(64 * 2**20)
        assert float(decoder["hw_decoder_load"]) == 0.5
        assert decoder["preallocate_height_hint"] == "6430"
    assert [decoder["preallocate_width_hint"] for decoder in decoders] == ["5980", "5980", "0", "0"]
    assert ["bytes_per_sample_hint" in decoder for decoder in decoders] == [False, False, True, True]
    for plain in decoders[:2]:
        assert not [name for name in plain if name.startswith("cache")]
    for cached in decoders[2:]:
        assert cached["bytes_per_sample_hint"] == "[1315942, ]"
        assert (cached["cache_size"], cached["cache_type"], cached["cache_threshold"]) == ("6144", "threshold", "0")


def test_decoder_of_a_newer_dali_gets_no_hint_of_its_outputs(graphs: Any) -> None:
    """nvImageCodec's decoder ends when its outputs are allocated already; all else is as for an old one."""
    for split in ("training", "evaluation"):
        old, new = graphs["cached"][split], graphs["nvImageCodec"][split]
        decoder = dict(old["decoders__Image"])
        del decoder["bytes_per_sample_hint"]
        assert new == {**old, "decoders__Image": decoder}


def test_a_decoder_cache_keeps_to_its_shard(graphs: Any) -> None:
    """Else a rank has other images in each epoch, and the cache hardly ever hits."""
    caching = ("stick_to_shard", "skip_cached_images", "lazy_init")
    for split in ("training", "evaluation"):
        reader = graphs["cached"][split]["readers__MXNet"]
        assert [reader.get(name) for name in caching] == ["True"] * 3, split
        assert (reader["shard_id"], reader["num_shards"], reader["dont_use_mmap"]) == ("3", "8", "True")
    assert not set(caching) & set(graphs["plain"]["training"]["readers__MXNet"])
    assert graphs["plain"]["evaluation"]["readers__MXNet"]["pad_last_batch"] == "True"


def test_crops_get_their_hints_and_labels_are_on_the_gpu(graphs: Any) -> None:
    for split, operator in (("training", "RandomResizedCrop"), ("evaluation", "Resize")):
        crop, normalize = (graphs["cached"][split][name] for name in (operator, "CropMirrorNormalize"))
        assert (crop["device"], normalize["device"]) == ("gpu", "gpu")
        assert (crop["bytes_per_sample_hint"], crop["temp_buffer_hint"]) == ("[165581, ]", "355568328")
        assert normalize["bytes_per_sample_hint"] == "[441549, ]"
        assert [graphs[name][split]["outputs"] for name in ("plain", "cached")] == [["gpu", "gpu"]] * 2


def test_resizing_smooths_only_where_it_was_submitted(graphs: Any) -> None:
    """DALI did so by its triangular filter alone until 1.16, which made it the default of the linear one."""
    for name, smooth in (("plain", "False"), ("cached", "True")):
        operators = [of for split in graphs[name].values() for of in split.items()]
        assert [of["antialias"] for operator, of in operators if "Resize" in operator] == [smooth] * 2
    assert graphs["resizing before 1.16"] == [{}, {"min_filter": "DALIInterpType.INTERP_TRIANGULAR"}]
    choice = catalogue.choose("resnet")
    systems = [system for system in catalogue.systems(choice) if system.kind in ("submitted", "later")]
    found = [configuration.resolve(choice, each, each.nodes, each.gpus_per_node, []) for each in systems]
    assert {each.system.system for each in found if each.get("antialias")} == {"dgxh100", "dgxh100_n8", "h200"}
