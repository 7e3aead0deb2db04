"""What public logs and altered ones showed of reading: clocks, units, rounds, sizes of data sets, many evaluations."""

import gzip
from pathlib import Path

import pytest

from encore.errors import EncoreError
from encore.results.audit.judge import audit_path
from encore.results.compliance.compliance import check
from encore.results.logs.run_log import Reason, read_run
from encore.results.rules import canonical, rule_for, targets_of
from tests.results.result_logs import resnet_v07, write_set


@pytest.mark.parametrize(("round_", "met"), [("v0.5", True), ("v0.6", True), ("v0.7", False), ("v4.0", False)])
def test_float32_is_allowed_for_where_no_official_rule_compares_exactly(round_: str, met: bool) -> None:
    target = targets_of(round_, "resnet")[0]
    assert target.met_by({"value": target.value - 5e-8}) is met
    assert target.met_by({"value": target.value})


LATER = "rnnt unet3d gpt3 stable_diffusion llama2_70b_lora llama31_8b llama31_405b flux1 gnn rgat dlrm_dcnv2 retinanet"


@pytest.mark.parametrize("name", LATER.split())
def test_every_benchmark_of_every_round_has_its_rule(name: str) -> None:
    assert canonical(name) == name
    rules = [rule for round_ in ("v1.0", "v3.1", "v4.0", "v5.0", "v5.1") if (rule := rule_for(round_, name))]
    assert rules
    assert all(rule.targets for rule in rules)


_ARABIC = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (gzip.compress(resnet_v07().encode(), mtime=0)[:30], "the compressed file is damaged"),
        (resnet_v07().translate(_ARABIC).encode(), "holds a damaged event"),
    ],
    ids=["cut off", "other digits"],
)
def test_a_file_without_a_whole_event_is_damaged_and_no_crash(content: bytes, why: str, tmp_path: Path) -> None:
    folder = write_set(tmp_path, [resnet_v07(40.0 + number) for number in range(4)])
    path = folder / "result_4.txt"
    path.write_bytes(content)
    run = read_run(path)
    assert (run.reason, run.events) == (Reason.DAMAGED, 0)
    assert why in run.explanation
    (audit,) = audit_path(folder)
    assert audit.score.score_minutes is None
    assert f"not to be judged: result_4.txt ({run.explanation})" in audit.score.missing
    assert not any("do not touch the time" in finding.found for finding in audit.findings)
    with pytest.raises(EncoreError, match=why):
        check(path)
