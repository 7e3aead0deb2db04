"""What a user gets who installs Encore: the wheel in an empty environment, away from the checkout."""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from encore import __version__, paths, release
from encore.cli import schemas
from encore.cli.app import app
from encore.errors import EncoreError
from encore.lab.submissions import bundle
from encore.run import run_folder
from tests.conftest import records
from tests.json_schemas import validate

pytestmark = pytest.mark.training


def uv(*arguments: str | Path, **options: str) -> None:
    command = [str(Path(sys.executable).with_name("uv")), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **options}, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # From what git has, as a release is: no caches, no data, no results
    made = tmp_path_factory.mktemp("dist")
    clone, files = made / "clone", subprocess.check_output(["git", "ls-files", "-z"], cwd=paths.ROOT, text=True)
    for name in files.split("\0")[:-1]:
        if (paths.ROOT / name).exists():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((paths.ROOT / name).read_bytes())
            (clone / name).chmod((paths.ROOT / name).stat().st_mode)
    uv("build", "--quiet", "--out-dir", made, clone)
    return made


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elsewhere")
    uv("venv", "--quiet", folder / "env")
    (wheel,) = built.glob("*.whl")
    pins = paths.REQUIREMENTS / "encore.txt"
    uv("pip", "install", "--quiet", "--constraint", pins, wheel, VIRTUAL_ENV=str(folder / "env"))
    return folder


