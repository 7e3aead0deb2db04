"""`encore reproduce` on small made repositories: what maps, what does not, the system, the command, bad input."""

import ast
import json
import os
import shlex
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from encore import catalogue, configuration
from encore.catalogue import System
from encore.cli.app import app
from encore.errors import EncoreError
from encore.lab.submissions.reproduction import Reproduction, reproduce
from encore.lab.submissions.source import open_source
from tools import reproduced_configurations

FOLDER = "training_results_v0.7/Maker/benchmarks/resnet/implementations/mxnet"
COMMON = 'export DGXNGPU=8\nexport OMPI_MCA_btl="^openib"\nexport MXNET_EXTENDED_NORMCONV_SUPPORT=1\n'
CONFIG = """source $(dirname ${BASH_SOURCE[0]})/config_DGXA100_common.sh
export OPTIMIZER=sgd BATCHSIZE="408" LR=${LR:-"6"}   # a comment
export DGXNNODES=1 WALLTIME=01:00:00 OWN_SWITCH=3 OWN_TIME=$(date)
export MXNET_HOROVOD_NUM_GROUPS=20
export DGXSYSTEM=$(basename $(readlink -f ${BASH_SOURCE[0]}) | sed 's/^config_//' | sed 's/\\.sh$//' )
"""
SCRIPT = """PREFETCH=${PREFETCH:-5}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
PARAMS=(
  --batch-size $BATCHSIZE --kv-store horovod --lr "${LR}" --mom 0.9 --lr-step-epochs pow2 --lars-eta 0.0
  --label-smoothing 0.1 --wd 2.5e-05 --warmup-epochs 5 --eval-period 4 --eval-offset 0 --optimizer "${OPTIMIZER}"
  --num-layers 50 --num-epochs 42 --accuracy-threshold 0.759 --dtype float16 --image-shape 4,224,224
  --min-random-area 0.05 --max-random-area 1.0 --input-layout NHWC --batchnorm-mom 0.9 --batchnorm-eps 1e-5
  --dali-prefetch-queue ${PREFETCH} --dali-nvjpeg-memory-padding 256 --new-option 7
)
python -u train_imagenet.py "${PARAMS[@]}"; ret_code=$?
"""


def environment_of(system: System) -> str:
    given = {name: value for values in system.environment.values() for name, value in values.items()}
    left = {"OMPI_MCA_btl", "MXNET_EXTENDED_NORMCONV_SUPPORT", "NCCL_DEBUG"}
    words = " \\\n    ".join(f"{name}={value}" for name, value in given.items() if name not in left)
    return f"ARG FROM_IMAGE_NAME=nvcr.io/nvidia/mxnet:20.06-py3\nFROM ${{FROM_IMAGE_NAME}}\nENV {words}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose one configuration is, key by key, the system dgxa100 of v0.7."""
    made = tmp_path / FOLDER
    made.mkdir(parents=True)
    ours = catalogue.find_system(catalogue.choose("resnet"), "dgxa100", "v0.7")
    (made / "Dockerfile").write_text(environment_of(ours))
    (made / "config_DGXA100_common.sh").write_text(COMMON)
    (made / "config_DGXA100.sh").write_text(CONFIG)
    (made / "run_and_time.sh").write_text(SCRIPT)
    return made


def read(path: Path, config: str | None = None) -> Reproduction:
    source = open_source(path, config, None)
    return reproduce(source, source.configurations[0])


def encore(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["reproduce", *map(str, words)])


