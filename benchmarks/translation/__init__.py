"""Code shared by GNMT and the Transformer: data preparation, batch orders, beam search, BLEU."""

PARTS = ("train", "test")
SIDES = ("source", "target")
VOCABULARY, CODES = "vocabulary.txt", "codes.txt"
SOURCES, REFERENCES = "test_source.txt", "test_references.txt"
TRAIN_FILES, TEST_FILES = (
    tuple(f"{part}_{side}{kind}.npy" for side in SIDES for kind in ("", "_offsets")) for part in PARTS
)
# Files in a prepared data set, see arrays.py.
FILES = (*TRAIN_FILES, *TEST_FILES, VOCABULARY, CODES, SOURCES, REFERENCES)