def ran(folder: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["XDG_DATA_HOME"] = str(folder / "share")
    command = [str(folder / "env" / "bin" / "encore"), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(installed: Path) -> Path:
    ran(installed, "run", "ncf", "2", "--seed", "1")
    (folder,) = (installed / "results").iterdir()
    return folder


def test_wheel_and_sdist_have_all_that_git_has_of_a_run(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    packed = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.check_output(["git", "ls-files"], cwd=paths.ROOT, text=True).splitlines()
    for name in tracked:
        top = name.partition("/")[0]
        if top in ("benchmarks", "containers", "requirements", "slurm"):
            assert f"encore/tree/{name}" in packed and name in source
        elif top == "encore":
            assert name in packed and name in source
    assert not [name for name in packed if name.endswith(".pyc") or "/data/bert/" in name]
    assert {"run.sh", "setup.sh", "CHANGELOG.md", "docs/quickstart-cpu.md"} <= source


def test_an_installed_encore_trains_without_the_checkout(installed: Path, run: Path) -> None:
    facts = json.loads(ran(installed, "--version", "--json"))
    assert facts == {**release.facts(), "code": {"commit": None, "uncommitted_sha256": None}, "python": facts["python"]}
    # The gate has the user's cache inside of the checkout
    shown = ran(installed, "run", "resnet", "2", "--dry-run").replace(str(paths.cache_folder()), "CACHE")
    assert str(paths.ROOT) not in shown
    script = ran(installed, "submit", "ncf", "--nodes", "2", "--dry-run")
    assert f"export ENCORE_PROGRAM={installed}/env/bin/encore" in script
    assert json.loads(ran(installed, "schema", "config-ncf")) == schemas.schema_of("config-ncf"), "its comments, too"
    (end,) = records(run / "experiment_0" / "metrics.jsonl", "end")
    assert end["outcome"] == "reached"
    assert (installed / "share" / "encore" / "ncf" / "dataset.json").exists()
    assert "reached" in ran(installed, "status")
    tree = next((installed / "env").glob("lib/*/site-packages/encore/tree"))
    assert not {"results", "data", "build"} & {path.name for path in tree.iterdir()}, "nothing is written there"


def test_the_version_is_one_everywhere() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"encore {__version__}\n")
    for order in (["--version", "--json"], ["--json", "--version"]):
        facts = json.loads(CliRunner().invoke(app, order).output)
        assert facts["version"] == __version__ and len(facts["data_sha256"]) == 64
    citation = yaml.safe_load((paths.ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == __version__


# -- a bundle and its forgeries ----------------------------------------------------------------------


def key_of(folder: Path, name: str) -> Path:
    # A key, and the file that says that it may sign
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


def test_a_bundle_is_accepted_and_its_signer_named(signed: Path, keys: Path, run: Path, tmp_path: Path) -> None:
    found = bundle.verify(signed, keys / "ours.signers")
    assert found.accepted and not found.findings and "ours@lab" in found.signer
    assert [(score["benchmark"], score["round"]) for score in found.scores] == [("ncf", "v0.5")]
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
    run_folder.write_passport(other, passport)
    bundle.write_bundle(other, tmp_path / "other.tar.gz", keys / "ours")
    (missing,) = bundle.verify(tmp_path / "other.tar.gz", keys / "ours.signers").findings
    assert missing.severity == "warning" and "dataset.json" in missing.expected, "what it was trained on is not there"
    # Without a file of signers the key is told, and nobody is believed to be anybody
    (warning,) = bundle.verify(signed).findings
    assert warning.severity == "warning" and "SHA256:" in warning.found


Files = dict[str, bytes]


def edited(name: str, pattern: bytes, by: bytes) -> Callable[[Files], None]:
    def forge(files: Files) -> None:
        changed = re.sub(pattern, by, files[name], count=1)
        assert changed != files[name], "the forgery changes something"
        files[name] = changed

    return forge


def without_lines(name: str, begin: float, end: float) -> Callable[[Files], None]:
    def forge(files: Files) -> None:
        lines = files[name].splitlines(keepends=True)
        files[name] = b"".join(lines[: int(len(lines) * begin)] + lines[int(len(lines) * end) :])

    return forge


def later(name: str, seconds: float) -> Callable[[Files], None]:
    def forge(files: Files) -> None:
        shift = lambda match: b'"time": ' + str(float(match[1]) + seconds).encode()  # noqa: E731
        files[name] = re.sub(rb'"time": ([\d.]+)', shift, files[name])

    return forge


def faster(files: Files) -> None:
    # The log as if it had trained in half of the time, in both of its places
    for name in ("result_0.txt", "experiment_0/result.txt"):
        begin = re.search(rb" (\d+\.\d+) \S+ run_start", files[name])
        assert begin is not None
        start = float(begin[1])
        times = re.compile(rb" (\d+\.\d+) \(")
        for time in times.findall(files[name]):
            half = b"%.9f" % (start + (float(time) - start) / 2)
            files[name] = files[name].replace(b" %s (" % time, b" %s (" % half)


def both(forge: Callable[[str], Callable[[Files], None]]) -> Callable[[Files], None]:
    def forged(files: Files) -> None:
        for name in ("result_0.txt", "experiment_0/result.txt"):
            forge(name)(files)

    return forged


def dropped(name: str) -> Callable[[Files], None]:
    return lambda files: files.pop(name)


def passport_rewritten(change: Callable[[dict[str, Any]], None]) -> Callable[[Files], None]:
    # With its own checksum made anew
    def forge(files: Files) -> None:
        passport = json.loads(files["run.json"])
        change(passport)
        passport["sha256"] = run_folder.checksum(passport)
        files["run.json"] = json.dumps(passport).encode()

    return forge


def with_gpus(passport: dict[str, Any]) -> None:
    passport["node"]["cpu"] = "AMD EPYC 9654"


CONFIG, METRICS, TELEMETRY = (f"experiment_0/{name}" for name in ("config.json", "metrics.jsonl", "telemetry.jsonl"))
# By whoever has no key: the file in the archive is another one.
IN_TRANSIT: dict[str, Callable[[Files], None]] = {
    "edited log": edited("result_0.txt", rb"hit_rate|eval_hp|eval_accuracy", b"eval_accuracy2"),
    "swapped configuration": edited(CONFIG, rb'"batch_size": \d+', b'"batch_size": 1048576'),
    "another image": edited("run.json", rb'"image": null', b'"image": {"name": "other"}'),
    "other data": edited("dataset.json", rb'"id": "..', b'"id": "00'),
    "cut telemetry": without_lines(TELEMETRY, 0.3, 0.8),
    "changed system": edited(
        "system.json", rb'"host_processor_model_name": "', b'"host_processor_model_name": "Faster '
    ),
    "a file less": dropped(METRICS),
    "a file more": lambda files: files.update({"result_1.txt": files["result_0.txt"]}),
    "another score": edited("bundle.json", rb'"elapsed_minutes": ', b'"elapsed_minutes": 1'),
    "another name": edited("bundle.json", rb'"name": "', b'"name": "fastest-'),
}
# By who runs it, before it is packed and signed.
BEFORE_SIGNING: dict[str, Callable[[Files], None]] = {
    "a faster log": faster,
    "a higher quality": both(lambda name: edited(name, rb'(eval_accuracy: {"epoch": 1, "value": )', rb"\g<1>0.9")),
    "another seed in the log": both(lambda name: edited(name, rb"(run_set_random_seed: )\d+", rb"\g<1>77")),
    "one log of two": edited("result_0.txt", rb"(eval_target: 0\.4)", rb"\g<1>1"),
    "a log that stops earlier": both(lambda name: edited(name, rb" \d+(\.\d+ \S+ run_stop)", rb" 1\g<1>")),
    "another batch": edited(CONFIG, rb'"batch_size": \d+', b'"batch_size": 1048576'),
    "another rate": edited(CONFIG, rb'"learning_rate": [\d.e-]+', b'"learning_rate": 0.5'),
    "another seed": edited(CONFIG, rb'"seed": \d+', b'"seed": 9'),
    "telemetry without its middle": without_lines(TELEMETRY, 0.2, 0.9),
    "telemetry without its end": without_lines(TELEMETRY, 0.3, 1.0),
    "telemetry of another day": later(TELEMETRY, 86400.0),
    "metrics of another day": later(METRICS, 86400.0),
    "metrics of another result": edited(METRICS, rb'"qualities": {"hit_rate": 0', b'"qualities": {"hit_rate": 0.9'),
    "metrics without an evaluation": edited(METRICS, rb'"kind": "eval"', b'"kind": "step"'),
    "metrics that missed": edited(METRICS, rb'"outcome": "reached"', b'"outcome": "not_reached"'),
    "no telemetry": dropped(TELEMETRY),
    "a worse run left out": passport_rewritten(lambda passport: passport["seeds"].append(2)),
    "another processor": edited(
        "system.json", rb'"host_processor_model_name": "', b'"host_processor_model_name": "Faster '
    ),
    "more memory": edited("system.json", rb'"host_memory_capacity": "', b'"host_memory_capacity": "9'),
    "another framework": edited("system.json", rb'"framework": "', b'"framework": "not '),
    "more nodes": edited("system.json", rb'"number_of_nodes": "1"', b'"number_of_nodes": "4"'),
    "a GPU that is not there": edited(
        "system.json", rb'"accelerator_model_name": ""', b'"accelerator_model_name": "NVIDIA H200"'
    ),
    "a passport by hand": edited("run.json", rb'"round": "v0.5"', b'"round": "v0.7"'),
    "a passport of another machine": passport_rewritten(with_gpus),
    "a passport of another batch": passport_rewritten(
        lambda passport: passport["configuration"]["batch_size"].update(value=1 << 20)
    ),
    "a shorter experiment": edited("experiment_0/state.json", rb'"ended": "\d+', b'"ended": "2019'),
}


# What no file that encore writes has; hashes are computed again.
WRONG_KINDS: dict[str, Callable[[Files], None]] = {
    "data a number": edited("run.json", rb'"data": {', b'"data": 3, "data2": {'),
    "node a text": edited("run.json", rb'"node": {', b'"node": "x", "node2": {'),
    "configuration a list": edited("run.json", rb'"configuration": {', b'"configuration": [], "configuration2": {'),
    "no passport": lambda files: files.update({"run.json": b"[]"}),
    "a deep passport": lambda files: files.update({"run.json": b"[" * 200_000}),
    "no log of the experiment": dropped("experiment_0/result.txt"),
    "a start without a time": edited(METRICS, rb'("kind": "start".*?)"time"', rb'\g<1>"times"'),
    "metrics of lists": edited(METRICS, rb'"qualities": {[^}]*}', b'"qualities": [1]'),
}


def contents(path: Path) -> Files:
    with tarfile.open(path) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def packed(files: Files, target: Path) -> Path:
    with tarfile.open(target, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return target


def rehashed(files: Files) -> None:
    manifest = json.loads(files["bundle.json"])
    names = files.keys() - {"bundle.json", "bundle.json.sig"}
    manifest["files"] = {
        name: {"bytes": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest()} for name in names
    }
    files["bundle.json"] = json.dumps(manifest).encode()


@pytest.mark.parametrize("hashed", [False, True], ids=["", "hashed again"])
@pytest.mark.parametrize("forgery", IN_TRANSIT)
def test_what_was_changed_after_signing_is_found(
    forgery: str, hashed: bool, signed: Path, keys: Path, tmp_path: Path
) -> None:
    files = contents(signed)
    IN_TRANSIT[forgery](files)
    if hashed:
        rehashed(files)
    found = bundle.verify(packed(files, tmp_path / "forged.tar.gz"), keys / "ours.signers")
    assert not found.accepted
    assert not hashed or any("signature is not valid" in each.found for each in found.findings)


@pytest.mark.parametrize("forgery", BEFORE_SIGNING)
def test_what_was_changed_before_signing_contradicts(
    forgery: str, run: Path, signed: Path, keys: Path, tmp_path: Path
) -> None:
    files = contents(signed)
    BEFORE_SIGNING[forgery](files)
    found = signed_again(files, run, keys, tmp_path)
    assert "ours@lab" in found.signer
    assert not found.accepted, "signed, and yet its files contradict each other"


def signed_again(files: Files, run: Path, keys: Path, tmp_path: Path) -> bundle.Verified:
    folder = tmp_path / run.name
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    bundle.write_bundle(folder, tmp_path / "again.tar.gz", keys / "ours")
    return bundle.verify(tmp_path / "again.tar.gz", keys / "ours.signers")


def stopped_for_a_minute(files: Files) -> None:
    # In the middle of the run's steps: all that comes later is a minute later, and begins with the resume's record
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


def test_a_run_that_was_stopped_and_resumed_is_accepted(run: Path, signed: Path, keys: Path, tmp_path: Path) -> None:
    files = contents(signed)
    stopped_for_a_minute(files)
    found = signed_again(files, run, keys, tmp_path / "whole")
    assert found.accepted, found.findings
    # But not as one that went on in between.
    without = {**files, METRICS: re.sub(rb'"resumed_step": 5', b'"resumed_step": 0', files[METRICS])}
    assert not signed_again(without, run, keys, tmp_path / "went on").accepted


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_values_of_the_wrong_kind_are_found(name: str, signed: Path, tmp_path: Path) -> None:
    files = contents(signed)
    del files["bundle.json.sig"]
    WRONG_KINDS[name](files)
    rehashed(files)
    assert not bundle.verify(packed(files, tmp_path / "forged.tar.gz")).accepted


def test_a_manifest_of_the_wrong_kinds_is_refused(signed: Path, tmp_path: Path) -> None:
    files = contents(signed)
    manifest = json.loads(files["bundle.json"])
    for wrong in ({"scores": [1]}, {"files": {"a": 1}}, {"files": []}, {"name": None}, {"schema": 99}):
        files["bundle.json"] = json.dumps({**manifest, **wrong}).encode()
        with pytest.raises(EncoreError):
            bundle.verify(packed(files, tmp_path / "forged.tar.gz"))
    files["bundle.json"] = json.dumps({**manifest, "scores": [{"round": None}]}).encode()
    assert not bundle.verify(packed(files, tmp_path / "forged.tar.gz")).accepted


def test_signatures_of_others_are_none(signed: Path, keys: Path, tmp_path: Path) -> None:
    assert not bundle.verify(signed, keys / "others.signers").accepted
    assert not bundle.verify(signed, keys / "ours.signers", "others@lab").accepted
    files = contents(signed)
    del files["bundle.json.sig"]
    unsigned = packed(files, tmp_path / "unsigned.tar.gz")
    assert bundle.verify(unsigned).accepted and not bundle.verify(unsigned, keys / "ours.signers").accepted
    (tmp_path / "text").write_text("text", encoding="utf-8")
    command = ["ssh-keygen", "-Y", "sign", "-n", "file", "-f", str(keys / "ours"), str(tmp_path / "text")]
    subprocess.run(command, check=True, capture_output=True)
    files["bundle.json.sig"] = (tmp_path / "text.sig").read_bytes()
    other_purpose = packed(files, tmp_path / "purpose.tar.gz")
    assert (
        not bundle.verify(other_purpose, keys / "ours.signers").accepted and not bundle.verify(other_purpose).accepted
    )


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "link", "result_0.txt"])
def test_an_archive_that_is_no_bundle_is_refused(name: str, signed: Path, tmp_path: Path) -> None:
    target = packed(contents(signed), tmp_path / "forged.tar.gz")
    unpacked = tmp_path / "plain.tar"
    unpacked.write_bytes(gzip.decompress(target.read_bytes()))
    with tarfile.open(unpacked, "a") as archive:
        member = tarfile.TarInfo(name)
        if name == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member, io.BytesIO(b""))
    found = bundle.verify(unpacked)
    assert not found.accepted and any("no bundle has" in each.found for each in found.findings)
    assert not (tmp_path / "outside").exists()
    broken = tmp_path / "cut.tar.gz"
    broken.write_bytes(signed.read_bytes()[:2000])
    for bad in (broken, keys_of_nobody(tmp_path)):
        done = CliRunner().invoke(app, ["verify", str(bad)])
        assert isinstance(done.exception, EncoreError)


def keys_of_nobody(folder: Path) -> Path:
    (folder / "no.tar.gz").write_bytes(b"no archive")
    return folder / "no.tar.gz"