def test_a_folder_is_the_system_that_it_equals_and_what_has_no_counterpart_is_stated(folder: Path) -> None:
    (found,) = json.loads(encore(folder, "--json").stdout)
    left = {each["name"]: each for each in found["without_counterpart"]}
    assert "time limit" in left["WALLTIME"]["meaning"] and "no option" in left["OWN_SWITCH"]["meaning"]
    assert [left[name]["value"] for name in ("-u", "OWN_TIME", "--new-option")] == ["", "not known here", "7"]
    assert left["--new-option"]["meaning"] == ""
    rate = {"value": 6.0, "options": ["--lr"], "variables": ["LR", "PARAMS"], "origin": "command"}
    assert found["keys"]["learning_rate"].items() >= rate.items()
    assert found["environment"]["config_DGXA100_common.sh"]["OMPI_MCA_btl"] == "^openib"
    assert found.items() >= {
        "configuration": "DGXA100", "folder": "Maker/benchmarks/resnet/implementations/mxnet", "round": "v0.7",
        "benchmark": "resnet", "checked": True, "nodes": 1, "gpus_per_node": 8, "missing": {}, "not_understood": [],
        "base_image": "nvcr.io/nvidia/mxnet:20.06-py3", "base_image_now": "nvcr.io/nvidia/mxnet:24.06-py3",
        "equals": "dgxa100", "nearest": "dgxa100", "differences": [], "refused": "",
        "command": [
            "encore", "run", "resnet", "8", "--system", "dgxa100", "--round", "v0.7",
            "--data", "data/imagenet", "--runs", "5",
        ],
    }.items()  # fmt: skip
    shown = encore(folder)
    assert shown.exit_code == 0
    assert all(text in shown.stdout for text in ("equals", "--new-option", "not known", "mxnet:24.06-py3"))


def test_another_value_is_a_difference_that_the_command_sets(folder: Path, tmp_path: Path) -> None:
    (folder / "config_OURS.sh").write_text(CONFIG.replace('"6"', '"5.5"'))
    with (folder / "Dockerfile").open("a") as file:
        file.write('ENV "NCCL no=name"\n')
    made = read(folder, "OURS")
    assert [(each.name, each.published, each.ours) for each in made.differences] == [("learning_rate", 5.5, 6.0)]
    assert "--set learning_rate=5.5" in encore(folder / "config_OURS.sh").stdout.replace("\n", " ")
    done = encore(folder / "config_OURS.sh", "-o", tmp_path / "ours.toml")
    assert done.exit_code == 0
    written = catalogue.parse(System, tmp_path / "ours.toml")
    choice = catalogue.choose("resnet")
    whole = written.model_copy(update={"config": {**written.config, **written.implementations["mxnet"]}})
    resolved = configuration.resolve(choice, whole, 1, 8, [])
    assert (resolved.get("learning_rate"), resolved.get("gradient_groups")) == (5.5, 20)
    assert isinstance(encore(folder / "config_OURS.sh", "-o", tmp_path / "ours.toml").exception, EncoreError)


def test_a_written_system_takes_no_name_that_another_has_and_run_runs_the_command(folder: Path) -> None:
    (folder / "config_DGXA100_own.sh").write_text(CONFIG.replace('"6"', '"5.5"'))
    own, submitted = read(folder, "DGXA100_own").system, read(folder, "DGXA100").system
    assert own and submitted and (own.system, submitted.system) == ("dgxa100_own", "dgxa100")
    # On a machine without GPUs `encore run` refuses to start, with its own message and exit code.
    assert encore(folder, "--config", "DGXA100", "--run", "--data", folder / "nothing").exit_code == 2


@pytest.mark.parametrize("ending", ["zip", "tar.gz"])
def test_an_archive_is_read_as_its_folder(folder: Path, tmp_path: Path, ending: str) -> None:
    archive = tmp_path / f"training_results_v0.7.{ending}"
    names = [path for path in tmp_path.rglob("*") if path.is_file()]
    if ending == "zip":
        with zipfile.ZipFile(archive, "w") as packed:
            for path in names:
                packed.write(path, path.relative_to(tmp_path))
            packed.writestr("../escape/config_X.sh", "A=1")
    else:
        with tarfile.open(archive, "w:gz") as opened:
            for path in names:
                opened.add(path, path.relative_to(tmp_path))
            for name in (f"{FOLDER}/config_LINK.sh", "../escape/config_X.sh"):
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
                opened.addfile(link)
    inside = folder.relative_to(tmp_path / "training_results_v0.7")
    assert read(archive / inside).equals
    with pytest.raises(EncoreError) as listed:
        open_source(archive, None, None)
    assert str(inside) in str(listed.value) and "escape" not in str(listed.value)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["training_results_v0.7"]


