"""What GNMT and Transformer share in PyTorch: the loss, the beam search, batches, evaluation and optimizers."""

from __future__ import annotations

from typing import Any

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
    assert found["nothing but padding"] == 0
    assert found["gradient of padding"] == 0
    assert found["weights alone"] < 5e-6
    # The gradient of the weights is the largest tensor with any vocabulary, then one chunk of logits.
    assert max(found["largest tensors"]) == found["inputs and a chunk"] < found["logits"] / 2


def test_apex_is_taken_where_it_is_right_and_faster(in_pytorch: InFramework) -> None:
    found = result(in_pytorch("translation_loss.py"))["apex"]
    assert len(found["errors"]) == 2 * 3
    assert max(found["errors"].values()) < 1, "in units of the tolerance"
    assert found["wanted"] == {"loss": "apex", "norm": "apex"}
    assert found["resumed"] == {"loss": "apex", "norm": "plain"}
    assert found["of this machine"] == {"loss": "plain", "norm": "plain"}
    assert found["faster, wrong"] == {"loss": "apex", "norm": "plain"}
    assert "loss apex (apex" in found["told"] and "norm plain (apex ArithmeticError: wrong by" in found["told"]
    assert "use kernels=auto" in found["refused apex"] and "resume there" in found["refused auto"]


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


@pytest.mark.parametrize("ranks", [1, 2])
def test_updates_are_those_of_pytorch(in_pytorch: InFramework, ranks: int) -> None:
    found = result(in_pytorch("torch_updates.py", ranks=ranks))
    # Plain and fused, whole and split: without and with clipping, after overflows, and how far the ranks are apart.
    assert len(found["errors"]) == 4 * 4
    assert max(found["errors"].values()) < 1e-6
    # All that were skipped, then none since.
    assert all(each == [3, 0, 3] for each in found["skipped"].values())
    # A step that overflows has the rate that its batch has again: here at the first, and twice at the fourth.
    expected = [0.01, 0.01, 0.02, 0.03, 0.04, 0.04, 0.04, 0.05, 0.06]
    assert all(rates == pytest.approx(expected) for rates in found["rates"].values())
    # 77 weights, each tensor filled up to 64 elements.
    assert found["states"] == {name: 256 // (ranks if "split" in name else 1) for name in found["states"]}
    assert set(found["same bits"].values()) == {True}, "a resumed training is the same to the bit"


def test_dynamic_loss_scale(in_pytorch: InFramework) -> None:
    found = result(in_pytorch("torch_updates.py"))
    assert found["gnmt"] == [1024, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096, 4096]
    assert found["transformer"] == [128, 128, 256, 128, 128, 128, 256]


@pytest.fixture(scope="module", params=[1, 3])
def batches(request: pytest.FixtureRequest, in_pytorch: InFramework, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What tests/in_framework/translation_batches.py finds on so many ranks."""
    return result(in_pytorch("translation_batches.py", str(tmp_path_factory.mktemp("output")), ranks=request.param))


def test_batches_are_those_of_the_order_from_any_position(batches: Any) -> None:
    assert batches["batches"] == 4 * 5
    assert batches["wrong batches"] == 0, batches["names"]


def test_each_sentence_is_translated_once(batches: Any) -> None:
    assert batches["translated"] == [1, 2, 7, 12, 13]
    assert batches["interrupted"] is None
    assert batches["twice"] == "translated 3 sentences, of them 2 different, of 3"


def test_bleu_of_the_transformer_is_that_of_the_round(batches: Any) -> None:
    """Over tokens of both sides; v0.5 matches no unknown word: 5 of 6 words, 4 of 5 pairs, 3 of 4, 2 of 3."""
    expected = {"v0.5": 100 * 3**-0.25, "v0.6": 100, "v0.7": 100}
    found = batches["judged"]
    assert found.pop("plain") < 30, "of the text, which is another one"
    assert found == pytest.approx(expected)


def test_translations_can_be_read(batches: Any) -> None:
    written = batches["written"]
    assert written["quality"] == pytest.approx(32 / 7), "of rank 0, on every rank"
    assert [line["index"] for line in written["lines"]] == list(range(7))
    assert [line["hypothesis"] for line in written["lines"]][:3] == ["ein Haus .", "Haus", ""]
    assert {line["epoch"] for line in written["lines"]} == {3}
    assert written["lines"][1]["reference"] == 'zwei\u2028Häuser "\\" .'
    assert written["kept"] is True
    assert written["scores"][0] == [100, 100] and written["scores"][4] == [0, 0]
    assert written["files"] == ["translations.jsonl"], "nothing half-written stays"
