"""Signed bundles of a run: accepted as packed, rejected after a forgery, and the contradictions between run files."""

import gzip
import hashlib
import io
import json
import math
import re
import subprocess
import tarfile
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from encore.lab.submissions import bundle
from encore.lab.submissions.consistency import contradictions
from encore.run.run_folder import checksum
from tests.command_line import error_of, output_of, run_encore
from tests.conftest import ToyRun
from tests.json_schemas import validate
from tests.results.result_logs import START_MS, mllog, resnet_v07, write_files, write_set

START, SECONDS = 1_760_000_000.0, 900
QUALITIES = tuple(enumerate((0.5, 0.7, 0.76), 1))
Record = dict[str, Any]


def metrics() -> list[Record]:
    start = {"kind": "start", "time": START, "ranks": 2, "global_batch_size": 64, "batch_unit": "samples"}
    records: list[Record] = [{**start, "resumed_step": 0}]
    for number, quality in QUALITIES:
        begin = START + 300 * (number - 1)
        records += [{"kind": "step", "time": begin + 60 * n, "step": 5 * number - 5 + n} for n in range(1, 5)]
        records.append({"kind": "eval", "time": begin + 300, "epoch": 4 * number, "qualities": {"accuracy": quality}})
    return [*records, {"kind": "end", "time": START + SECONDS + 1, "outcome": "reached"}]


def log() -> list[Record]:
    texts = {"submission_benchmark": "resnet", "submission_division": "closed", "seed": 7, "global_batch_size": 64}
    return [
        *({"key": key, "time": START - 1, "value": value} for key, value in texts.items()),
        {"key": "run_start", "time": START, "value": None},
        *(
            {"key": key, "time": START + 300 * number - lead, "value": value, "epoch_num": 4 * number}
            for number, quality in QUALITIES
            for key, lead, value in (("eval_start", 30, None), ("eval_accuracy", 0, quality))
        ),
        {"key": "run_stop", "time": START + SECONDS + 1, "value": None, "status": "success"},
    ]


def make_run() -> SimpleNamespace:
    # The files of a run, which a forgery changes before they are written
    config = {"batch_size": 32, "device": "cpu"}
    node = {"cpu": "CPU", "sockets": 1, "cores": 2, "memory_gib": 8, "operating_system": "Linux", "gpus": []}
    return SimpleNamespace(
        log=log(),
        appended="",  # To the published copy of the log
        metrics=metrics(),
        steps=[{"time": START + 60 * n, "step": n, "window": 60.0, "median": 50.0} for n in range(1, 16)],
        telemetry=[{"time": START - 20 + 5 * n} for n in range(186)],
        passport={
            "round": "v0.7", "nodes": 1, "ranks_per_node": 2, "seeds": [7], "implementation": "x", "data": {"id": "1"},
            "configuration": {key: {"value": value} for key, value in config.items()}, "node": node,
        },
        config={**config, "seed": 7},
        dataset={"id": "1"},
        system={
            "number_of_nodes": "1", "host_processor_model_name": "CPU", "host_processors_per_node": "1",
            "host_processor_vcpu_count": "2", "host_memory_capacity": "8 GiB", "accelerators_per_node": "0",
            "accelerator_model_name": "", "accelerator_memory_capacity": "", "framework": "x",
            "operating_system": "Linux",
        },
        ended=START + SECONDS + 5,
    )  # fmt: skip


def pick(records: list[Record], number: int = 0, **fields: str) -> Record:
    return [record for record in records if fields.items() <= record.items()][number]


def utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def write(folder: Path, run: SimpleNamespace) -> Path:
    text = "".join(mllog(**{**event, "time_ms": round(event["time"] * 1000)}) for event in run.log)
    return write_files(folder, {
        "result_0.txt": text + run.appended,
        "experiment_0/result.txt": text,
        "experiment_0/metrics.jsonl": run.metrics,
        "experiment_0/steps/rank_0.jsonl": run.steps,
        "experiment_0/telemetry.jsonl": run.telemetry,
        "experiment_0/config.json": run.config,
        "experiment_0/state.json": {"status": "reached", "started": utc(START - 30), "ended": utc(run.ended)},
        "run.json": {"sha256": checksum(run.passport), **run.passport},
        "system.json": run.system,
        "dataset.json": run.dataset,
    })  # fmt: skip


