"""Read what NVIDIA submitted, from its own scripts: the training command and the environment of each configuration.

    $ .venv/bin/python -m tools.submitted_configurations MIRRORS > tests/samples/submitted_configurations.toml

MIRRORS holds bare clones, ``MIRRORS/training_results_v0.7`` and so on, of github.com/mlcommons. The submitted
config_*.sh and run_and_time.sh are executed as they are, in an empty environment and with programs in place of
python and of what binds it to cores that only note their command line. Nothing of this project's systems is read.
"""

import re
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

from encore.lab.submissions import option_mapping, scripts
from tools import Folder, run

V05 = "v0.5.0/nvidia/submission/code"
LATER = "NVIDIA/benchmarks"
# Round of the repository, folder, and the system of this project's for each configuration.
SOURCES = (
    ("v0.5", f"{V05}/image_classification/mxnet", "DGX1:dgx1 DGX1_multi:dgx1_n80 DGX2:dgx2 DGX2_multi:dgx2_n32"),
    ("v0.5", f"{V05}/object_detection/pytorch", "DGX1:dgx1 DGX1_multi:dgx1_n8 DGX2:dgx2 DGX2_multi:dgx2_n4"),
    ("v0.5", f"{V05}/recommendation/pytorch", "DGX1:dgx1 DGX2:dgx2"),
    ("v0.5", f"{V05}/rnn_translator/pytorch", "DGX1:dgx1 DGX1_multi:dgx1_n32 DGX2:dgx2 DGX2_multi:dgx2_n16"),
    ("v0.5", f"{V05}/single_stage_detector/pytorch", "DGX1:dgx1 DGX1_multi:dgx1_n8 DGX2:dgx2 DGX2_multi:dgx2_n8"),
    ("v0.5", f"{V05}/translation/pytorch", "DGX1:dgx1 DGX1_multi:dgx1_n24 DGX2:dgx2"),
    (
        "v0.6",
        f"{LATER}/resnet/implementations/mxnet",
        "DGX1:dgx1 DGX1_multi:dgx1_n130 DGX2:dgx2 DGX2_multi:dgx2_n96 DGX2_multi_32x16x65:dgx2_n32",
    ),
    (
        "v0.6",
        f"{LATER}/gnmt/implementations/pytorch",
        "DGX1:dgx1 DGX1_multi:dgx1_n48 DGX2:dgx2 DGX2_multi:dgx2_n24 DGX2_multi_16x16x32:dgx2_n16",
    ),
    (
        "v0.6",
        f"{LATER}/maskrcnn/implementations/pytorch",
        "DGX1:dgx1 DGX1_multi:dgx1_n24 DGX2:dgx2 DGX2_multi_4x16x2:dgx2_n4 DGX2_multi:dgx2_n12",
    ),
    (
        "v0.6",
        f"{LATER}/ssd/implementations/pytorch",
        "DGX1:dgx1 DGX1_multi:dgx1_n30 DGX2:dgx2 DGX2_multi_4x16x24:dgx2_n4 DGX2_multi:dgx2_n15"
        " DGX2_multi_even:dgx2_n30",
    ),
    (
        "v0.6",
        f"{LATER}/transformer/implementations/pytorch",
        "DGX1:dgx1 DGX1_multi:dgx1_n60 DGX2:dgx2 DGX2_multi:dgx2_n30 DGX2_multi_10x16x3840:dgx2_n10",
    ),
    (
        "v0.7",
        f"{LATER}/resnet/implementations/mxnet",
        "DGX1:dgx1 DGX2:dgx2 DGX2_multi_32x16x65:dgx2_n32 DGX2_multi_96x16x39:dgx2_n96 DGXA100:dgxa100"
        " DGXA100_multi_2x8x204:dgxa100_n2 DGXA100_multi_96x8x45:dgxa100_n96 DGXA100_multi_192x8x29:dgxa100_n192"
        " DGXA100_multi_230x8x35:dgxa100_n230",
    ),
    (
        "v0.7",
        f"{LATER}/bert/implementations/pytorch",
        "DGX1_1x8x6x6:dgx1 DGX2_1x16x27x1:dgx2 DGX2_32x16x18x1:dgx2_n32 DGX2_96x16x18x1:dgx2_n96"
        " DGXA100_1x8x32x1:dgxa100 DGXA100_2x8x27x1:dgxa100_n2 DGXA100_32x8x20x1:dgxa100_n32"
        " DGXA100_128x8x10x1:dgxa100_n128 DGXA100_256x8x4x1:dgxa100_n256",
    ),
    ("v0.7", f"{LATER}/dlrm/implementations/pytorch", "DGX2:dgx2 DGXA100:dgxa100"),
    ("v0.6", f"{LATER}/minigo/implementations/tensorflow", "DGX1:dgx1 DGX1_multi:dgx1_n3"),
    (
        "v0.7",
        f"{LATER}/minigo/implementations/tensorflow",
        "DGX1:dgx1 DGX2:dgx2 DGX2_multi_32nodes:dgx2_n32 DGXA100:dgxa100 DGXA100_multi_2nodes:dgxa100_n2"
        " DGXA100_multi_32nodes:dgxa100_n32 DGXA100_multi_224nodes:dgxa100_n224",
    ),
    (
        "v0.7",
        f"{LATER}/gnmt/implementations/pytorch",
        "DGX1:dgx1 DGX2:dgx2 DGX2_multi_16x16x32:dgx2_n16 DGX2_multi_64x16x16:dgx2_n64 DGXA100:dgxa100"
        " DGXA100_multi_2x8x192_dist:dgxa100_n2 DGXA100_multi_32x8x32_dist:dgxa100_n32"
        " DGXA100_multi_128x8x16_dist:dgxa100_n128",
    ),
    (
        "v0.7",
        f"{LATER}/maskrcnn/implementations/pytorch",
        "DGX1:dgx1 DGX2:dgx2 DGX2_multi_4x16x2:dgx2_n4 DGX2_multi:dgx2_n16 DGXA100:dgxa100"
        " DGXA100_2x8x6:dgxa100_n2 DGXA100_multi_4x8x4:dgxa100_n4 DGXA100_multi:dgxa100_n32",
    ),
    (
        "v0.7",
        f"{LATER}/ssd/implementations/pytorch",
        "DGX1:dgx1 DGX2:dgx2 DGX2_multi_4x16x24:dgx2_n4 DGXA100:dgxa100 DGXA100_multi_2x8x56:dgxa100_n2",
    ),
    (
        "v0.7",
        f"{LATER}/ssd/implementations/mxnet",
        "DGX2_multi_64x16x02x08:dgx2_n64 DGXA100_multi_8x8x24:dgxa100_n8 DGXA100_multi_64x8x4x4:dgxa100_n64"
        " DGXA100_multi_128x8x2x8:dgxa100_n128",
    ),
    (
        "v0.7",
        f"{LATER}/transformer/implementations/pytorch",
        "DGX1:dgx1 DGX2:dgx2 DGX2_multi_10x16x4608:dgx2_n10 DGX2_multi_60x16x768:dgx2_n60 DGXA100:dgxa100"
        " DGXA100_multi_2x8x6912:dgxa100_n2 DGXA100_multi_10x8x9216:dgxa100_n10"
        " DGXA100_multi_20x8x4608:dgxa100_n20 DGXA100_multi_60x8x1536:dgxa100_n60",
    ),
    ("v4.0", f"{LATER}/resnet/implementations/eos_ngc24.04_mxnet", "DGXH100:dgxh100"),
    ("v4.0", f"{LATER}/resnet/implementations/eos_n8_ngc24.04_mxnet", "DGXH100_multi_8x8x50:dgxh100_n8"),
    ("v4.0", f"{LATER}/resnet/implementations/h200_ngc24.04_mxnet", "DGXH100:h200"),
)
# What the frameworks, NCCL and MPI read. The rest of what the scripts export only makes up the command.
READ = re.compile("|".join(option_mapping.common().read))
# Of the command: nothing that says where the data are, is drawn anew for each run, or chooses a kernel.
LEFT_OUT = re.compile(
    r"--(data-|gpus|seed|disp-|profile|model_config|dataset|conv-|force-|fuse-|batchnorm-layout|pooling-|network|use-(?!fp16|nvjpeg)"
    r"|base_dir|flagfile|flags_dir|checkpoint_dir|target_path|e2e-|sustained|input_dir|output_dir|eval_dir|init_checkpoint|bert_config|local_rank|log_freq)"
)
# Minigo's command names files of flags (absl's), which name others; programs of their own get those of a folder.
FLAGS = "minigo/ml_perf/flags"
PROGRAMS = ("python", "python3", "bindpcie", "bind.sh", "ompi_bind_DGX1.sh", "ompi_bind_DGX2.sh")
STUB = """#!/bin/bash
# Minigo's data and evaluation have commands of their own.
[[ $1 == *get_data.py || $1 == *eval_models.py ]] && exit 0
# Passes over the options of what binds a rank to cores, up to the python that it would start.
if [[ $0 != */python && $0 != */python3 ]]; then
  while [[ $# -gt 0 && $1 != python ]]; do shift; done
  shift
fi
printf '%s\\0' "$@" > {folder}/command
env -0 > {folder}/environment
"""


