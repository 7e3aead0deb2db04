"""cluster.toml: what is particular to a cluster, in one place."""

import os
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from encore import catalogue, names, paths
from encore.catalogue import Strict
from encore.errors import EncoreError
from encore.kubernetes.settings import Kubernetes

MPI = re.compile(r"none|openmpi|pmi2|pmix(_v\d+)?|cray_shasta")  # plugins that srun --mpi may list (srun(1))
# Values of srun --cpu-bind (srun(1)), and auto.
CPU_BIND = re.compile(
    r"auto|((q|quiet|v|verbose),)*(n|no|none|rank_ldom|sockets|cores|threads|ldoms|boards|(map|mask)_(cpu|ldom):[\w,*]+)"
)
UNSAFE = re.compile(r"""[\x00-\x1f\x7f;&|<>`$"'\\*?!(){}]|^-""")
HOME = re.compile(r"~(?=/|$)|\$(HOME|USER)\b|\$\{(HOME|USER)\}")
# GPUs of a node as sbatch has them: 8, a100:8, gpu:8, gpu:a100:8.
GPUS = re.compile(r"(?:gpu:)?(?:(?P<type>[\w.-]+):)?(?P<count>\d+)")
GPUS_IN_OPTION = re.compile(r"--(?P<option>gres(?=[= ]gpu:)|gpus-per-node)[= ](?P<gpus>[\w.:-]+)")
GPU_OPTIONS = ("-G", "--gpus", "--gpus-per-node", "--gres")
# Options that Encore gives sbatch, and what to do instead of giving them once more.
OWN_OPTIONS = {
    ("-t", "--time"): "give it to Encore: --time MINUTES",
    ("-N", "--nodes"): "give it to Encore: --nodes N",
    ("-a", "--array"): "give it to Encore: --array 0-N",
    ("-p", "--partition"): "give it to Encore: --partition NAME",
    ("-A", "--account"): "give it to Encore: --account NAME",
    GPU_OPTIONS: "give it to Encore: --gpus-per-node N; gpu_type and gpu_option in cluster.toml",
    ("-J", "--job-name"): "give your part of it to Encore: --job-name NAME",
    ("-o", "--output"): "leave it out: the output goes to the results folder, --results DIR",
    ("--comment",): "give your part of it to Encore: --comment TEXT",
    ("--signal",): "leave it out: it makes the run write a checkpoint before the limit",
}