def scale(*lists: list[Record]) -> None:
    # Tenfold faster after the start
    for record in (record for records in lists for record in records if record["time"] > START):
        record["time"] = START + (record["time"] - START) / 10
        record.update({key: record[key] / 10 for key in record.keys() & {"window", "median"}})


def scale_to_the_end(run: SimpleNamespace, last_reading: float) -> None:
    scale(run.log, run.metrics, run.steps)
    run.ended = START + 95
    run.telemetry = [reading for reading in run.telemetry if reading["time"] <= START + last_reading]


def stop(run: SimpleNamespace, seconds: float) -> None:
    # In the log and in metrics.jsonl
    pick(run.log, key="run_stop")["time"] = pick(run.metrics, kind="end")["time"] = START + seconds


def remove_evaluation(run: SimpleNamespace) -> None:
    run.log.remove(pick(run.log, key="eval_accuracy"))
    run.metrics.remove(pick(run.metrics, kind="eval"))


def stop_and_resume(run: SimpleNamespace) -> None:
    # After the first evaluation; no telemetry for 55 s
    run.metrics.insert(6, {"kind": "start", "time": START + 355, "resumed_step": 5})
    del run.telemetry[65:75]


Forgery = Callable[[SimpleNamespace], object]
# By forgery: the change, and the quantities that contradict each other
DETECTED: dict[str, tuple[Forgery, str]] = {
    "run_stop earlier": (
        lambda run: stop(run, 90),
        "result_0.txt, run_stop; state.json, ended; metrics.jsonl; steps/rank_0.jsonl; telemetry.jsonl",
    ),
    "run_stop later": (
        lambda run: stop(run, 1300),
        "result_0.txt, clock; telemetry.jsonl while the clock ran; result_0.txt, run_stop",
    ),
    "run_start later": (
        lambda run: pick(run.log, key="run_start").update(time=START + 200),
        "metrics.jsonl, start",
    ),
    "clocks of the log scaled": (
        lambda run: (scale(run.log), pick(run.metrics, kind="end").update(time=START + 90.1)),
        "metrics.jsonl, evaluation time; state.json, ended; metrics.jsonl; steps/rank_0.jsonl; telemetry.jsonl",
    ),
    "metrics and log scaled": (
        lambda run: scale(run.log, run.metrics),
        "state.json, ended; steps/rank_0.jsonl; telemetry.jsonl",
    ),
    "metrics, log and steps scaled": (
        lambda run: scale(run.log, run.metrics, run.steps),
        "state.json, ended; telemetry.jsonl",
    ),
    "everything but telemetry scaled": (
        lambda run: scale_to_the_end(run, math.inf),
        "telemetry.jsonl",
    ),
    "exit of the ranks earlier": (
        lambda run: setattr(run, "ended", START + 300),
        "result_0.txt, clock; telemetry.jsonl",
    ),
    "exit of the ranks later": (
        lambda run: setattr(run, "ended", START + SECONDS + 200),
        "state.json, ended",
    ),
    "one log of two": (
        lambda run: setattr(run, "appended", mllog("seed", 8)),
        "result_0.txt is not result.txt",
    ),
    "quality raised": (
        lambda run: pick(run.log, 2, key="eval_accuracy").update(value=0.79),
        "metrics.jsonl, qualities",
    ),
    "quality not finite": (
        lambda run: pick(run.metrics, kind="eval").update(qualities={"accuracy": math.nan}),
        "metrics.jsonl, accuracy",
    ),
    "time not finite": (
        lambda run: pick(run.metrics, kind="end").update(time=math.inf),
        "metrics.jsonl, time",
    ),
    "evaluation removed": (
        remove_evaluation,
        "result_0.txt, evaluations",
    ),
    "evaluation removed from the metrics": (
        lambda run: run.metrics.remove(pick(run.metrics, kind="eval")),
        "metrics.jsonl, qualities; metrics.jsonl, evaluation time",
    ),
    "epochs renumbered": (
        lambda run: pick(run.log, 2, key="eval_accuracy").update(epoch_num=9),
        "metrics.jsonl, epochs",
    ),
    "outcome": (
        lambda run: pick(run.metrics, kind="end").update(outcome="not_reached"),
        "metrics.jsonl, outcome",
    ),
    "global batch of the log": (
        lambda run: pick(run.log, key="global_batch_size").update(value=128),
        "metrics.jsonl, global batch",
    ),
    "batch of config.json": (
        lambda run: run.config.update(batch_size=16),
        "config.json, batch_size",
    ),
    "batch of run.json and config.json": (
        lambda run: (run.config.update(batch_size=16), run.passport["configuration"].update(batch_size={"value": 16})),
        "metrics.jsonl, global batch",
    ),
    "ranks": (
        lambda run: run.passport.update(ranks_per_node=4),
        "metrics.jsonl, ranks",
    ),
    "seed of the log": (
        lambda run: pick(run.log, key="seed").update(value=8),
        "result_0.txt, seed",
    ),
    "seed of config.json": (
        lambda run: run.config.update(seed=9),
        "config.json, seed; result_0.txt, seed",
    ),
    "worse run left out": (
        lambda run: run.passport["seeds"].append(8),
        "experiments",
    ),
    "step times scaled": (
        lambda run: [step.update(window=step["window"] / 10) for step in run.steps],
        "steps/rank_0.jsonl, window",
    ),
    "telemetry removed": (
        lambda run: run.telemetry.clear(),
        "telemetry.jsonl while the clock ran",
    ),
    "telemetry cut": (
        lambda run: run.telemetry.__delitem__(slice(60, 120)),
        "telemetry.jsonl while the clock ran",
    ),
    "telemetry without its end": (
        lambda run: run.telemetry.__delitem__(slice(60, None)),
        "telemetry.jsonl while the clock ran",
    ),
    "telemetry of another day": (
        lambda run: [reading.update(time=reading["time"] + 86_400) for reading in run.telemetry],
        "telemetry.jsonl while the clock ran; telemetry.jsonl",
    ),
    "metrics of another day": (
        lambda run: [record.update(time=record["time"] + 86_400) for record in run.metrics],
        "metrics.jsonl, end; metrics.jsonl, start; metrics.jsonl, evaluation time",
    ),
    "other data": (
        lambda run: run.dataset.update(id="2"),
        "dataset.json",
    ),
    "run.json edited by hand": (
        lambda run: run.passport.update(sha256="0" * 64),
        "run.json was changed",
    ),
    "another processor": (
        lambda run: run.passport["node"].update(cpu="AMD EPYC 9654"),
        "system.json, host_processor_model_name",
    ),
    "another system": (
        lambda run: run.system.update(dict.fromkeys(run.system, "other")),
        "; ".join(f"system.json, {key}" for key in make_run().system),
    ),
}
# docs/report.md has the reasons
NOT_DETECTED: dict[str, Forgery] = {
    "every file scaled": lambda run: scale_to_the_end(run, 95),
    "quality raised in both files": lambda run: (
        pick(run.log, 2, key="eval_accuracy").update(value=0.79),
        pick(run.metrics, 2, kind="eval").update(qualities={"accuracy": 0.79}),
    ),
    "evaluation with its start removed": lambda run: (
        run.log.remove(pick(run.log, key="eval_start")),
        remove_evaluation(run),
    ),
}
CONSISTENT: dict[str, Forgery] = {"unchanged": lambda run: None, "stopped and resumed": stop_and_resume}