def git(mirror: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(mirror), *arguments], check=True, capture_output=True, text=True).stdout


def shown(mirror: Path, folder: str, name: str) -> str:
    return git(mirror, "show", f"HEAD:{folder}/{name}")


def extract(mirror: Path, folder: str, into: Path) -> None:
    # Write the scripts of a submitted folder, with programs in place of those that would train
    for name in git(mirror, "ls-tree", "--name-only", f"HEAD:{folder}").splitlines():
        if name == "run.sub":
            # BERT's command is put together there, and given to run_and_time.sh.
            command = re.search(r"(?ms)^THROUGHPUT_RUN=.*?^BERT_CMD=.*?^fi$", shown(mirror, folder, name))
            (into / "command.sh").write_text(command[0] if command else "")
        if name == "Dockerfile" or re.fullmatch(r"config_.*\.sh|run_and_time(_multinode)?\.sh|run_training\.sh", name):
            (into / name).write_text(shown(mirror, folder, name))
    for name in git(mirror, "ls-tree", "-r", "--name-only", f"HEAD:{folder}").splitlines():
        if name.startswith(FLAGS):
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            (into / name).write_text(shown(mirror, folder, name))
    for name in PROGRAMS:
        (into / name).write_text(STUB.format(folder=into))
    # Some scripts link the data set into the root, and try the cluster's shared folder.
    for name, does in {"sleep": "true", "ln": "true", "mktemp": f"echo {into}/temporary"}.items():
        (into / name).write_text(f"#!/bin/sh\n{does}\n")
    for name in (*PROGRAMS, "sleep", "ln", "mktemp"):
        (into / name).chmod(0o755)


