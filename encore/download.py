"""Download raw data from their publishers, as listed in ``[download]`` of benchmark.toml, by wget, curl, gsutil or hf.

Files are written as NAME.part and renamed after their checksum is verified, so that incomplete files are never
prepared; the same command resumes a download. MLCommons documents a script to be piped into a shell
(mlcommons/r2-downloader, mlc-r2-downloader.sh). This module does the same with the script's metadata: a folder URL,
and a list of files with MD5 checksums.
"""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote, urlsplit

from encore import catalogue, data, environment, hub
from encore.errors import EncoreError, ExitCode, unknown_name
from encore.files import existing

PART = ".part"
IN_FOLDER = "DIR"  # Placeholder for the raw data folder in benchmark.toml
TOOLS = ("wget", "curl")
HUB_CLIENT = "hf"
FULL_BYTES = 1 << 20  # A disk with less free space is full
POLL_SECONDS = 0.2  # Interval between progress reports
R2_SCRIPT = "https://raw.githubusercontent.com/mlcommons/r2-downloader/refs/heads/main/mlc-r2-downloader.sh"
# A line of the list of MD5 that MLCommons publishes, as md5sum writes it.
_LISTED = re.compile(r"([0-9a-f]{32}) [ *](?:\./)?(.+)")
_DENIED = re.compile(r"\b40[13]\b|Authentication Failed|Access denied")  # Output of curl, wget and hf


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """A file or folder of the raw data, and its source."""

    # url, r2 (a list of files of MLCommons' storage), gs, login, or hub (repository of the Hugging Face Hub)
    kind: str
    address: str
    target: Path  # A file; of r2 and gs a folder
    bytes: int | None = None  # None: no size is published
    unpacked_bytes: int = 0  # Unpacked size of a gzip file that is unpacked before the preparation
    checksums: Mapping[str, tuple[str, ...]]  # Accepted digests, or their prefixes, by algorithm
    source: str  # Source of size and checksums
    hub: catalogue.Hub | None = None  # With the commit in ``revision``, if known
    header: Path | None = None  # File with an HTTP header, for curl

    @property
    def final(self) -> Path:
        return self.target.with_suffix("") if self.unpacked_bytes else self.target

    def command(self, tool: str) -> str:
        """Return the equivalent shell command, or instructions for pages with a login."""
        if self.kind == "r2":
            return f"bash <(curl -s {R2_SCRIPT}) -d {shlex.quote(str(self.target))} {self.address}"
        if self.kind == "login":
            return f"log in to {self.address} and save it as {self.target}"
        if self.kind == "gs":
            return shlex.join(gsutil(self))
        return shlex.join(
            hub.client_command(self.hub, self.target) if self.hub else argv(tool, self.address, self.target)
        )

    def state(self) -> str:
        if self.kind in ("r2", "gs", "hub"):
            # Their tools verify completeness by checksums.
            return "unchecked" if self.target.is_dir() and any(self.target.iterdir()) else "missing"
        is_packed = bool(self.unpacked_bytes) and self.target.exists()
        if self.final.exists() and not is_packed:
            return "present"
        return "started" if is_packed or part_of(self.target).exists() else "missing"

    def missing_bytes(self) -> int:
        """Return the required disk space in bytes, as far as sizes are known."""
        if self.state() == "present":
            return 0
        if self.unpacked_bytes:
            return self.unpacked_bytes  # The packed one goes when it is unpacked
        files = self.target.rglob("*") if self.target.is_dir() else (self.target, part_of(self.target))
        there = sum(path.stat().st_size for path in files if path.is_file())
        return max(0, (self.bytes or 0) - there)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sources of a benchmark's raw data."""

    benchmark: str
    data_set: str
    directory: Path
    output: Path  # Where the data set is to be prepared
    fetches: tuple[Fetch, ...]
    prepared_bytes: int  # Upper limit; 0 if unknown
    terms: str
    needs: str  # Files that the user has to add before the preparation
    words: tuple[str, ...]  # Of the preparation: the raw data, and options
    weights: tuple[str, ...]  # Settings of a run, such as base=FILE
    variants: Mapping[str, str]  # Addresses of the alternatives, by name

    def preparation(self) -> data.Preparation:
        source, *options = (self._found(word) for word in self.words)
        return data.Preparation(source=Path(source), options=tuple(options))

    def next(self) -> list[str]:
        preparation = self.preparation()
        source = str(preparation.source)
        return ["encore", "data", "prepare", self.benchmark, source, "-o", str(self.output), *preparation.options]

    def _found(self, word: str) -> str:
        # Replace DIR by the folder, and a pattern by the single file that matches it.
        if not word.startswith(IN_FOLDER):
            return word
        name = word[len(IN_FOLDER) :].lstrip("/")
        matches = sorted(self.directory.glob(name)) if "*" in name else []
        return str((matches[0] if len(matches) == 1 else self.directory / name).absolute())


