"""Signed bundles of a run: accepted as packed, rejected after any forgery."""

import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError
from encore.lab.submissions import bundle
from encore.run import run_folder
from tests.conftest import ToyRun
from tests.json_schemas import validate
from tests.results.result_logs import START_MS, resnet_v07, write_set

pytestmark = pytest.mark.training


@pytest.fixture(scope="module")
def run(toy_run: Callable[[str], ToyRun]) -> Path:
    return toy_run("ncf").folder


def key_of(folder: Path, name: str) -> Path:
    # SSH key pair, and a file of allowed signers with its public key
    key = folder / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(key)], check=True)
    public = key.with_suffix(".pub").read_text("utf-8").split()
    (folder / f"{name}.signers").write_text(f"{name}@lab {public[0]} {public[1]}\n", encoding="utf-8")
    return key


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ours", "others"):
        key_of(folder, name)
    return folder


@pytest.fixture(scope="module")
def signed(run: Path, keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("bundles") / "run.tar.gz"
    bundle.write_bundle(run, target, keys / "ours")
    return target


def test_bundle_is_accepted_with_the_name_of_its_signer(signed: Path, keys: Path, run: Path, tmp_path: Path) -> None:
    verified = bundle.verify(signed, keys / "ours.signers")
    assert verified.accepted and not verified.findings and "ours@lab" in verified.signer
    assert [(score["benchmark"], score["round"]) for score in verified.scores] == [("ncf", "v0.5")]
    with tarfile.open(signed) as archive:
        names = archive.getnames()
        validate("bundle", json.loads(archive.extractfile("bundle.json").read()))
    assert names[:2] == ["bundle.json", "bundle.json.sig"]
    assert {"dataset.json", "run.json", "system.json", "result_0.txt", "experiment_0/telemetry.jsonl"} <= set(names)
    assert {"experiment_0/steps/rank_0.jsonl", "experiment_0/steps/rank_1.jsonl"} <= set(names)
    assert not [name for name in names if "checkpoint" in name or "ranks" in name]
    done = CliRunner().invoke(app, ["verify", str(signed), "--signers", str(keys / "ours.signers"), "--json"])
    assert (done.exit_code, json.loads(done.output)["accepted"]) == (0, True)
    other = tmp_path / run.name
    shutil.copytree(run, other, ignore=shutil.ignore_patterns("checkpoint"))
    passport = json.loads((run / "run.json").read_text("utf-8"))
    passport["data"]["id"] = "0" * 64
    run_folder.write_metadata(other, passport)
    bundle.write_bundle(other, tmp_path / "other.tar.gz", keys / "ours")
    (missing,) = bundle.verify(tmp_path / "other.tar.gz", keys / "ours.signers").findings
    assert missing.severity == "warning" and "dataset.json" in missing.expected, "the data set is not in the bundle"
    # Without allowed signers, the key's fingerprint is a warning
    (warning,) = bundle.verify(signed).findings
    assert warning.severity == "warning" and "SHA256:" in warning.found


Files = dict[str, bytes]


def edit(name: str, pattern: bytes, replacement: bytes) -> Callable[[Files], None]:
    def forge(files: Files) -> None:
        changed = re.sub(pattern, replacement, files[name], count=1)
        assert changed != files[name], "the forgery changed nothing"
        files[name] = changed

    return forge


def cut_lines(name: str, start: float, end: float) -> Callable[[Files], None]:
    def forge(files: Files) -> None:
        lines = files[name].splitlines(keepends=True)
        files[name] = b"".join(lines[: int(len(lines) * start)] + lines[int(len(lines) * end) :])

    return forge


def shift_times(name: str, seconds: float) -> Callable[[Files], None]:
    def forge(files: Files) -> None:
        shift = lambda match: b'"time": ' + str(float(match[1]) + seconds).encode()  # noqa: E731
        files[name] = re.sub(rb'"time": ([\d.]+)', shift, files[name])

    return forge


def halve_times(files: Files) -> None:
    # Twice as fast in both copies of the log
    for name in ("result_0.txt", "experiment_0/result.txt"):
        begin = re.search(rb" (\d+\.\d+) \S+ run_start", files[name])
        assert begin is not None
        start = float(begin[1])
        times = re.compile(rb" (\d+\.\d+) \(")
        for time in times.findall(files[name]):
            half = b"%.9f" % (start + (float(time) - start) / 2)
            files[name] = files[name].replace(b" %s (" % time, b" %s (" % half)


def in_both_logs(forge: Callable[[str], Callable[[Files], None]]) -> Callable[[Files], None]:
    def forged(files: Files) -> None:
        for name in ("result_0.txt", "experiment_0/result.txt"):
            forge(name)(files)

    return forged


def remove(name: str) -> Callable[[Files], None]:
    return lambda files: files.pop(name)


def rewrite_manifest(change: Callable[[dict[str, Any]], None]) -> Callable[[Files], None]:
    # run.json with a valid checksum
    def forge(files: Files) -> None:
        passport = json.loads(files["run.json"])
        change(passport)
        passport["sha256"] = run_folder.checksum(passport)
        files["run.json"] = json.dumps(passport).encode()

    return forge


def change_processor(passport: dict[str, Any]) -> None:
    passport["node"]["cpu"] = "AMD EPYC 9654"


CONFIG, METRICS, TELEMETRY = (f"experiment_0/{name}" for name in ("config.json", "metrics.jsonl", "telemetry.jsonl"))
# Forgeries in the archive, without the key.
IN_TRANSIT: dict[str, Callable[[Files], None]] = {
    "edited log": edit("result_0.txt", rb"hit_rate|eval_hp|eval_accuracy", b"eval_accuracy2"),
    "swapped configuration": edit(CONFIG, rb'"batch_size": \d+', b'"batch_size": 1048576'),
    "another image": edit("run.json", rb'"image": null', b'"image": {"name": "other"}'),
    "other data": edit("dataset.json", rb'"id": "..', b'"id": "00'),
    "cut telemetry": cut_lines(TELEMETRY, 0.3, 0.8),
    "changed system": edit("system.json", rb'"host_processor_model_name": "', b'"host_processor_model_name": "Faster '),
    "a file less": remove(METRICS),
    "a file more": lambda files: files.update({"result_1.txt": files["result_0.txt"]}),
    "another score": edit("bundle.json", rb'"elapsed_minutes": ', b'"elapsed_minutes": 1'),
    "another name": edit("bundle.json", rb'"name": "', b'"name": "fastest-'),
}
# Forgeries in the run folder before packing and signing.
BEFORE_SIGNING: dict[str, Callable[[Files], None]] = {
    "a faster log": halve_times,
    "a higher quality": in_both_logs(
        lambda name: edit(name, rb'(eval_accuracy: {"epoch": 1, "value": )', rb"\g<1>0.9")
    ),
    "another seed in the log": in_both_logs(lambda name: edit(name, rb"(run_set_random_seed: )\d+", rb"\g<1>77")),
    "one log of two": edit("result_0.txt", rb"(eval_target: 0\.4)", rb"\g<1>1"),
    "a log that stops earlier": in_both_logs(lambda name: edit(name, rb" \d+(\.\d+ \S+ run_stop)", rb" 1\g<1>")),
    "another batch": edit(CONFIG, rb'"batch_size": \d+', b'"batch_size": 1048576'),
    "another rate": edit(CONFIG, rb'"learning_rate": [\d.e-]+', b'"learning_rate": 0.5'),
    "another seed": edit(CONFIG, rb'"seed": \d+', b'"seed": 9'),
    "telemetry without its middle": cut_lines(TELEMETRY, 0.2, 0.9),
    "telemetry without its end": cut_lines(TELEMETRY, 0.3, 1.0),
    "telemetry of another day": shift_times(TELEMETRY, 86400.0),
    "metrics of another day": shift_times(METRICS, 86400.0),
    "metrics of another result": edit(METRICS, rb'"qualities": {"hit_rate": 0', b'"qualities": {"hit_rate": 0.9'),
    "metrics without an evaluation": edit(METRICS, rb'"kind": "eval"', b'"kind": "step"'),
    "metrics that missed": edit(METRICS, rb'"outcome": "reached"', b'"outcome": "not_reached"'),
    "no telemetry": remove(TELEMETRY),
    "a worse run left out": rewrite_manifest(lambda passport: passport["seeds"].append(2)),
    "another processor": edit(
        "system.json", rb'"host_processor_model_name": "', b'"host_processor_model_name": "Faster '
    ),
    "more memory": edit("system.json", rb'"host_memory_capacity": "', b'"host_memory_capacity": "9'),
    "another framework": edit("system.json", rb'"framework": "', b'"framework": "not '),
    "more nodes": edit("system.json", rb'"number_of_nodes": "1"', b'"number_of_nodes": "4"'),
    "a GPU that is not there": edit(
        "system.json", rb'"accelerator_model_name": ""', b'"accelerator_model_name": "NVIDIA H200"'
    ),
    "a passport by hand": edit("run.json", rb'"round": "v0.5"', b'"round": "v0.7"'),
    "a passport of another machine": rewrite_manifest(change_processor),
    "a passport of another batch": rewrite_manifest(
        lambda passport: passport["configuration"]["batch_size"].update(value=1 << 20)
    ),
    "a shorter experiment": edit("experiment_0/state.json", rb'"ended": "\d+', b'"ended": "2019'),
}


# Structures that Encore never writes, with valid hashes.
MALFORMED: dict[str, Callable[[Files], None]] = {
    "data a number": edit("run.json", rb'"data": {', b'"data": 3, "data2": {'),
    "node a text": edit("run.json", rb'"node": {', b'"node": "x", "node2": {'),
    "configuration a list": edit("run.json", rb'"configuration": {', b'"configuration": [], "configuration2": {'),
    "no passport": lambda files: files.update({"run.json": b"[]"}),
    "a deep passport": lambda files: files.update({"run.json": b"[" * 200_000}),
    "no log of the experiment": remove("experiment_0/result.txt"),
    "a start without a time": edit(METRICS, rb'("kind": "start".*?)"time"', rb'\g<1>"times"'),
    "metrics of lists": edit(METRICS, rb'"qualities": {[^}]*}', b'"qualities": [1]'),
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
    manifest = json.loads(files["bundle.json"])
    names = files.keys() - {"bundle.json", "bundle.json.sig"}
    manifest["files"] = {
        name: {"bytes": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest()} for name in names
    }
    files["bundle.json"] = json.dumps(manifest).encode()


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
    assert not verified.accepted
    assert not hashed or any("signature is invalid" in finding.found for finding in verified.findings)


@pytest.mark.parametrize("forgery", BEFORE_SIGNING)
def test_changes_before_signing_are_rejected(forgery: str, run: Path, signed: Path, keys: Path, tmp_path: Path) -> None:
    files = unpack(signed)
    BEFORE_SIGNING[forgery](files)
    verified = sign_again(files, run, keys, tmp_path)
    assert "ours@lab" in verified.signer
    assert not verified.accepted, "the signature is valid, the files are not"


def sign_again(files: Files, run: Path, keys: Path, tmp_path: Path) -> bundle.Verified:
    folder = tmp_path / run.name
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    bundle.write_bundle(folder, tmp_path / "again.tar.gz", keys / "ours")
    return bundle.verify(tmp_path / "again.tar.gz", keys / "ours.signers")


def pause_for_a_minute(files: Files) -> None:
    # A stop and resume at half of the steps: later records move by a minute
    lines = files[METRICS].splitlines(keepends=True)
    steps = [place for place, line in enumerate(lines) if b'"kind": "step"' in line]
    middle = steps[len(steps) // 2]
    begin = float(re.search(rb'"time": ([\d.]+)', lines[middle])[1])  # type: ignore[index]

    def moved(match: re.Match[bytes]) -> bytes:
        time = float(match[2])
        return match[1] + (b"%.6f" % (time + 60) if time > begin else match[2])

    lines.insert(middle + 1, b'{"kind": "start", "time": %.3f, "resumed_step": 5}\n' % (begin + 60))
    files[METRICS] = b"".join(lines[: middle + 2]) + re.sub(
        rb'("time": )([\d.]+)', moved, b"".join(lines[middle + 2 :])
    )
    files[TELEMETRY] = re.sub(rb'("time": )([\d.]+)', moved, files[TELEMETRY])
    for name in ("result_0.txt", "experiment_0/result.txt"):
        files[name] = re.sub(rb"( )(\d{10}\.\d+)(?= \()", moved, files[name])
    state = json.loads(files["experiment_0/state.json"])
    ended = datetime.fromisoformat(state["ended"]) + timedelta(minutes=1)
    files["experiment_0/state.json"] = json.dumps({**state, "ended": ended.isoformat().replace("+00:00", "Z")}).encode()


def test_stopped_and_resumed_run_is_accepted(run: Path, signed: Path, keys: Path, tmp_path: Path) -> None:
    files = unpack(signed)
    pause_for_a_minute(files)
    verified = sign_again(files, run, keys, tmp_path / "resumed")
    assert verified.accepted, verified.findings
    # A gap without a resume is a contradiction
    uninterrupted = {**files, METRICS: re.sub(rb'"resumed_step": 5', b'"resumed_step": 0', files[METRICS])}
    assert not sign_again(uninterrupted, run, keys, tmp_path / "uninterrupted").accepted


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files_are_rejected(name: str, signed: Path, tmp_path: Path) -> None:
    files = unpack(signed)
    del files["bundle.json.sig"]
    MALFORMED[name](files)
    update_hashes(files)
    assert not bundle.verify(pack(files, tmp_path / "forged.tar.gz")).accepted


def test_malformed_manifest_is_rejected(signed: Path, tmp_path: Path) -> None:
    files = unpack(signed)
    manifest = json.loads(files["bundle.json"])
    for change in ({"scores": [1]}, {"files": {"a": 1}}, {"files": []}, {"name": None}, {"schema": 99}):
        files["bundle.json"] = json.dumps({**manifest, **change}).encode()
        with pytest.raises(EncoreError):
            bundle.verify(pack(files, tmp_path / "forged.tar.gz"))
    files["bundle.json"] = json.dumps({**manifest, "scores": [{"round": None}]}).encode()
    assert not bundle.verify(pack(files, tmp_path / "forged.tar.gz")).accepted


def test_foreign_and_missing_signatures_are_rejected(signed: Path, keys: Path, tmp_path: Path) -> None:
    assert not bundle.verify(signed, keys / "others.signers").accepted
    assert not bundle.verify(signed, keys / "ours.signers", "others@lab").accepted
    files = unpack(signed)
    del files["bundle.json.sig"]
    unsigned = pack(files, tmp_path / "unsigned.tar.gz")
    assert bundle.verify(unsigned).accepted and not bundle.verify(unsigned, keys / "ours.signers").accepted
    (tmp_path / "text").write_text("text", encoding="utf-8")
    command = ["ssh-keygen", "-Y", "sign", "-n", "file", "-f", str(keys / "ours"), str(tmp_path / "text")]
    subprocess.run(command, check=True, capture_output=True)
    files["bundle.json.sig"] = (tmp_path / "text.sig").read_bytes()
    other_purpose = pack(files, tmp_path / "purpose.tar.gz")
    assert (
        not bundle.verify(other_purpose, keys / "ours.signers").accepted and not bundle.verify(other_purpose).accepted
    )


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "link", "result_0.txt"])
def test_unsafe_and_truncated_archives_are_rejected(name: str, signed: Path, tmp_path: Path) -> None:
    target = pack(unpack(signed), tmp_path / "forged.tar.gz")
    unpacked = tmp_path / "plain.tar"
    unpacked.write_bytes(gzip.decompress(target.read_bytes()))
    with tarfile.open(unpacked, "a") as archive:
        member = tarfile.TarInfo(name)
        if name == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member, io.BytesIO(b""))
    verified = bundle.verify(unpacked)
    assert not verified.accepted and any("unexpected member" in finding.found for finding in verified.findings)
    assert not (tmp_path / "outside").exists()
    broken = tmp_path / "cut.tar.gz"
    broken.write_bytes(signed.read_bytes()[:2000])
    for bad in (broken, not_an_archive(tmp_path)):
        done = CliRunner().invoke(app, ["verify", str(bad)])
        assert isinstance(done.exception, EncoreError)


