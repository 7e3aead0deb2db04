"""The NGC catalogue, the lock, and what Dockerfiles may and may not say."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from encore import catalogue, environment, paths
from encore.containers import dockerfiles, images, standins
from encore.errors import EncoreError
from encore.run import image_test
from encore.run.passport import SECRET
from tests.conftest import Encore

DOCKERFILES = sorted((paths.ROOT / "containers").rglob("Dockerfile"))


def test_defaults_are_releases_and_every_release_has_a_source() -> None:
    known = images.catalogue()
    for framework, release in known.default.items():
        assert images.find_release(framework).release == release
    for release in known.release:
        assert re.fullmatch(r"nvcr\.io/nvidia/(mxnet|pytorch|tensorflow):[\w.-]+", release.reference)
        assert all(source.startswith("https://") for source in release.sources)
    assert len({release.reference for release in known.release}) == len(known.release)


NOT_SUBMITTED = {"minigo": {"v0.5"}}
"""Rounds in which NVIDIA submitted nothing for a benchmark."""


def test_every_round_of_a_benchmark_has_its_submitted_base() -> None:
    known = images.catalogue()
    for choice in catalogue.choices().values():
        rounds = {entry.round for entry in known.submitted if entry.benchmark == choice.benchmark.name}
        assert rounds == set(choice.benchmark.rounds) - NOT_SUBMITTED.get(choice.benchmark.name, set())
    for entry in known.submitted:
        assert images.find_release(entry.framework, entry.release)


def test_every_benchmark_has_an_image_and_every_dockerfile_is_as_its_template_writes_it() -> None:
    assert set(images.catalogue().image) == set(catalogue.choices())
    wanted = dockerfiles.every()
    assert set(wanted) == set(DOCKERFILES)
    stale = [str(path) for path, text in wanted.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, f"stale: {', '.join(stale)}; do this: make docs"


def test_a_benchmark_without_a_row_is_refused() -> None:
    choice = catalogue.choose("resnet")
    other = dataclasses.replace(choice, benchmark=choice.benchmark.model_copy(update={"name": "new"}))
    with pytest.raises(EncoreError, match="new has no image") as error:
        images.find_row(other)
    assert "[image.new]" in error.value.remedy


def test_pip_is_not_held_to_a_bases_own_versions() -> None:
    """NVIDIA's PyTorch names a constraint file, which would refuse what an image pins; the other bases none."""
    for choice in catalogue.choices().values():
        text = dockerfiles.path_of(choice.name).read_text(encoding="utf-8")
        release = images.find_release(choice.implementation.framework)
        assert ('PIP_CONSTRAINT=""' in text) == bool(release.pip_constraint)
        assert bool(release.pip_constraint) == (release.framework == "pytorch")


