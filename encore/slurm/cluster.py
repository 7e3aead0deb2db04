"""Site configuration (cluster.toml)."""

import os
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from encore import catalogue, paths
from encore.catalogue import Strict
from encore.errors import EncoreError, unknown_name
from encore.kubernetes.settings import Kubernetes

# Values of srun options (srun(1)), and auto.
SRUN_VALUES = {
    "mpi": (
        r"none|openmpi|pmi2|pmix(_v\d+)?|cray_shasta",
        "a plugin of srun --mpi; expected pmix, pmi2, openmpi or none",
    ),
    "cpu_bind": (
        r"auto|((q|quiet|v|verbose),)*"
        r"(n|no|none|rank_ldom|sockets|cores|threads|ldoms|boards|(map|mask)_(cpu|ldom):[\w,*]+)",
        "a value of srun --cpu-bind; expected auto, none, cores, map_cpu:LIST ...",
    ),
}
UNSAFE = re.compile(r"""[\x00-\x1f\x7f;&|<>`$"'\\*?!(){}]|^-""")
HOME = re.compile(r"~(?=/|$)|\$(HOME|USER)\b|\$\{(HOME|USER)\}")
# GPUs per node in sbatch syntax: 8, a100:8, gpu:8, gpu:a100:8.
GPUS = re.compile(r"(?:gpu:)?(?:(?P<type>[\w.-]+):)?(?P<count>\d+)")
GPUS_IN_OPTION = re.compile(r"--(?P<option>gres(?=[= ]gpu:)|gpus-per-node)[= ](?P<gpus>[\w.:-]+)")
GPU_OPTIONS = ("-G", "--gpus", "--gpus-per-node", "--gres")
# sbatch options that Encore sets, with the replacement to use.
RESERVED_OPTIONS = {
    ("-t", "--time"): "use --time MINUTES of encore submit",
    ("-N", "--nodes"): "use --nodes N of encore submit",
    ("-a", "--array"): "use --array 0-N of encore submit",
    ("-p", "--partition"): "use --partition NAME of encore submit",
    ("-A", "--account"): "use --account NAME of encore submit",
    GPU_OPTIONS: "use --gpus-per-node N of encore submit; gpu_type and gpu_option in cluster.toml",
    ("-J", "--job-name"): "use --job-name NAME of encore submit, which appends NAME",
    ("-o", "--output"): "leave it out: the output goes to the results folder, --results DIR",
    ("--comment",): "use --comment TEXT of encore submit, which appends TEXT",
    ("--signal",): "leave it out: it makes the run write a checkpoint before the limit",
}