def expanded(folder: Path, words: list[str]) -> list[str]:
    # A command with the flags of the files that it names in their place, those of evaluations as eval_NAME
    found: list[str] = []
    for word in words:
        name, _, value = word.partition("=")
        found.append(word)
        if name == "--flagfile":
            found += expanded(folder, flags_of(folder, value))
        elif name == "--flags_dir":
            for role in ("selfplay", "train"):
                found += expanded(folder, flags_of(folder, f"{value}{role}.flags"))
            found += [f"--eval_{flag[2:]}" for flag in flags_of(folder, f"{value}eval.flags")]
    return found


def flags_of(folder: Path, file: str) -> list[str]:
    lines = (folder / "minigo" / file).read_text().splitlines()
    return [line for line in map(str.strip, lines) if line.startswith("--")]


def submitted(folder: Path, config: str) -> tuple[list[str], dict[str, dict[str, str]]]:
    # The training command and the variables of one configuration, by the script that set them last
    several = (folder / "run_and_time_multinode.sh").exists() and config.endswith("_multi")
    program = "run_and_time_multinode.sh" if several else "run_and_time.sh"
    script = f'source config_{config}.sh; source command.sh; exec bash {program} ${{BERT_CMD:+"$BERT_CMD" 1}}'
    variables = {"PATH": f"{folder}:/usr/bin:/bin", "DGXSYSTEM": config, "SLURM_LOCALID": "0", "DATADIR": "/data"}
    subprocess.run(["bash", "-c", script], cwd=folder, env=variables, check=False, capture_output=True)
    command = expanded(folder, (folder / "command").read_text().rstrip("\0").split("\0"))
    exported = dict(pair.split("=", 1) for pair in (folder / "environment").read_text().split("\0") if pair)
    common = re.search(r"config_\w+_(common|multi)\.sh", (folder / f"config_{config}.sh").read_text())
    found: dict[str, dict[str, str]] = {}
    # What a configuration sets, run_and_time.sh leaves as it is, but for switches of its own that are off.
    for file in (f"config_{config}.sh", *([common[0]] if common else []), "run_and_time.sh"):
        names = re.findall(r"^\s*export (\w+)=", (folder / file).read_text(), re.MULTILINE)
        before = {name for each in found.values() for name in each}
        found[file] = {n: exported[n].strip() for n in names if n in exported and READ.match(n) and n not in before}
    return command, {file: values for file, values in found.items() if values}


def options(command: list[str]) -> str:
    # The command without what differs between runs of one configuration
    # A word that is a dictionary or a tuple of Python's keeps neither quotes nor spaces.
    joined = re.split(r" (?=--?[a-z])", " ".join(re.sub(r"['\s]", "", word) for word in command))
    return " ".join(option for option in joined if not LEFT_OUT.match(option))


def words(text: str) -> str:
    wrapped = textwrap.fill(text, 118, break_on_hyphens=False, break_long_words=False)
    return f"'''\n{wrapped}'''"


def assignments(variables: dict[str, str]) -> str:
    return words(" ".join(f"{name}={value}" for name, value in variables.items()))


def tables(mirrors: Path) -> Iterator[str]:
    for round_name, folder, configurations in SOURCES:
        mirror = mirrors / f"training_results_{round_name}"
        with tempfile.TemporaryDirectory() as temporary:
            extract(mirror, folder, Path(temporary))
            given = scripts.environment((Path(temporary) / "Dockerfile").read_text())
            of_image = {name: value for name, value in given.items() if READ.match(name)}
            yield "[[submission]]"
            yield f'repository = "mlcommons/training_results_{round_name}"'
            yield f'commit = "{git(mirror, "rev-parse", "HEAD").strip()}"'
            yield f'folder = "{folder}"'
            yield f"dockerfile = {assignments(of_image)}\n"
            for pair in configurations.split():
                config, system = pair.split(":")
                command, environment = submitted(Path(temporary), config)
                yield "[[submission.configuration]]"
                yield f'config = "{config}"'
                yield f'system = "{system}"'
                yield f"command = {words(options(command))}"
                yield from (f'environment."{file}" = {assignments(each)}' for file, each in environment.items())
                yield ""


def main(mirrors: Folder) -> None:
    print(f"# Written by {Path(__file__).name} from the submitted scripts; see there.\n")
    print("\n".join(tables(mirrors)), end="")


if __name__ == "__main__":
    run(main, __doc__)