def part_of(path: Path) -> Path:
    return path.with_name(path.name + PART)


def plan(benchmark: catalogue.Benchmark, directory: Path, output: Path, variant: str = "", revision: str = "") -> Plan:
    """Return the downloads for a benchmark's raw data, without network access.

    ``variant`` replaces files by an alternative; ``revision`` is the commit of repositories without a published one.

    Raises:
        EncoreError: unknown variant, or a revision that is not needed or not a commit.
    """
    download = benchmark.download
    if download.same_as:
        download = catalogue.benchmarks()[download.same_as].download
    variants = {file.variant: file.place[1] for file in download.files if file.variant}
    if variant and variant not in variants:
        raise unknown_name("variant", variant, variants)
    replaced = {file.file for file in download.files if variant and file.variant == variant}
    selected = [file for file in download.files if file.variant == (variant if file.file in replaced else "")]
    files = [_with_revision(file, revision) for file in selected]
    if revision and not any(file.hub and file.hub.revision == revision for file in files):
        raise EncoreError("--revision: all commits are published", hint="leave it out")
    fetches = [fetch for file in files for fetch in _fetches(file, directory)]
    # Initial weights published as one file; other weights are part of the data, or are specified for the run.
    for weights in itertools.chain.from_iterable(benchmark.weights.values()):
        if re.match("https?://", weights.source) and weights.source.endswith(f"/{weights.file}"):
            target = directory / weights.file
            checksums = {str(name): digests for name, digests in weights.checksums.items()}
            fetches.append(
                Fetch(kind="url", address=weights.source, target=target, checksums=checksums, source=weights.published)
            )
    return Plan(
        benchmark=benchmark.name,
        data_set=benchmark.full_data.name,
        directory=directory,
        output=output,
        fetches=tuple(fetches),
        prepared_bytes=download.prepared_bytes,
        terms=download.terms,
        needs=download.needs,
        words=download.prepare,
        weights=tuple(
            f"{key}={(directory / weights.raw).absolute()}"
            for key, candidates in benchmark.weights.items()
            for weights in candidates
            if weights.raw
        ),
        variants={name: address for name, address in variants.items() if name != variant},
    )


def _with_revision(file: catalogue.RawFile, revision: str) -> catalogue.RawFile:
    if not revision or file.hub is None or file.hub.revision:
        return file
    if not re.fullmatch("[0-9a-f]{40}", revision):
        hint = f"copy it from {hub.page(file.hub)}/commits/main"
        raise EncoreError(f"--revision {revision}", expected="a commit: 40 hexadecimal digits", hint=hint)
    return file.model_copy(update={"hub": file.hub.model_copy(update={"revision": revision})})


def _fetches(file: catalogue.RawFile, directory: Path) -> Iterator[Fetch]:
    kind, address = file.place
    for number in range(file.count):
        url = address.replace("{number}", str(number))
        yield Fetch(
            kind=kind,
            address=url,
            target=directory / (file.file or PurePosixPath(urlsplit(url).path).name),
            bytes=file.bytes // file.count or None,
            unpacked_bytes=file.unpacked_bytes // file.count,
            checksums={name: (digest,) for name, digest in (("md5", file.md5), ("sha256", file.sha256)) if digest},
            source=file.source,
            hub=file.hub,
        )