class Cluster(Strict):
    """All keys are optional; an unknown one is refused."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    # GPUs of a node; empty: what Slurm hands out, or what the node has.
    gpus_per_node: int | None = Field(default=None, ge=1, le=64)
    # Slurm's type of these GPUs, such as a100; also in gpus_per_node = "gpu:a100:8".
    gpu_type: str = Field(default="", pattern=r"^[\w.-]*$")
    # How GPUs are asked for; none where Slurm does not manage them.
    gpu_option: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    runtime: Literal["auto", "host", "docker", "podman", "apptainer", "enroot", "pyxis"] = "auto"
    image: str = ""  # image or image file of the runtime; empty: the benchmark's own
    # The user's own Python of each framework, for the host runtime; empty: the environments that Encore makes.
    python: dict[str, Path] = Field(default_factory=dict)
    data: Path | None = None  # folder with a data set per benchmark: DATA/resnet
    results: Path | None = None
    textfile: Path | None = None  # folder of node_exporter's textfile collector on every node
    network_interface: str = ""  # empty: found on the node
    cpu_bind: str = "auto"  # value of srun --cpu-bind; auto: each rank to the cores of its GPU, where Slurm can bind
    mpi: str = "pmix"  # plugin of srun --mpi for Horovod
    # After a lost node or at the time limit; then the job fails, with the reason.
    max_requeues: int = Field(default=5, ge=0)
    sbatch: tuple[str, ...] = ()  # further options of sbatch, such as "--constraint=a100"
    kubernetes: Kubernetes = Field(default_factory=Kubernetes)

    @field_validator("sbatch")
    @classmethod
    def _are_options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            if not option.startswith("-") or "\n" in option:
                raise ValueError(f"{option!r} is no option of sbatch, such as '--constraint=a100'")
        return options

    @model_validator(mode="before")
    @classmethod
    def _take_gpus(cls, given: Any) -> Any:
        # Take the GPUs and their type from ``gpus_per_node = "a100:8"`` and from the options of ``sbatch``.
        given, found = dict(given), []
        if isinstance(given.get("gpus_per_node"), str):
            text = given.pop("gpus_per_node")
            found.append((f"gpus_per_node = {text!r}", text, ""))
        options = given.get("sbatch")
        if isinstance(options, list) and given.get("gpu_option") != "none":
            matches = {each: match for each in map(str, options) if (match := GPUS_IN_OPTION.fullmatch(each))}
            found += [(f"sbatch = [{each!r}]", match["gpus"], match["option"]) for each, match in matches.items()]
            given["sbatch"] = [each for each in options if each not in matches]
        for what, text, option in found:
            kind, count = typed(text)
            for key, value in (("gpus_per_node", count), ("gpu_type", kind), ("gpu_option", option)):
                if value != "" and given.setdefault(key, value) != value:
                    raise ValueError(f"{what} contradicts {key} = {given[key]!r}")
        return given

    @field_validator("data", "results", "image", mode="before")
    @classmethod
    def _expand(cls, text: Any) -> Any:
        return expanded(text) if isinstance(text, str) else text

    @field_validator("python", mode="before")
    @classmethod
    def _expand_pythons(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {choice.implementation.framework for choice in catalogue.choices().values()}
        for framework in given:
            if framework not in known:
                raise ValueError(" ".join(str(names.unknown("framework", framework, known)).split()))
        return {name: expanded(file) if isinstance(file, str) else file for name, file in given.items()}

    @field_validator("partition", "account", "qos", "network_interface", "image", "data", "results", "textfile")
    @classmethod
    def _is_plain(cls, value: Any) -> Any:
        if UNSAFE.search(str(value or "")):
            raise ValueError(f"{str(value)!r} has a line break or a shell metacharacter")
        return value

    @field_validator("mpi")
    @classmethod
    def _is_plugin(cls, name: str) -> str:
        if not MPI.fullmatch(name):
            raise ValueError(f"{name!r} is no plugin of srun --mpi; expected pmix, pmi2, openmpi or none")
        return name

    @field_validator("cpu_bind")
    @classmethod
    def _is_binding(cls, value: str) -> str:
        if not CPU_BIND.fullmatch(value):
            raise ValueError(f"{value!r} is no value of srun --cpu-bind; expected auto, none, cores, map_cpu:LIST ...")
        return value

    def data_of(self, benchmark: str) -> Path | None:
        return self.data / benchmark if self.data is not None else None


def expanded(text: str) -> str:
    """Return a path with the home folder and the user's name in place of ``~``, ``$HOME`` and ``$USER``.

    ValueError for any other variable: a job may have another value of it than the shell that submits.
    """
    found = HOME.sub(lambda match: os.environ.get(match[1] or match[2] or "HOME", match[0]), text)
    if "$" in found or found.startswith("~"):
        raise ValueError(f"{text!r} is no path; of variables only $HOME, $USER and a leading ~/ are replaced")
    return found


def typed(text: str) -> tuple[str, int]:
    """Return Slurm's type and the number of a node's GPUs in ``8``, ``a100:8`` or ``gpu:a100:8``; ValueError else."""
    match = GPUS.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no number of GPUs; expected 8, or with Slurm's type a100:8")
    return match["type"] or "", int(match["count"])


def own_option(option: str) -> tuple[str, ...] | None:
    """Return the option of Encore's that this one is, in whatever form sbatch takes: --time=5, --tim 5, -t5."""
    name = re.split("[= ]", option, maxsplit=1)[0]
    if name.startswith("--"):
        return next((own for own in OWN_OPTIONS if any(each.startswith(name) for each in own)), None)
    return next((own for own in OWN_OPTIONS if name[:2] in own), None)


def places() -> tuple[Path, ...]:
    configuration = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return (paths.ROOT / "cluster.toml", configuration / "encore" / "cluster.toml")


def named() -> str:
    """Return the file that ENCORE_CLUSTER names, as a path that holds everywhere; empty where it names none."""
    file = os.environ.get("ENCORE_CLUSTER")
    return str(Path(file).absolute()) if file else ""


def load(file: Path | None = None) -> tuple[Cluster, Path | None]:
    """Return the cluster file and its path; all defaults where there is none. EncoreError for what it may not hold."""
    wanted = file or (Path(named()) if named() else None)
    if wanted is not None and not wanted.is_file():
        raise EncoreError(
            f"no cluster file {wanted}", expected="a TOML file", hint="copy slurm/cluster.example.toml there"
        )
    found = next((path for path in (wanted, *places()) if path is not None and path.is_file()), None)
    if found is None:
        return Cluster(), None
    cluster = catalogue.parse(Cluster, found)
    for option in cluster.sbatch:
        own = own_option(option)
        if own is not None and not (own == GPU_OPTIONS and cluster.gpu_option == "none"):
            raise EncoreError(
                f"sbatch = [{option!r}] in {found} contradicts what Encore gives sbatch",
                hint=f"take it out there; {OWN_OPTIONS[own]}",
            )
    return cluster, found
