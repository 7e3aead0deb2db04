"""Fine-tuning of BERT to answer questions: SQuAD v1.1."""

from typing import Tuple

PARTS = ("train", "test")
VOCABULARY, PARAGRAPHS = "vocabulary.txt", "test_paragraphs.jsonl"
OF_TOKENS = {"tokens": "<u2", "begins": "<u2", "ends": "<u2", "best": "|u1"}
OF_WINDOWS = {"second": "<u2", "start": "<u2", "end": "<u2", "question": "<i4"}
ARRAYS = {**OF_TOKENS, "offsets": "<i8", **OF_WINDOWS}  # names and types, in the order of Windows


def part_files(part: str) -> Tuple[str, ...]:
    names = tuple(f"{part}_{name}.npy" for name in ARRAYS)
    return (*names, VOCABULARY) if part == "train" else (*names, PARAGRAPHS)


FILES = (*part_files("train"), *part_files("test"))  # files in a prepared data set, see arrays.py
