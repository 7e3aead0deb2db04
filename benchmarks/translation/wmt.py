"""WMT's published text, English and German: archives, members and known checksums.

GNMT was submitted with WMT16's news task (download_dataset.sh, v0.5 to v0.7), the Transformer with WMT17's
(preprocess.py, v0.6 and v0.7). Archives are read as streams, and only the listed members are extracted, by base
name: other members, including links and paths, are never written.
"""

import gzip
import hashlib
import re
import tarfile
from contextlib import closing
from pathlib import Path
from typing import IO, Dict, List, NamedTuple, Tuple, cast

from benchmarks.common.data.files import in_one_step
from benchmarks.common.data.prepare import check_room
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.text_files import LONGEST_LINE, read_bytes, too_long, undamaged
from benchmarks.common.data.workers import Report

CHUNK = 1 << 20  # bytes per read
GZIP = b"\x1f\x8b"
PACKED = ".gz"  # suffix of text that is compressed by gzip and in no archive
LANGUAGES = ("en", "de")


class Published(NamedTuple):
    stem: str  # name of the files, followed by the language
    archives: Tuple[str, ...]  # names of the archive where it is published, or in download_dataset.sh
    url: str


EUROPARL = Published(
    "europarl-v7.de-en",
    ("europarl-v7-de-en.tgz", "de-en.tgz", "training-parallel-europarl-v7.tgz"),
    "http://www.statmt.org/europarl/v7/de-en.tgz",
)
COMMON_CRAWL = Published(
    "commoncrawl.de-en",
    ("training-parallel-commoncrawl.tgz", "common-crawl.tgz"),
    "http://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
)
NEWS_11 = Published(
    "news-commentary-v11.de-en",
    ("training-parallel-nc-v11.tgz", "nc-v11.tgz"),
    "http://data.statmt.org/wmt16/translation-task/training-parallel-nc-v11.tgz",
)
NEWS_12 = Published(
    "news-commentary-v12.de-en",
    ("training-parallel-nc-v12.tgz", "nc-v12.tgz"),
    "http://data.statmt.org/wmt17/translation-task/training-parallel-nc-v12.tgz",
)
# In the concatenation order in the submissions.
CORPORA = {"wmt16": (EUROPARL, COMMON_CRAWL, NEWS_11), "wmt17": (NEWS_12, COMMON_CRAWL, EUROPARL)}
TEST = "newstest2014"
# The archive contains the test part as SGM.
DEV = Published(TEST, ("dev.tgz",), "http://data.statmt.org/wmt16/translation-task/dev.tgz")
SGM = {"en": f"{TEST}-deen-ref.en.sgm", "de": f"{TEST}-deen-src.de.sgm"}
# From translation/verify_dataset.sh (v0.5); rnn_translator/verify_dataset.sh also has the second. The archives lack
# published checksums: that script compares a hash over all of raw_data/.
KNOWN_MD5 = {
    f"{TEST}.en": "dabf51a9c02b2235632f3cee75c72d49",
    f"{TEST}.de": "f6c3818b477e4a25cad68b61cc883c17",
}
# Checksums of the BPE text, from WMT16: rnn_translator/verify_dataset.sh (v0.5), tokenized with the original Moses.
SUBMITTED_MD5 = {
    ("train", "source"): "b7482095b787264a310d4933d197a134",
    ("train", "target"): "409064aedaef5b7c458ff19a7beda462",
    ("test", "source"): "cb014e2509f86cd81d5a87c240c07464",
    ("test", "target"): "d616740f6026dc493e66efdf9ac1cb04",
}


class Extraction(NamedTuple):
    archive: str
    members: Tuple[str, ...]  # base names in the archive
    folder: str  # where they are written to, under the same names

    @property
    def size(self) -> int:
        return Path(self.archive).stat().st_size

    @property
    def is_done(self) -> bool:
        return all((Path(self.folder) / name).exists() for name in self.members)


def holds_wmt(origin: Path) -> bool:
    # Return whether a folder has any archive or file of WMT's.
    all_items = (*CORPORA["wmt16"], *CORPORA["wmt17"])
    names = {name for item in all_items for name in (*item.archives, *(f"{item.stem}.{code}" for code in LANGUAGES))}
    return any(path.name in names for path in origin.rglob("*"))


