"""BERT on SQuAD: official scores, spans, windows, data, training on ranks, resume and bad input."""

import json
import re
import resource
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.bert_squad import answers, events, made, squad, windows, writer
from benchmarks.bert_squad.answers import Places
from benchmarks.bert_squad.arrays import open_data
from benchmarks.bert_squad.squad import Answer, Paragraph, Question
from benchmarks.bert_squad.windows import Cut
from benchmarks.common.data.problem import Problem
from benchmarks.language import vocabulary
from benchmarks.language.vocabulary import Vocabulary
from benchmarks.language.wordpiece import Tokenizer
from encore import data
from tests.bert_data import unpack
from tests.conftest import Encore, evaluations, logged, losses, only_run, quality
from tests.trainings import (
    BENCHED,
    BareRuns,
    assert_resumed,
    bare_runs,
    benched,
    config_of,
    exported,
    steps_so_far,
    with_other_offsets,
    write_small_config,
)

# -- scores --------------------------------------------------------------------------------------------


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
def test_scores_are_those_of_the_official_rules(prediction: str, reference: str, exact: float, f1: float) -> None:
    # As evaluate-v1.1.py of SQuAD gives them.
    assert answers.exact_match(prediction, reference) == exact
    assert answers.f1(prediction, reference) == pytest.approx(f1)


def test_each_question_counts_once_with_its_best_reference() -> None:
    found = answers.score(["The cat sat.", "dog"], [["a dog", "cat sat"], ["cat", "big dog", "bird"]])
    assert found.exact_match == 50.0
    assert found.f1 == pytest.approx(100 * (1 + 2 / 3) / 2)
    with pytest.raises(ValueError, match="1 predictions for 2 questions"):
        answers.score(["cat"], [["cat"], ["dog"]])


# -- spans ---------------------------------------------------------------------------------------------


def every_span(start: np.ndarray, end: np.ndarray, places: Places, count: int, longest: int) -> list[tuple[Any, ...]]:
    # The published rule by loops: all pairs of the best tokens, judged one by one, the best of each text first.

    def best(logits: np.ndarray) -> list[int]:
        return [place for place, _ in sorted(enumerate(logits.tolist()), key=lambda pair: -pair[1])][:count]

    found: list[tuple[float, int, int]] = []
    for first in best(start):
        for last in best(end):
            if not places.ends[first] or not places.ends[last] or not places.best[first]:
                continue
            if last < first or last - first + 1 > longest:
                continue
            found.append((float(start[first]) + float(end[last]), int(places.begins[first]), int(places.ends[last])))
    texts: dict[tuple[int, int], float] = {}
    for score, begin, stop in sorted(found, key=lambda span: -span[0]):
        texts.setdefault((begin, stop), score)
    return [(score, *text) for text, score in texts.items()][:count]


def test_best_spans_are_those_of_the_published_rule() -> None:
    random = np.random.RandomState(1)
    for _ in range(50):
        length, question = random.randint(12, 60), random.randint(2, 8)
        inside = np.arange(length) >= question
        inside[-1] = False
        begins = np.where(inside, 3 * np.arange(length), 0)
        places = Places(begins, np.where(inside, begins + 2, 0), inside & (random.rand(length) < 0.7))
        start, end = random.randn(2, length).round(1).astype(np.float32)  # rounded: some are equal
        found = answers.best_spans(start, end, places, 5, 7)
        assert [tuple(span) for span in found] == every_span(start, end, places, 5, 7)
        assert all(span.end > span.begin for span in found)


def test_no_value_of_an_array_is_read_as_the_data_set_is_opened(made_set: Path, tmp_path: Path) -> None:
    # Training opens it before the clock starts.
    open_data(with_other_offsets(made_set, tmp_path / "copy"))