# -- the disk ------------------------------------------------------------------------------------------


def check_space(plan: Plan) -> None:
    """Reject a download if the disk is too small for the raw data and the prepared data set.

    Raises:
        EncoreError: not enough free space, based on published sizes.
    """
    needed: dict[int, tuple[Path, int]] = {}
    raw = sum(fetch.missing_bytes() for fetch in plan.fetches)
    prepared = 0 if data.holds(plan.output, plan.data_set) else plan.prepared_bytes
    for folder, size in ((plan.directory, raw), (plan.output, prepared)):
        disk = existing(folder.absolute())
        device = disk.stat().st_dev
        needed[device] = (disk, size + needed.get(device, (disk, 0))[1])
    for disk, size in needed.values():
        _require_space(disk, size, f": {raw / 1e9:,.1f} GB to download, {prepared / 1e9:,.1f} GB prepared")


def _require_space(folder: Path, size: int, parts: str = "") -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise EncoreError(
            f"{free / 1e9:,.1f} GB free on the disk of {folder}",
            expected=f"{size / 1e9:,.1f} GB{parts}",
            hint="use a folder on a larger disk, or -o DIR on another disk for the prepared data set",
        )


# -- fetching ------------------------------------------------------------------------------------------


def choose_tool(tool_name: str | None) -> str:
    available = [tool for tool in ([tool_name] if tool_name else TOOLS) if shutil.which(tool)]
    if not available:
        raise EncoreError(f"no {tool_name or ' or '.join(TOOLS)} on this machine", hint="install wget or curl")
    return available[0]


def argv(tool: str, url: str, path: Path, header: Path | None = None) -> list[str]:
    """Return the command that starts or resumes a download."""
    if tool == "curl":
        secret = ["--header", f"@{header}"] if header else []
        retry = ["--retry", "5", "--retry-connrefused", "--connect-timeout", "60", "--speed-time", "60"]
        quiet = ["--silent", "--show-error", "--fail", "--location"]
        return ["curl", "--continue-at", "-", *quiet, *retry, *secret, "--output", str(path), url]
    retry = ["--tries=5", "--timeout=60", "--retry-connrefused", "--retry-on-http-error=429,500,502,503,504"]
    return ["wget", "--continue", "--no-verbose", *retry, f"--output-document={path}", url]


def gsutil(fetch: Fetch) -> list[str]:
    return ["gsutil", "-m", "cp", "-n", "-r", fetch.address, str(fetch.target)]


def run(plan: Plan, tool: str, on_update: data.OnUpdate, uses_client: bool = False) -> None:
    """Download missing files and verify existing files.

    ``uses_client``: download repositories of the Hugging Face Hub by its client instead of ``tool``.

    Raises:
        EncoreError: not enough space, a wrong checksum, or a file that requires a login (exit code 2); a downloader
            failed (1); an interruption (130).
    """
    check_space(plan)
    plan.directory.mkdir(parents=True, exist_ok=True)
    absent = [fetch for fetch in plan.fetches if fetch.kind == "login" and not fetch.target.exists()]
    for fetch in (candidate for candidate in plan.fetches if candidate not in absent):
        if fetch.hub:
            _fetch_hub(fetch, fetch.hub, tool, uses_client, on_update)
        elif fetch.kind == "r2":
            _fetch_r2(fetch, tool, on_update)
        elif fetch.kind == "gs":
            fetch.target.mkdir(exist_ok=True)
            _follow(gsutil(fetch), fetch.target, data.Update(phase=fetch.target.name), on_update)
        elif not fetch.unpacked_bytes or fetch.target.exists() or not fetch.final.exists():
            _fetch_file(fetch, tool, on_update)
            if fetch.unpacked_bytes:
                unpacking = data.Update(phase=fetch.final.name, total=fetch.unpacked_bytes)
                _follow(["gunzip", "--force", str(fetch.target)], fetch.final, unpacking, on_update)
    if absent:
        raise EncoreError(
            f"{', '.join(str(fetch.target) for fetch in absent)}: missing; they require your login to download",
            expected=plan.terms,
            hint=f"log in to {absent[0].address}, save them there and run the same command again",
        )