def locate(origin: Path, corpus: str) -> List[Dict[str, Tuple[Path, str]]]:
    """Return the location of the corpora per language, test part last: a path, and the archive member.

    Raises:
        Problem: archives are missing; the message lists all missing archives.
    """
    files = {path.name: path for path in sorted(origin.rglob("*"), reverse=True) if path.is_file()}
    paths, missing = [], []
    for item in (*CORPORA[corpus], DEV):
        members = {code: SGM[code] if item is DEV else f"{item.stem}.{code}" for code in LANGUAGES}
        plain = {code: files.get(f"{item.stem}.{code}") for code in LANGUAGES}
        archive = next((files[name] for name in item.archives if name in files), None)
        if all(plain.values()):
            paths.append({code: (cast(Path, path), "") for code, path in plain.items()})
        elif all(name in files for name in members.values()):
            paths.append({code: (files[name], name) for code, name in members.items()})
        elif archive:
            paths.append({code: (archive, name) for code, name in members.items()})
        else:
            missing.append(f"{item.archives[0]} ({item.url})")
    if missing:
        raise Problem(
            f"{origin} lacks {', '.join(missing)}",
            f"all archives of {corpus}",
            "download the missing archives into the folder, or select another list with --corpus",
        )
    return paths


# -- checksums -------------------------------------------------------------------------------------------------


def check_test(path: Path, expected: str) -> None:
    # Reject a file of newstest2014 whose checksum is not the known one.
    digest = hashlib.md5(path.read_bytes()).hexdigest()
    if digest != expected:
        published = f"{expected}, as verify_dataset.sh of v0.5 has it"
        raise Problem(f"{path} has md5 {digest}", published, "download the file again")


# -- archives --------------------------------------------------------------------------------------------------


def extract(task: Extraction, report: Report) -> Tuple[int, int]:
    """Extract members from an archive, in one pass over the complete file to verify the checksum.

    Raises:
        Problem: the archive is damaged, or a member is missing.
    """
    path, folder, missing = Path(task.archive), Path(task.folder), set(task.members)
    expected = "the whole file" if path.suffix == PACKED else "a whole tar archive"
    with undamaged(path, expected), path.open("rb") as raw:
        is_packed = path.suffix == PACKED or raw.read(len(GZIP)) == GZIP
        raw.seek(0)
        stream = cast(IO[bytes], gzip.GzipFile(fileobj=raw) if is_packed else raw)
        if path.suffix == PACKED:
            _copy(stream, folder / missing.pop(), report, raw, str(path))
            return path.stat().st_size, 0
        with closing(tarfile.open(fileobj=stream, mode="r|")) as archive:
            for entry in archive:
                name = Path(entry.name).name
                if entry.isreg() and name in missing:
                    missing.remove(name)
                    check_room(folder, entry.size)
                    _copy(cast(IO[bytes], archive.extractfile(entry)), folder / name, report, raw, f"{name} in {path}")
                report(raw.tell(), 0)
        while stream.read(CHUNK):
            report(raw.tell(), 0)
    if missing:
        raise Problem(
            f"{path} has no {', '.join(sorted(missing))}",
            "the published archive of this name",
            "download it again",
        )
    return path.stat().st_size, 0


def _copy(file: IO[bytes], to: Path, report: Report, raw: IO[bytes], name: str) -> None:
    # A few KB may unpack to one line that fills the disk
    number, length = 1, 0
    with in_one_step(to) as output:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            number, last = number + chunk.count(b"\n"), chunk.rfind(b"\n")
            length = len(chunk) - last - 1 if last >= 0 else length + len(chunk)
            if length > LONGEST_LINE:
                raise too_long(name, number)
            output.write(chunk)
            report(raw.tell(), 0)


def read_sgm(path: Path) -> List[str]:
    """Return the segments in an SGM file as lines, without unescaping entities (Moses' input-from-sgm.perl).

    Raises:
        Problem: the file lacks segments or is not UTF-8.
    """
    try:
        text = read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise Problem(f"{path.name}, line {line:,}: {error.reason}", "UTF-8 text", "download it again") from None
    lines = [" ".join(segment.split()) for segment in re.findall(r"<seg\b[^>]*>(.*?)</seg>", text, re.DOTALL | re.I)]
    if not lines:
        raise Problem(f"{path.name} has no <seg>", "SGM, as WMT publishes its test sets", "download it again")
    return lines