CONTRADICTIONS = {**DETECTED, **{name: (change, "") for name, change in {**CONSISTENT, **NOT_DETECTED}.items()}}


@pytest.mark.parametrize("forgery", CONTRADICTIONS)
def test_forgery_contradicts_another_file(forgery: str, tmp_path: Path) -> None:
    change, expected = CONTRADICTIONS[forgery]
    change(run := make_run())
    quantities = [quantity.replace("experiment_0/", "") for quantity, *_ in contradictions(write(tmp_path, run))]
    assert "; ".join(dict.fromkeys(quantities)) == expected


# --- bundles ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # SSH key pairs, and files of allowed signers with their public keys
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ours", "others"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        write_files(folder, {f"{name}.signers": f"{name}@lab {(folder / f'{name}.pub').read_text('utf-8')}"})
    return folder


@pytest.fixture(scope="module")
def signed(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, run = tmp_path_factory.mktemp("bundles"), make_run()
    run.passport["data"]["folder"] = str(folder / "run")  # It has the manifest of the data set
    bundle.write_bundle(write(folder / "run", run), folder / "run.tar.gz", keys / "ours")
    return folder / "run.tar.gz"


def test_bundle_is_accepted_with_the_name_of_its_signer(signed: Path, keys: Path, tmp_path: Path) -> None:
    verified = json.loads(output_of("verify", signed, "--signers", keys / "ours.signers", "--json"))
    assert (verified["accepted"], verified["findings"], "ours@lab" in verified["signer"]) == (True, [], True)
    # Without allowed signers, the key's fingerprint is a warning, and so is a bundle without the data set
    bundle.write_bundle(write(tmp_path / "run", make_run()), tmp_path / "run.tar.gz", keys / "ours")
    (fingerprint,) = bundle.verify(signed).findings
    (missing,) = bundle.verify(tmp_path / "run.tar.gz", keys / "ours.signers").findings
    assert "SHA256:" in fingerprint["found"] and "dataset.json" in missing["expected"]
    assert (fingerprint["severity"], missing["severity"]) == ("warning", "warning")


def test_bundle_of_a_training_is_accepted(toy_run: Callable[[str], ToyRun], keys: Path, tmp_path: Path) -> None:
    bundle.write_bundle(toy_run("ncf").folder, tmp_path / "run.tar.gz", keys / "ours")
    verified = bundle.verify(tmp_path / "run.tar.gz", keys / "ours.signers")
    scores = [(score["benchmark"], score["round"]) for score in verified.scores]
    assert (verified.accepted, [*verified.findings], scores) == (True, [], [("ncf", "v0.5")])
    files = unpack(tmp_path / "run.tar.gz")
    validate("bundle", json.loads(files["bundle.json"]))
    names = ("dataset.json", "run.json", "system.json", "result_0.txt", TELEMETRY, "experiment_0/steps/rank_1.jsonl")
    assert {*names} <= files.keys() and not any("checkpoint" in name or "ranks" in name for name in files)


@pytest.mark.parametrize("forgery", ["one log of two", "quality raised", "another system", "run.json edited by hand"])
def test_changes_before_signing_are_rejected(forgery: str, keys: Path, tmp_path: Path) -> None:
    DETECTED[forgery][0](run := make_run())
    bundle.write_bundle(write(tmp_path / "run", run), tmp_path / "run.tar.gz", keys / "ours")
    verified = bundle.verify(tmp_path / "run.tar.gz", keys / "ours.signers")
    # The signature is valid, the files are not
    assert ("ours@lab" in verified.signer, verified.accepted) == (True, False)


Files = dict[str, bytes]


def edit(name: str, pattern: bytes, replacement: bytes) -> Callable[[Files], None]:
    def forge(files: Files) -> None:
        changed = re.sub(pattern, replacement, files[name], count=1)
        assert changed != files[name], "the forgery changed nothing"
        files[name] = changed

    return forge


CONFIG, METRICS, TELEMETRY = (f"experiment_0/{name}" for name in ("config.json", "metrics.jsonl", "telemetry.jsonl"))
# Forgeries in the archive, without the key.
IN_TRANSIT: dict[str, Callable[[Files], None]] = {
    "edited log": edit("result_0.txt", rb"eval_accuracy", b"eval_accuracy2"),
    "swapped configuration": edit(CONFIG, rb'"batch_size": \d+', b'"batch_size": 1048576'),
    "more nodes": edit("run.json", rb'"nodes": 1', b'"nodes": 2'),
    "other data": edit("dataset.json", rb'"id": "', b'"id": "0'),
    "cut telemetry": edit(TELEMETRY, rb"\A(?:.*\n){3}", b""),
    "changed system": edit("system.json", rb'"host_processor_model_name": "', b'"host_processor_model_name": "Faster '),
    "a file less": lambda files: files.__delitem__(METRICS),
    "a file more": lambda files: files.update({"result_1.txt": files["result_0.txt"]}),
    "another score": edit("bundle.json", rb'"elapsed_minutes": ', b'"elapsed_minutes": 1'),
    "another name": edit("bundle.json", rb'"name": "', b'"name": "fastest-'),
}
# Structures that Encore never writes, with valid hashes.
MALFORMED: dict[str, Callable[[Files], None]] = {
    "data a number": edit("run.json", rb'"data": {', b'"data": 3, "data2": {'),
    "node a text": edit("run.json", rb'"node": {', b'"node": "x", "node2": {'),
    "configuration a list": edit("run.json", rb'"configuration": {', b'"configuration": [], "configuration2": {'),
    "no passport": lambda files: files.update({"run.json": b"[]"}),
    "a deep passport": lambda files: files.update({"run.json": b"[" * 200_000}),
    "no log of the experiment": lambda files: files.__delitem__("experiment_0/result.txt"),
    "a start without a time": edit(METRICS, rb'("kind": "start".*?)"time"', rb'\g<1>"times"'),
    "metrics of lists": edit(METRICS, rb'"qualities": {[^}]*}', b'"qualities": [1]'),
    "a score without a round": edit("bundle.json", rb'"scores": \[', b'"scores": [{"round": null}, '),
}


def unpack(path: Path) -> Files:
    with tarfile.open(path) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def pack(files: Files, target: Path) -> Path:
    with tarfile.open(target, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return target


def update_hashes(files: Files) -> None:
    hashes = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
        if name not in ("bundle.json", "bundle.json.sig")
    }
    files["bundle.json"] = json.dumps({**json.loads(files["bundle.json"]), "files": hashes}).encode()


@pytest.mark.parametrize("hashed", [False, True], ids=["", "hashed again"])
@pytest.mark.parametrize("forgery", IN_TRANSIT)
def test_changes_after_signing_are_rejected(
    forgery: str, hashed: bool, signed: Path, keys: Path, tmp_path: Path
) -> None:
    files = unpack(signed)
    IN_TRANSIT[forgery](files)
    if hashed:
        update_hashes(files)
    verified = bundle.verify(pack(files, tmp_path / "forged.tar.gz"), keys / "ours.signers")
    is_invalid = any("signature is invalid" in finding["found"] for finding in verified.findings)
    assert (verified.accepted, is_invalid or not hashed) == (False, True)


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files_are_rejected(name: str, signed: Path, tmp_path: Path) -> None:
    files = unpack(signed)
    del files["bundle.json.sig"]
    MALFORMED[name](files)
    update_hashes(files)
    assert not bundle.verify(pack(files, tmp_path / "forged.tar.gz")).accepted


@pytest.mark.parametrize(
    "change", [{"scores": [1]}, {"files": {"a": 1}}, {"files": []}, {"name": None}, {"schema": 99}], ids=str
)
def test_malformed_manifest_is_rejected(change: dict[str, Any], signed: Path, tmp_path: Path) -> None:
    files = unpack(signed)
    files["bundle.json"] = json.dumps({**json.loads(files["bundle.json"]), **change}).encode()
    error_of("verify", pack(files, tmp_path / "forged.tar.gz"))


def test_foreign_and_missing_signatures_are_rejected(signed: Path, keys: Path, tmp_path: Path) -> None:
    write_files(tmp_path, {"text": "text"})
    command = ["ssh-keygen", "-Y", "sign", "-n", "file", "-f", str(keys / "ours"), str(tmp_path / "text")]
    subprocess.run(command, check=True, capture_output=True)
    files = unpack(signed)
    files["bundle.json.sig"] = (tmp_path / "text.sig").read_bytes()
    other_purpose = pack(files, tmp_path / "purpose.tar.gz")
    del files["bundle.json.sig"]
    unsigned, ours = pack(files, tmp_path / "unsigned.tar.gz"), keys / "ours.signers"
    asked = ((signed, keys / "others.signers"), (signed, ours, "others@lab"), (unsigned, ours), (unsigned,),
             (other_purpose, ours), (other_purpose,))  # fmt: skip
    assert [bundle.verify(*words).accepted for words in asked] == [False, False, False, True, False, False]


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "link", "result_0.txt"])
def test_unsafe_and_truncated_archives_are_rejected(name: str, signed: Path, tmp_path: Path) -> None:
    packed = {"cut.tar.gz": signed.read_bytes()[:2000], "no.tar.gz": b"no archive"}
    write_files(tmp_path, {**packed, "plain.tar": gzip.decompress(signed.read_bytes())})
    for bad in packed:
        error_of("verify", tmp_path / bad)
    with tarfile.open(tmp_path / "plain.tar", "a") as archive:
        member = tarfile.TarInfo(name)
        if name == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    verified = bundle.verify(tmp_path / "plain.tar")
    found = any("unexpected member" in finding["found"] for finding in verified.findings)
    assert (verified.accepted, found, (tmp_path / "outside").exists()) == (False, True, False)


def test_directories_and_unsigned_bundles_are_explained(tmp_path: Path) -> None:
    logs = write_set(tmp_path / "logs", [resnet_v07(40 + n, start_ms=START_MS + n * 10**8) for n in range(5)])
    bundle.write_bundle(logs, tmp_path / "logs.tar.gz")
    shown = f"{error_of('verify', logs)}{run_encore('verify', tmp_path / 'logs.tar.gz').output}"
    texts = (
        "is a directory",
        "archive",
        "bundle is not signed",
        "--key KEY",
        "official score 42.000 minutes of 5 runs",
    )
    assert [text for text in texts if text not in shown] == []
