"""One file that a stranger can verify: a run, or a set of logs, with hashes, its score and a signature.

``bundle.json`` is first in the archive. It has the hash of every other file, what computed the score, and the score;
``bundle.json.sig`` is its signature by an SSH key, as ``ssh-keygen -Y sign`` makes it. Nothing is believed when it is
verified: hashes, scores and what two files say of one thing are computed again.
"""

import hashlib
import io
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
NAMESPACE = "encore-bundle"  # of the signature: one made for another purpose is none
RULE = "encore/lab/submissions/bundle.py"
# Of a folder of a run: what it is judged by, but no checkpoint, and nothing that ranks print.
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
    """The first file of a bundle; its signature is in bundle.json.sig."""

    schema: int  # Version of this format
    created: str  # UTC
    encore: release.Release  # What computed the scores
    name: str  # Of the folder that was packed
    files: dict[str, PackedFile]  # Every other file
    scores: list[ClaimJson]


class VerifiedJson(TypedDict):
    """What a verification found."""

    name: str
    signer: str  # As ssh-keygen names it; empty where nobody signed
    files: int
    scores: tuple[Mapping[str, Any], ...]  # As claimed, and computed again
    findings: list[FindingJson]  # What is wrong with the bundle
    audit: list[FindingJson]  # What is odd in logs that are as claimed
    accepted: bool


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What a verification found; ``findings`` are what is wrong, ``audit`` what is odd in logs that are as claimed."""

    name: str
    signer: str  # as ssh-keygen names it; empty where nobody signed
    files: int
    scores: tuple[Mapping[str, Any], ...]
    findings: tuple[Finding, ...]
    audit: tuple[Finding, ...]

    @property
    def accepted(self) -> bool:
        return no_error(self.findings)

    def as_json(self) -> VerifiedJson:
        return {
            "name": self.name, "signer": self.signer, "files": self.files, "scores": self.scores,
            "findings": [each.as_json() for each in self.findings], "audit": [each.as_json() for each in self.audit],
            "accepted": self.accepted,
        }  # fmt: skip


# -- packed ------------------------------------------------------------------------------------------


def write_bundle(folder: Path, output: Path, key: Path | None = None) -> int:
    """Pack a run folder, or a folder of logs, and sign it with an SSH key; return how many files are in it.

    Raises:
        EncoreError: it has no log, ``output`` is there already, or the key cannot sign.
    """
    if output.exists():
        raise EncoreError(f"{output} is there already", hint="give a new name, or remove it")
    scores = score_folder(folder)
    chosen = dict(_chosen(folder))
    contents = {name: path.read_bytes() for name, path in sorted(chosen.items())}
    manifest: Manifest = {
        "schema": SCHEMA,
        "created": files.utc_now(),
        "encore": release.facts(),
        "name": folder.absolute().name,
        "files": {name: {"bytes": len(text), "sha256": _sha256(text)} for name, text in contents.items()},
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


# Name in the bundle and path of each file of a run, or of a folder of logs and its system's description.
def _chosen(folder: Path) -> Iterator[tuple[str, Path]]:
    if (folder / "run.json").exists():
        for path in folder.rglob("*"):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and not path.is_symlink() and _RUN.fullmatch(name):
                yield name, path
        data = files.read_json(folder / "run.json").get("data", {})
        manifest = Path(str(data.get("folder"))) / DATA
        # Of the data set that was trained on, if it is there still.
        if manifest.is_file() and files.read_json(manifest).get("id") == data.get("id"):
            yield DATA, manifest
        return
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield f"results/{path.relative_to(folder).as_posix()}", path
    # results/SYSTEM/BENCHMARK and systems/SYSTEM.json, as MLPerf has them
    system = folder.absolute().parent
    described = system.parent.parent / "systems" / f"{system.name}.json"
    if described.is_file():
        yield f"systems/{described.name}", described


# Scores without what depends on where the logs are.
def _claims(scores: Sequence[Score], folder: Path) -> list[ClaimJson]:
    own = ({**score.as_json(), "folder": score.folder.relative_to(folder).as_posix()} for score in scores)
    return [cast(ClaimJson, {k: value for k, value in each.items() if k != "round_is_guess"}) for each in own]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sha256_of(path: Path) -> str:
    content = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            content.update(block)
    return content.hexdigest()


def _signature(text: bytes, key: Path) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        signed = Path(scratch) / MANIFEST
        signed.write_bytes(text)
        _ssh_keygen("sign", "-f", str(key), str(signed))
        return (Path(scratch) / SIGNATURE).read_bytes()


def _ssh_keygen(what: str, *arguments: str, given: bytes = b"") -> str:
    command = ["ssh-keygen", "-Y", what, "-n", NAMESPACE, *arguments]
    try:
        done = subprocess.run(command, input=given, capture_output=True, check=False, timeout=SIGN_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise EncoreError(
            f"ssh-keygen -Y {what} did not end in {SIGN_SECONDS} s",
            expected="a key whose passphrase is given in time, or that ssh-agent has",
            hint="ssh-add KEY",
        ) from error
    except FileNotFoundError as error:
        raise EncoreError("ssh-keygen is not installed", hint="install openssh-client, 8.2 or newer") from error
    text = (done.stdout + done.stderr).decode(errors="replace").strip()
    if done.returncode != 0:
        raise EncoreError(f"ssh-keygen -Y {what}: {text.splitlines()[-1] if text else 'failed'}")
    return text


# -- verified ----------------------------------------------------------------------------------------


def verify(bundle: Path, signers: Path | None = None, identity: str | None = None) -> Verified:
    """Verify a bundle without a network, in the memory of its largest file.

    Args:
        bundle: as ``write_bundle`` makes it.
        signers: an allowed_signers file of ssh-keygen; without one a signature only says which key made it.
        identity: who has to have signed, by a name in ``signers``.

    Raises:
        EncoreError: it is no bundle that can be read at all.
    """
    if bundle.is_dir():
        hint = f"pack it: encore archive {bundle} -o run.tar.gz --bundle --key KEY"
        raise EncoreError(f"{bundle} is a directory", expected="a file of encore archive --bundle", hint=hint)
    if signers is not None:
        _check_signers(signers)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "bundle"
        found = list(_unpack(bundle, folder))
        manifest = _manifest(bundle, folder)
        signer, problems = _signer(folder, signers, identity)
        found += [*problems, *_of_hashes(folder, manifest["files"])]
        root = folder if (folder / "run.json").exists() else folder / "results"
        scores = _scores(root, manifest["scores"])
        claims = _claims(scores, root)
        if json.dumps(claims, sort_keys=True) != json.dumps(manifest["scores"], sort_keys=True):
            found.append(
                _finding("its score is not that of its logs", f"{_times(claims)}", f"{_times(manifest['scores'])}")
            )
        if (folder / "run.json").exists():
            found += _contradictions(folder)
            if DATA not in manifest["files"]:
                hint = "pack it where its data set is"
                found.append(_finding("what the run was trained on is not in it", DATA, "nothing", hint, "warning"))
        audit = tuple(each for one in audit_scores(scores) for each in one.findings)
        return Verified(
            name=str(manifest["name"]), signer=signer, files=len(manifest["files"]), scores=tuple(claims),
            findings=tuple(found), audit=audit,
        )  # fmt: skip


_KEY_TYPES = ("ssh-", "ecdsa-sha2-", "sk-ssh-", "sk-ecdsa-sha2-")


def _check_signers(signers: Path) -> None:
    # ssh-keygen reports lines in other formats as signatures that are not valid
    try:
        lines = signers.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _unsupported_signers(f"{signers} is not a text file: {error}") from error
    entries = [(number, line.split()) for number, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
    if not entries:
        raise _unsupported_signers(f"{signers} has no key")
    for number, words in entries:
        place = f"{signers}, line {number}"
        if words[0].startswith(_KEY_TYPES):
            raise _unsupported_signers(f"{place}: a public key without the name of its signer")
        if not any(word.startswith(_KEY_TYPES) for word in words[1:]):
            raise _unsupported_signers(f"{place}: {words[0][:40]!r} is not followed by an SSH public key")


def _unsupported_signers(problem: str) -> EncoreError:
    return EncoreError(
        problem,
        expected="lines of NAME and SSH public key, such as NAME ssh-ed25519 AAAA...",
        hint='for example: echo "NAME $(cat KEY.pub)" > allowed_signers; PEM, PGP and private keys are not supported',
    )


# A value of the wrong kind in a file of the bundle is what is wrong with it, not with this program.
def _contradictions(folder: Path) -> Iterator[Finding]:
    try:
        for each in consistency.contradictions(folder):
            yield _finding(*each)
    except (EncoreError, OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        yield _finding("its files are not those of a run", "files as encore run writes them", repr(error))


# Logs that fit several rounds, of which a folder's name decided, are scored by the round that is claimed.
def _scores(root: Path, claims: Sequence[Any]) -> list[Score]:
    found = score_folder(root) if root.exists() else []
    rounds = {str(each.get("round")) for each in claims}
    if len(rounds) == 1 and rounds < set(ROUNDS) and any(each.round_is_guess or each.round is None for each in found):
        return score_folder(root, rounds.pop())
    return found


# Write the files of an archive below ``folder``, and say what no bundle has: links, other paths, a name twice.
def _unpack(bundle: Path, folder: Path) -> Iterator[Finding]:
    folder.mkdir()
    room, seen = _MOST_BYTES, set[str]()
    with files.archive_errors(bundle):
        for count, (member, size, content) in enumerate(files.tar_members(bundle)):
            if count >= _MOST_FILES:
                raise ValueError(f"it has more than {_MOST_FILES:,} members")
            name = files.plain_path(member)
            if name is None or name != member or content is None or name in seen:
                yield _finding("the archive has what no bundle has", "plain files, each once", repr(member))
                continue
            room -= size
            if room < 0:
                raise ValueError(f"its files have more than {_MOST_BYTES // 1024**3} GiB")
            seen.add(name)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("wb") as target:
                shutil.copyfileobj(content, target)


def _manifest(bundle: Path, folder: Path) -> dict[str, Any]:
    expected = "a file that encore archive --bundle made"
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        whole = all(isinstance(found[name], kind) for name, kind in (("files", dict), ("scores", list), ("name", str)))
        whole = whole and all(isinstance(each, dict) and "sha256" in each for each in found["files"].values())
        whole = whole and all(isinstance(each, dict) for each in found["scores"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise EncoreError(f"{bundle}: no {MANIFEST} that can be read: {error}", expected=expected) from error
    if not whole or found.get("schema") != SCHEMA:
        raise EncoreError(f"{bundle}: {MANIFEST} of schema {found.get('schema')}", expected=f"schema {SCHEMA}")
    return dict(found)


# Who signed, and what is wrong with it.
def _signer(folder: Path, signers: Path | None, identity: str | None) -> tuple[str, list[Finding]]:
    text, signature = (folder / MANIFEST).read_bytes(), folder / SIGNATURE
    if not signature.exists():
        hint = "ask for a signed bundle: encore archive RUN -o FILE --bundle --key KEY"
        if signers is None:
            return "", [_finding("the bundle is not signed", "a signature", "none", hint, "warning")]
        return "", [_finding("the bundle is not signed", f"a signature by a key of {signers}", "none", hint)]
    options = ["-s", str(signature)]
    try:
        if signers is None:
            found = _ssh_keygen("check-novalidate", *options, given=text)
            hint = "name who may sign: --signers FILE"
            unknown = _finding("whose key signed it is not known", "a key in a file of signers", found, hint, "warning")
            return found, [unknown]
        if identity is None:
            identity = _ssh_keygen("find-principals", "-f", str(signers), *options).splitlines()[0]
        if not _IDENTITY.fullmatch(identity):
            raise EncoreError(f"no name of a signer: {identity!r}")
        return _ssh_keygen("verify", "-f", str(signers), "-I", identity, *options, given=text), []
    except EncoreError as error:
        return "", [_finding("its signature is not valid", f"one by a key of {signers or 'anybody'}", str(error))]


def _of_hashes(folder: Path, wanted: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    for name in sorted(wanted.keys() | there - {MANIFEST, SIGNATURE}):
        if name not in there:
            yield _finding("a file is missing", name, "nothing")
        elif name not in wanted:
            yield _finding("a file is not in bundle.json", "no other file", name)
        elif (hashed := _sha256_of(folder / name)) != wanted[name]["sha256"]:
            yield _finding(f"{name} is not the file that was packed", str(wanted[name]["sha256"]), hashed)


def _times(claims: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{each.get('benchmark')} {each.get('score_minutes')}" for each in claims) or "no score"


def _finding(
    found: str, expected: str, what: str, hint: str = "ask whoever made it", severity: Any = "error"
) -> Finding:
    return Finding(line=None, rule=RULE, expected=expected, found=f"{found}: {what}", hint=hint, severity=severity)
