"""What GNMT and Transformer share in PyTorch: the loss, the beam search, batches, evaluation and optimizers."""

from __future__ import annotations

import pytest

from tests.trainings import InFramework, result


def test_loss_is_the_plain_one_without_its_logits(in_pytorch: InFramework) -> None:
    found = result(in_pytorch("translation_loss.py"))
    assert found["gradcheck"] is True
    assert found["float32"] < 5e-6
    for name, most in (("float16", 5e-3), ("bfloat16", 4e-2)):
        errors = found["low precision"][name]
        assert 0 < errors["chunked"] < min(most, 1.5 * errors["plain"])
    assert found["rows given"] is True
    assert found["nothing but padding"] == [0, 0]
    assert found["gradient of padding"] == 0
    assert found["weights alone"] < 5e-6
    # The gradient of the weights is the largest tensor with any vocabulary, then one chunk of logits.
    assert max(found["largest tensors"]) == found["inputs and a chunk"] < found["logits"] / 2


@pytest.mark.parametrize("submission", ["gnmt", "gnmt as submitted", "transformer"])
def test_beam_search(in_pytorch: InFramework, submission: str) -> None:
    found = result(in_pytorch("translation_beam.py"))["searches"][submission]
    assert found["all hypotheses"] is True, "a beam of everything finds the best of everything"
    assert found["greedy"] is True, "a beam of 1 is greedy search"
    assert found["as the algorithm"] == [True] * 10, "beams of 1 to 5, without and with equal scores"
    assert found["one by one"] is True, "a batch finds what each sentence finds alone, by the same work"
    assert found["own limits"] is True
    assert found["rows"][0] < 40 * 4 * 4, "what has ended leaves the batch"
    assert found["different"] > 8 and len(found["lengths"]) >= 3


def test_order_of_equal_scores(in_pytorch: InFramework) -> None:
    found = result(in_pytorch("translation_beam.py"))
    assert found["smallest"] == [[2, 3, 5, 1, 4, 6, 0]]
    assert found["none"] == []
