"""Reader of SQuAD v1.1 (JSON): articles with paragraphs, questions, answers and the answers' offsets."""

from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

from benchmarks.common.data.problem import Problem
from benchmarks.common.data.text_files import load_json, read_bytes, refuse_compressed, text_of

TRAIN, TEST = "train-v1.1.json", "dev-v1.1.json"
LONGEST = 1 << 27  # bytes of a file: four times the published training set (30,288,272 bytes)
HINT = "use the files as they are published: train-v1.1.json and dev-v1.1.json"


class Answer(NamedTuple):
    text: str
    begin: int  # first character, from 0


class Question(NamedTuple):
    id: str
    text: str
    answers: Tuple[Answer, ...]  # at least one; in the development set, answers by different people


class Paragraph(NamedTuple):
    context: str
    questions: Tuple[Question, ...]


def read(path: Path) -> List[Paragraph]:
    """Read a file of SQuAD v1.1.

    Raises:
        Problem: the file does not exist, is not JSON or not SQuAD v1.1, or has a paragraph without text, a
            question without answers, or an answer with a wrong offset.
    """
    try:
        refuse_compressed(path, TRAIN if "train" in path.name else TEST)
        content = load_json(read_bytes(path, LONGEST), str(path))
    except FileNotFoundError:
        raise Problem(f"{path} is not there", f"a folder with {TRAIN} and {TEST}", HINT) from None
    except (OSError, ValueError) as error:
        raise Problem(f"{path} is not JSON: {error}", "SQuAD v1.1 as published", HINT) from None
    try:
        return list(_paragraphs(path, content))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise Problem(
            f"{path} is not in the format of SQuAD v1.1: {error!r}",
            "data, paragraphs, context, qas, id, question, answers, text, answer_start",
            HINT,
        ) from None


def _paragraphs(path: Path, content: Dict[str, Any]) -> Iterator[Paragraph]:
    seen_ids = set()
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            title = f"{path}: paragraph in {article.get('title', '?')!r}"
            context, entries = text_of(paragraph, "context", title), paragraph["qas"]
            if not context.strip():
                raise Problem(f"{title} is empty", "text", HINT)
            questions = tuple(_question(path, context, entry) for entry in entries)
            for question in questions:
                if question.id in seen_ids:
                    raise Problem(f"{path}: two questions have the id {question.id}", "a unique id per question", HINT)
                seen_ids.add(question.id)
            yield Paragraph(context, questions)
    if not seen_ids:
        raise Problem(f"{path} has no questions", "at least one question", HINT)


def _offset(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"answer_start is {value!r}, not an integer")
    return int(value)


def _question(path: Path, context: str, entry: Dict[str, Any]) -> Question:
    location = f"{path}: question {entry['id']}"
    answers = tuple(
        Answer(text_of(answer_entry, "text", location), _offset(answer_entry["answer_start"]))
        for answer_entry in entry["answers"]
    )
    if not answers:
        raise Problem(
            f"{location} has no answer",
            "at least one",
            f"{HINT}; questions without an answer belong to SQuAD 2.0, a different task",
        )
    for answer in answers:
        if not answer.text or answer.begin < 0 or not context.startswith(answer.text, answer.begin):
            raise Problem(
                f"{location}: {answer.text[:60]!r} is not at character {answer.begin} of its paragraph",
                f"there is {context[max(answer.begin, 0) :][:60]!r}",
                HINT,
            )
    return Question(text_of(entry, "id", location), text_of(entry, "question", location), answers)
