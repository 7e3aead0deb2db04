"""The NGC catalogue, the lock of digests, and the Dockerfiles."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from encore import catalogue, environment, paths
from encore.containers import building, engines, images
from encore.errors import EncoreError
from encore.run import image_test
from encore.run.passport import SECRET

NAMES = sorted(catalogue.choices())


def test_releases_have_a_reference_and_sources() -> None:
    releases = images.catalogue().release
    for release in releases:
        assert re.fullmatch(r"nvcr\.io/nvidia/(mxnet|pytorch|tensorflow):[\w.-]+", release.reference)
        assert all(source.startswith("https://") for source in release.sources)
    assert len({release.reference for release in releases}) == len(releases)
    for framework, release_name in images.catalogue().default.items():
        assert images.find_release(framework).release == release_name
    with pytest.raises(EncoreError, match=r"(?s)unknown mxnet release.*hint: .*24\.06"):
        images.find_release("mxnet", "24.60")


# Rounds without a submission of NVIDIA, or without public results
NOT_SUBMITTED = {"minigo": {"v0.5"}, "gpt-oss-20b": {"v6.0", "v6.1"}, "llama31-8b": {"v6.0", "v6.1"}}
NOT_SUBMITTED |= {"llama2-70b-lora": {"v6.0", "v6.1"}}


@pytest.mark.parametrize("name", NAMES)
def test_every_round_has_its_submitted_base(name: str) -> None:
    benchmark = catalogue.choose(name).benchmark
    entries = [entry for entry in images.catalogue().submitted if entry.benchmark == benchmark.name]
    assert {entry.round for entry in entries} == set(benchmark.rounds) - NOT_SUBMITTED.get(benchmark.name, set())
    assert all(images.find_release(entry.framework, entry.release) for entry in entries)


def test_dockerfiles_are_up_to_date_and_contain_no_secret_and_no_url() -> None:
    texts = building.dockerfiles()
    files = set((paths.ROOT / "containers").rglob("Dockerfile"))
    assert (set(images.catalogue().image), set(texts)) == (set(NAMES), files)
    assert {path: path.read_text(encoding="utf-8") for path in files} == texts, "hint: make docs"
    for text in texts.values():
        lines = text.splitlines()
        assert not re.search(r"https?://", text)
        assert not [line for line in lines if line.startswith(("ARG ", "ENV ")) and SECRET.search(line)]
        sources = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
        assert all(
            word.startswith(("--from=", "/opt/", "benchmarks", "requirements/", "containers/")) for word in sources
        )


@pytest.mark.parametrize("name", NAMES)
def test_image_has_an_unprivileged_user_pinned_packages_and_the_code_in_its_last_layer(name: str) -> None:
    release = images.find_release(catalogue.choose(name).implementation.framework)
    text = building.dockerfile(name).read_text(encoding="utf-8")
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE)[-1] not in ("0", "root")
    assert "\nRUN " not in text.partition("COPY benchmarks /workspace/encore/benchmarks")[2]
    assert f"ARG BASE={release.reference}\n" in text
    # NVIDIA's PyTorch sets a constraint file that would reject pinned packages.
    assert ('PIP_CONSTRAINT=""' in text) == bool(release.pip_constraint) == (release.framework == "pytorch")
    pins = re.split(
        r"\n(?=[a-z])", re.sub(r"^#.*\n", "", image_test.pinned(catalogue.choose(name)), flags=re.M).strip()
    )
    assert all("==" in pin and "--hash=sha256:" in pin for pin in pins)


def test_benchmark_without_an_image_is_refused() -> None:
    choice = catalogue.choose("resnet")
    other = dataclasses.replace(choice, benchmark=choice.benchmark.model_copy(update={"name": "new"}))
    with pytest.raises(EncoreError, match=r"(?s)new has no image.*\[image\.new\]"):
        images.find_row(other)


def test_lock_records_the_first_digest_and_rejects_another(tmp_path: Path) -> None:
    lock, reference = tmp_path / "images.lock", "nvcr.io/nvidia/mxnet:24.06-py3"
    for _ in range(2):
        images.hold_to_lock(reference, "sha256:aa", lock)
    with pytest.raises(EncoreError, match=r"(?s)another digest than images\.lock.*expected: sha256:aa, recorded "):
        images.hold_to_lock(reference, "sha256:bb", lock)
    images.record(reference, "sha256:bb", lock)
    images.hold_to_lock(reference, "sha256:bb", lock)
    lock.write_text('{"images": 3}', encoding="utf-8")
    with pytest.raises(EncoreError, match="is damaged"):
        images.read_lock(lock)


@pytest.mark.parametrize("framework", sorted(images.catalogue().default))
def test_stand_in_installs_packages_of_this_machine(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = building.dockerfile(f"standin/{framework}").read_text(encoding="utf-8")
    assert framework in images.catalogue().standin and f'encore.standin="{framework}"' in text
    # The build needs no package index and no settings of this machine.
    words = (f"source=build/wheels/{framework},", "--no-index", "type=secret")
    assert [word in text for word in words] == [True, True, False]
    command, *others = building.download_commands(framework)
    requirements = str(paths.REQUIREMENTS / catalogue.framework(framework).requirements)
    assert (command[-1], [other[-1] for other in others]) == (
        requirements,
        [str(environment.HOROVOD_SOURCE)] if framework != "pytorch" else [],
    )
    options = [command[command.index(name) + 1] for name in ("--python-version", "--dest")]
    assert options == [building.PLATFORM["python"], str(paths.ROOT / "build" / "wheels" / framework)]


def test_stand_in_takes_the_horovod_wheel_of_its_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    entry = catalogue.framework("mxnet")
    assert entry.horovod is not None
    switches = environment.build_switches(entry.horovod, mpi=True)
    for distribution in ("ubuntu 24.04", building.PLATFORM["distribution"]):
        assert building.compiled_horovod("mxnet") is None
        platform = {**building.PLATFORM, "distribution": distribution}
        requirements = paths.REQUIREMENTS / entry.requirements
        folder = environment.wheel_folder("mxnet", requirements, entry.horovod, platform, switches)
        folder.mkdir(parents=True)
        (folder / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl").touch()
    assert building.compiled_horovod("mxnet") == folder / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    assert len(building.download_commands("mxnet")) == 1


def test_build_gets_the_settings_of_pip_without_local_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    # Variables override pip's files, as in pip
    settings = (
        ":env:.index-url='https://own/simple'\nglobal.extra-index-url='file:///one\\nhttps://two'\n"
        "global.find-links='/wheels'\nglobal.index-url='https://other/simple'\n"
    )
    monkeypatch.setattr(engines, "ask", lambda command: SimpleNamespace(stdout=settings))
    monkeypatch.setenv("SSL_CERT_FILE", "/certificates.crt")
    expected = {"cert": "/certificates.crt", "extra-index-url": "https://two", "index-url": "https://own/simple"}
    assert building.pip_settings() == expected
