"""A prepared data set: documents as token ids in Megatron's format, and the tokenizer.

train.bin train.idx test.bin test.idx    see benchmarks/llama/megatron.py
tokenizer.json                           published with the model, or trained
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Mapping, Optional

from benchmarks.common.data import manifest
from benchmarks.common.data.arrays import check_sizes, opening
from benchmarks.llama.megatron import Documents, open_documents

PARTS = ("train", "test")


@dataclass(frozen=True)
class DataSet:
    train: Documents
    test: Documents
    manifest: Mapping[str, Any]

    @property
    def vocabulary(self) -> int:
        return int(self.manifest["facts"]["vocabulary"])

    def padded_vocabulary(self, multiple: int) -> int:
        return -(-self.vocabulary // multiple) * multiple

    def excluding_labels_after(self, token: Optional[int]) -> "DataSet":
        """Exclude the label after each ``token`` from the loss, as Megatron's eod_mask_loss; None: no such token."""
        end = -1 if token is None else token
        return replace(self, train=replace(self.train, end_token=end), test=replace(self.test, end_token=end))


def open_data(folder: Path) -> DataSet:
    """Open a prepared data set; reads no tokens, so it may be called before the clock starts.

    Raises:
        Problem: the data set is missing, incomplete, or does not match its manifest.
    """
    contents = manifest.read(folder)
    with opening(folder, "Llama"):
        documents = {part: open_documents(folder / part) for part in PARTS}
        counted = ((f"documents in {part}", documents[part], contents["splits"][part]["count"]) for part in PARTS)
        check_sizes(
            folder,
            contents,
            [(label, len(documents_of_part.lengths), count) for label, documents_of_part, count in counted],
        )
        data = DataSet(documents["train"], documents["test"], contents)
        _ = data.vocabulary
    return data