def _fetch_file(fetch: Fetch, tool: str, on_update: data.OnUpdate) -> None:
    target, part = fetch.target, part_of(fetch.target)
    if target.exists():
        check(target, fetch)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    phase = data.Update(phase=target.name, total=fetch.bytes)
    try:
        _follow(argv(tool, fetch.address, part, fetch.header), part, phase, on_update)
    except EncoreError as error:
        # The file may have been complete before an interruption: curl reports an error if the server has sent all data.
        is_whole = error.exit_code is ExitCode.FAILED and part.exists() and bool(fetch.checksums)
        if not is_whole or any(wrong_checksums(part, fetch.checksums)):
            raise
    check(part, fetch)
    part.replace(target)


def check(path: Path, fetch: Fetch) -> None:
    """Verify a file's checksums.

    Raises:
        EncoreError: mismatch; the file is not changed.
    """
    for name, digest in wrong_checksums(path, fetch.checksums):
        raise EncoreError(
            f"{path} has {name} {digest}",
            expected=f"{' or '.join(fetch.checksums[name])} ({fetch.source})",
            hint=f"rm {shlex.quote(str(path))}, and run the same command again",
        )


def wrong_checksums(path: Path, checksums: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield the algorithms and digests that do not match."""
    for name, digests in checksums.items():
        digest = hub.digest_of(path, name)
        if not digest.startswith(tuple(digests)):
            yield name, digest


def _fetch_r2(fetch: Fetch, tool: str, on_update: data.OnUpdate) -> None:
    fetch.target.mkdir(exist_ok=True)
    stem = PurePosixPath(urlsplit(fetch.address).path).stem
    texts = []
    for ending in (".uri", ".md5"):
        path = fetch.target / f"{stem}{ending}"
        for old in (path, part_of(path)):  # MLCommons may have published a new version
            old.unlink(missing_ok=True)
        address = fetch.address[: -len(".uri")] + ending
        _fetch_file(Fetch(kind="url", address=address, target=path, checksums={}, source=""), tool, on_update)
        texts.append(path.read_text(encoding="utf-8", errors="replace").strip())
    base, listing = texts[0].rstrip("/"), listed(texts[1], fetch)
    of_metadata, of_files = urlsplit(fetch.address), urlsplit(base)
    if (of_files.scheme, of_files.netloc) != (of_metadata.scheme, of_metadata.netloc):
        raise EncoreError(f"{fetch.address} names {base!r}", expected="a folder of the same server", hint="look at it")
    for name, digest in listing.items():
        address = f"{base}/{quote(name)}"
        md5 = {"md5": (digest,)}
        source = f"{stem}.md5 of MLCommons"
        file = Fetch(kind="url", address=address, target=fetch.target / name, checksums=md5, source=source)
        _fetch_file(file, tool, on_update)


def listed(text: str, fetch: Fetch) -> dict[str, str]:
    """Return the MD5 checksums in MLCommons' list, by path below the folder.

    Raises:
        EncoreError: a line is invalid, or a path is outside of the folder.
    """
    checksums = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = _LISTED.fullmatch(line)
        name = PurePosixPath(match[2]) if match else None
        if match is None or name is None or name.is_absolute() or ".." in name.parts:
            raise EncoreError(
                f"{fetch.address}: line {number} of its list of files is {line[:80]!r}",
                expected="an MD5 and a name",
                hint=f"look at it, or use MLCommons' own script: {fetch.command('')}",
            )
        checksums[str(name)] = match[1]
    return checksums


@contextmanager
def _token_header() -> Iterator[Path | None]:
    # A file that only the user can read: other users see the command line.
    secret = hub.token()
    if not secret:
        yield None
        return
    if shutil.which("curl") is None:
        # wget sends headers also to the hosts of redirects (CVE-2021-31879)
        raise EncoreError("no curl on this machine", expected="curl, for downloads with HF_TOKEN", hint="install curl")
    with tempfile.NamedTemporaryFile("w", prefix="encore-") as file:
        file.write(f"Authorization: Bearer {secret}\n")
        file.flush()
        yield Path(file.name)


def _fetch_hub(fetch: Fetch, repository: catalogue.Hub, tool: str, uses_client: bool, on_update: data.OnUpdate) -> None:
    # Download a commit's files, verify them, and write the manifest.
    revision, folder = repository.revision, fetch.target
    if not revision:
        raise EncoreError(
            f"no submission publishes a commit of {repository.repository}",
            expected="a commit, so that all machines get the same files",
            hint=f"select one at {hub.page(repository)}/commits/main: --revision COMMIT",
        )
    if repository.terms and not hub.token():
        raise hub.denied(repository)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _token_header() as header:
            # The files of a commit do not change: the list is downloaded once.
            path, address = folder / f".{revision[:12]}.json", hub.listing_url(repository)
            listing = Fetch(kind="url", address=address, target=path, checksums={}, source="", header=header)
            _fetch_file(listing, "curl" if header else tool, on_update)
            files = hub.parse_listing(path.read_bytes(), repository)
            _require_space(folder, sum(_file_of(file, fetch, repository, header).missing_bytes() for file in files))
            if uses_client:
                python = environment.ensure_environment(hub.ENVIRONMENT, lambda text: on_update(data.Update(note=text)))
                command = [str(python.with_name(HUB_CLIENT)), *hub.client_command(repository, folder)[1:]]
                _follow(command, folder, data.Update(phase=folder.name), on_update)
            for file in files:
                _fetch_file(_file_of(file, fetch, repository, header), "curl" if header else tool, on_update)
    except EncoreError as error:
        if _DENIED.search(error.found):
            raise hub.denied(repository) from error
        raise
    if repository.combined_md5:
        on_update(data.Update(note=f"{folder}: computing the MD5 of {len(files):,} files"))
        digest = hub.combined_md5(folder / file.path for file in files)
        if digest != repository.combined_md5:
            raise EncoreError(
                f"{folder} has the combined MD5 {digest}",
                expected=f"{repository.combined_md5} ({fetch.source})",
                hint=f"compare commit {revision} at {hub.page(repository)} with the source",
            )
    hub.write_manifest(folder, repository, files)


def _file_of(file: hub.HubFile, fetch: Fetch, repository: catalogue.Hub, header: Path | None) -> Fetch:
    return Fetch(
        kind="url",
        address=hub.file_url(repository, file.path),
        target=fetch.target / file.path,
        bytes=file.size,
        checksums={file.checksum[0]: (file.checksum[1],)},
        source=f"commit {repository.revision} of {repository.repository}",
        header=header,
    )


def _follow(command: list[str], path: Path, phase: data.Update, on_update: data.OnUpdate) -> None:
    """Run a downloader and report the size of ``path``.

    Raises:
        EncoreError: it is not installed, failed (with its last output), or was interrupted.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            variables = {**hub.CLIENT_VARIABLES, **os.environ}
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables)
        except OSError as error:
            raise EncoreError(f"{command[0]}: {error.strerror}", hint=f"install {command[0]}") from None
        with data.stopped_on_error(child):
            while child.poll() is None:
                on_update(_with_done(phase, path))
                with suppress(subprocess.TimeoutExpired):
                    child.wait(POLL_SECONDS)
        if child.returncode:
            if shutil.disk_usage(existing(path)).free < FULL_BYTES:
                raise EncoreError(f"the disk of {path.parent} is full", hint=data.AGAIN, exit_code=ExitCode.FAILED)
            output.seek(0)
            tail = "\n    ".join(output.read().splitlines()[-data.LAST_LINES :])
            problem = f"{command[0]} of {command[-1]} ended with exit code {child.returncode}"
            raise EncoreError(problem + (f":\n    {tail}" if tail else ""), hint=data.AGAIN, exit_code=ExitCode.FAILED)
    done = _with_done(phase, path).done
    on_update(data.Update(phase=phase.phase, done=done, total=done))


def _with_done(phase: data.Update, path: Path) -> data.Update:
    try:
        done = sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size
    except FileNotFoundError:
        done = 0
    return data.Update(phase=phase.phase, done=done, total=phase.total)