def test_the_tool_counts_configurations_and_results(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submitter = folder.parents[3]
    (submitter / "results/dgxa100_made_mxnet/resnet").mkdir(parents=True)
    (submitter / "results/dgx2_made_mxnet/resnet").mkdir(parents=True)
    reproduced_configurations.main([str(submitter)])
    lines = capsys.readouterr().out.splitlines()
    configurations, results = (ast.literal_eval(line) for line in lines if line.startswith("{"))
    assert (configurations["configurations"], configurations["equal"]) == (1, 1)
    assert (results["result folders"], results["with one configuration"], results["equal"]) == (2, 1, 1)
    assert read(submitter / "results/dgxa100_made_mxnet/resnet").source.submission == "dgxa100_made_mxnet"


def test_a_result_of_v05_leads_to_the_folder_of_its_task(tmp_path: Path) -> None:
    submission = tmp_path / "v0.5.0/maker/submission"
    code = submission / "code/image_classification/mxnet"
    code.mkdir(parents=True)
    (code / "config_DGX1.sh").write_text("DGXNNODES=1\n")
    (code / "config_DGX1_multi.sh").write_text("DGXNNODES=80\n")
    (submission / "code/other/mxnet").mkdir(parents=True)
    (submission / "code/other/mxnet/config_DGX1.sh").write_text("DGXNNODES=1\n")
    for system, expected in (("dgx1_ngc_mxnet", "config_DGX1.sh"), ("dgx1_multi_ngc_mxnet", "config_DGX1_multi.sh")):
        result = submission / "results" / system / "resnet"
        result.mkdir(parents=True)
        opened = open_source(result, None, None)
        assert (opened.folder, opened.configurations) == ("code/image_classification/mxnet", (expected,))
    unknown = submission / "results/dgx2_ngc_mxnet/resnet"
    unknown.mkdir(parents=True)
    with pytest.raises(EncoreError, match="number of nodes") as refused:
        open_source(unknown, None, None)
    assert "code/image_classification/mxnet" in (refused.value.hint or "")
    assert "code/other/mxnet" not in (refused.value.hint or "")


CONFIGURATIONS = {
    "mxnet": {
        "DGXA100": "export DGXNGPU=8 DGXNNODES=1",
        "R750xax4A100-PCIE-80GB": "export DGXNNODES=1\nexport DGXNGPU=4",
        "2xR750xax4A100-80GB-PCIe": "export DGXNNODES=2\nexport DGXNGPU=4",
        "XE8545x4A100-SXM-80GB": "export DGXNNODES=1\nexport DGXNGPU=4",
        "X660 G45_1x8x7": "source $(dirname $0)/config_common.sh",
        "common": "export DGXNGPU=8",
        "mounts": "export A=1",
    },
    "v30-mxnet": {"DGXH100_multi_8x8x50": "export DGXNGPU=8"},
    "NC96": {"DGXA100_1x8x7": "export DGXNGPU=8"},
}


@pytest.mark.parametrize(
    ("system", "description", "expected"),
    [
        ("R750xax4A100-PCIE-80GB", {}, "mxnet/R750xax4A100-PCIE-80GB"),
        # The same words in another order, and nodes in front.
        ("2xR750xax4A100-PCIE-80GB", {"number_of_nodes": 2}, "mxnet/2xR750xax4A100-80GB-PCIe"),
        ("X660 G45_mxnet", {"accelerators_per_node": "8"}, "mxnet/X660 G45_1x8x7"),
        # A folder of the system's own name before one that fits as well; else by GPUs, and what is no other's.
        ("NC96", {"accelerators_per_node": "8"}, "NC96/DGXA100_1x8x7"),
        ("R99", {"accelerators_per_node": "8", "accelerator_model_name": "NVIDIA A100"}, "mxnet/DGXA100"),
        ("eos_n8_ngc23.04_mxnet", {"accelerator_model_name": "H100"}, "v30-mxnet/DGXH100_multi_8x8x50"),
        ("R99x4", {"accelerators_per_node": "4"}, None),
        ("gone", {"number_of_nodes": 3}, None),
    ],
)
def test_a_result_leads_to_what_names_its_system(
    system: str, description: dict[str, Any], expected: str | None, tmp_path: Path
) -> None:
    maker = tmp_path / "training_results_v3.0/A Maker"
    for folder, files in CONFIGURATIONS.items():
        made = maker / "benchmarks/resnet/implementations" / folder
        made.mkdir(parents=True)
        (made / "Dockerfile").write_text(f"FROM nvcr.io/nvidia/mxnet:{'23.04' if 'v30' in folder else '23.09'}-py3")
        for name, text in files.items():
            (made / f"config_{name}.sh").write_text(text)
    (maker / "systems").mkdir()
    for name in ("R750xax4A100-PCIE-80GB", "XE8545x4A100-SXM-80GB", "2xR750xax4A100-PCIE-80GB", "NC96", "X660 G45"):
        (maker / f"systems/{name}.json").write_text("{}")
    (maker / f"systems/{system}.json").write_text(json.dumps(description))
    result = maker / "results" / system / "resnet"
    result.mkdir(parents=True)
    if expected is not None:
        opened = open_source(result, None, None)
        folder, _, name = expected.partition("/")
        assert (opened.folder.rpartition("/")[2], opened.configurations) == (folder, (f"config_{name}.sh",))
        return
    with pytest.raises(EncoreError) as refused:
        open_source(result, None, None)
    # What is suggested is a whole command, which a shell takes.
    (_, first, *_) = (refused.value.hint or "").splitlines()
    words = shlex.split(first)
    assert words[-2] == "reproduce" and list(Path(words[-1]).glob("config_*.sh"))
    with pytest.raises(EncoreError) as named:
        open_source(result.parent, None, None)
    assert shlex.split((named.value.hint or "").splitlines()[1])[-1] == str(result)


def test_scripts_without_a_configuration_are_named(tmp_path: Path) -> None:
    maker = tmp_path / "training_results_v1.0/Maker"
    for system in ("tpu-v4-128", "tpu-v4-16"):
        made = maker / "benchmarks/bert" / system
        made.mkdir(parents=True)
        (made / "run_and_time.sh").write_text("python train.py")
    empty, result = maker / "benchmarks/bert/implementations/ours", maker / "results/tpu-v4-16/bert"
    for each in (empty, result):
        each.mkdir(parents=True)
        with pytest.raises(EncoreError, match="scripts that Encore does not read") as refused:
            open_source(each, None, None)
        assert f"{maker}/benchmarks/bert/tpu-v4-16: run_and_time.sh" in (refused.value.hint or "")
    assert "tpu-v4-128" not in (refused.value.hint or "")


def test_a_round_that_was_never_held_is_refused(folder: Path) -> None:
    done = encore(folder, "--round", "v0.8")
    assert isinstance(done.exception, EncoreError) and "v0.7" in done.exception.expected
    (folder / "config_A B.sh").write_text(CONFIG)
    several = encore(folder, "--run")
    assert isinstance(several.exception, EncoreError)
    assert shlex.split(several.exception.hint)[-4:] == [str(folder), "--config", "A B", "--run"]


SETTINGS: dict[str, Any] = {
    "solver": {"batchsize": 4096, "batchsize_eval": 8192, "max_iter": 10, "eval_interval": 5, "mixed_precision": 64},
    "optimizer": {
        "type": "SGD",
        "sgd_hparam": {
            "learning_rate": 24.0, "end_lr": 0.0, "decay_power": 2,
            "warmup_steps": 2, "decay_start": 4, "decay_steps": 3,
        },
    },
    "layers": [
        {"name": "data", "num_samples": 40960},
        *({"name": f"fc{n}", "fc_param": {"num_output": size}} for n, size in enumerate((8, 8, 4, 8, 8, 8, 8, 1), 1)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("text", [json.dumps(SETTINGS), None, "no { json", "[" * 100_000])
def test_settings_in_a_json_file_are_options(text: str | None, tmp_path: Path) -> None:
    made = tmp_path / "training_results_v0.7/Maker/benchmarks/dlrm/implementations/hugectr"
    made.mkdir(parents=True)
    (made / "config_DGXA100.sh").write_text("export DGXNGPU=8 CONFIG=settings.json\n")
    (made / "run_and_time.sh").write_text("huge_ctr --train ${CONFIG} | tee log\n")
    if text is not None:
        (made / "settings.json").write_text(text)
    found = read(made)
    if text is None or not text.startswith("{"):
        assert "learning_rate" in found.missing and any("no JSON" in note.reason for note in found.notes)
        return
    mapped = {each.key: each.value for each in found.mapped}
    assert not found.missing
    assert (mapped["batch_size"], mapped["bottom_mlp"], mapped["epochs"]) == (512, (8, 8, 4), 1)
    rate = next(each for each in found.mapped if each.key == "learning_rate")
    assert (rate.options, rate.sources) == (("optimizer.sgd_hparam.learning_rate",), {"CONFIG"})


def test_a_later_script_is_read_where_the_first_has_no_command(folder: Path) -> None:
    made = folder.parents[2] / "bert/implementations/pytorch"
    made.mkdir(parents=True)
    (made / "config_DGXA100.sh").write_text("export DGXNGPU=8 LR=4e-4\n")
    handed_over = "BERT_CMD=${1}\n"
    put_together = 'BERT_CMD="python run_pretraining.py --learning_rate=$LR"\n'
    for first, second in (
        (put_together, handed_over),
        ("srun x\n", f'{put_together}eval "$LOGGER $BERT_CMD --fp16"\n'),
    ):
        (made / "run.sub").write_text(first)
        (made / "run_and_time.sh").write_text(second)
        assert next(each.value for each in read(made).mapped if each.key == "learning_rate") == 4e-4


def test_links_and_paths_out_of_the_folder_are_not_followed(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.sh"
    secret.write_text("export BATCHSIZE=1")
    (folder / "linked.sh").symlink_to(secret)
    os.mkfifo(folder / "config_PIPE.sh")
    (folder / "config_DGXA100.sh").write_text(f"{CONFIG}source linked.sh\nsource {secret}\nsource ../../../x.sh\n")
    made = read(folder, "DGXA100")
    assert [note.line for note in made.notes] == [6, 7, 8] and made.equals


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("--lr ", "--rate "), "no value"),
        (("train_imagenet.py", "another.py"), "was not found"),
        (("--num-epochs 42", "--num-epochs many"), "no value"),
        (("--num-epochs 42", "--num-epochs $(cat /etc/hostname)"), "known on the submitter's machine"),
    ],
)
def test_what_cannot_be_read_is_stated_and_not_run(folder: Path, change: tuple[str, str], expected: str) -> None:
    (folder / "run_and_time.sh").write_text(SCRIPT.replace(*change))
    shown = encore(folder)
    assert shown.exit_code == 0 and expected in shown.stdout.replace("\n", " ")
    refused = encore(folder, "--run")
    assert isinstance(refused.exception, EncoreError) and refused.exception.exit_code == 2


def test_gpus_that_nothing_names_are_asked_for(folder: Path) -> None:
    (folder / "config_DGXA100_common.sh").write_text(COMMON.replace("export DGXNGPU=8", ""))
    assert "--gpus-per-node" in read(folder).missing["gpus_per_node"]
    assert "equals" in encore(folder, "--gpus-per-node", "8").stdout


def test_a_later_task_under_the_same_name_is_none_of_ours(tmp_path: Path) -> None:
    made = tmp_path / "training_results_v3.0/Maker/benchmarks/ssd/implementations/pytorch"
    made.mkdir(parents=True)
    (made / "config_DGXH100.sh").write_text("export DGXNGPU=8 LR=1\n")
    (made / "run_and_time.sh").write_text("python train.py --lr $LR\n")
    assert "RetinaNet" in read(made).refused
    other = tmp_path / "training_results_v3.0/Maker/benchmarks/unet3d/implementations/mxnet"
    other.mkdir(parents=True)
    (other / "config_DGXH100.sh").write_text("export DGXNGPU=8 \x1b[2J LR='\x1b]0;x\x07'\n")
    shown = encore(other)
    assert "no benchmark here" in shown.stdout and "\x1b]0" not in shown.stdout


@pytest.mark.parametrize("name", ["nothing", "empty", "broken.zip", "broken.tar.gz", "config_LONG.sh"])
def test_what_is_no_source_is_refused_in_words(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.zip").write_bytes(b"PK\x03\x04 not really")
    (tmp_path / "broken.tar.gz").write_bytes(b"no archive" * 100)
    (tmp_path / "config_LONG.sh").write_bytes(b"A" * 2_000_000)
    done = encore(tmp_path / name)
    assert isinstance(done.exception, EncoreError) and done.exception.expected