def test_text_is_the_paragraphs_own() -> None:
    context = "In the caf\u00e9 Zo\u00eb's U.S. friends (1895-1943)."
    tokenizer = Tokenizer(
        Vocabulary(
            (
                *writer.SPECIAL,
                *sorted({*"abcdefghijklmnopqrstuvwxyz'.()-0123456789"}),
                *(f"##{each}" for each in "abcdefghijklmnopqrstuvwxyz0123456789"),
            )
        )
    )
    text = windows.tokenized(context, tokenizer)
    for wanted in ("café", "Zoë's", "U.S.", "1895", "1895-1943"):
        first, last = windows.answer_tokens(text, Answer(wanted, context.index(wanted)))  # type: ignore[misc]
        assert context[text.begins[first] : text.ends[last]] == wanted
    decomposed = windows.tokenized("cafe\u0301 x", tokenizer)
    assert "cafe\u0301 x"[: decomposed.ends[3]] == "cafe\u0301", "an accent of its own belongs to its letter"
    assert answers.text_of([], context) == ""


# -- windows -------------------------------------------------------------------------------------------


def test_most_context_is_the_published_choice() -> None:
    for length in (1, 7, 30, 31, 64, 100):
        cut = windows.parts(length, 30, 12)
        covered = [place for begin, size in cut for place in range(begin, begin + size)]
        assert set(covered) == set(range(length)) and cut[-1][0] + cut[-1][1] == length
        chosen = windows.most_context(length, cut)
        for place in range(length):
            best, owner = -1.0, -1
            for number, (begin, size) in enumerate(cut):
                if begin <= place < begin + size:
                    score = min(place - begin, begin + size - 1 - place) + 0.01 * size
                    if score > best:
                        best, owner = score, number
            assert chosen[place] == owner


@pytest.mark.slow
def test_no_answer_of_the_development_set_is_lost_by_windows(tmp_path: Path) -> None:
    # Every answer is whole in a window, and what the best span of that window reads is the answer.
    paragraphs = squad.read(next(unpack("squad_dev_v1.1.tar.xz", tmp_path).rglob("dev-v1.1*.json")))
    tokenizer = Tokenizer(vocabulary.read(next(unpack("bert_vocab.tar.xz", tmp_path).rglob("vocab.txt"))))
    cut, count, worst = writer.PUBLISHED, 0, []
    for paragraph in paragraphs:
        text = windows.tokenized(paragraph.context, tokenizer)
        for question in paragraph.questions:
            ids = tokenizer.encode(question.text).ids[: cut.question_length]
            chosen = windows.parts(len(text.ids), cut.sequence_length - len(ids) - windows.MARKS, cut.stride)
            count += len(chosen)
            for answer in question.answers:
                place = windows.answer_tokens(text, answer)
                assert place is not None
                first, last = place
                assert any(begin <= first and last < begin + size for begin, size in chosen), answer
                read = paragraph.context[text.begins[first] : text.ends[last]]
                assert answer.text.strip() in read, "tokens hold the whole answer"
                worst.append(answers.exact_match(read, answer.text))
    assert count == 10_833, "the windows that the published code has at 384 and 128"
    assert np.mean(worst) > 0.99, "an answer that ends within a word is widened to it"


# -- data ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made_set(pytorch_python: Path, toy: Callable[[str], Path]) -> Path:
    return toy("bert-squad")


def test_small_set_has_every_answer_in_its_windows(made_set: Path) -> None:
    found = open_data(made_set)
    assert found.passport["facts"]["questions"]["test"] == len(found.questions)
    assert data.check_data(made_set, "bert-squad").name == made.NAME
    whole: Counter[int] = Counter()
    for index in range(len(found.test)):
        start, end = int(found.test.start[index]), int(found.test.end[index])
        if not start:
            continue
        number = int(found.test.question[index])
        asked, places = found.questions[number], found.test.places(index)
        assert asked.context[places.begins[start] : places.ends[end]] in asked.references
        whole[number] += 1
    assert set(whole) == set(range(len(found.questions)))
    assert len(found.test) > len(found.questions), "some paragraphs have several windows"
    again = made.paragraphs("test", 0)
    assert again == made.paragraphs("test", 0) != made.paragraphs("test", 1)


CONTEXT = "Ada lives in Old Bray. Ben lives in New Alton."


