"""Catalogue and configuration: every system resolves, values have their origin, and mistakes are reported."""

import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from encore import catalogue, configuration, paths
from encore.cli import schemas
from encore.errors import EncoreError
from encore.slurm import cluster
from tests.json_schemas import validate
from tests.results.result_logs import write_files
from tests.trainings import checked_config

RESNET = catalogue.choose("resnet")


def resolve(system: str, round_name: str | None, gpus: int, *settings: str) -> configuration.Configuration:
    return configuration.resolve(RESNET, catalogue.find_system(RESNET, system, round_name), 1, gpus, list(settings))


@pytest.mark.parametrize("name", catalogue.choices())
def test_systems_resolve_without_deviations_and_with_other_numbers_of_gpus(name: str) -> None:
    choice = catalogue.choose(name)
    for system in catalogue.systems(choice):
        resolved = configuration.resolve(choice, system, system.nodes, system.gpus_per_node, [])
        if system.framework in ("", choice.implementation.framework):
            assert (resolved.deviations, resolved.is_submitted) == ((), system.kind == "submitted"), system.file
        validate(f"config-{name}", json.loads(json.dumps(resolved.plain())))
        doubled = configuration.resolve(choice, system, 1, 2 * system.gpus_per_node, [])
        assert doubled.get("batch_size") >= 1 and doubled.get("learning_rate") > 0
    assert {*schemas.meanings(configuration.config_class(choice.folder))} == {*configuration.field_types(choice.folder)}
    for rate in ("0", "-0.1"):
        with pytest.raises(EncoreError, match="learning_rate must be above 0"):
            configuration.resolve(choice, system, system.nodes, system.gpus_per_node, [f"learning_rate={rate}"])


def test_precedence_and_origin_of_values() -> None:
    settings = ("learning_rate=3.5", "decay_epochs=[1, 2]", "mirror=false")
    plain, changed = resolve("dgx1", "v0.5", 8), resolve("dgx1", None, 8, *settings)
    keys = ("depth", "quality_target", "learning_rate", "decay_epochs", "mirror")
    assert [(plain.get(key), plain.values[key].origin) for key in keys[:3]] == [
        (50, "default"), (0.749, "benchmark.toml, round v0.5"), (0.6, "systems/dgx1_v0.5.toml"),
    ]  # fmt: skip
    assert [(changed.get(key), changed.values[key].origin) for key in keys] == [
        (50, "default"), (0.759, "benchmark.toml, round v0.7"), (3.5, "--set"), ((1, 2), "--set"), (False, "--set"),
    ]  # fmt: skip
    assert changed.why_not_submitted == (
        "learning_rate = 3.5 (--set); decay_epochs = (1, 2) (--set); mirror = False (--set)"
    )
    assert resolve("dgxa100", "v0.7", 8, "epochs=42").is_submitted, "the submitted value"


@pytest.mark.parametrize(("system", "factor"), [("dgxa100", 0.5), ("dgx1", math.sqrt(0.5))])
def test_learning_rate_is_scaled_with_the_number_of_gpus(system: str, factor: float) -> None:
    eight, four = resolve(system, "v0.7", 8), resolve(system, "v0.7", 4)
    rate = pytest.approx(eight.get("learning_rate") * factor, rel=1e-5)
    assert (four.get("batch_size"), four.get("learning_rate")) == (eight.get("batch_size"), rate)
    assert four.deviations[0] == configuration.Deviation("gpus", "1 x 4 GPUs instead of 1 x 8")
    assert "rule:" in four.values["learning_rate"].origin


def test_warm_up_factor_is_scaled_with_the_learning_rate() -> None:
    # Mask R-CNN: the submitted factor would start one of eight GPUs at a negative rate
    choice = catalogue.choose("maskrcnn")
    system = catalogue.find_system(choice, "dgxa100", "v0.7")
    eight, one = (configuration.resolve(choice, system, 1, gpus, []) for gpus in (8, 1))
    for name in ("learning_rate", "warmup_factor"):
        assert one.get(name) == pytest.approx(eight.get(name) / 8) and "rule:" in one.values[name].origin
    with pytest.raises(EncoreError, match="the first rate would be negative"):
        configuration.resolve(choice, system, 1, 8, ["warmup_steps=1000"])


