"""Single-file bundles that third parties can verify: a run or logs, with hashes, score and signature.

``bundle.json`` is the first file of the archive, with the hash of all other files, the version that computed the
score, and the score. ``bundle.json.sig`` is its SSH signature (``ssh-keygen -Y sign``). Verification recomputes
hashes, scores and consistency.
"""

import hashlib
import io
import itertools
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from typing_extensions import TypedDict

from encore import files, release
from encore.errors import EncoreError
from encore.lab.submissions import consistency
from encore.results.audit.audit import audit_scores
from encore.results.findings import Finding, FindingJson, no_error
from encore.results.rules import ROUNDS
from encore.results.scores.score import ClaimJson, Score, score_folder

SCHEMA = 1
MANIFEST, SIGNATURE = "bundle.json", "bundle.json.sig"
DATA = "dataset.json"
SIGN_SECONDS = 300  # a person may have to type a passphrase
NAMESPACE = "encore-bundle"  # signature namespace: signatures for other purposes are invalid
RULE = "encore/lab/submissions/bundle.py"
# Run folder files that verification needs; no checkpoints or rank output
_RUN = re.compile(
    r"(run|system|links|gate)\.json|result_\d+\.txt"
    r"|experiment_\d+/((config|state)\.json|result\.txt|[a-z]+([._][^/]*)?\.jsonl|steps/rank_\d+\.jsonl)"
)
_MOST_FILES, _MOST_BYTES = 10_000, 4 * 1024**3
_IDENTITY = re.compile(r"[^\s\0]{1,200}")


class PackedFile(TypedDict):
    bytes: int
    sha256: str


