"""English text for language models: WordPiece tokens, and arrays of samples without padding."""

from typing import Tuple

PARTS = ("train", "test")
VOCABULARY = "vocabulary.txt"
# Names and types of the arrays of pretraining data, in the order of arrays.Samples.
ARRAYS = {
    "tokens": "<u2",
    "offsets": "<i8",
    "second": "<u2",
    "masked_places": "<u2",
    "masked_labels": "<u2",
    "masked_offsets": "<i8",
    "next": "|u1",
}


def part_files(part: str) -> Tuple[str, ...]:
    return tuple(f"{part}_{name}.npy" for name in ARRAYS)


# Files of prepared pretraining data, see arrays.py.
FILES = (*part_files("train"), *part_files("test"), VOCABULARY)
