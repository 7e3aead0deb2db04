"""Llama 3.1 8B, gpt-oss-20b and Llama 2 70B LoRA: Megatron's files, sample order, preparation of text, and memory."""

import gzip
import io
import json
import math
import os
import shutil
import struct
import sys
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.llama import compiled, megatron, order, safetensors, tokenization, writer
from benchmarks.llama.dataset import open_data
from benchmarks.llama2_70b_lora.dataset import open_data as open_lora_data
from encore import paths
from tests import preparing
from tests.conftest import Encore, ToyRun
from tests.preparing import check_refusal, notes, prepared, ran, refused, write_files
from tests.trainings import checked_config, exported, serving

prepare = partial(preparing.run, "llama31_8b")

# -- files and order --------------------------------------------------------------------------------------


def indexed(name: str, documents: list[list[int]], kind: str = "<u2") -> dict[str, bytes]:
    index = io.BytesIO()
    megatron.write_index(index, list(map(len, documents)), np.dtype(kind))
    tokens = np.array([token for document in documents for token in document], kind)
    return {f"{name}.idx": index.getvalue(), f"{name}.bin": tokens.tobytes()}


def write_documents(folder: Path, documents: list[list[int]], kind: str = "<u2") -> megatron.Documents:
    return megatron.open_documents(write_files(folder, indexed("part", documents, kind)) / "part")


@pytest.mark.parametrize(("kind", "code", "size"), [("<u2", 8, 2), ("<i4", 4, 4)])
def test_documents_round_trip(tmp_path: Path, kind: str, code: int, size: int) -> None:
    contents = [[5, 6, 7], [], [8], [9, 10, 11, 12]]
    documents = write_documents(tmp_path, contents, kind)
    read = [documents.read(number, 0, 99).tolist() for number in range(4)]
    assert (read, documents.read(3, 1, 2).tolist()) == (contents, [10, 11])
    # The bytes of Megatron's _IndexWriter
    lengths, offsets = np.array([3, 0, 1, 4], "<i4"), np.array([0, 3, 3, 4], "<i8") * size
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 4, 5)
    content = header + lengths.tobytes() + offsets.tobytes() + np.arange(5, dtype="<i8").tobytes()
    assert (tmp_path / "part.idx").read_bytes() == content


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"part.idx": b"MMAPIDX"}, "expected: an index of Megatron's"),
        ({"part.idx": lambda content: content[:-1]}, "one sequence per document"),
        ({"part.bin": lambda content: content[2:]}, "copy both files again"),
    ],
    ids=["header", "index", "tokens"],
)
def test_damaged_files_are_rejected(tmp_path: Path, files: preparing.Files, message: str) -> None:
    write_documents(tmp_path, [[1, 2], [3]])
    with pytest.raises(Problem, match=message):
        megatron.open_documents(write_files(tmp_path, files) / "part")


@pytest.mark.parametrize(
    ("seed", "count", "checksum"),
    # Computed token by token in the order of Megatron's GPTDataset. Epochs: 4, 2, 3, 1, 6; with the seeds 0 and 8 the
    # last epoch is shuffled separately.
    [
        (0, 80, 87748338),
        (1, 28, 1713175539),
        (2, 50, 3947534383),
        (3, 89, 1297574008),
        (8, 50, 494998822),
    ],
)
def test_samples_are_in_the_order_of_megatron(tmp_path: Path, seed: int, count: int, checksum: int) -> None:
    random = np.random.RandomState(seed)
    documents = [random.randint(999, size=random.randint(1, 30)).tolist() for _ in range(random.randint(4, 20))]
    length, samples = int(random.randint(2, 20)), int(random.randint(1, 120))
    source = write_documents(tmp_path, documents)
    key, other_key = (order.key_of(source.lengths, length, number, seed) for number in (samples, samples + 1))
    order.write(order.shuffled(source.lengths, length, samples, seed), tmp_path / "order", key)
    assert order.is_there(tmp_path / "order", key) and not order.is_there(tmp_path / "order", other_key)
    stored = order.read(tmp_path / "order", length)
    tokens = [stored.tokens(source, number).tolist() for number in range(len(stored))]
    assert (len(tokens), zlib.crc32(np.array(tokens, "<i4").tobytes())) == (count, checksum)


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
@pytest.mark.parametrize(
    ("count", "swaps"),
    [
        (2, 99),
        (3000, 99),
        (1 << 16, 99),
        ((1 << 16) + 1, 99),
        (3_000_000, 30_001),
        (3_000_000, 6),
        (2_097_153, 1 << 20),
    ],
    ids=["two", "small", "power-of-two", "more-than-a-power", "many-flushes", "one-slot", "power-and-buckets"],
)
def test_compiled_shuffle_equals_numpy(count: int, swaps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "LARGE", 0)
    monkeypatch.setattr(compiled, "SWAPS", swaps)
    assert compiled.library()
    randoms, ours, numpys = (
        [np.random.RandomState(count) for _ in range(2)],
        np.arange(count, dtype=np.int32),
        [*range(count)],
    )
    compiled.shuffle(ours, randoms[0])
    randoms[1].shuffle(numpys)
    assert ours.tolist() == numpys and len({random.randint(1 << 30) for random in randoms}) == 1