class Manifest(TypedDict):
    """First bundle file; bundle.json.sig is the signature."""

    schema: int  # Version of this format
    created: str  # UTC
    encore: release.Release  # Version that computed the scores
    name: str  # Of the folder that was packed
    files: dict[str, PackedFile]  # Every other file
    scores: list[ClaimJson]


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Verification result."""

    name: str
    signer: str  # Identity from ssh-keygen; empty if unsigned
    files: int
    scores: tuple[Mapping[str, Any], ...]  # Claimed and recomputed
    findings: list[FindingJson]  # Errors in the bundle
    audit: list[FindingJson]  # Anomalies in logs that match the claims
    accepted: bool


# -- packed ------------------------------------------------------------------------------------------


def write_bundle(folder: Path, output: Path, key: Path | None = None) -> int:
    """Pack a run folder or a folder of logs, sign it with an SSH key, and return the number of files.

    Raises:
        EncoreError: no log in the folder, ``output`` exists, or signing failed.
    """
    if output.exists():
        raise EncoreError(f"{output} already exists", hint="choose a new name, or remove the file")
    scores = score_folder(folder)
    contents = {name: path.read_bytes() for name, path in sorted(_bundle_members(folder).items())}
    manifest: Manifest = {
        "schema": SCHEMA,
        "created": files.utc_now(),
        "encore": release.facts(),
        "name": folder.absolute().name,
        "files": {
            name: {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()} for name, text in contents.items()
        },
        "scores": _claims(scores, folder),
    }
    text = (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode()
    first = {MANIFEST: text, **({SIGNATURE: _signature(text, key)} if key is not None else {})}
    partial = output.with_name(f".{output.name}.writing")
    try:
        with tarfile.open(partial, mode="w:gz") as archive:
            for name, content in (*first.items(), *contents.items()):
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(content), 0o644
                archive.addfile(member, io.BytesIO(content))
        partial.replace(output)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise EncoreError(f"{output} cannot be written: {error.strerror or error}") from error
    return len(contents)


# Bundle names and paths of run files, or of logs with the system description.
def _bundle_members(folder: Path) -> dict[str, Path]:
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    members = {path.relative_to(folder).as_posix(): path for path in paths}
    if "run.json" in members:
        data = files.read_json(folder / "run.json").get("data", {})
        manifest = Path(str(data.get("folder"))) / DATA
        # Of the data set that was trained on, if it is there still.
        members = {name: path for name, path in members.items() if _RUN.fullmatch(name)}
        if manifest.is_file() and files.read_json(manifest).get("id") == data.get("id"):
            members[DATA] = manifest
        return members
    # results/SYSTEM/BENCHMARK and systems/SYSTEM.json, as in MLPerf submissions
    system = folder.absolute().parent
    described = system.parent.parent / "systems" / f"{system.name}.json"
    description = {f"systems/{described.name}": described} if described.is_file() else {}
    return {f"results/{name}": path for name, path in members.items()} | description


# Scores without fields that depend on the location of the logs.
def _claims(scores: Sequence[Score], folder: Path) -> list[ClaimJson]:
    score_records = ({**score.as_json(), "folder": score.folder.relative_to(folder).as_posix()} for score in scores)
    return [
        cast(ClaimJson, {k: value for k, value in record.items() if k != "round_is_guess"}) for record in score_records
    ]


def _signature(text: bytes, key: Path) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        signed = Path(scratch) / MANIFEST
        signed.write_bytes(text)
        _ssh_keygen("sign", "-f", str(key), str(signed))
        return (Path(scratch) / SIGNATURE).read_bytes()


def _ssh_keygen(action: str, *arguments: str, stdin: bytes = b"") -> str:
    command = ["ssh-keygen", "-Y", action, "-n", NAMESPACE, *arguments]
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, check=False, timeout=SIGN_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise EncoreError(
            f"ssh-keygen -Y {action} did not finish within {SIGN_SECONDS} s",
            expected="a key in ssh-agent, or its passphrase in time",
            hint="ssh-add KEY",
        ) from error
    except FileNotFoundError as error:
        raise EncoreError("ssh-keygen is not installed", hint="install openssh-client, 8.2 or newer") from error
    text = (done.stdout + done.stderr).decode(errors="replace").strip()
    if done.returncode != 0:
        raise EncoreError(f"ssh-keygen -Y {action}: {text.splitlines()[-1] if text else 'failed'}")
    return text


# -- verified ----------------------------------------------------------------------------------------


def verify(bundle: Path, signers: Path | None = None, identity: str | None = None) -> Verified:
    """Verify a bundle offline; needs memory for the largest file only.

    Args:
        bundle: a file from ``write_bundle``.
        signers: an allowed_signers file of ssh-keygen; without it a signature only identifies the key.
        identity: required signer, by a name in ``signers``.

    Raises:
        EncoreError: the file is not a readable bundle.
    """
    if bundle.is_dir():
        hint = f"pack it: encore archive {bundle} -o run.tar.gz --bundle --key KEY"
        raise EncoreError(f"{bundle} is a directory", expected="a file of encore archive --bundle", hint=hint)
    if signers is not None:
        _check_signers(signers)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "bundle"
        findings = list(_unpack(bundle, folder))
        manifest = _manifest(bundle, folder)
        signer, problems = _signer(folder, signers, identity)
        findings += [*problems, *_check_hashes(folder, manifest["files"])]
        root = folder if (folder / "run.json").exists() else folder / "results"
        scores = _scores(root, manifest["scores"])
        claims = _claims(scores, root)
        if json.dumps(claims, sort_keys=True) != json.dumps(manifest["scores"], sort_keys=True):
            findings.append(
                _finding("the score does not match the logs", f"{_times(claims)}", f"{_times(manifest['scores'])}")
            )
        if (folder / "run.json").exists():
            findings += _contradictions(folder)
            if DATA not in manifest["files"]:
                hint = "pack it on a machine with the data set"
                findings.append(_finding("the data set manifest is missing", DATA, "nothing", hint, "warning"))
        audits = audit_scores(scores)
        return Verified(
            name=str(manifest["name"]), signer=signer, files=len(manifest["files"]), scores=tuple(claims),
            findings=[finding.as_json() for finding in findings],
            audit=[finding.as_json() for score_audit in audits for finding in score_audit.findings],
            accepted=no_error(findings),
        )  # fmt: skip


_KEY_TYPES = ("ssh-", "ecdsa-sha2-", "sk-ssh-", "sk-ecdsa-sha2-")


def _check_signers(signers: Path) -> None:
    # ssh-keygen reports lines in other formats as signatures that are not valid
    try:
        lines, problem = signers.read_text("utf-8").splitlines(), f"{signers} has no key"
    except (OSError, UnicodeDecodeError) as error:
        lines, problem = [], f"{signers} is not a text file: {error}"
    entries = [(number, line.split()) for number, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
    problem = "" if entries else problem
    for number, (name, *words) in reversed(entries):  # The first problem is reported
        if name.startswith(_KEY_TYPES):
            problem = f"{signers}, line {number}: a public key without a signer name"
        elif not any(word.startswith(_KEY_TYPES) for word in words):
            problem = f"{signers}, line {number}: {name[:40]!r} is not followed by an SSH public key"
    if problem:
        raise EncoreError(
            problem,
            expected="lines of NAME and SSH public key, such as NAME ssh-ed25519 AAAA...",
            hint='such as echo "NAME $(cat KEY.pub)" > allowed_signers; PEM, PGP and private keys are not supported',
        )


# Values of the wrong type in a bundle file are findings, not program errors.
def _contradictions(folder: Path) -> Iterator[Finding]:
    try:
        yield from itertools.starmap(_finding, consistency.contradictions(folder))
    except (EncoreError, OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        yield _finding("the files do not form a run folder", "files written by encore run", repr(error))


# Logs that match multiple rounds, decided by a folder name, are scored by the claimed round.
def _scores(root: Path, claims: Sequence[Any]) -> list[Score]:
    scored = score_folder(root) if root.exists() else []
    rounds = {str(claim.get("round")) for claim in claims}
    is_guess = any(score.round_is_guess or score.round is None for score in scored)
    return score_folder(root, rounds.pop()) if is_guess and len(rounds) == 1 and rounds < set(ROUNDS) else scored


# Extract an archive below ``folder``, and yield findings for links, other paths and duplicate names.
def _unpack(bundle: Path, folder: Path) -> Iterator[Finding]:
    folder.mkdir()
    room, names = _MOST_BYTES, set[str]()
    with files.archive_errors(bundle):
        for count, (member, size, content) in enumerate(files.tar_members(bundle)):
            if count >= _MOST_FILES:
                raise ValueError(f"it has more than {_MOST_FILES:,} members")
            name = files.plain_path(member)
            if name is None or name != member or content is None or name in names:
                yield _finding("unexpected member in the archive", "plain files without duplicates", repr(member))
                continue
            room -= size
            if room < 0:
                raise ValueError(f"the files exceed {_MOST_BYTES // 1024**3} GiB")
            names.add(name)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("wb") as target:
                shutil.copyfileobj(content, target)


def _manifest(bundle: Path, folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        is_valid = (
            all(isinstance(manifest[name], kind) for name, kind in (("files", dict), ("scores", list), ("name", str)))
            and all(isinstance(entry, dict) and "sha256" in entry for entry in manifest["files"].values())
            and all(isinstance(entry, dict) for entry in manifest["scores"])
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"{bundle}: no {MANIFEST} that can be read: {error}"
        raise EncoreError(problem, expected="a file from encore archive --bundle") from error
    if not is_valid or manifest.get("schema") != SCHEMA:
        raise EncoreError(f"{bundle}: {MANIFEST} of schema {manifest.get('schema')}", expected=f"schema {SCHEMA}")
    return dict(manifest)


# Signer, and findings about the signature.
def _signer(folder: Path, signers: Path | None, identity: str | None) -> tuple[str, list[Finding]]:
    text, signature = (folder / MANIFEST).read_bytes(), folder / SIGNATURE
    if not signature.exists():
        hint = "request a signed bundle: encore archive RUN -o FILE --bundle --key KEY"
        expected, severity = (f"a signature by a key of {signers}", "error") if signers else ("a signature", "warning")
        return "", [_finding("the bundle is not signed", expected, "none", hint, severity)]
    options = ["-s", str(signature)]
    try:
        if signers is None:
            output = _ssh_keygen("check-novalidate", *options, stdin=text)
            hint = "name who may sign: --signers FILE"
            unknown = _finding("the signing key is unknown", "a key in a file of signers", output, hint, "warning")
            return output, [unknown]
        if identity is None:
            identity = _ssh_keygen("find-principals", "-f", str(signers), *options).splitlines()[0]
        if not _IDENTITY.fullmatch(identity):
            raise EncoreError(f"invalid signer name: {identity!r}")
        return _ssh_keygen("verify", "-f", str(signers), "-I", identity, *options, stdin=text), []
    except EncoreError as error:
        return "", [_finding("the signature is invalid", f"one by a key of {signers or 'anybody'}", str(error))]


def _check_hashes(folder: Path, expected_hashes: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    for name in sorted(expected_hashes.keys() | there - {MANIFEST, SIGNATURE}):
        if name not in there:
            yield _finding("a file is missing", name, "nothing")
        elif name not in expected_hashes:
            yield _finding("a file is not in bundle.json", "no other file", name)
        elif (hashed := files.file_digest(folder / name)) != expected_hashes[name]["sha256"]:
            yield _finding(f"{name} is not the file that was packed", str(expected_hashes[name]["sha256"]), hashed)


def _times(claims: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{claim.get('benchmark')} {claim.get('score_minutes')}" for claim in claims) or "no score"


def _finding(
    problem: str, expected: str, actual: str, hint: str = "contact the author", severity: Any = "error"
) -> Finding:
    return Finding(line=None, rule=RULE, expected=expected, found=f"{problem}: {actual}", hint=hint, severity=severity)
