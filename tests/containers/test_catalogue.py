"""The NGC catalogue, the lock, and what Dockerfiles may and may not say."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from encore import catalogue, environment, paths
from encore.containers import building, engines, images
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


# Rounds in which NVIDIA submitted nothing for a benchmark, or whose results are not public yet
NOT_SUBMITTED = {"minigo": {"v0.5"}, "gpt-oss-20b": {"v6.0", "v6.1"}, "llama31-8b": {"v6.0", "v6.1"}}
NOT_SUBMITTED |= {"llama2-70b-lora": {"v6.0", "v6.1"}}


def test_every_round_of_a_benchmark_has_its_submitted_base() -> None:
    known = images.catalogue()
    for choice in catalogue.choices().values():
        rounds = {entry.round for entry in known.submitted if entry.benchmark == choice.benchmark.name}
        assert rounds == set(choice.benchmark.rounds) - NOT_SUBMITTED.get(choice.benchmark.name, set())
    for entry in known.submitted:
        assert images.find_release(entry.framework, entry.release)


def test_every_benchmark_has_an_image_and_every_dockerfile_is_as_its_template_writes_it() -> None:
    wanted = building.dockerfiles()
    assert (set(images.catalogue().image), set(wanted)) == (set(catalogue.choices()), set(DOCKERFILES))
    stale = [str(path) for path, text in wanted.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, f"stale: {', '.join(stale)}; hint: make docs"


def test_a_benchmark_without_a_row_is_refused() -> None:
    choice = catalogue.choose("resnet")
    other = dataclasses.replace(choice, benchmark=choice.benchmark.model_copy(update={"name": "new"}))
    with pytest.raises(EncoreError, match=r"(?s)new has no image.*\[image\.new\]"):
        images.find_row(other)


def test_unknown_release_offers_the_nearest() -> None:
    with pytest.raises(EncoreError, match=r"(?s)unknown mxnet release.*hint: .*24\.06"):
        images.find_release("mxnet", "24.60")


def test_lock_records_the_first_digest_and_refuses_another(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: str(file.parent.relative_to(paths.ROOT / "containers")))
def test_dockerfiles_hold_no_secret_no_machine_and_no_data(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert not re.search(r"https?://", text)
    assert not [line for line in lines if line.startswith(("ARG ", "ENV ")) and SECRET.search(line)]
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert all(word.startswith(("--from=", "/opt/", "benchmarks", "requirements/", "containers/")) for word in copied)


@pytest.mark.parametrize("name", sorted(catalogue.choices()))
def test_an_image_ends_as_nobody_special_with_the_code_last(name: str) -> None:
    # NVIDIA's PyTorch names a constraint file, which would refuse what an image pins; the other bases none
    release = images.find_release(catalogue.choose(name).implementation.framework)
    text = building.dockerfile(name).read_text(encoding="utf-8")
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE)[-1] not in ("0", "root")
    assert "\nRUN " not in text.partition("COPY benchmarks /workspace/encore/benchmarks")[2]
    assert f"ARG BASE={release.reference}\n" in text
    assert ('PIP_CONSTRAINT=""' in text) == bool(release.pip_constraint) == (release.framework == "pytorch")


@pytest.mark.parametrize("name", sorted(catalogue.choices()))
def test_requirements_of_images_are_pinned_with_hashes(name: str) -> None:
    text = image_test.pinned(catalogue.choose(name))
    entries = re.split(r"\n(?=[a-z])", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip())
    assert all("==" in entry and "--hash=sha256:" in entry for entry in entries)


@pytest.mark.parametrize("framework", sorted(images.catalogue().default))
def test_every_framework_has_a_stand_in(framework: str) -> None:
    text = building.dockerfile(f"standin/{framework}").read_text(encoding="utf-8")
    assert framework in images.catalogue().standin and f'encore.standin="{framework}"' in text
    # This machine brings the packages: the build needs no index, and so none of the machine's settings.
    packages = (f"source=build/wheels/{framework},", "--no-index", "type=secret")
    assert [each in text for each in packages] == [True, True, False]


def test_packages_of_a_stand_in_fit_its_python_and_what_was_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Horovod is that of an environment with the same framework, distribution, Python and MPI; else it is compiled
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    entry = catalogue.framework("mxnet")
    assert entry.horovod is not None
    switches = environment.build_switches(entry.horovod, mpi=True)
    for distribution in ("ubuntu 24.04", building.PLATFORM["distribution"]):
        assert building.compiled_horovod("mxnet") is None
        built_on = {**building.PLATFORM, "distribution": distribution}
        requirements = paths.REQUIREMENTS / entry.requirements
        folder = environment.wheel_folder("mxnet", requirements, entry.horovod, built_on, switches)
        folder.mkdir(parents=True)
        (folder / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl").touch()
    found = building.compiled_horovod("mxnet")
    assert found is not None and found.parent == folder
    commands = {framework: building.download_commands(framework) for framework in images.catalogue().standin}
    fetched = {framework: [each[-1] for each in every] for framework, every in commands.items()}
    own = {name: str(paths.REQUIREMENTS / catalogue.framework(name).requirements) for name in commands}
    assert fetched == {name: [own[name], *(["horovod==0.28.1"] if name == "tensorflow" else [])] for name in own}
    first = commands["pytorch"][0]
    options = {name: first[first.index(name) + 1] for name in ("--python-version", "--dest")}
    folder = paths.ROOT / "build" / "wheels" / "pytorch"
    assert options == {"--python-version": building.PLATFORM["python"], "--dest": str(folder)}
    assert "!build/wheels" in (paths.ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()


def test_a_build_has_pips_settings_but_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the environment says wins over pip's files, as for pip
    listed = (
        ":env:.index-url='https://own/simple'\nglobal.extra-index-url='file:///one\\nhttps://two'\n"
        "global.find-links='/wheels'\nglobal.index-url='https://other/simple'\n"
    )
    monkeypatch.setattr(engines, "ask", lambda command: SimpleNamespace(stdout=listed))
    monkeypatch.setenv("SSL_CERT_FILE", "/certificates.crt")
    settings = {"cert": "/certificates.crt", "extra-index-url": "https://two", "index-url": "https://own/simple"}
    assert building.pip_settings() == settings


@pytest.mark.slow
def test_list_shows_the_catalogue(encore: Encore) -> None:
    content = json.loads(encore("images", "list", "--json").stdout)
    of_resnet = [entry["round"] for entry in content["submitted"] if entry["benchmark"] == "resnet"]
    assert of_resnet == ["v0.5", "v0.6", "v0.7"]
    assert any(entry["reference"] == "nvcr.io/nvidia/mxnet:24.06-py3" for entry in content["releases"])
    assert "mxnet:24.06-py3" in encore("images", "list").stdout
