"""cluster.toml: what is particular to a cluster, in one place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from encore import catalogue, paths
from encore.errors import EncoreError

RUNTIMES = ("auto", "host", "docker", "podman", "apptainer", "enroot", "pyxis")


class Cluster(BaseModel):
    """All keys are optional; an unknown one is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    partition: str = ""
    account: str = ""
    qos: str = ""
    gpus_per_node: int | None = Field(default=None, ge=1, le=64)
    """GPUs of a node; empty: what Slurm hands out, or what the node has."""
    gpu_option: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """How GPUs are asked for; none where Slurm does not manage them."""
    runtime: Literal["auto", "host", "docker", "podman", "apptainer", "enroot", "pyxis"] = "auto"
    image: str = ""
    """Image or image file of the runtime; empty: the benchmark's own."""
    python: dict[str, Path] = Field(default_factory=dict)
    """The user's own Python of each framework, for the host runtime; empty: the environments that Encore makes."""
    data: Path | None = None
    """Folder with a data set per benchmark: DATA/resnet."""
    results: Path | None = None
    network_interface: str = ""
    """Empty: found on the node."""
    cpu_bind: str = "auto"
    """Value of srun --cpu-bind; auto: each rank to the cores of its GPU, where Slurm can bind."""
    mpi: str = "pmix"
    """Plugin of srun --mpi for Horovod."""
    max_requeues: int = Field(default=5, ge=0)
    """After a lost node or at the time limit; then the job fails, with the reason."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, such as "--constraint=a100"."""

    @field_validator("sbatch")
    @classmethod
    def _are_options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            if not option.startswith("-") or "\n" in option:
                raise ValueError(f"{option!r} is no option of sbatch, such as '--constraint=a100'")
        return options

    def data_of(self, benchmark: str) -> Path | None:
        """Return the data set of a benchmark, where the file names a folder."""
        return self.data / benchmark if self.data is not None else None


def places() -> tuple[Path, ...]:
    """Return where the file is looked for; the first that is there counts."""
    configuration = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return (paths.ROOT / "cluster.toml", configuration / "encore" / "cluster.toml")


def named() -> str:
    """Return the file that ENCORE_CLUSTER names, as a path that holds everywhere; empty where it names none."""
    file = os.environ.get("ENCORE_CLUSTER")
    return str(Path(file).absolute()) if file else ""


def load(file: Path | None = None) -> tuple[Cluster, Path | None]:
    """Return the cluster file and its path; all defaults where there is none. EncoreError for a wrong key."""
    wanted = file or (Path(named()) if named() else None)
    if wanted is not None and not wanted.is_file():
        raise EncoreError(
            f"no cluster file {wanted}", expected="a TOML file", remedy="copy slurm/cluster.example.toml there"
        )
    found = next((path for path in (wanted, *places()) if path is not None and path.is_file()), None)
    if found is None:
        return Cluster(), None
    return catalogue.parse(Cluster, found), found