def file_of(context: str = CONTEXT, answer: str = "Old Bray", begin: int = 13) -> dict[str, Any]:
    # SQuAD's form with one question.
    asked = {"id": "q1", "question": "Where does Ada live?", "answers": [{"text": answer, "answer_start": begin}]}
    return {"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": [asked]}]}]}


def without_answers() -> dict[str, Any]:
    content = file_of()
    content["data"][0]["paragraphs"][0]["qas"][0]["answers"] = []
    return content


def asked_twice() -> dict[str, Any]:
    content = file_of()
    content["data"] *= 2
    return content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no JSON"),
        ({"data": [{"paragraphs": [{"qas": []}]}]}, "has another form than SQuAD"),
        ([], "has another form than SQuAD"),
        (file_of(begin=14), "'Old Bray' is not at character 14 of its paragraph"),
        (file_of(begin=-3), "is not at character -3"),
        (without_answers(), "question q1 has no answer"),
        (asked_twice(), "two questions have the id q1"),
        (file_of(context="  "), "empty paragraph in 't'"),
        ({"data": []}, "has no question"),
    ],
)
def test_bad_input_is_named_with_what_to_do(content: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / squad.TRAIN
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    with pytest.raises(Problem) as caught:
        squad.read(path)
    assert words in caught.value.found and caught.value.hint
    path.write_text(json.dumps(file_of()), encoding="utf-8")
    (paragraph,) = squad.read(path)
    assert paragraph == Paragraph(CONTEXT, (Question("q1", "Where does Ada live?", (Answer("Old Bray", 13),)),))


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    arguments = {"origin": tmp_path, "name": None, "seed": 0}
    lengths = {"sequence_length": None, "stride": None, "question_length": None}
    with pytest.raises(Problem, match=re.escape("train-v1.1.json is not there")):
        writer.list_source(SimpleNamespace(**arguments, **lengths), SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(Problem, match="--sequence-length 32 with --question-length 64"):
        short = {**lengths, "sequence_length": 32}
        writer.list_source(SimpleNamespace(**arguments, **short), SimpleNamespace())  # type: ignore[arg-type]
    assert Cut(384, 128, 64) == writer.PUBLISHED


# -- schedule ------------------------------------------------------------------------------------------


def test_learning_rate_is_the_published_one() -> None:
    config = config_of("bert-squad", "dgxa100-80g", None, 8)
    found = [events.learning_rate(config, step, 100) / 4.6e-5 for step in (0, 9, 19, 20, 59, 99)]
    assert found == pytest.approx([0.05, 0.5, 1, 79 / 80, 0.5, 0])


# -- training ------------------------------------------------------------------------------------------

SHORT = ("epochs=2", "quality_target=100.0", "width=16", "heads=2", "inner_width=16", "log_interval=1")
GLOBAL_BATCH = 240
# Less than an epoch has.
STEPS = 20


def write_config(path: Path, ranks: int, *settings: str) -> Path:
    # config.json of the small system with a fixed seed.
    return write_small_config(path, "bert-squad", ranks, (*SHORT, f"batch_size={GLOBAL_BATCH // ranks}", *settings))


runs = bare_runs("benchmarks.bert_squad.pytorch.train", "made_set", write_config)


def test_two_ranks_train_like_one(runs: BareRuns) -> None:
    one, two = (runs.uninterrupted(ranks) for ranks in (1, 2))
    first, second = (losses(output / "metrics.jsonl") for output in (one, two))
    assert len(first) == len(second) > 2 * STEPS
    # The same windows and weights: sums in another order are the only difference.
    assert second == pytest.approx(first, abs=1e-3)
    answered = [json.loads((output / "predictions.json").read_text(encoding="utf-8")) for output in (one, two)]
    assert answered[0].keys() == answered[1].keys()
    same = sum(answered[0][each] == answered[1][each] for each in answered[0])
    assert same > 0.97 * len(answered[0])


def test_scores_of_a_run_are_those_of_its_predictions(runs: BareRuns) -> None:
    output, asked = runs.uninterrupted(2), open_data(runs.folder).questions
    predicted = json.loads((output / "predictions.json").read_text(encoding="utf-8"))
    expected = answers.score([predicted[each.id] for each in asked], [each.references for each in asked])
    last = evaluations(output / "metrics.jsonl")[-1]
    assert (quality(last), last["exact_match"]) == pytest.approx((expected.f1, expected.exact_match))
    listed = json.loads((output / "nbest_predictions.json").read_text(encoding="utf-8"))
    assert all(listed[each][0]["text"] == text for each, text in predicted.items())
    assert max(map(len, listed.values())) == 20
    assert all(sum(span["probability"] for span in spans) == pytest.approx(1) for spans in listed.values())


def test_stopped_and_resumed_run_is_an_uninterrupted_one(runs: BareRuns, tmp_path: Path) -> None:
    settings = ("dropout=0.1", "attention_dropout=0.1")
    output = tmp_path / "stopped"
    metrics = output / "metrics.jsonl"
    runs.stop(output, 2, *settings, once=lambda: steps_so_far(metrics) >= STEPS // 2)
    assert evaluations(metrics) == [], "it was stopped before the first evaluation was over"
    assert_resumed(runs.end(output, 2, *settings), runs.uninterrupted(2, *settings))
    assert len(evaluations(metrics)) == 2


@pytest.fixture(scope="module")
def small_run(encore: Encore, made_set: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    # The small run as a user starts it: its folder and what was printed.
    results = tmp_path_factory.mktemp("results")
    done = encore("run", "bert-squad", "2", "--data", str(made_set), "--results", str(results), "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    return only_run(results), done.stdout


def test_small_run_reaches_the_target(small_run: tuple[Path, str]) -> None:
    folder, _ = small_run
    assert "bert-squad" in folder.name
    found = evaluations(folder / "experiment_0" / "metrics.jsonl")
    assert quality(found[-1]) >= 80
    values = {each["key"]: each["value"] for each in logged(folder / "result_0.txt")}
    assert values["submission_benchmark"] == "bert-squad"
    assert values["eval_accuracy"] == pytest.approx(quality(found[-1]))


def test_exported_model_answers_alike(small_run: tuple[Path, str], encore: Encore, tmp_path: Path) -> None:
    assert exported(encore, small_run[0], tmp_path / "exported")["reached"]


def test_nothing_claims_an_mlperf_score(small_run: tuple[Path, str], encore: Encore) -> None:
    folder, printed = small_run
    assert "passes" not in printed and "breaks rules" not in printed, "no ruleset of MLPerf has it"
    assert json.loads((folder / "run.json").read_text(encoding="utf-8"))["round"] == "published"
    (score,) = [json.loads(encore("score", str(folder), "--json").stdout)]
    assert score["score_minutes"] is None and score["round"] is None
    compared = json.loads(encore("compare", str(folder), "--json").stdout)
    assert compared["verdict"] == "not comparable"
    assert not compared["score_is_official"]
    checked = encore("check", str(folder))
    assert "which is no round of MLPerf" in checked.stdout + checked.stderr


def test_bench_shows_every_kind(encore: Encore, made_set: Path) -> None:
    assert benched(encore, "bert-squad", made_set) == BENCHED


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("batch_size=20000", "set a smaller batch_size, take fewer ranks, or more data"),
        ("sequence_length=32", "set sequence_length=40"),
        ("checkpoint=nowhere.pt", "--set checkpoint=FILE"),
    ],
    ids=["batch", "length", "weights"],
)
def test_what_cannot_be_trained_is_refused(runs: BareRuns, tmp_path: Path, setting: str, words: str) -> None:
    assert words in runs.refused(tmp_path / "run", 1, setting)


def test_memory_that_is_too_small_ends_with_what_to_lower(encore: Encore, made_set: Path, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (3 * 2**29, 3 * 2**29))

    where = ("--data", str(made_set), "--results", str(tmp_path))
    large = ("--set", "batch_size=8000", "--set", "width=256")
    done = encore("run", "bert-squad", "1", *where, *large, preexec_fn=limit)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "out of memory on the CPU; hint: start a new run with a lower batch_size (now 8000)" in done.stdout
    assert "resume with" not in done.stdout
