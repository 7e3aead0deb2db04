"""Documents and tokenizer, for benchmarks/common/data/sample_checks.py."""

from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Tuple

from benchmarks.common.data import sample_checks
from benchmarks.llama import tokenization
from benchmarks.llama.dataset import open_data
from benchmarks.llama.megatron import Documents

READ = 256  # maximum tokens to read per document
SHORT = 8  # documents up to this number of tokens may be duplicates
DECODED = 64  # documents to decode and encode again
LEAST_SAME = 0.8  # minimum fraction with the same tokens; a document may end within a character


def _key(documents: Documents, index: int) -> Optional[bytes]:
    tokens, length = documents.read(index, 0, READ), documents.lengths[index : index + 1]
    return None if 0 < len(tokens) <= SHORT else sample_checks.key(tokens, length)


def _part(documents: Documents) -> sample_checks.Part:
    return sample_checks.Part(
        len(documents.lengths), lambda indices: [_key(documents, index) for index in indices.tolist()]
    )


def view(directory: Path, manifest: Mapping[str, Any]) -> sample_checks.View:
    data = open_data(directory)
    parts = {"train": data.train, "test": data.test}

    def own() -> Iterator[Tuple[str, str]]:
        tokenizer = tokenization.read(directory / tokenization.FILE)
        for name, documents in parts.items():
            texts = [
                documents.read(index, 0, READ)
                for index in sample_checks.spread(len(documents.lengths), DECODED).tolist()
            ]
            marks = tokenizer.get_added_tokens_decoder()  # start and end of documents
            plain = [[token for token in ids.tolist() if token not in marks] for ids in texts]
            again = tokenization.encode(tokenizer, [tokenizer.decode(ids) for ids in plain])
            # The last tokens depend on the text after READ tokens.
            cut = [max(1, min(len(ids), READ - SHORT)) for ids in plain]
            same = {
                number: original[:end] == encoded[:end]
                for number, (original, encoded, end) in enumerate(zip(plain, again, cut))
            }
            problem = f"documents of {name} are other tokens when they are decoded and encoded again"
            yield from sample_checks.agreement(same, problem, "tokens by the tokenizer of the data set", LEAST_SAME)

    return sample_checks.View({name: _part(documents) for name, documents in parts.items()}, extra_checks=own)
