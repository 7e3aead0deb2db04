"""BERT's samples: pairs of segments, and masks."""

import hashlib

import numpy as np
import pytest

from benchmarks.bert import (
    masking,
)
from benchmarks.bert.masking import Documents
from benchmarks.language import ARRAYS
from benchmarks.language.arrays import Samples
from tests.bert_data import (
    NUMBERS,
    drawn_samples,
    numbered_documents,
)


@pytest.fixture(scope="module")
def numbered() -> Documents:
    return numbered_documents()


@pytest.fixture(scope="module")
def drawn() -> Samples:
    return drawn_samples()


def test_second_segment_follows_or_is_from_another_document(numbered: Documents, drawn: Samples) -> None:
    bounds = np.array(numbered.sentences)[numbered.documents] + 5

    def document(token: int) -> int:
        return int(np.searchsorted(bounds, token, side="right"))

    cut = 0
    for number in range(len(drawn)):
        tokens, second = drawn.original(number), int(drawn.second[number])
        assert tokens[0] == NUMBERS.cls and tokens[second - 1] == tokens[-1] == NUMBERS.sep
        first, after = tokens[1 : second - 1].astype(int), tokens[second:-1].astype(int)
        assert len(first) and len(after) and len(tokens) <= 64
        for segment in (first, after):
            assert (np.diff(segment) == 1).all() and document(segment[0]) == document(segment[-1])
        if drawn.next[number]:
            assert document(first[0]) != document(after[0])
        else:
            assert document(first[0]) == document(after[0]) and after[0] > first[-1]
            cut += after[0] > first[-1] + 1
            assert after[0] == first[-1] + 1 or len(tokens) == 64  # what is between was cut to the length
    assert cut


def test_samples_of_a_seed_are_the_recorded_ones(drawn: Samples) -> None:
    """RandomState's stream is frozen: what was prepared once is prepared again."""
    content = b"".join(getattr(drawn, name).astype(kind).tobytes() for name, kind in ARRAYS.items())
    assert hashlib.md5(content).hexdigest() == "cd71c3aecfdebfc52ae4e0fd012facd2"


def test_half_is_random_and_a_tenth_of_the_documents_is_short(drawn: Samples) -> None:
    # 50 %, and the samples of one sentence, which have no text that follows.
    assert 0.5 < drawn.next.mean() < 0.62
    assert drawn.lengths.max() == 64 and (drawn.lengths < 40).mean() > 0.05


def test_masks_are_15_percent_of_which_80_are_mask_and_10_stay(drawn: Samples) -> None:
    counts = np.diff(drawn.masked_offsets)
    assert (counts == np.clip(np.rint(drawn.lengths * 0.15), 1, 9)).all()
    shown = np.concatenate([drawn[number][drawn.masked(number)[0]] for number in range(len(drawn))])
    labels = drawn.masked_labels
    assert not np.isin(labels, [NUMBERS.cls, NUMBERS.sep]).any()
    # Over 20,000 draws: five standard deviations are 0.014.
    assert len(labels) > 20000
    assert abs((shown == NUMBERS.mask).mean() - 0.8) < 0.014
    assert abs((shown == labels).mean() - 0.1) < 0.011
    places = drawn.masked_places[:-1].astype(int)
    within = np.delete(np.diff(drawn.masked_places.astype(int)), drawn.masked_offsets[1:-1] - 1)
    assert (within > 0).all() and len(places)


@pytest.mark.parametrize("sizes", [(10, 10), (30, 3), (3, 30), (21, 20), (1, 40)])
def test_longer_segment_is_cut_as_one_by_one(sizes: tuple[int, int]) -> None:
    random = masking.stream(0, 0)
    for length in range(2, 20):
        left = list(sizes)
        while sum(left) > length:
            left[0 if left[0] > left[1] else 1] -= 1
        first, first_end, second, second_end = masking._cut(100, 100 + sizes[0], 500, 500 + sizes[1], length, random)
        assert [first_end - first, second_end - second] == left
        assert first >= 100 and first_end <= 100 + sizes[0]
        assert second >= 500 and second_end <= 500 + sizes[1]