class Cluster(Strict):
    """Settings of a cluster. All keys are optional; unknown keys are rejected."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    # GPUs per node. Default: the GPUs of the Slurm allocation, else all of the node.
    gpus_per_node: int | None = Field(default=None, ge=1, le=64)
    # Slurm's type of these GPUs, such as a100; also in gpus_per_node = "gpu:a100:8".
    gpu_type: str = Field(default="", pattern=r"^[\w.-]*$")
    # sbatch option that requests GPUs; none if Slurm does not manage them.
    gpu_option: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    runtime: Literal["auto", "host", "docker", "podman", "apptainer", "enroot", "pyxis"] = "auto"
    image: str = ""  # Image or image file for the runtime. Default: the image of the benchmark
    # Python interpreter per framework, for the host runtime. Default: the environments that Encore builds.
    python: dict[str, Path] = Field(default_factory=dict)
    data: Path | None = None  # folder with a data set per benchmark: DATA/resnet
    results: Path | None = None
    textfile: Path | None = None  # folder of node_exporter's textfile collector on every node
    network_interface: str = ""  # empty: found on the node
    # Value of srun --cpu-bind. auto: each rank on the cores local to the GPU, if Slurm supports binding
    cpu_bind: str = "auto"
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
                raise ValueError(f"{option!r} is not an sbatch option, such as '--constraint=a100'")
        return options

    @model_validator(mode="before")
    @classmethod
    def _take_gpus(cls, values: Any) -> Any:
        # Move GPU count and type from ``gpus_per_node = "a100:8"`` and from the ``sbatch`` options to separate keys.
        values, sources = dict(values), []
        if isinstance(values.get("gpus_per_node"), str):
            text = values.pop("gpus_per_node")
            sources.append((f"gpus_per_node = {text!r}", text, ""))
        options = values.get("sbatch")
        if isinstance(options, list) and values.get("gpu_option") != "none":
            matches = {
                argument: match for argument in map(str, options) if (match := GPUS_IN_OPTION.fullmatch(argument))
            }
            sources += [
                (f"sbatch = [{argument!r}]", match["gpus"], match["option"]) for argument, match in matches.items()
            ]
            values["sbatch"] = [argument for argument in options if argument not in matches]
        for source, text, option in sources:
            kind, count = parse_gpus(text)
            for key, value in (("gpus_per_node", count), ("gpu_type", kind), ("gpu_option", option)):
                if value != "" and values.setdefault(key, value) != value:
                    raise ValueError(f"{source} contradicts {key} = {values[key]!r}")
        return values

    @field_validator("data", "results", "image", mode="before")
    @classmethod
    def _expand(cls, text: Any) -> Any:
        return expand_path(text) if isinstance(text, str) else text

    @field_validator("python", mode="before")
    @classmethod
    def _expand_pythons(cls, pythons: Any) -> Any:
        if not isinstance(pythons, dict):
            return pythons
        frameworks = {choice.implementation.framework for choice in catalogue.choices().values()}
        for framework in pythons:
            if framework not in frameworks:
                raise ValueError(" ".join(str(unknown_name("framework", framework, frameworks)).split()))
        return {name: expand_path(file) if isinstance(file, str) else file for name, file in pythons.items()}

    @field_validator("partition", "account", "qos", "network_interface", "image", "data", "results", "textfile")
    @classmethod
    def _is_plain(cls, value: Any) -> Any:
        if UNSAFE.search(str(value or "")):
            raise ValueError(f"{str(value)!r} has a line break or a shell metacharacter")
        return value

    @field_validator(*SRUN_VALUES)
    @classmethod
    def _is_srun_value(cls, value: str, info: ValidationInfo) -> str:
        pattern, description = SRUN_VALUES[str(info.field_name)]
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{value!r} is not {description}")
        return value

    def data_of(self, benchmark: str) -> Path | None:
        return self.data / benchmark if self.data is not None else None


def expand_path(text: str) -> str:
    """Expand ``~``, ``$HOME`` and ``$USER`` in a path.

    Other variables raise ValueError, because they may differ between the submitting shell and the job.
    """
    path = HOME.sub(lambda match: os.environ.get(match[1] or match[2] or "HOME", match[0]), text)
    if "$" in path or path.startswith("~"):
        raise ValueError(f"{text!r} is not a path; only $HOME, $USER and a leading ~/ are expanded")
    return path


def parse_gpus(text: str) -> tuple[str, int]:
    """Parse ``8``, ``a100:8`` or ``gpu:a100:8`` into GPU type and count per node. Raise ValueError otherwise."""
    match = GPUS.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number of GPUs; expected 8, or with Slurm's type a100:8")
    return match["type"] or "", int(match["count"])


def reserved_option(option: str) -> tuple[str, ...] | None:
    """Return the key of RESERVED_OPTIONS that matches an sbatch option in any spelling: --time=5, --tim 5, -t5."""
    name = re.split("[= ]", option, maxsplit=1)[0]
    if name.startswith("--"):
        return next(
            (spellings for spellings in RESERVED_OPTIONS if any(spelling.startswith(name) for spelling in spellings)),
            None,
        )
    return next((spellings for spellings in RESERVED_OPTIONS if name[:2] in spellings), None)


def default_files() -> tuple[Path, ...]:
    configuration = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return (paths.ROOT / "cluster.toml", configuration / "encore" / "cluster.toml")


def file_from_environment() -> str:
    """Return the absolute path in ENCORE_CLUSTER, or an empty string."""
    file = os.environ.get("ENCORE_CLUSTER")
    return str(Path(file).absolute()) if file else ""


def load(file: Path | None = None) -> tuple[Cluster, Path | None]:
    """Load the cluster file. Return the defaults and None without a file. Raise EncoreError for invalid values."""
    requested = file or (Path(file_from_environment()) if file_from_environment() else None)
    if requested is not None and not requested.is_file():
        raise EncoreError(
            f"no cluster file {requested}", expected="a TOML file", hint="copy slurm/cluster.example.toml there"
        )
    cluster_path = next((path for path in (requested, *default_files()) if path is not None and path.is_file()), None)
    if cluster_path is None:
        return Cluster(), None
    cluster = catalogue.parse(Cluster, cluster_path)
    for option in cluster.sbatch:
        reserved = reserved_option(option)
        if reserved is not None and not (reserved == GPU_OPTIONS and cluster.gpu_option == "none"):
            raise EncoreError(
                f"sbatch = [{option!r}] in {cluster_path} conflicts with an option that Encore sets",
                hint=f"remove it there; {RESERVED_OPTIONS[reserved]}",
            )
    return cluster, cluster_path