# The global batch stays, and the warm-up is no longer than the training
@pytest.mark.parametrize(
    ("ranks", "settings", "batch", "warmup"),
    [
        *((ranks, (), batch, 2) for ranks, batch in ((1, 64), (2, 32), (3, 21), (8, 8), (64, 1))),
        (1, ("epochs=2",), 64, 2), (1, ("epochs=1",), 64, 1),
    ],
)  # fmt: skip
def test_small_system(ranks: int, settings: tuple[str, ...], batch: int, warmup: int) -> None:
    resolved = resolve("cpu", None, ranks, *settings)
    assert [resolved.get(key) for key in ("batch_size", "learning_rate", "warmup_epochs")] == [batch, 0.1, warmup]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("lerning_rate=1",), "did you mean 'learning_rate'?"),
        (("learning_rate=fast",), "a number"),
        (("learning_rate=NaN",), "a number"),
        (("batch_size=1.5",), "a whole number"),
        (("batch_size=true",), "a whole number"),
        (("mirror=2",), "true or false"),
        (("depth=51",), "one of 18, 34, 50, 101, 152"),
        (("optimizer=adam",), "one of sgd, lars"),
        (("crop_area=[1]",), "two values"),
        (("decay_epochs=3",), "a list of a whole number"),
        (("seed=3",), "--seed"),
        (("nothing",), "key=value"),
        (("precision=fp16",), "device=cpu cannot run precision=fp16"),
        (("layout=NHWC",), "no NHWC convolution"),
        (("accumulation_steps=2",), "MXNet's step has no accumulation"),
        (("accumulation_steps=3",), "batch_size=32 must be a multiple of accumulation_steps=3"),
        (("accumulation_steps=0",), "accumulation_steps must be at least 1"),
        (("schedule=step",), "decay_epochs"),
        (("eval_offset=7",), "eval_offset"),
        (("batch_size=0",), "batch_size"),
        (("epochs=0",), "epochs"),
        (("eval_resize=8",), "eval_resize"),
        (("quality_target=95",), "quality_target"),
        (("epochs=1" + 23 * "0",), "is too large\n  expected: a whole number up to 2147483647"),
        (("epochs=1", "warmup_epochs=2"), "warmup_epochs=2 must be in 0..epochs=1: set warmup_epochs"),
        (("precision=half",), "hint: --set precision=VALUE with one of them"),
    ],
)
def test_invalid_values_are_reported(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(EncoreError, match=re.escape(message)):
        resolve("cpu", None, 2, *settings)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: catalogue.choose("resnt"), "did you mean 'resnet'?"),
        (lambda: catalogue.find_system(RESNET, "dgx-1", None), "did you mean 'dgx1'?"),
        (lambda: catalogue.find_system(RESNET, "h100", None), "did you mean 'dgxh100' or 'h100-80gb'"),
        (lambda: catalogue.find_system(RESNET, "H200-141", None), "did you mean 'h200-141gb'?"),
        (lambda: catalogue.find_system(RESNET, "dgx1", "v9"), "unknown round"),
        (lambda: catalogue.find_system(RESNET, "dgxa100", "v0.5"), "use --round v0.7"),
        (lambda: resolve("cpu", None, 65), "at most 64 data-parallel ranks"),
        (lambda: resolve("dgxa100", "v0.7", 8, "epochs=1"), "set warmup_epochs"),
        (lambda: checked_config("llama31-8b", "cpu", None, "tensor_parallelism=0"), "tensor_parallelism=0, "),
    ],
)
def test_unknown_names_are_reported(call: Callable[[], object], message: str) -> None:
    with pytest.raises(EncoreError, match=re.escape(message)):
        call()


NCF = (paths.BENCHMARKS / "ncf" / "benchmark.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("load", "text", "key", "expected"),
    [
        (cluster.load, "bogus = 1\n", "bogus", r"one of \d+, such as .*\baccount\b.*"),
        *(
            (
                partial(catalogue.parse, catalogue.Benchmark),
                NCF.replace(f"[{table}]", f"[{table}]\nbogus = 1"),
                f"{table}.bogus",
                f".*{table}.{keys}.*",
            )
            for table, keys in (("small_data", "name, small_data.system"), ("implementations.pytorch", "framework"))
        ),
    ],
    ids=["cluster", "table", "nested table"],
)
def test_unknown_key_of_a_file_is_refused_with_the_known_keys(
    load: Callable[[Path], object], text: str, key: str, expected: str, tmp_path: Path
) -> None:
    file = write_files(tmp_path, {"file.toml": text}) / "file.toml"
    with pytest.raises(EncoreError, match=f"unknown key in {file}: '{key}'") as caught:
        load(file)
    assert re.fullmatch(expected, caught.value.expected)
