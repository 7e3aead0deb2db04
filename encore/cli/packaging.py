"""``encore archive`` and ``encore verify``: submission trees and signed bundles."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typing_extensions import TypedDict

from encore.cli import options
from encore.cli.layout import console, reading, say, text, write_json
from encore.errors import EncoreError, ExitCode
from encore.lab.submissions.archive import check_package, write_archive
from encore.lab.submissions.bundle import verify as verify_bundle
from encore.lab.submissions.bundle import write_bundle
from encore.lab.submissions.merge import merge_trees
from encore.results.format import count_of


class Bundled(TypedDict):
    """A bundle that was written."""

    bundle: str
    files: int
    signed: bool


def archive(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of logs.")],
    output: options.Output,
    submitter: Annotated[str | None, typer.Option(help="Submitter. Default: from the logs.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge submission trees. Fails on collisions.")] = False,
    bundle: Annotated[
        bool, typer.Option("--bundle", help="Write a single file of one run for encore verify, instead of a tree.")
    ] = False,
    key: Annotated[
        Path | None,
        typer.Option(help="With --bundle: private SSH key for the signature, or the public key if an agent holds it."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Pack runs as an MLPerf submission tree and check it with mlperf-logging's package checker.

    Exits with 1 if the checker finds errors or if merged trees collide. With --bundle, pack one run or log folder
    into a file with hashes, score and signature for `encore verify`.

    Examples:

      encore archive results/20260101T120000Z-resnet-mxnet-dgxa100 -o submission --submitter MyLab

      encore archive submissions/ours submissions/theirs -o round --merge

      encore archive results/20260101T120000Z-resnet-mxnet-dgxa100 -o run.tar.gz --bundle --key ~/.ssh/id_ed25519
    """
    if key is not None and not bundle:
        raise EncoreError("--key without --bundle", hint="a submission tree is not signed")
    if bundle:
        if len(runs) != 1 or merge or submitter is not None:
            raise EncoreError("--bundle with more than one run, --merge or --submitter", expected="one run")
        packed_files = write_bundle(runs[0], output, key)
        if as_json:
            write_json("bundled", Bundled(bundle=str(output), files=packed_files, signed=key is not None))
        else:
            signed = "signed" if key is not None else "not signed: use --key"
            say(console(), text(f"{output}: {count_of(packed_files, 'file')}, {signed}"))
        return
    if merge:
        _merge(runs, output, submitter, as_json)
    packages = [check_package(package) for package in write_archive(runs, output, submitter)]
    if as_json:
        write_json("archive", packages)
    for package in packages if not as_json else ():
        screen = console()
        style = "green" if package.accepted else "yellow" if package.accepted is None else "red"
        say(screen, text(f"{package.folder}: {package.summary}", style))
        for line in package.errors:
            say(screen, text(f"  {line}"))
    raise typer.Exit(ExitCode.FAILED if any(package.accepted is False for package in packages) else ExitCode.REACHED)


def verify(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="File from encore archive --bundle.")],
    signers: Annotated[
        Path | None, typer.Option(help="File of allowed signers (allowed_signers of ssh-keygen).")
    ] = None,
    identity: Annotated[str | None, typer.Option(help="Required signer, by a name in --signers.")] = None,
    as_json: options.Json = False,
) -> None:
    """Verify a bundle offline: signature, hashes, recomputed scores and consistency of the files.

    Findings of `encore audit` are listed, but are not errors. Exits with 1 on errors.

    Examples:

      encore verify run.tar.gz --signers allowed_signers

      encore verify run.tar.gz --json
    """
    if identity is not None and signers is None:
        raise EncoreError("--identity without --signers", hint="name the file that has the key of that name")
    if signers is not None and not signers.is_file():
        raise EncoreError(f"{signers} does not exist", expected="an allowed_signers file of ssh-keygen")
    with reading():
        verification = verify_bundle(bundle, signers, identity)
    if as_json:
        write_json("verification", verification)
    else:
        screen = console()
        for finding in verification.findings:
            style = "red" if finding["severity"] == "error" else "yellow"
            line = f"{finding['severity']}: {finding['found']}; expected {finding['expected']}; {finding['hint']}"
            say(screen, text(line, style))
        for finding in verification.audit:
            say(screen, text(f"audit, {finding['severity']}: {finding['found']}"))
        for score in verification.scores:
            say(screen, text(f"{score['round']} {score['benchmark']}: {_time_of(score)}"))
        verdict = "unchanged and consistent" if verification.accepted else "not accepted"
        style = "green" if verification.accepted else "red"
        files = count_of(verification.files, "file")
        say(screen, text(f"{verification.name}: {files}, {verdict}. {verification.signer}".rstrip(), style))
    raise typer.Exit(ExitCode.REACHED if verification.accepted else ExitCode.FAILED)


def _time_of(score: Mapping[str, Any]) -> str:
    runs = count_of(len(score["runs"]), "run")
    raw, official, factor = (score.get(name) for name in ("score_minutes", "official_minutes", "scaling_factor"))
    if raw is None:
        return f"no score of {runs}: {score.get('missing')}"
    scaled = f" (raw {raw:.3f} minutes, scaling factor {factor:g})" if factor is not None else ""
    return f"official score {official if official is not None else raw:.3f} minutes of {runs}{scaled}"


def _merge(trees: list[Path], output: Path, submitter: str | None, as_json: bool) -> NoReturn:
    if submitter is not None:
        raise EncoreError("--submitter with --merge", hint="merged trees keep the names of their submitters")
    merged = merge_trees(trees, output)
    if as_json:
        write_json("merge", merged)
    screen = console()
    for collision in merged.collisions if not as_json else ():
        say(screen, text(f"{collision.place}: {collision.why}", "red"))
        say(screen, text(f"    in {', '.join(collision.trees)}"))
        say(screen, text(f"    {collision.hint}"))
    if not as_json:
        trees_of = f"{count_of(merged.files, 'file')} of {count_of(merged.trees, 'tree')}"
        collided = f"{trees_of}: {count_of(len(merged.collisions), 'collision')}; nothing written"
        say(screen, text(collided if merged.collisions else f"{output}: {trees_of}"))
    raise typer.Exit(ExitCode.FAILED if merged.collisions else ExitCode.REACHED)
