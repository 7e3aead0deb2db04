"""What a user gets who installs Encore: the wheel in an empty environment, away from the checkout."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from encore import __version__, paths, release
from encore.cli.app import app
from tests.conftest import records

pytestmark = pytest.mark.training


def uv(*arguments: str | Path, **options: str) -> None:
    command = [str(Path(sys.executable).with_name("uv")), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **options}, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # From what git has, as a release is: no caches, no data, no results
    made = tmp_path_factory.mktemp("dist")
    clone, files = made / "clone", subprocess.check_output(["git", "ls-files", "-z"], cwd=paths.ROOT, text=True)
    for name in files.split("\0")[:-1]:
        if (paths.ROOT / name).exists():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((paths.ROOT / name).read_bytes())
            (clone / name).chmod((paths.ROOT / name).stat().st_mode)
    uv("build", "--quiet", "--out-dir", made, clone)
    return made


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elsewhere")
    uv("venv", "--quiet", folder / "env")
    (wheel,) = built.glob("*.whl")
    pins = paths.REQUIREMENTS / "encore.txt"
    uv("pip", "install", "--quiet", "--constraint", pins, wheel, VIRTUAL_ENV=str(folder / "env"))
    return folder


def ran(folder: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["XDG_DATA_HOME"] = str(folder / "share")
    command = [str(folder / "env" / "bin" / "encore"), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_and_sdist_have_all_that_git_has_of_a_run(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    packed = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.check_output(["git", "ls-files"], cwd=paths.ROOT, text=True).splitlines()
    for name in tracked:
        top = name.partition("/")[0]
        if top in ("benchmarks", "containers", "requirements", "slurm"):
            assert f"encore/tree/{name}" in packed and name in source
        elif top == "encore":
            assert name in packed and name in source
    assert not [name for name in packed if name.endswith(".pyc") or "/data/bert/" in name]
    assert {"run.sh", "setup.sh", "CHANGELOG.md", "docs/quickstart-cpu.md"} <= source


def test_an_installed_encore_trains_without_the_checkout(installed: Path) -> None:
    facts = json.loads(ran(installed, "--version", "--json"))
    assert facts == {**release.facts(), "code": {"commit": None, "uncommitted_sha256": None}, "python": facts["python"]}
    assert str(paths.ROOT) not in ran(installed, "run", "resnet", "2", "--dry-run")
    script = ran(installed, "submit", "ncf", "--nodes", "2", "--dry-run")
    assert f"export ENCORE_PROGRAM={installed}/env/bin/encore" in script
    ran(installed, "run", "ncf", "2", "--seed", "1")
    (run,) = (installed / "results").iterdir()
    (end,) = records(run / "experiment_0" / "metrics.jsonl", "end")
    assert end["outcome"] == "reached"
    assert (installed / "share" / "encore" / "ncf" / "dataset.json").exists()
    assert "reached" in ran(installed, "status")
    tree = next((installed / "env").glob("lib/*/site-packages/encore/tree"))
    assert not {"results", "data", "build"} & {path.name for path in tree.iterdir()}, "nothing is written there"


def test_the_version_is_one_everywhere() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"encore {__version__}\n")
    for order in (["--version", "--json"], ["--json", "--version"]):
        facts = json.loads(CliRunner().invoke(app, order).output)
        assert facts["version"] == __version__ and len(facts["data_sha256"]) == 64
    citation = yaml.safe_load((paths.ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == __version__
