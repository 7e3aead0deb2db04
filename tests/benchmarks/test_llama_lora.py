"""LoRA on Llama 2 70B: packed data, published weights' files, schedule, memory, ranks, resume, the toy set's target."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.llama import safetensors, tokenization
from benchmarks.llama.schedule import learning_rate
from benchmarks.llama2_70b_lora import events, noise
from benchmarks.llama2_70b_lora.dataset import open_data
from tests import preparing
from tests.conftest import Encore, evaluations, losses, quality
from tests.trainings import (
    BENCHED,
    BareRuns,
    bare_runs,
    benched,
    checked_config,
    config_of,
    exported,
    reached,
    steps_so_far,
    write_small_config,
)

prepare = partial(preparing.run, "llama2_70b_lora")


# -- preparing ---------------------------------------------------------------------------------------------


def write_rows(folder: Path, train: list[dict[str, object]], test: list[dict[str, object]]) -> Path:
    folder.mkdir()
    for part, rows in (("train", train), ("validation", test)):
        (folder / f"{part}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_texts_are_packed_and_summaries_alone_count_in_evaluation(tmp_path: Path) -> None:
    pairs = {
        part: [{"input": f"the {word} number {number}", "output": f"one {word}"} for number in range(9)]
        for part, word in (("train", "town"), ("test", "sea"))
    }
    pairs["train"].append({"input": "xyzzy " * 90, "output": "left out"})
    raw = write_rows(tmp_path / "raw", pairs["train"], pairs["test"])
    tokenizer = tokenization.learn([each["input"] for each in pairs["train"][:9]], 300)
    tokenizer.save(str(raw / "tokenizer.json"))
    code, lines = prepare(raw, "-o", tmp_path / "to", "--sequence-length", 200)
    assert code == 0, lines[-1]
    found, end = open_data(tmp_path / "to"), tokenizer.token_to_id(tokenization.END)
    assert found.passport["how"]["left_out"] == {"train": 1, "test": 0} and found.passport["name"] == "raw"
    for part, samples in (("train", found.train), ("test", found.test)):
        stream, counts = samples.tokens.flatten().tolist(), samples.counts.flatten()
        assert samples.length == 200 and len(samples) >= 2
        whole = tokenizer.decode(stream[: stream.index(end)])
        text, summary = pairs[part][0]["input"], pairs[part][0]["output"]
        assert whole == f"### Summarize the following text:\n {text}\n ### Summary:\n {summary}"
        if part == "train":
            assert counts.all()
            continue
        first = stream.index(end) + 1
        assert tokenizer.decode(np.array(stream[:first])[counts[:first]].tolist()).strip() == summary
        assert not counts[np.array(stream) == end].any()
    assert prepare("--verify", tmp_path / "to")[0] == 0


def packed(first: int, count: int = 12, length: int = 16, masked: int = 0) -> list[dict[str, object]]:
    rows = [list(range(first + row, first + row + length)) for row in range(count)]
    return [{"input_ids": row, "labels": [-100] * masked + row[masked:]} for row in rows]


def test_packed_samples_are_kept_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = packed(0), packed(200, masked=5)
    raw = write_rows(tmp_path / "raw", train, test)
    code, lines = prepare(raw, "-o", tmp_path / "to")
    assert code == 0, lines[-1]
    # Not MLPerf's: the counts of its samples are others.
    assert "splits.train.count 12 for 3,901" in preparing.notes(lines)
    found = open_data(tmp_path / "to")
    assert found.train.tokens.tolist() == [row["input_ids"] for row in train] and found.train.counts.all()
    assert (found.test.counts == (np.arange(16) >= 5)).all() and found.vocabulary == 32000
    # The same rows as Parquet, by pyarrow's reader of batches; the real one was tried by hand, see README.md.
    parquet = tmp_path / "parquet"
    parquet.mkdir()
    for part in ("train", "validation"):
        (parquet / f"{part}-00000-of-00001.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "needs pyarrow" in preparing.refused(prepare(parquet, "-o", tmp_path / "other"))
    module, package = ModuleType("pyarrow.parquet"), ModuleType("pyarrow")
    rows = {"train": train, "validation": test}

    def batches(path: str) -> SimpleNamespace:
        part = rows[Path(path).name.split("-")[0]]
        return SimpleNamespace(iter_batches=lambda size: [SimpleNamespace(to_pylist=lambda: part)])

    vars(module)["ParquetFile"], vars(package)["parquet"] = batches, module
    monkeypatch.setitem(sys.modules, "pyarrow", package)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    assert prepare(parquet, "-o", tmp_path / "other")[0] == 0
    assert (tmp_path / "other" / "test_counts.npy").read_bytes() == (tmp_path / "to" / "test_counts.npy").read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": [1] * 16}, "row 1 has labels that are not its tokens"),
        ({"input_ids": [7] * 15}, "row 1 has 15 ids and 16 labels"),
        ({"input_ids": ["a"] * 16}, "row 1 has no lists of numbers"),
        ({"labels": [-100] * 16}, "sample 1 of the test part has no token that counts"),
        ({"input_ids": [40000] * 16, "labels": [40000] * 16}, "and 32,000 entries"),
        ({"labels": None}, "row 1 has input_ids, labels"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    test = packed(200)
    raw = write_rows(tmp_path / "raw", packed(0), [{**test[0], **change}, *test[1:]])
    assert words in preparing.refused(prepare(raw, "-o", tmp_path / "to"))


def test_texts_without_a_tokenizer_and_several_files_are_refused(tmp_path: Path) -> None:
    raw = write_rows(tmp_path / "raw", [{"input": "a", "output": "b"}], [{"input": "c", "output": "d"}])
    assert "name it with --tokenizer" in preparing.refused(prepare(raw, "-o", tmp_path / "to"))
    (raw / "train-2.jsonl").write_text("")
    assert "has 2 files for training, 1 for evaluation" in preparing.refused(prepare(raw, "-o", tmp_path / "to"))


# -- published weights ---------------------------------------------------------------------------------------


def test_a_file_of_tensors_is_as_safetensors_has_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.write(path, {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(2)})
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0 and header["b"] == {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]}
    found = safetensors.tensors_of(path)
    assert found["a"].values[1:, 1:].tolist() == [[4.0, 5.0]] and found["b"].shape == (2,)


@pytest.mark.parametrize(
    ("header", "words"),
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
def test_a_damaged_file_of_tensors_is_refused(tmp_path: Path, header: str, words: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    with pytest.raises(Problem, match=words):
        safetensors.tensors_of(path)


def test_an_index_names_files_next_to_it(tmp_path: Path) -> None:
    safetensors.write(tmp_path / "one.safetensors", {"a": np.ones(2)})
    index = tmp_path / "model.safetensors.index.json"
    for placed, words in (
        ({"a": "../one.safetensors"}, "no weight_map of files next to it"),
        ({"b": "one.safetensors"}, "b is not in one.safetensors"),
        ({"a": "two.safetensors"}, "cannot read"),
    ):
        index.write_text(json.dumps({"weight_map": placed}))
        with pytest.raises(Problem, match=words):
            safetensors.tensors_of(index)
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    assert safetensors.tensors_of(index)["a"].shape == (2,)


# -- schedule and memory ---------------------------------------------------------------------------------------


def test_learning_rate_and_evaluations_are_the_rules() -> None:
    config = config_of("llama2-70b-lora", "eos", "v4.0", 8)
    rates = [learning_rate(config, step) / 5e-4 for step in (0, 448, 895)]
    assert rates == pytest.approx([1, 0.5, 0], abs=1e-5)
    logged = events.hyperparameters(SimpleNamespace(**{**vars(config), "accumulation": 4}), 8)
    assert (logged["global_batch_size"], logged["opt_learning_rate_training_steps"]) == (8, 896)
    # NVIDIA's log has 1536, 1920, 2304 ... samples; training_rules.adoc has 384 rounded up to whole steps of 128.
    for batch, first in ((8, 1536), (64, 11 * 384), (128, 19 * 384), (1000, 128 * 1000)):
        timeline = events.timeline(SimpleNamespace(**{**vars(config), "batch_size": batch, "max_steps": 9999}), 1)
        found = [timeline.epoch_num(step) for step in range(1, 9999) if timeline.evaluates_after(step)]
        assert found[:2] == [first, first + max(384, batch)]
        assert timeline.evaluates_after(9999)


made = partial(checked_config, "llama2-70b-lora")


def test_what_cannot_fit_is_refused() -> None:
    facts = {"facts": {"sequence_length": 8192, "vocabulary": 32000}}
    for system, round_, gigabytes in (("eos", "v4.0", 80), ("h200", "v4.1", 141), ("reference_a100", "v4.0", 80)):
        assert made(system, round_).misfits(facts, 8, gigabytes * 1e9) == []
    stated = {"eos": (22, 66), "h200": (28, 117), "nyx": (35, 212)}
    for system, gigabytes in stated.items():
        both = [made(system, None, f"recompute={each}").needed_memory(32000, 8) for each in ("true", "false")]
        assert [int(each / 1e9 + 0.5) for each in both] == pytest.approx(gigabytes, abs=1), system
    ((found, expected, hint),) = made("eos", "v4.0").misfits(facts, 4, 35e9)
    assert found.startswith("a rank needs 3") and "35.0 GB" in expected and "more ranks" in hint
    kept = made("reference_a100", "v4.0", "recompute=false")
    assert "a rank needs 2" in kept.misfits(facts, 8, 80e9)[0][0]
    in_fp8 = made("eos", "v4.0", "fp8=scaled_mm").needed_memory(32000, 8)
    assert made("eos", "v4.0").needed_memory(32000, 8) - in_fp8 == 80 * 855_654_400 / 8
    facts["facts"]["sequence_length"] = 4096
    assert made("eos", "v4.0").misfits(facts, 8, 80e9)[0][1] == "sequence_length=8192"


def test_synthetic_sizes_are_those_of_llama_2(tmp_path: Path) -> None:
    noise.write(tmp_path, length=64)
    found = open_data(tmp_path)
    assert (found.vocabulary, found.padded_vocabulary(128), found.train.length) == (32000, 32000, 64)


# -- training --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def summaries(pytorch_python: Path, toy: Callable[[str], Path]) -> Path:
    # With the base that its preparation trains
    return toy("llama2-70b-lora")


STEPS, GLOBAL_BATCH = 10, 4
SHORT = ("eval_interval_samples=12", f"max_steps={STEPS}", "quality_target=0.1", "log_interval=1", "micro_batch=2")


def write_config(path: Path, ranks: int, *settings: str) -> Path:
    # config.json of the small system with a fixed seed.
    return write_small_config(
        path, "llama2-70b-lora", ranks, (*SHORT, f"batch_size={GLOBAL_BATCH // ranks}", *settings)
    )


runs = bare_runs("benchmarks.llama2_70b_lora.pytorch.train", "summaries", write_config)


def test_two_ranks_train_like_one_in_every_split(runs: BareRuns) -> None:
    one = runs.uninterrupted(1)
    first = losses(one / "metrics.jsonl")
    assert len(first) == STEPS
    for settings in ((), ("tensor_parallelism=2",)):
        two = runs.uninterrupted(2, *settings)
        assert losses(two / "metrics.jsonl") == pytest.approx(first, rel=1e-4), settings
        pairs = list(zip(evaluations(two / "metrics.jsonl"), evaluations(one / "metrics.jsonl"), strict=True))
        assert len(pairs) == 2
        assert all(quality(here) == pytest.approx(quality(there), rel=1e-4) for here, there in pairs), settings
    config = json.loads((two / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    ours, theirs = (safetensors.tensors_of(each / "adapter" / "adapter_model.safetensors") for each in (one, two))
    assert all(np.allclose(ours[name].values, theirs[name].values, atol=1e-4) for name in theirs) and len(ours) == 24


def test_stopped_run_resumes_on_another_number_of_ranks_and_split(runs: BareRuns, tmp_path: Path) -> None:
    output = tmp_path / "stopped"
    metrics = output / "metrics.jsonl"
    runs.stop(output, 2, "tensor_parallelism=2", once=lambda: steps_so_far(metrics) >= STEPS // 2)
    (checkpoint,) = (output / "checkpoint").glob("step_*")
    # Adapters and two moments of each in fp32, of both ranks, and no base.
    written = sum(path.stat().st_size for path in checkpoint.iterdir())
    assert written < (runs.folder / "base.safetensors").stat().st_size
    ended, whole = runs.end(output, 1), runs.uninterrupted(1)
    ours, theirs = (losses(each / "metrics.jsonl") for each in (ended, whole))
    assert ours == pytest.approx(theirs, rel=1e-4) and len(ours) == STEPS


@pytest.fixture(scope="module")
def small_run(encore: Encore, summaries: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The small run as a user starts it.
    return reached(encore, "llama2-70b-lora", summaries, tmp_path_factory.mktemp("results"))


def test_small_run_is_better_than_its_base(small_run: Path, runs: BareRuns, encore: Encore) -> None:
    found = quality(evaluations(small_run / "experiment_0" / "metrics.jsonl")[-1])
    target = config_of("llama2-70b-lora", "cpu", None, 2).quality_target
    # Adapters add nothing at first, and next to nothing at this rate.
    base = quality(evaluations(runs.uninterrupted(1, "max_steps=1", "learning_rate=1e-12") / "metrics.jsonl")[-1])
    assert found <= target < base - MARGIN
    values = {each["key"]: each for each in logged(small_run / "result_0.txt")}
    assert values["submission_benchmark"]["value"] == "llama2_70b_lora"
    assert (values["lora_rank"]["value"], values["lora_alpha"]["value"]) == (16, 32)
    assert {"samples_count"} <= set(values["eval_accuracy"]["metadata"])
    assert json.loads(encore("check", str(small_run), "--json", code=None).stdout)["passed_but_for_data"]


MARGIN = 0.15  # as the README says


def logged(path: Path) -> list[dict[str, dict[str, object]]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line.split(":::MLLOG ")[1]) for line in lines if ":::MLLOG " in line]


def test_exported_model_predicts_alike(small_run: Path, encore: Encore, tmp_path: Path) -> None:
    assert exported(encore, small_run, tmp_path / "exported")["reached"]


def test_bench_shows_every_kind(encore: Encore, summaries: Path) -> None:
    assert benched(encore, "llama2-70b-lora", summaries) == BENCHED