@pytest.mark.parametrize("compiler", ["false", "missing"])
def test_order_needs_no_compiler(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    assert compiled.library.__wrapped__() is None


@pytest.mark.parametrize(
    ("module", "limit", "value"), [(compiled, "LARGE", 0), (order, "CHUNK", 7)], ids=["compiled", "in chunks"]
)
@pytest.mark.parametrize(("shortest", "samples"), [(0, 900), (0, 3), (1, 900), (9, 900)])
def test_cut_equals_numpys_at_once(
    module: Any, limit: str, value: int, shortest: int, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in an index, the lengths are not aligned.
    counts = np.random.RandomState(0).randint(shortest, 30, 200).astype("<i4")
    lengths = np.frombuffer(b"xx" + counts.tobytes(), "<i4", 200, 2)
    numpys = order.shuffled(lengths, 8, samples, 3)
    monkeypatch.setattr(module, limit, value)
    assert compiled.library() is not None
    ours = order.shuffled(lengths, 8, samples, 3)
    assert all((getattr(ours, name) == getattr(numpys, name)).all() for name in order.FILES)


def test_evaluation_samples_stay_in_order(tmp_path: Path) -> None:
    source = write_documents(tmp_path, [[0, 1, 2], [3, 4], [5, 6, 7, 8, 9]])
    samples, two = (order.in_order(source.lengths, 3, most) for most in (1024, 2))
    tokens = [samples.tokens(source, number).tolist() for number in range(len(samples))]
    assert (tokens, len(two)) == ([[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]], 2)


def test_shuffled_evaluation_samples_are_those_of_the_first_evaluation() -> None:
    lengths = np.random.RandomState(0).randint(1, 30, 50).astype(np.int32)
    samples, all_samples = order.shuffled_start(lengths, 8, 5, 40, 3), order.shuffled(lengths, 8, 200, 3)
    assert (len(samples), samples.sequences.tolist()) == (5, all_samples.sequences[:5].tolist())


# -- preparation ------------------------------------------------------------------------------------------


TOKENIZER = tokenization.learn(["the town of the sea"] * 9, 270)
ENTRIES, WITH_TOKENIZER = TOKENIZER.get_vocab_size(), {"tokenizer.json": TOKENIZER.to_str()}
TRAIN, VALID = "c4-train.en_6_text_document", "c4-validation-91205-samples.en_text_document"
INDEXED = {**indexed(TRAIN, [[1, 2, 3]] * 20), **indexed(VALID, [[3, ENTRIES - 1]] * 20), **WITH_TOKENIZER}


@pytest.mark.parametrize("suffix", [".jsonl", ".json.gz", ".txt"])
def test_text_is_tokenized(tmp_path: Path, suffix: str) -> None:
    texts, files = {"train": ["the town", "of the\nsea"], "valid": ["the sea, Größe"]}, {}
    for part, documents in texts.items():
        lines = documents if suffix == ".txt" else [json.dumps({"text": text, "url": ""}) for text in documents]
        content = (("\n\n" if suffix == ".txt" else "\n").join(lines) + "\n").encode()
        files[f"c4-{part}{suffix}"] = gzip.compress(content) if suffix.endswith(".gz") else content
    raw, end = write_files(tmp_path / "raw", {**files, **WITH_TOKENIZER}), TOKENIZER.token_to_id(tokenization.END)
    content = open_data(prepared("llama31_8b", raw, tmp_path / "to", "--append-eod"))
    stored = [
        [part.read(number, 0, 99).tolist() for number in range(len(part.lengths))]
        for part in (content.train, content.test)
    ]
    assert [[TOKENIZER.decode(tokens[:-1]) for tokens in part] for part in stored] == [*texts.values()]
    assert {tokens[-1] for part in stored for tokens in part} == {end}
    assert (content.vocabulary, content.padded_vocabulary(128)) == (ENTRIES, 384)
    notes(prepare("--verify", tmp_path / "to"))


def test_indexed_files_are_linked_and_checked(tmp_path: Path) -> None:
    raw = write_files(tmp_path / "raw", INDEXED)
    assert "facts.documents.test 20 for 91,205" in notes(prepare(raw, "-o", tmp_path / "to"))
    assert (tmp_path / "to" / "train.bin").samefile(raw / f"{TRAIN}.bin")
    assert open_data(tmp_path / "to").manifest["name"] == "own data"


HEADER = megatron.HEADER.size


@pytest.mark.parametrize(
    ("suffix", "offset", "kind", "value", "message"),
    [
        # An index has the lengths, then the pointers, then the boundaries of 20 documents
        ("idx", HEADER + 4, "<i4", -1, "document 1 (from 0) has the length -1"),
        ("idx", HEADER + 4, "<i4", 9, "document 2 (from 0) has the pointer 12"),
        ("idx", HEADER + 20 * 4 + 8, "<i8", -6, "document 1 (from 0) has the pointer -6"),
        ("idx", HEADER + 20 * 4 + 8 * 3, "<i8", 12, "document 3 (from 0) has the pointer 12"),
        ("idx", HEADER + 20 * 12, "<i8", 1, "document 0 (from 0) has the boundary 1"),
        ("idx", HEADER + 20 * 12 + 8 * 20, "<i8", 19, "document 20 (from 0) has the boundary 19"),
        ("bin", 6 * 2, "<u2", 9999, "document 2 (from 0) has the token 9,999"),
    ],
)
def test_wrong_indexed_files_are_rejected_by_preparation_and_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, offset: int, kind: str, value: int, message: str
) -> None:
    raw, number = write_files(tmp_path / "raw", INDEXED), np.array(value, kind).tobytes()
    change = {f"{TRAIN}.{suffix}": lambda content: content[:offset] + number + content[offset + len(number) :]}
    check_refusal("llama31_8b", raw, change, [message], "--allow-overlap")
    # As an earlier version prepared it
    for name in ("check_index", "check_tokens"):
        monkeypatch.setattr(writer, name, lambda *_: None)
    assert message in refused(prepare("--verify", prepared("llama31_8b", raw, tmp_path / "to", "--allow-overlap")))


def jsonl(rows: Iterable[object]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def packed(first: int, masked: int = 0, **changes: Any) -> str:
    # Rows of 16 tokens, with changes to the first one
    rows = [list(range(first + row, first + row + 16)) for row in range(12)]
    first_row, *rest = ({"input_ids": row, "labels": [-100] * masked + row[masked:]} for row in rows)
    return jsonl([{**first_row, **changes}, *rest])


TEXTS, PAIRS = {"test.txt": "c\n"}, {"train.jsonl": jsonl([{"input": "a", "output": "b"}])}
PAIRS["validation.jsonl"] = jsonl([{"input": "c", "output": "d"}])


@pytest.mark.parametrize(
    ("benchmark", "files", "options", "message"),
    [
        ("llama31_8b", {**INDEXED, **indexed(VALID, [[3, ENTRIES]] * 20)}, (), f"0 (from 0) has the token {ENTRIES}"),
        ("llama31_8b", {**INDEXED, **indexed("train_7", [[1, 2, 3]] * 20)}, (), "one indexed file per part"),
        ("llama31_8b", {"train.jsonl": jsonl([{"text": "a"}, {"words": "b"}])}, (), "line 2: text is missing"),
        ("llama31_8b", {"train.jsonl": "[]\n"}, (), "line 1: not a JSON object"),
        (
            "llama31_8b", {"train-00000-of-00002.jsonl": jsonl([{"text": "a"}])}, (),
            "has 1 of 2 files train*-of-00002.jsonl, number 1",
        ),
        (
            "llama31_8b", {"train-00002-of-00002.jsonl": jsonl([{"text": "a"}])}, (),
            "has 1 of 2 files train*-of-00002.jsonl, number 1",
        ),
        (
            "llama31_8b", {"train.jsonl": jsonl([{"text": "a"}]), "train.jsonl.gz": gzip.compress(b"")}, (),
            "train.jsonl.gz have the same content",
        ),
        ("llama31_8b", {"train.jsonl": "\n"}, (), "train.jsonl: no documents"),
        ("llama31_8b", {"train.txt": "a", **TEXTS}, ("--vocabulary-size", "600"), "text without a tokenizer"),
        ("llama31_8b", {"other.txt": "a", **TEXTS}, (), "has 0 files for training, 1 for evaluation"),
        ("llama31_8b", {"train.txt": "a\n", **TEXTS, "tokenizer.json": None}, (), "tokenizer.json"),
        ("llama2_70b_lora", {**PAIRS, "tokenizer.json": None}, (), "pass it with --tokenizer"),
        ("llama2_70b_lora", {**PAIRS, "train-2.jsonl": ""}, (), "has 2 files for training, 1 for evaluation"),
    ],
)  # fmt: skip
def test_bad_source_is_rejected(
    benchmark: str, files: preparing.Files, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    test = {} if {"test.txt", f"{VALID}.bin", "validation.jsonl"} & {*files} else {"test.jsonl": jsonl([{"text": "c"}])}
    check_refusal(benchmark, tmp_path / "raw", {**WITH_TOKENIZER, **test, **files}, [message], *options)


# -- memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sizes"),
    # Sizes of a micro-batch and of the batch of a data-parallel rank
    [
        ((), (2, 4)),
        (("micro_batch=3",), (2, 4)),
        (("batch_size=3",), (1, 3)),
        (("batch_size=3", "tensor_parallelism=8"), (1, 3)),
    ],
)
def test_micro_batch_divides_the_batch(settings: tuple[str, ...], sizes: tuple[int, int]) -> None:
    config = checked_config("llama31-8b", "reference_h200", None, *settings)
    assert (config.micro_batch_size, config.accumulation * config.micro_batch_size) == sizes


def facts_of(**facts: object) -> dict[str, Any]:
    return {"facts": {"vocabulary": 128256, "tokens": {"train": 10**9, "test": 10**9}, **facts}}


LONG_ENOUGH = {"train": 65537, "test": 65537}
LORA_FACTS = facts_of(sequence_length=8192, vocabulary=32000)


@pytest.mark.parametrize(
    ("name", "system", "settings", "nodes", "facts", "memory", "needed"),
    [
        ("llama31-8b", "reference_h100", (), 1, facts_of(), 80, 24),
        ("llama31-8b", "reference_h200", (), 1, facts_of(), 141, 27),
        ("llama31-8b", "hpf_n8", (), 8, facts_of(), 80, 51),
        ("llama31-8b", "tyche_ngpu8", (), 1, facts_of(), 186, 106),
        ("llama31-8b", "xe9680l_b200", (), 1, facts_of(), 180, 106),
        ("gpt-oss-20b", "reference_b200", (), 1, facts_of(), 180, 48),
        ("llama31-8b", "h100-80gb", (), 1, facts_of(), 80, 53),
        ("llama31-8b", "h200-141gb", (), 1, facts_of(), 141, 85),
        ("llama31-8b", "h200-141gb", ("micro_batch=4", "recompute_layers=16"), 1, facts_of(), 141, 85),
        ("gpt-oss-20b", "h100-80gb", (), 1, facts_of(), 80, 65),
        ("gpt-oss-20b", "h200-141gb", (), 1, facts_of(), 141, 119),
        ("llama2-70b-lora", "h100-80gb", (), 1, LORA_FACTS, 80, 58),
        ("llama2-70b-lora", "h200-141gb", (), 1, LORA_FACTS, 141, 109),
        ("llama31-8b", "reference_h200", ("sequence_length=65536",), 1, facts_of(tokens=LONG_ENOUGH), math.inf, 76),
        # Estimates of the README, with and without recomputation
        ("llama2-70b-lora", "eos", (), 1, LORA_FACTS, 80, 22),
        ("llama2-70b-lora", "h200", (), 1, LORA_FACTS, 141, 28),
        ("llama2-70b-lora", "reference_a100", (), 1, LORA_FACTS, 80, 35),
        ("llama2-70b-lora", "eos", ("recompute=false",), 1, LORA_FACTS, math.inf, 66),
        ("llama2-70b-lora", "eos", ("fp8=scaled_mm",), 1, LORA_FACTS, 80, 13),
        ("llama2-70b-lora", "h200", ("recompute=false",), 1, LORA_FACTS, math.inf, 117),
        ("llama2-70b-lora", "reference_a100", ("recompute=false",), 1, LORA_FACTS, math.inf, 212),
    ],
)
def test_systems_have_enough_memory(
    name: str, system: str, settings: tuple[str, ...], nodes: int, facts: Any, memory: float, needed: int
) -> None:
    config = checked_config(name, system, None, *settings, nodes=nodes)
    assert round(config.needed_memory(facts["facts"]["vocabulary"], 8 * nodes) / 1e9) == needed
    assert config.mismatches(facts, 8 * nodes, memory * 1e9) == []


@pytest.mark.parametrize(
    ("name", "system", "settings", "facts", "ranks", "memory", "parts"),
    [
        (
            "llama31-8b", "reference_h200", ("recompute=false", "micro_batch=4"), facts_of(), 8, 141,
            ["a rank needs 193.8 GB | 95% of its memory, 141.0 GB | ", "recompute=true or more recompute_layers"],
        ),
        ("gpt-oss-20b", "reference_b200", ("recompute=false",), facts_of(), 8, 80, ["a rank needs", "recompute=true"]),
        # Weights, AdamW and gradients: 16 bytes of 8.03e9 weights are 128.5 GB
        ("llama31-8b", "reference_h200", (), facts_of(), 1, 141, ["a rank needs 139.9 GB", "more ranks"]),
        ("llama31-8b", "h100-80gb", ("micro_batch=2",), facts_of(), 8, 80, ["a rank needs 85.1 GB"]),
        (
            "llama31-8b", "reference_h200", ("sequence_length=65536",),
            facts_of(tokens={**LONG_ENOUGH, "test": 65536}), 8, math.inf,
            ["65,536 tokens in the test part", "set a shorter sequence_length"],
        ),
        (
            "llama31-8b", "reference_h200", ("tensor_parallelism=2",), facts_of(), 3, math.inf,
            ["3 ranks | a multiple of the 2 that share a sample"],
        ),
        (
            "gpt-oss-20b", "reference_b200", (), facts_of(), 12, math.inf,
            ["a multiple of expert_parallelism=8"],
        ),
        (
            "gpt-oss-20b", "reference_b200", ("expert_parallelism=2", "width=40", "inner_width=40"), facts_of(), 6,
            math.inf, ["3 copies of each expert"],
        ),
        ("llama2-70b-lora", "eos", (), LORA_FACTS, 4, 35, ["a rank needs 3", "35.0 GB", "more ranks"]),
        ("llama2-70b-lora", "reference_a100", ("recompute=false",), LORA_FACTS, 8, 80, ["a rank needs 2"]),
        (
            "llama2-70b-lora", "eos", (), facts_of(sequence_length=4096, vocabulary=32000), 8, 80,
            [" | sequence_length=8192 | "],
        ),
    ],
)  # fmt: skip
def test_data_and_ranks_that_do_not_fit_are_rejected(
    name: str, system: str, settings: tuple[str, ...], facts: Any, ranks: int, memory: float, parts: list[str]
) -> None:
    (misfit,) = checked_config(name, system, None, *settings).mismatches(facts, ranks, memory * 1e9)
    assert [part for part in parts if part not in " | ".join(misfit)] == [], misfit


# -- training ---------------------------------------------------------------------------------------------


@pytest.mark.long
def test_server_continues_a_text(
    toy_run: Callable[[str], ToyRun],
    encore: Encore,
    toy: Callable[[str], Path],
    serving_python: Path,
    tmp_path: Path,
) -> None:
    folder, tokenizer = tmp_path / "exported", toy("gpt-oss-20b") / "tokenizer.json"
    exported(encore, toy_run("gpt-oss-20b").folder, folder, "onnx")
    (packages,) = serving_python.parent.parent.glob("lib/python3*/site-packages")
    environment = {**os.environ, "PYTHONPATH": f"{paths.ROOT}:{packages}"}
    with serving(folder) as ports:
        program = (sys.executable, "-m", "benchmarks.llama.generate", folder, "The list of", "--tokenizer", tokenizer)
        url = ("--url", f"127.0.0.1:{ports['http']}")
        greedy, same, drawn = (
            ran(*program, *url, "--tokens", "12", *options, env=environment).stdout
            for options in ((), (), ("--temperature", "2", "--seed", "1"))
        )
    assert greedy == same != drawn and greedy.startswith("The list of ") and len(greedy) > 20
    done = ran(*program, *url, "--wait", "0.5", env=environment)
    assert done.returncode == 2 and "is the server up?" in done.stderr


lora_prepare = partial(preparing.run, "llama2_70b_lora")

# -- preparation ------------------------------------------------------------------------------------------


def test_texts_are_packed_and_only_summaries_count_in_evaluation(tmp_path: Path) -> None:
    train, test = (
        [{"input": f"the {word} number {number}", "output": f"one {word}"} for number in range(9)]
        for word in ("town", "sea")
    )
    tokenizer = tokenization.learn([row["input"] for row in train], 300)
    files = {"train.jsonl": [*train, {"input": "xyzzy " * 90, "output": "left out"}], "validation.jsonl": test}
    raw = {**{name: jsonl(rows) for name, rows in files.items()}, "tokenizer.json": tokenizer.to_str()}
    source, end = write_files(tmp_path / "raw", raw), tokenizer.token_to_id(tokenization.END)
    content = open_lora_data(prepared("llama2_70b_lora", source, tmp_path / "to", "--sequence-length", 200))
    assert (content.manifest["how"]["left_out"], content.manifest["name"]) == ({"train": 1, "test": 0}, "raw")
    for word, samples in (("town", content.train), ("sea", content.test)):
        stream = samples.tokens.flatten().tolist()
        text = f"### Summarize the following text:\n the {word} number 0\n ### Summary:\n one {word}"
        assert (tokenizer.decode(stream[: stream.index(end)]), samples.length) == (text, 200) and len(samples) >= 2
    tokens, counts = content.test.tokens.flatten(), content.test.counts.flatten()
    first = slice(stream.index(end) + 1)
    assert tokenizer.decode(tokens[first][counts[first]].tolist()).strip() == "one sea"
    assert content.train.counts.all() and not counts[tokens == end].any()
    notes(lora_prepare("--verify", tmp_path / "to"))


def test_packed_samples_are_not_changed(tmp_path: Path) -> None:
    files = {"train.jsonl": packed(0), "validation.jsonl": packed(200, masked=5)}
    # Not the data set of MLPerf, which has other counts
    noted = notes(lora_prepare(write_files(tmp_path / "raw", files), "-o", tmp_path / "to"))
    assert "splits.train.count 12 for 3,901" in noted
    content = open_lora_data(tmp_path / "to")
    assert content.train.tokens.tolist() == [[*range(row, row + 16)] for row in range(12)]
    assert content.train.counts.all() and (content.test.counts == (np.arange(16) >= 5)).all()
    assert (content.vocabulary, content.padded_vocabulary(128), content.padded_vocabulary(96)) == (32000, 32000, 32064)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [1] * 16}, "line 1 has labels that are not its tokens"),
        ({"input_ids": [7] * 15}, "line 1 has 15 ids and 16 labels"),
        ({"input_ids": ["a"] * 16}, "line 1 has no lists of numbers"),
        ({"labels": [-100] * 16}, "sample 1 of the test part has no token in the loss"),
        ({"input_ids": [40000] * 16, "labels": [40000] * 16}, "and 32,000 entries"),
        ({"labels": None}, "line 1 has no lists of numbers"),
        ({"input_ids": [7.5] * 16}, "line 1 has no lists of numbers"),
        ({"input_ids": [1 << 32] * 16}, "line 1 has no lists of numbers"),
    ],
)
def test_bad_row_is_rejected(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    files = {"train.jsonl": packed(0), "validation.jsonl": packed(200, **change)}
    check_refusal("llama2_70b_lora", tmp_path / "raw", files, [message])


# -- published weights ------------------------------------------------------------------------------------


def test_tensors_are_written_in_the_format_of_safetensors(tmp_path: Path) -> None:
    path, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    safetensors.write(path, {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(2)})
    length, content = int.from_bytes(path.read_bytes()[:8], "little"), path.read_bytes()[8:]
    header = json.loads(content[:length])
    assert (length % 8, header["b"]) == (0, {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]})
    index.write_text(json.dumps({"weight_map": dict.fromkeys("ab", path.name)}))
    tensors = [safetensors.tensors_of(file) for file in (path, index)]
    assert [(each["a"].values[1:, 1:].tolist(), each["b"].shape) for each in tensors] == [([[4.0, 5.0]], (2,))] * 2
