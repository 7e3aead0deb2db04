"""BERT on SQuAD: official scores, spans, windows, and sources."""

import gzip
import json
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bert_squad import answers, made, squad, windows, writer
from benchmarks.bert_squad.answers import Places
from benchmarks.bert_squad.arrays import open_data
from benchmarks.bert_squad.squad import Answer, Paragraph, Question
from benchmarks.language.vocabulary import Vocabulary
from benchmarks.language.wordpiece import Tokenizer
from encore import data
from tests.conftest import Encore
from tests.preparing import Files, check_refusal

# -- scores -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "reference", "exact", "f1"),
    [
        ("The cat's, dog.", "cats dog", 1.0, 1.0),
        ("U.S.", "us", 1.0, 1.0),
        ("a theatre", "theatre an", 1.0, 1.0),
        ("cat dog cat", "cat cat bird", 0.0, 2 / 3),
        ("cat dog", "cat", 0.0, 2 / 3),
        ("10,000 (dog)", "10000 \u2013 dog", 0.0, 4 / 5),
        ("\u00e9t\u00e9", "ete", 0.0, 0.0),
        ("the", "", 1.0, 0.0),
    ],
)
def test_scores_of_the_official_script(prediction: str, reference: str, exact: float, f1: float) -> None:
    # Values of SQuAD's evaluate-v1.1.py
    found = answers.exact_match(prediction, reference), answers.f1(prediction, reference)
    assert found == (exact, pytest.approx(f1))


def test_question_is_scored_with_its_best_reference() -> None:
    scores = answers.score(["The cat sat.", "dog"], [["a dog", "cat sat"], ["cat", "big dog", "bird"]])
    assert (scores.exact_match, scores.f1) == (50.0, pytest.approx(100 * (1 + 2 / 3) / 2))
    with pytest.raises(ValueError, match="1 predictions for 2 questions"):
        answers.score(["cat"], [["cat"], ["dog"]])


# -- spans ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "longest", "spans"),
    [
        (3, 3, [(9, 4, 11)]),
        (5, 3, [(9, 4, 11), (9, 12, 15), (7, 4, 15), (7, 8, 11), (7, 8, 15)]),
        (5, 7, [(11, 4, 27), (11, 12, 27), (9, 4, 11), (9, 4, 15), (9, 12, 15)]),
        (4, 1, []),
    ],
)
def test_best_spans(count: int, longest: int, spans: list[tuple[float, int, int]]) -> None:
    # Worked out by hand with the rule of run_squad.py. Tokens 0 and 1 are the question's, token 9 a mark; tokens 5 and
    # 6 have the same characters; tokens 7 and 8 have more context in another window.
    begins = np.array([0, 0, 0, 4, 8, 12, 12, 20, 24, 0])
    ends = np.array([0, 0, 3, 7, 11, 15, 15, 23, 27, 0])
    places = Places(begins, ends, np.array([0, 0, 1, 1, 1, 1, 1, 0, 0, 0], bool))
    start = np.array([9, 0, 1, 4, 2, 4, 0, 8, 0, 0], np.float32)
    end = np.array([9, 0, 0, 1, 5, 3, 5, 2, 7, 0], np.float32)
    assert [tuple(span) for span in answers.best_spans(start, end, places, count, longest)] == spans


LETTERS_AND_DIGITS = "abcdefghijklmnopqrstuvwxyz0123456789"


def test_answer_has_the_characters_of_the_paragraph() -> None:
    context = "In the caf\u00e9 Zo\u00eb's U.S. friends (1895-1943)."
    pieces = (f"##{character}" for character in LETTERS_AND_DIGITS)
    tokenizer = Tokenizer(Vocabulary((*writer.SPECIAL, *sorted({*LETTERS_AND_DIGITS, *"'.()-"}), *pieces)))
    text, decomposed = (windows.tokenized(words, tokenizer) for words in (context, "cafe\u0301 x"))
    for answer in ("café", "Zoë's", "U.S.", "1895", "1895-1943"):
        first, last = windows.answer_tokens(text, Answer(answer, context.index(answer)))  # type: ignore[misc]
        assert context[text.begins[first] : text.ends[last]] == answer
    # A combining accent belongs to its letter
    assert (decomposed.ends[3], answers.text_of([], context)) == (len("cafe\u0301"), "")


