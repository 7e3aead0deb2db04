"""The NGC catalogue, the lock of digests, and the Dockerfiles."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from encore import catalogue, environment, paths
from encore.containers import building, checks, compatibility, engines, images, runtimes
from encore.errors import EncoreError
from encore.machine import interpreters, node
from encore.run import image_test, run_metadata
from tests.machine.machines import gpus_of
from tests.results.result_logs import write_files
from tests.trainings import resolved

NAMES = sorted(catalogue.choices())
BENCHMARK = catalogue.choose("resnet").benchmark


def test_releases_have_a_reference_and_sources() -> None:
    names = [release.reference for release in images.catalogue().release]
    assert all(re.fullmatch(r"nvcr\.io/nvidia/(mxnet|pytorch|tensorflow):[\w.-]+", name) for name in names)
    assert all(source.startswith("https://") for release in images.catalogue().release for source in release.sources)
    assert len(set(names)) == len(names)
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
    files = {path: path.read_text(encoding="utf-8") for path in (paths.ROOT / "containers").rglob("Dockerfile")}
    assert files == texts and set(images.catalogue().image) == set(NAMES), "hint: make docs"
    lines = [line for text in texts.values() for line in text.splitlines()]
    assert not [line for line in lines if re.search(r"https?://", line)]
    assert not [line for line in lines if line.startswith(("ARG ", "ENV ")) and run_metadata.SECRET.search(line)]
    sources = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    folders = ("--from=", "/opt/", "benchmarks", "requirements/", "containers/")
    assert not [source for source in sources if not source.startswith(folders)]


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
    other = replace(catalogue.choose("resnet"), benchmark=BENCHMARK.model_copy(update={"name": "new"}))
    with pytest.raises(EncoreError, match=r"(?s)new has no image.*\[image\.new\]"):
        images.find_row(other)


def test_lock_records_the_first_digest_and_rejects_another(tmp_path: Path) -> None:
    lock, reference = tmp_path / "images.lock", "nvcr.io/nvidia/mxnet:24.06-py3"
    for _ in range(2):
        images.check_lock(reference, "sha256:aa", lock)
    with pytest.raises(EncoreError, match=r"(?s)a different digest than images\.lock.*expected: sha256:aa, recorded "):
        images.check_lock(reference, "sha256:bb", lock)
    images.record(reference, "sha256:bb", lock)
    images.check_lock(reference, "sha256:bb", lock)
    lock.write_text('{"images": 3}', encoding="utf-8")
    with pytest.raises(EncoreError, match="is damaged"):
        images.read_lock(lock)


@pytest.mark.parametrize("framework", sorted(images.catalogue().default))
def test_stand_in_installs_packages_of_this_machine(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = building.dockerfile(f"standin/{framework}").read_text(encoding="utf-8")
    # The build needs no package index and no settings of this machine.
    words = (f'encore.standin="{framework}"', f"source=build/wheels/{framework},", "--no-index", "type=secret")
    assert [word in text for word in words] == [True, True, True, False] and framework in images.catalogue().standin
    commands = building.download_commands(framework)
    last = "torch==2.13.0" if framework == "pytorch" else str(environment.HOROVOD_SOURCE)
    assert [command[-1] for command in commands] == [str(building.wheels(framework) / "hashed.txt"), last]
    options = [commands[0][commands[0].index(name) + 1] for name in ("--python-version", "--dest")]
    assert options == [building.PLATFORM["python"], str(paths.ROOT / "build" / "wheels" / framework)]


def test_build_gets_the_settings_of_pip_without_local_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Variables override pip's files, as in pip
    settings = (
        ":env:.index-url='https://own/simple'\nglobal.extra-index-url='file:///one\\nhttps://two'\n"
        "global.find-links='/wheels'\nglobal.index-url='https://other/simple'\n"
    )
    monkeypatch.setattr(engines, "ask", lambda command: SimpleNamespace(stdout=settings))
    file = write_files(tmp_path, {"certificates.crt": "PEM"}) / "certificates.crt"
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    expected = {"cert": str(file), "extra-index-url": "https://two", "index-url": "https://own/simple"}
    assert building.pip_settings() == expected
    with building.build_secrets() as folder:
        assert {path.name: path.read_text("utf-8") for path in folder.iterdir()} == {
            "ca.pem": "PEM",
            "pip.conf": "[global]\nextra-index-url = https://two\nindex-url = https://own/simple\n"
            "cert = /run/secrets/ca.pem\n",
        }


BASE = "org.opencontainers.image.base.name"


def target_on(base: str) -> runtimes.Target:
    image = engines.Image(id="id", digests=(), labels={BASE: base}, user="1", bytes=1)
    return replace(runtimes.ON_HOST, runtime="docker", image="own:1", image_info=image)


@pytest.mark.parametrize(
    ("machine", "release", "capability", "driver"),
    [
        # The last image runs up to Hopper; older driver branches support data center GPUs only.
        ("v100", "24.06", "OK", "OK"),
        ("a100", "24.06", "OK", "OK"),
        ("h100", "24.06", "OK", "OK"),
        ("h200", "24.06", "OK", "OK"),
        ("rtx3090", "24.06", "OK", "FAIL"),
        ("v100_old_driver", "24.06", "OK", "FAIL"),
        # Code runs on later GPUs of its generation, not on the next generation.
        ("a100", "22.05", "OK", "OK"),
        ("rtx3090", "22.05", "OK", "OK"),
        ("h100", "22.05", "FAIL", "OK"),
        # Missing facts are warnings.
        ("v100", "19.05", "WARN", "WARN"),
        ("v100_ancient", "24.06", "WARN", "FAIL"),
        ("mixed", "24.06", "OK FAIL", "OK OK"),
    ],
)
def test_machines_and_releases(machine: str, release: str, capability: str, driver: str) -> None:
    results = compatibility.check_gpus(images.find_release("mxnet", release), gpus_of(machine), BENCHMARK)
    levels = [level for gpu in zip(capability.split(), driver.split(), strict=True) for level in gpu]
    assert [check.level for check in results] == levels
    assert {check.name for check in results} == {"compute capability", "driver"}


def test_blackwell_needs_another_implementation() -> None:
    check, _ = compatibility.check_gpus(images.find_release("mxnet", "24.06"), gpus_of("b200"), BENCHMARK)
    assert check.level == "FAIL" and "no implementation of resnet runs on Blackwell yet" in check.hint
    assert re.search(r"NVIDIA B200 is Blackwell \(10\.0\).*mxnet images end at Hopper", check.found)


def test_less_memory_than_submitted_offers_a_smaller_batch() -> None:
    configuration = resolved("dlrm", "dgxa100", None)
    large, small = (compatibility.check_memory(configuration, gpus_of(name)[0]) for name in ("a100", "v100"))
    hint = f"if it does not fit: --set batch_size={configuration.get('batch_size') * 16 // 40}"
    assert (large.level, small.level, small.hint) == ("OK", "WARN", hint)


@pytest.mark.parametrize(
    ("name", "release", "message", "hint"),
    [
        ("resnet", "20.06", "Python 3.6, 3.8 needed", "release 24.05"),
        ("resnet", "22.05", "DALI 1.13.0, 1.35 needed", "release 24.05"),
        ("ncf", "18.11", "19.05 is later and has Python 3.6", "release 24.10"),
        ("dlrm", "20.06", "Python 3.6", "release 24.10"),
        ("bert-squad", "21.11", "PyTorch 1.11.0a0+b6df043", "release 24.10"),
        ("minigo", "20.06-tf1", "Python 3.6", "release 25.02-tf2"),
        ("minigo", "23.03-tf1", "TensorFlow 1.15.5", "release 25.02-tf2"),
    ],
)
def test_too_old_release_is_refused_before_the_pull(name: str, release: str, message: str, hint: str) -> None:
    engine = engines.Engine(name="docker", program="docker")
    with pytest.raises(EncoreError, match=f"(?s){re.escape(message)}.*hint: .*{re.escape(hint)}"):
        building.build(catalogue.choose(name), engine, release, True, pytest.fail)


@pytest.mark.parametrize("name", catalogue.choices())
def test_minimum_versions_are_those_of_recorded_runs(name: str) -> None:
    # A run with the minimum succeeded, and runs with older versions failed
    needs = catalogue.choose(name).implementation.needs
    runs = [run for run in compatibility.tried() if run.implementation == name and not run.problem]
    assert catalogue.choose(name).implementation.framework in needs
    for package, text in needs.items():
        minimum = compatibility.version(text)
        versions = [compatibility.version(run.versions[package]) for run in runs if package in run.versions]
        assert min(version[: len(minimum)] for version in versions) == minimum, f"{package} {text}"


@pytest.mark.slow
def test_run_in_a_too_old_image_is_refused() -> None:
    # Without a label of NVIDIA's base, the versions come from the Python in the image.
    facts = interpreters.PythonInfo(
        python="3.8.10", problems={}, packages={"torch": "1.11.0a0+b6df043"}, cuda="11.5", gpus=1, mpirun=False,
        horovod=0, check_build="",
    )  # fmt: skip
    minimum = catalogue.choose("ncf").implementation.needs["pytorch"]
    for target, message in (
        (target_on("nvcr.io/nvidia/pytorch:20.06-py3"), "Python 3.6, 3.8 needed"),
        (replace(target_on("own:0"), python_info=facts), f"PyTorch 1.11.0a0+b6df043, {minimum} needed"),
    ):
        results = checks.check(target, resolved("ncf", "cpu", None), node.this_node(), [])
        image = "own:1" if target.python_info else "nvcr.io/nvidia/pytorch:20.06-py3"
        assert [c.found for c in results if c.level == "FAIL"] == [f"{image} is too old for ncf: {message}"]


def test_image_of_the_run_is_compared_with_the_submission() -> None:
    submitted, later = "nvcr.io/nvidia/pytorch:20.06-py3", "nvcr.io/nvidia/pytorch:25.12-py3"
    on_host, same, other = (
        {check.name: check.found for check in checks.check_as_submitted(target, resolved("bert", "dgxa100", None))}
        for target in (runtimes.ON_HOST, target_on(submitted), target_on(later))
    )
    assert (set(on_host), set(same)) == ({"training text", "evaluation text", "image"}, set(on_host) - {"image"})
    for differences, image in ((on_host, "the host's Python"), (other, later)):
        assert differences["image"] == f"not as submitted, {submitted}, but {image}"
    assert "wiki_test_set_md5.txt" in on_host["evaluation text"]
    for system in ("cpu", "gpu", "h200-141gb"):  # no submission
        assert checks.check_as_submitted(runtimes.ON_HOST, resolved("bert", system, None)) == []