@pytest.mark.parametrize("name", sorted(catalogue.choices()))
def test_dockerfile_and_catalogue_name_the_same_base(name: str) -> None:
    choice = catalogue.choose(name)
    text = dockerfiles.path_of(choice.name).read_text(encoding="utf-8")
    match = re.search(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    assert match and match.group(1) == images.find_release(choice.implementation.framework).reference


def test_unknown_release_offers_the_nearest() -> None:
    with pytest.raises(EncoreError, match="unknown mxnet release") as error:
        images.find_release("mxnet", "24.60")
    assert "24.06" in error.value.remedy


def test_lock_records_the_first_digest_and_refuses_another(tmp_path: Path) -> None:
    lock = tmp_path / "images.lock"
    images.hold_to_lock("nvcr.io/nvidia/mxnet:24.06-py3", "sha256:aa", lock)
    images.hold_to_lock("nvcr.io/nvidia/mxnet:24.06-py3", "sha256:aa", lock)
    with pytest.raises(EncoreError, match=r"another digest than images\.lock") as error:
        images.hold_to_lock("nvcr.io/nvidia/mxnet:24.06-py3", "sha256:bb", lock)
    assert error.value.expected.startswith("sha256:aa, recorded ")
    images.record("nvcr.io/nvidia/mxnet:24.06-py3", "sha256:bb", lock)
    images.hold_to_lock("nvcr.io/nvidia/mxnet:24.06-py3", "sha256:bb", lock)


def test_damaged_lock_is_reported(tmp_path: Path) -> None:
    (tmp_path / "images.lock").write_text('{"images": 3}', encoding="utf-8")
    with pytest.raises(EncoreError, match="is damaged"):
        images.read_lock(tmp_path / "images.lock")


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: str(file.parent.relative_to(paths.ROOT / "containers")))
def test_dockerfiles_hold_no_secret_no_machine_and_no_data(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    for line in lines:
        if line.startswith(("ARG ", "ENV ")):
            assert not SECRET.search(line)
        assert not re.search(r"https?://", line)
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert all(word.startswith(("--from=", "/opt/", "benchmarks", "requirements/", "containers/")) for word in copied)


def test_benchmark_images_end_as_nobody_special_with_the_code_last() -> None:
    for choice in catalogue.choices().values():
        lines = dockerfiles.path_of(choice.name).read_text(encoding="utf-8").splitlines()
        users = [line.split()[1] for line in lines if line.startswith("USER ")]
        assert users[-1] not in ("0", "root")
        code = lines.index("COPY benchmarks /workspace/encore/benchmarks")
        assert not any(line.startswith("RUN ") for line in lines[code:])


@pytest.mark.parametrize("name", sorted(catalogue.choices()))
def test_requirements_of_images_are_pinned_with_hashes(name: str) -> None:
    text = image_test.pinned(catalogue.choose(name))
    entries = re.split(r"\n(?=[a-z])", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip())
    assert all("==" in entry and "--hash=sha256:" in entry for entry in entries)


@pytest.mark.parametrize("framework", sorted(images.catalogue().default))
def test_every_framework_has_a_stand_in(framework: str) -> None:
    assert framework in images.catalogue().standin
    text = dockerfiles.path_of(f"standin/{framework}").read_text(encoding="utf-8")
    assert f'encore.standin="{framework}"' in text
    # This machine brings the packages: the build needs no index, and so none of the machine's settings.
    assert f"source=build/wheels/{framework}," in text
    assert "--no-index" in text and "type=secret" not in text


def test_packages_of_a_stand_in_fit_its_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (command,) = standins.download_commands("pytorch")
    assert command[command.index("--python-version") + 1] == standins.PLATFORM.python
    assert Path(command[command.index("--dest") + 1]).relative_to(paths.ROOT) == Path("build/wheels/pytorch")
    _, horovod = standins.download_commands("tensorflow")
    assert horovod[-1].startswith("horovod==")
    ignored = (paths.ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "!build/wheels" in ignored


def test_a_stand_in_takes_the_horovod_that_an_environment_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same framework, distribution, Python and MPI; else it compiles its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    entry = catalogue.framework("mxnet")
    assert entry.horovod is not None
    switches = environment.build_switches(entry.horovod, mpi=True)
    requirements = paths.REQUIREMENTS / entry.requirements

    def compiled_on(platform: environment.Platform) -> Path:
        folder = environment.wheel_folder("mxnet", requirements, entry.horovod, platform, switches)
        folder.mkdir(parents=True)
        (folder / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl").touch()
        return folder

    compiled_on(dataclasses.replace(standins.PLATFORM, distribution="ubuntu 24.04"))
    assert standins.compiled_horovod("mxnet") is None
    fitting = compiled_on(standins.PLATFORM)
    found = standins.compiled_horovod("mxnet")
    assert found is not None and found.parent == fitting
    (packages,) = standins.download_commands("mxnet")
    assert "horovod" not in " ".join(packages)
    assert standins.compiled_horovod("tensorflow") is None and standins.compiled_horovod("pytorch") is None


def test_list_shows_the_catalogue(encore: Encore) -> None:
    done = encore("images", "list", "--json")
    content = json.loads(done.stdout)
    of_resnet = [entry["round"] for entry in content["submitted"] if entry["benchmark"] == "resnet"]
    assert of_resnet == ["v0.5", "v0.6", "v0.7"]
    assert any(entry["reference"] == "nvcr.io/nvidia/mxnet:24.06-py3" for entry in content["releases"])
    assert "mxnet:24.06-py3" in encore("images", "list").stdout