# -- windows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "parts", "changes"),
    [
        (1, [(0, 1)], []),
        (30, [(0, 30)], []),
        (31, [(0, 30), (12, 19)], [21]),
        (64, [(0, 30), (12, 30), (24, 30), (36, 28)], [21, 33, 45]),
    ],
)
def test_windows_and_the_one_with_most_context(length: int, parts: list[tuple[int, int]], changes: list[int]) -> None:
    assert windows.parts(length, 30, 12) == parts
    owners = windows.most_context(length, parts)
    assert owners.tolist() == [sum(place >= change for change in changes) for place in range(length)]


# -- data -------------------------------------------------------------------------------------------------


@pytest.mark.training
def test_every_answer_of_the_toy_data_set_is_in_a_window(toy: Callable[[str], Path]) -> None:
    content = open_data(toy("bert-squad"))
    questions = content.manifest["facts"]["questions"]["test"], data.check_data(toy("bert-squad"), "bert-squad").name
    assert questions == (len(content.questions), made.NAME)
    answered = set()
    for index in np.flatnonzero(content.test.start).tolist():
        question, places = content.questions[content.test.question[index]], content.test.places(index)
        answer = question.context[places.begins[content.test.start[index]] : places.ends[content.test.end[index]]]
        assert answer in question.references
        answered.add(int(content.test.question[index]))
    assert answered == set(range(len(content.questions)))
    assert len(content.test) > len(content.questions), "some paragraphs have several windows"


def test_generated_paragraphs_depend_on_the_seed() -> None:
    first, second, other = (made.paragraphs("test", seed) for seed in (0, 0, 1))
    assert first == second != other


def test_file_is_read(tmp_path: Path) -> None:
    question = {"id": "q1", "question": "Where does Ada live?", "answers": [{"text": "Old Bray", "answer_start": 13}]}
    content = {"data": [{"title": "t", "paragraphs": [{"context": "Ada lives in Old Bray.", "qas": [question]}]}]}
    (tmp_path / squad.TRAIN).write_text(json.dumps(content), encoding="utf-8")
    read = Question("q1", "Where does Ada live?", (Answer("Old Bray", 13),))
    assert squad.read(tmp_path / squad.TRAIN) == [Paragraph("Ada lives in Old Bray.", (read,))]


PACKED = {f"{squad.TRAIN}.gz": gzip.compress(b"{}", mtime=0)}


@pytest.mark.parametrize(
    ("files", "words", "message"),
    [
        ({"readme": ""}, (), "train-v1.1.json is not there"),
        ({"readme": ""}, ("--sequence-length", "32"), "--sequence-length 32 with --question-length 64"),
        (
            PACKED,
            (),
            "{raw}/train-v1.1.json.gz is compressed by gzip | train-v1.1.json without compression | gunzip",
        ),
    ],
)
def test_bad_source_is_rejected(files: Files, words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    check_refusal("bert_squad", tmp_path / "raw", files, [message], *words)


# -- training ---------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.training
def test_out_of_memory_run_reports_the_setting_to_lower(
    encore: Encore, toy: Callable[[str], Path], tmp_path: Path
) -> None:
    limit_memory = partial(resource.setrlimit, resource.RLIMIT_AS, (3 * 2**29, 3 * 2**29))
    folders = ("--data", str(toy("bert-squad")), "--results", str(tmp_path))
    large = ("--set", "batch_size=8000", "--set", "width=256")
    output = encore("run", "bert-squad", "1", *folders, *large, preexec_fn=limit_memory, code=1).stdout
    assert "out of memory on the CPU; hint: start a new run with a lower batch_size (now 8000)" in output
    assert "resume with" not in output
