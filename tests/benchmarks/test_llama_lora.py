"""LoRA on Llama 2 70B: packed data, files of published weights, schedule, and memory."""

import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.llama import safetensors, tokenization
from benchmarks.llama.schedule import learning_rate
from benchmarks.llama2_70b_lora import events, noise
from benchmarks.llama2_70b_lora.dataset import open_data
from tests import preparing
from tests.trainings import checked_config, config_of

prepare = partial(preparing.run, "llama2_70b_lora")

# -- preparation ------------------------------------------------------------------------------------------


def write_rows(folder: Path, train: Iterable[dict[str, Any]], test: Iterable[dict[str, Any]]) -> Path:
    folder.mkdir()
    for part, rows in (("train", train), ("validation", test)):
        (folder / f"{part}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_texts_are_packed_and_only_summaries_count_in_evaluation(tmp_path: Path) -> None:
    train, test = (
        [{"input": f"the {word} number {number}", "output": f"one {word}"} for number in range(9)]
        for word in ("town", "sea")
    )
    raw = write_rows(tmp_path / "raw", [*train, {"input": "xyzzy " * 90, "output": "left out"}], test)
    tokenizer = tokenization.learn([row["input"] for row in train], 300)
    tokenizer.save(str(raw / "tokenizer.json"))
    code, lines = prepare(raw, "-o", tmp_path / "to", "--sequence-length", 200)
    assert code == 0, lines[-1]
    content, end = open_data(tmp_path / "to"), tokenizer.token_to_id(tokenization.END)
    passport = content.passport
    assert (passport["how"]["left_out"], passport["name"]) == ({"train": 1, "test": 0}, "raw")
    for word, samples in (("town", content.train), ("sea", content.test)):
        stream = samples.tokens.flatten().tolist()
        assert samples.length == 200 and len(samples) >= 2
        text = f"### Summarize the following text:\n the {word} number 0\n ### Summary:\n one {word}"
        assert tokenizer.decode(stream[: stream.index(end)]) == text
    assert content.train.counts.all()
    stream, counts = content.test.tokens.flatten(), content.test.counts.flatten()
    first = stream[: stream.tolist().index(end) + 1]
    assert tokenizer.decode(first[counts[: len(first)]].tolist()).strip() == "one sea"
    assert not counts[stream == end].any()
    assert prepare("--verify", tmp_path / "to")[0] == 0


def packed(first: int, count: int = 12, length: int = 16, masked: int = 0) -> list[dict[str, Any]]:
    rows = [list(range(first + row, first + row + length)) for row in range(count)]
    return [{"input_ids": row, "labels": [-100] * masked + row[masked:]} for row in rows]


def test_packed_samples_are_not_changed(tmp_path: Path) -> None:
    raw = write_rows(tmp_path / "raw", packed(0), packed(200, masked=5))
    code, lines = prepare(raw, "-o", tmp_path / "to")
    assert code == 0, lines[-1]
    # Not the data set of MLPerf, which has other counts
    assert "splits.train.count 12 for 3,901" in preparing.notes(lines)
    content = open_data(tmp_path / "to")
    assert content.train.tokens.tolist() == [row["input_ids"] for row in packed(0)] and content.train.counts.all()
    assert (content.test.counts == (np.arange(16) >= 5)).all() and content.vocabulary == 32000


def test_parquet_has_the_same_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By a stand-in for pyarrow's reader of batches; the real one was tried by hand, see README.md
    rows = {"train": packed(0), "validation": packed(200, masked=5)}
    parquet = tmp_path / "parquet"
    parquet.mkdir()
    for part in rows:
        (parquet / f"{part}-00000-of-00001.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "needs pyarrow" in preparing.refused(prepare(parquet, "-o", tmp_path / "to"))
    module, package = ModuleType("pyarrow.parquet"), ModuleType("pyarrow")

    def parquet_file(path: str) -> SimpleNamespace:
        part = rows[Path(path).name.split("-")[0]]
        return SimpleNamespace(iter_batches=lambda size: [SimpleNamespace(to_pylist=lambda: part)])

    vars(module)["ParquetFile"], vars(package)["parquet"] = parquet_file, module
    monkeypatch.setitem(sys.modules, "pyarrow", package)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    assert prepare(parquet, "-o", tmp_path / "to")[0] == 0
    content = open_data(tmp_path / "to")
    assert content.train.tokens.tolist() == [row["input_ids"] for row in rows["train"]]
    assert (content.test.counts == (np.arange(16) >= 5)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [1] * 16}, "line 1 has labels that are not its tokens"),
        ({"input_ids": [7] * 15}, "line 1 has 15 ids and 16 labels"),
        ({"input_ids": ["a"] * 16}, "line 1 has no lists of numbers"),
        ({"labels": [-100] * 16}, "sample 1 of the test part has no token that counts"),
        ({"input_ids": [40000] * 16, "labels": [40000] * 16}, "and 32,000 entries"),
        ({"labels": None}, "line 1 has input_ids, labels"),
        ({"input_ids": [7.5] * 16}, "line 1 has no lists of numbers"),
        ({"input_ids": [1 << 32] * 16}, "line 1 has no lists of numbers"),
    ],
)
def test_bad_row_is_rejected(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    test = packed(200)
    raw = write_rows(tmp_path / "raw", packed(0), [{**test[0], **change}, *test[1:]])
    assert message in preparing.refused(prepare(raw, "-o", tmp_path / "to"))


def test_texts_without_a_tokenizer_and_several_files_are_rejected(tmp_path: Path) -> None:
    raw = write_rows(tmp_path / "raw", [{"input": "a", "output": "b"}], [{"input": "c", "output": "d"}])
    assert "name it with --tokenizer" in preparing.refused(prepare(raw, "-o", tmp_path / "to"))
    (raw / "train-2.jsonl").write_text("")
    assert "has 2 files for training, 1 for evaluation" in preparing.refused(prepare(raw, "-o", tmp_path / "to"))


def test_synthetic_data_has_the_sizes_of_llama_2(tmp_path: Path) -> None:
    noise.write(tmp_path, length=64)
    content = open_data(tmp_path)
    assert (content.vocabulary, content.padded_vocabulary(128), content.train.length) == (32000, 32000, 64)


# -- published weights ------------------------------------------------------------------------------------


def test_tensors_are_written_in_the_format_of_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.write(path, {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(2)})
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0 and header["b"] == {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]}
    tensors = safetensors.tensors_of(path)
    assert tensors["a"].values[1:, 1:].tolist() == [[4.0, 5.0]] and tensors["b"].shape == (2,)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}', "at 0 to 9"),
        ('{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}', "at 0 to 12"),
        ('{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}', "at 8 to 0"),
        ('{"a": {"dtype": "I8", "shape": [2], "data_offsets": [0, 2]}}', "a tensor of F64"),
        ('{"a": 3}', "a tensor of F64"),
        ('{"a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 0]}}', "at 0 to 0"),
        ("[]", "no header of JSON"),
        ("[" * 200000, "no header of JSON"),
    ],
)
def test_damaged_file_of_tensors_is_rejected(tmp_path: Path, header: str, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    with pytest.raises(Problem, match=message):
        safetensors.tensors_of(path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../one.safetensors"}, "no weight_map of files next to it"),
        ({"b": "one.safetensors"}, "b is not in one.safetensors"),
        ({"a": "two.safetensors"}, "cannot read"),
        ({"a": "one.safetensors"}, None),
    ],
)
def test_index_of_tensors(tmp_path: Path, weight_map: dict[str, str], message: str | None) -> None:
    safetensors.write(tmp_path / "one.safetensors", {"a": np.ones(2)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    if message is None:
        assert safetensors.tensors_of(index)["a"].shape == (2,)
    else:
        with pytest.raises(Problem, match=message):
            safetensors.tensors_of(index)


# -- schedule and memory ----------------------------------------------------------------------------------


def test_learning_rate_and_evaluations_of_the_rules() -> None:
    config = config_of("llama2-70b-lora", "eos", "v4.0", 8)
    rates = [learning_rate(config, step) / 5e-4 for step in (0, 448, 895)]
    assert rates == pytest.approx([1, 0.5, 0], abs=1e-5)
    logged = events.hyperparameters(SimpleNamespace(**{**vars(config), "accumulation": 4}), 8)
    assert (logged["global_batch_size"], logged["opt_learning_rate_training_steps"]) == (8, 896)
    # NVIDIA's log has 1536, 1920, 2304 ... samples; training_rules.adoc has 384 rounded up to full steps of 128.
    for batch, first in ((8, 1536), (64, 11 * 384), (128, 19 * 384), (1000, 128 * 1000)):
        timeline = events.timeline(SimpleNamespace(**{**vars(config), "batch_size": batch, "max_steps": 9999}), 1)
        samples = [timeline.epoch_num(step) for step in range(1, 9999) if timeline.evaluates_after(step)]
        assert samples[:2] == [first, first + max(384, batch)]
        assert timeline.evaluates_after(9999)


lora_config = partial(checked_config, "llama2-70b-lora")
FACTS = {"facts": {"sequence_length": 8192, "vocabulary": 32000}}


@pytest.mark.parametrize(
    ("system", "round_name", "memory"), [("eos", "v4.0", 80), ("h200", "v4.1", 141), ("reference_a100", "v4.0", 80)]
)
def test_systems_have_enough_memory(system: str, round_name: str, memory: int) -> None:
    assert lora_config(system, round_name).misfits(FACTS, 8, memory * 1e9) == []


# Estimates of the README
@pytest.mark.parametrize(("system", "gigabytes"), [("eos", (22, 66)), ("h200", (28, 117)), ("nyx", (35, 212))])
def test_memory_with_and_without_recomputation(system: str, gigabytes: tuple[int, int]) -> None:
    configs = [lora_config(system, None, f"recompute={value}") for value in ("true", "false")]
    assert [config.needed_memory(32000, 8) / 1e9 for config in configs] == pytest.approx(gigabytes, abs=1.5)


def test_configuration_without_enough_memory_is_rejected() -> None:
    config = lora_config("eos", "v4.0")
    ((problem, expected, hint),) = config.misfits(FACTS, 4, 35e9)
    assert problem.startswith("a rank needs 3") and "35.0 GB" in expected and "more ranks" in hint
    ((problem, _, _),) = lora_config("reference_a100", "v4.0", "recompute=false").misfits(FACTS, 8, 80e9)
    assert problem.startswith("a rank needs 2")
    in_fp8 = lora_config("eos", "v4.0", "fp8=scaled_mm").needed_memory(32000, 8)
    assert config.needed_memory(32000, 8) - in_fp8 == 80 * 855_654_400 / 8
    short = {"facts": {**FACTS["facts"], "sequence_length": 4096}}
    assert config.misfits(short, 8, 80e9)[0][1] == "sequence_length=8192"