def not_an_archive(folder: Path) -> Path:
    (folder / "no.tar.gz").write_bytes(b"no archive")
    return folder / "no.tar.gz"


SIGNERS = {
    "pem": "-----BEGIN PUBLIC KEY-----\nMCow\n-----END PUBLIC KEY-----\n",
    "no_name": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 me@lab\n",
    "empty": "# no key\n",
}


@pytest.mark.parametrize(
    ("name", "problem"), [("pem", "line 1"), ("no_name", "without a signer name"), ("empty", "no key")]
)
def test_signers_in_other_formats_are_explained(name: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "signers").write_text(SIGNERS[name], encoding="utf-8")
    with pytest.raises(EncoreError, match=problem) as raised:
        bundle.verify(not_an_archive(tmp_path), tmp_path / "signers")
    assert "ssh-ed25519" in raised.value.expected


def test_directories_and_unsigned_bundles_are_explained(tmp_path: Path) -> None:
    logs = write_set(
        tmp_path / "logs",
        [resnet_v07(minutes, start_ms=START_MS + n * 10**8) for n, minutes in enumerate((40, 41, 42, 43, 44))],
    )
    error = CliRunner().invoke(app, ["verify", str(logs)]).exception
    assert isinstance(error, EncoreError) and "is a directory" in error.found and "archive" in error.hint
    bundle.write_bundle(logs, tmp_path / "logs.tar.gz")
    done = CliRunner().invoke(app, ["verify", str(tmp_path / "logs.tar.gz")])
    assert "the bundle is not signed" in done.output and "--key KEY" in done.output
    assert "official score 42.000 minutes of 5 runs" in done.output
