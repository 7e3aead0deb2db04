"""The wheel, installed in an empty environment away from the checkout."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from encore import __version__, paths, release
from encore.cli import schemas
from tests.command_line import output_of
from tests.conftest import records

pytestmark = pytest.mark.training


def uv(*arguments: str | Path, **options: str) -> None:
    command = [str(Path(sys.executable).with_name("uv")), *map(str, arguments)]
    subprocess.run(command, env={**os.environ, **options}, check=True)


def tracked_files() -> list[str]:
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=paths.ROOT, text=True).split("\0")
    return [name for name in names if name and (paths.ROOT / name).exists()]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Build the wheel and the sdist from tracked files only: no caches, data or results
    folder = tmp_path_factory.mktemp("dist")
    for name in tracked_files():
        copy = folder / "clone" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(paths.ROOT / name, copy)
    uv("build", "--quiet", "--out-dir", folder, folder / "clone")
    return folder


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elsewhere")
    uv("venv", "--quiet", folder / "env")
    pins = paths.REQUIREMENTS / "encore.txt"
    uv("pip", "install", "--quiet", "--constraint", pins, *dist.glob("*.whl"), VIRTUAL_ENV=str(folder / "env"))
    return folder


def encore_in(folder: Path, *arguments: str, code: int = 0) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["XDG_DATA_HOME"] = str(folder / "share")
    command = [str(folder / "env" / "bin" / "encore"), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_wheel_and_sdist_contain_the_tracked_files(dist: Path) -> None:
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    places = dict.fromkeys(("benchmarks", "containers", "requirements", "slurm"), "encore/tree/") | {"encore": ""}
    installed = {name: places[top] + name for name in tracked_files() if (top := name.partition("/")[0]) in places}
    assert {*installed.values()} <= in_wheel
    assert {*installed, "run.sh", "setup.sh", "CHANGELOG.md", "docs/quickstart-cpu.md"} <= in_sdist
    assert not [name for name in in_wheel if name.endswith(".pyc") or "/data/bert/" in name]


def test_installed_wheel_trains_without_the_checkout(installed: Path) -> None:
    facts = json.loads(encore_in(installed, "--version", "--json"))
    assert facts == {**release.facts(), "code": {"commit": None, "uncommitted_sha256": None}, "python": facts["python"]}
    # .ci/run has its cache inside the checkout
    dry_run = encore_in(installed, "run", "resnet", "2", "--dry-run").replace(str(paths.cache_folder()), "CACHE")
    assert str(paths.ROOT) not in dry_run
    script = encore_in(installed, "submit", "ncf", "--nodes", "2", "--dry-run")
    assert f"export ENCORE_PROGRAM={installed}/env/bin/encore" in script
    # Descriptions come from comments of the source
    assert json.loads(encore_in(installed, "schema", "config-ncf")) == schemas.schema_of("config-ncf")
    # One epoch: the target is reached in the run that other tests share
    encore_in(installed, "run", "ncf", "2", "--set", "epochs=1", code=3)
    (metrics,) = (installed / "results").glob("*/experiment_0/metrics.jsonl")
    assert [end["outcome"] for end in records(metrics, "end")] == ["not_reached"]
    assert (installed / "share" / "encore" / "ncf" / "dataset.json").exists()
    assert "not reached" in encore_in(installed, "status")
    tree = next((installed / "env").glob("lib/*/site-packages/encore/tree"))
    assert not {"results", "data", "build"} & {path.name for path in tree.iterdir()}, "the package is read-only"


def test_version_is_the_same_everywhere() -> None:
    facts = json.loads(output_of("--json", "--version"))
    assert (output_of("--version"), facts["version"]) == (f"encore {__version__}\n", __version__)
    assert yaml.safe_load((paths.ROOT / "CITATION.cff").read_text("utf-8"))["version"] == __version__
