"""`encore reproduce` on small synthetic repositories: mapped and unmapped options, systems, and bad input."""

import importlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from encore import catalogue, configuration
from encore.catalogue import Choice, System
from encore.errors import EncoreError
from encore.lab.submissions import option_mapping
from encore.lab.submissions.log_options import printed_options
from encore.lab.submissions.reproduction import Reproduction, reproduce, reproduce_log
from encore.lab.submissions.source import open_source
from tests.command_line import error_of, output_of, run_encore
from tests.results.result_logs import mllog, write_files, write_set

Recorded = Callable[[str, object], None]
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


def submission() -> dict[str, str]:
    # A folder with one configuration, which equals the system dgxa100 of v0.7
    system = catalogue.find_system(catalogue.choose("resnet"), "dgxa100", "v0.7")
    variables = {name: value for values in system.environment.values() for name, value in values.items()}
    elsewhere = {"OMPI_MCA_btl", "MXNET_EXTENDED_NORMCONV_SUPPORT", "NCCL_DEBUG"}
    words = " \\\n    ".join(f"{name}={value}" for name, value in variables.items() if name not in elsewhere)
    image = (
        "ARG FROM_IMAGE_NAME=nvcr.io/nvidia/mxnet:20.06-py3\nLABEL FROM_IMAGE_NAME=ignored\nFROM ${FROM_IMAGE_NAME}\n"
    )
    dockerfile = f"{image}ENV {words}\n"
    files = {"Dockerfile": dockerfile, "config_DGXA100_common.sh": COMMON, "config_DGXA100.sh": CONFIG}
    return {f"{FOLDER}/{name}": text for name, text in {**files, "run_and_time.sh": SCRIPT}.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path, submission()) / FOLDER


def read(path: Path, config: str | None = None) -> Reproduction:
    source = open_source(path, config, None)
    return reproduce(source, source.configurations[0])


def encore(*words: str | Path) -> str:
    return output_of("reproduce", *words, width=120)


def without_program(text: str) -> str:
    # The path of the command is that of this installation
    return re.sub(r"\S*(?=encore (?:re|run))", "", text)


def test_folder_that_equals_a_system(folder: Path, recorded: Recorded) -> None:
    complete, lines = encore(folder, "--all"), encore(folder).splitlines()
    recorded("equal.txt", without_program(complete))
    assert lines == [*complete.splitlines()[:39], f"{complete.count(chr(10)) - 39} more lines with --all"]


def test_different_value_is_set_and_written_as_a_system(folder: Path, tmp_path: Path) -> None:
    dockerfile = submission()[f"{FOLDER}/Dockerfile"] + 'ENV "NCCL no=name"\n'
    write_files(folder, {"config_OURS.sh": CONFIG.replace('"6"', '"5.5"'), "Dockerfile": dockerfile})
    result, submitted = read(folder, "OURS"), read(folder, "DGXA100").system
    assert [(key.name, key.published, key.ours) for key in result.differences] == [("learning_rate", 5.5, 6.0)]
    assert (result.system.system, submitted.system) == ("ours", "dgxa100")
    command = (folder / "config_OURS.sh", "-o", tmp_path / "ours.toml")
    assert "--set learning_rate=5.5" in encore(*command).replace("\n", " ")
    system = catalogue.parse(System, tmp_path / "ours.toml")
    complete = system.model_copy(update={"config": {**system.config, **system.implementations["mxnet"]}})
    resolved = configuration.resolve(catalogue.choose("resnet"), complete, 1, 8, [])
    assert (resolved.get("learning_rate"), resolved.get("gradient_groups")) == (5.5, 20)
    error_of("reproduce", *command)  # The file exists
    # `encore run` refuses to start without data and GPUs, with its own exit code
    assert run_encore("reproduce", folder, "--config", "DGXA100", "--run", "--data", folder / "nothing").exit_code == 2


@pytest.mark.parametrize("form", ["zip", "gztar"])
def test_archive_is_read_as_its_folder(folder: Path, tmp_path: Path, form: str) -> None:
    name = FOLDER.partition("/")[0]
    archive = Path(shutil.make_archive(str(tmp_path / name), form, tmp_path, name))
    place = folder.relative_to(tmp_path / name)
    assert read(archive / place).equals
    with pytest.raises(EncoreError, match=str(place)):
        open_source(archive, None, None)


V05 = "v0.5.0/maker/submission"
MAKER = "training_results_v3.0/A Maker"
LATER = "training_results_v1.0/Maker/benchmarks/bert"
MXNET, V30, NC96 = (f"{MAKER}/benchmarks/resnet/implementations/{name}" for name in ("mxnet", "v30-mxnet", "NC96"))
TREES = {
    "v0.5": {
        f"{V05}/code/image_classification/mxnet/config_DGX1.sh": "DGXNNODES=1\n",
        f"{V05}/code/image_classification/mxnet/config_DGX1_multi.sh": "DGXNNODES=80\n",
        f"{V05}/code/other/mxnet/config_DGX1.sh": "DGXNNODES=1\n",
    },
    "v3.0": {
        f"{MXNET}/config_DGXA100.sh": "export DGXNGPU=8 DGXNNODES=1",
        f"{MXNET}/config_R750xax4A100-PCIE-80GB.sh": "export DGXNNODES=1\nexport DGXNGPU=4",
        f"{MXNET}/config_2xR750xax4A100-80GB-PCIe.sh": "export DGXNNODES=2\nexport DGXNGPU=4",
        f"{MXNET}/config_XE8545x4A100-SXM-80GB.sh": "export DGXNNODES=1\nexport DGXNGPU=4",
        f"{MXNET}/config_X660 G45_1x8x7.sh": "source $(dirname $0)/config_common.sh",
        f"{MXNET}/config_common.sh": "export DGXNGPU=8",
        f"{MXNET}/config_mounts.sh": "export A=1",
        f"{V30}/config_DGXH100_multi_8x8x50.sh": "export DGXNGPU=8",
        f"{NC96}/config_DGXA100_1x8x7.sh": "export DGXNGPU=8",
        **{f"{each}/Dockerfile": "FROM nvcr.io/nvidia/mxnet:23.09-py3" for each in (MXNET, NC96)},
        f"{V30}/Dockerfile": "FROM nvcr.io/nvidia/mxnet:23.04-py3",
        **{
            f"{MAKER}/systems/{name}.json": "{}"
            for name in (
                "R750xax4A100-PCIE-80GB",
                "XE8545x4A100-SXM-80GB",
                "2xR750xax4A100-PCIE-80GB",
                "NC96",
                "X660 G45",
            )
        },
    },
    "v4.0": {"v4.0/M/benchmarks/ft-llm/implementations/nemo/config_X.sh": "export MINIBS=2 TP=1\n"},
    # Scripts of one system's name before those of another.
    "v1.0": {f"{LATER}/{name}/run_and_time.sh": "python train.py" for name in ("tpu-v4-128", "tpu-v4-16")},
}
RESULTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("v0.5", f"{V05}/results/dgx1_ngc_mxnet/resnet", {}),
    ("v0.5", f"{V05}/results/dgx1_multi_ngc_mxnet/resnet", {}),
    ("v0.5", f"{V05}/results/dgx2_ngc_mxnet/resnet", {}),
    *(
        ("v3.0", f"{MAKER}/results/{system}/resnet", description)
        for system, description in (
            ("R750xax4A100-PCIE-80GB", {}),
            # The same words in another order, and nodes in front.
            ("2xR750xax4A100-PCIE-80GB", {"number_of_nodes": 2}),
            ("X660 G45_mxnet", {"accelerators_per_node": "8"}),
            # A folder of the system's own name before one that fits as well; else by GPUs, and what is no other's.
            ("NC96", {"accelerators_per_node": "8"}),
            ("R99", {"accelerators_per_node": "8", "accelerator_model_name": "NVIDIA A100"}),
            ("eos_n8_ngc23.04_mxnet", {"accelerator_model_name": "H100"}),
            ("R99x4", {"accelerators_per_node": "4"}),
            ("gone", {"number_of_nodes": 3}),
        )
    ),
    # The folder of a system, and not the folder of a benchmark in it.
    ("v3.0", f"{MAKER}/results/gone", {}),
    ("v1.0", f"{LATER}/implementations/ours", {}),
    # A folder with another name than its result.
    ("v4.0", "v4.0/M/results/X/llama2_70b_lora", {}),
    ("v1.0", f"{LATER.partition('/benchmarks')[0]}/results/tpu-v4-16/bert", {}),
)


def test_configurations_of_result_folders(tmp_path: Path, recorded: Recorded) -> None:
    sources = {}
    for number, (tree, place, description) in enumerate(RESULTS):
        system = {f"{MAKER}/systems/{place.split('/')[-2]}.json": description} if description else {}
        root = write_files(tmp_path / str(number), {**TREES[tree], **system})
        (root / place / ("resnet" if place.endswith("gone") else "")).mkdir(parents=True)
        try:
            source = open_source(root / place, None, None)
        except EncoreError as error:
            sources[place] = without_program(str(error).replace(str(root), "")).splitlines()
        else:
            sources[place] = [source.folder, *source.configurations]
    recorded("sources.json", sources)


def test_unknown_round_and_several_configurations(folder: Path) -> None:
    assert "v0.7" in error_of("reproduce", folder, "--round", "v0.8").expected
    (folder / "config_A B.sh").write_text(CONFIG)
    assert shlex.split(error_of("reproduce", folder, "--run").hint)[-4:] == [str(folder), "--config", "A B", "--run"]


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


DLRM = "training_results_v0.7/Maker/benchmarks/dlrm/implementations/hugectr"
BERT = "training_results_v0.7/Maker/benchmarks/bert/implementations/pytorch"
SSD = "training_results_v3.0/Maker/benchmarks/ssd/implementations/pytorch"
UNET = "training_results_v3.0/Maker/benchmarks/unet3d/implementations/mxnet"
HUGECTR = {
    f"{DLRM}/config_DGXA100.sh": "export DGXNGPU=8 CONFIG=settings.json\n",
    f"{DLRM}/run_and_time.sh": "huge_ctr --train ${CONFIG} | tee log\n",
}
PUT_TOGETHER = 'BERT_CMD="python run_pretraining.py --learning_rate=$LR"\n'
# By name: the folder that is read, and its files, those of ``submission`` except the given ones
READ: dict[str, tuple[str, dict[str, str]]] = {
    "the same": (FOLDER, {}),
    "settings in a JSON file": (DLRM, {**HUGECTR, f"{DLRM}/settings.json": json.dumps(SETTINGS)}),
    "no settings": (DLRM, HUGECTR),
    "settings that are no JSON": (DLRM, {**HUGECTR, f"{DLRM}/settings.json": "no { json"}),
    "settings too deep": (DLRM, {**HUGECTR, f"{DLRM}/settings.json": "[" * 100_000}),
    # A later script is read where the first has no command.
    **{
        f"the command in {name}": (BERT, {
            f"{BERT}/config_DGXA100.sh": "export DGXNGPU=8 LR=4e-4\n",
            f"{BERT}/run.sub": first,
            f"{BERT}/run_and_time.sh": second,
        })
        for name, first, second in (
            ("the first script", PUT_TOGETHER, "BERT_CMD=${1}\n"),
            ("the second script", "srun x\n", f'{PUT_TOGETHER}eval "$LOGGER $BERT_CMD --fp16"\n'),
        )
    },
    **{
        f"{old} becomes {new}": (FOLDER, {f"{FOLDER}/run_and_time.sh": SCRIPT.replace(old, new)})
        for old, new in (
            ("--lr ", "--rate "), ("train_imagenet.py", "another.py"), ("--num-epochs 42", "--num-epochs many"),
            ("--num-epochs 42", "--num-epochs $(cat /etc/hostname)"),
        )
    },
    "no number of GPUs": (FOLDER, {f"{FOLDER}/config_DGXA100_common.sh": COMMON.replace("export DGXNGPU=8", "")}),
    # RetinaNet under the name of SSD, and a benchmark that is none here, with what would control a terminal.
    "a later task": (SSD, {
        f"{SSD}/config_DGXH100.sh":
            "export DGXNGPU=8 LR=1\n",
        f"{SSD}/run_and_time.sh":
            "python train.py --lr $LR\n",
    }),
    "no benchmark here": (UNET, {
        f"{UNET}/config_DGXH100.sh":
            "export DGXNGPU=8 \x1b[2J LR='\x1b]0;x\x07'\n",
    }),
}  # fmt: skip


@pytest.mark.slow
def test_values_that_are_read_from_scripts(tmp_path: Path, recorded: Recorded) -> None:
    results = {}
    for number, (name, (place, files)) in enumerate(READ.items()):
        path = write_files(tmp_path / str(number), {**submission(), **files}) / place
        (result,) = json.loads(run_encore("reproduce", path, "--json").stdout)
        keys = result.pop("keys")
        rate = [value for key, value in keys.get("learning_rate", {}).items() if key != "meaning"]
        refused = bool(result["refused"] or result["missing"]) and error_of("reproduce", path, "--run").found
        results[name] = {**result, "keys": len(keys), "learning_rate": rate, "run": str(refused).replace(str(path), "")}
        assert "\x1b" not in run_encore("reproduce", path).stdout
        if name == "no number of GPUs":
            assert "equals" in encore(path, "--gpus-per-node", "8")
    recorded("read.json", results)


def bert_script() -> str:
    system = catalogue.find_system(catalogue.choose("bert"), "dgxa100", "v0.7")
    options = {
        "train_batch_size": 72, "gradient_accumulation_steps": 1, "max_steps": 700, "max_samples_termination": 10**6,
        "warmup_steps": 0, "start_warmup_step": 0, "opt_lamb_beta_1": 0.9, "opt_lamb_beta_2": 0.999,
        "weight_decay_rate": 0.01, "target_mlm_accuracy": 0.72, "eval_iter_start_samples": 1, "eval_iter_samples": 1,
        "eval_batch_size": 16, "max_seq_length": 512, "learning_rate": system.config["learning_rate"],
    }  # fmt: skip
    return f'BERT_CMD="python run_pretraining.py {" ".join(f"--{key}={value}" for key, value in options.items())}"\n'


def test_later_round_of_bert_starts_from_the_checkpoint(tmp_path: Path) -> None:
    place = "training_results_v4.1/Maker/benchmarks/bert/implementations/pytorch"
    files = {f"{place}/config_DGXH100_8x8x72x1.sh": "export DGXNGPU=8\n", f"{place}/run.sub": bert_script()}
    output = encore(write_files(tmp_path, files) / place)
    texts = ("checkpoint=", "put model.ckpt-28252.index and ", "8 x 8 GPUs", "rules of v0.7")
    assert [output.count(text) for text in texts] == [0, 1, 1, 1]
    assert output.index("submit bert --nodes 8") < output.index("max_steps: 700 published")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("DGXH100_128x8x1xtp4pp1cp2", "128 x 8"), ("DGXH100_128x8", "128 x 8"), ("DGXH100_008x08x004", "8 x 8"),
        ("DGX2_multi_32x16x65", "32 x 16"), ("2x2xH100", "2 x 2"), ("DGXH100", "1 x ?"), ("R750xax4A100", "1 x ?"),
    ],
)  # fmt: skip
def test_benchmark_without_mapping(name: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = [entry for entry in option_mapping.implementations() if entry[0] != "gpt_oss_20b"]
    monkeypatch.setattr(option_mapping, "implementations", lambda: mapped)
    place = "training_results_v6.0/Maker/benchmarks/gpt_oss_20b/implementations/nemo"
    output = encore(write_files(tmp_path, {f"{place}/config_{name}.sh": "export LR=1\n"}) / place)
    texts = (f"{layout} GPUs", "not mapped yet", "run gpt-oss-20b 8 --system ", "--round v6.0 ")
    assert [text for text in texts if text not in output] == []


NEMO = {"MINIBS": 2, "LR": 0.0004, "MAX_STEPS": 1200000, "TENSOR_MODEL_PARALLEL": 1, "CONTEXT_PARALLEL": 1,
        "MICRO_BATCH_SIZE": 2, "WARMUP_STEPS": 16, "VAL_CHECK_INTERVAL": 768}  # fmt: skip
LORA = {"MINIBS": 2, "TP": 1, "CP": 2, "MAX_STEPS": 896, "LR": 0.0005}
PRIMUS = {"PRIMUS_GLOBAL_BATCH_SIZE": 32, "PRIMUS_LR": 0.001, "PRIMUS_MIN_LR": 0.0001,
          "PRIMUS_EVAL_INTERVAL": "$((12288 / 32))", "PRIMUS_TRAIN_ITERS": 1200000}  # fmt: skip
GPT_OSS = {**NEMO, "MINIBS": 4, "EXPERT_PARALLEL": 8, "TENSOR_MODEL_PARALLEL": 2, "LR_WARMUP_STEPS": 384}


LATER_V4, LATER_V5, LATER_V6 = (f"training_results_{round_}/M/benchmarks" for round_ in ("v4.1", "v5.1", "v6.0"))
# By the path of a configuration: the variables that it exports.
CONFIGURATIONS: tuple[tuple[str, dict[str, object]], ...] = (
    (f"{LATER_V5}/llama31_8b/implementations/nemo/config_GB200_2x4x2.sh", NEMO),
    (f"{LATER_V5}/llama31_8b/implementations/nemo/config_GB200_2x4x2.sh", {**NEMO, "MODEL_SIZE": "405b"}),
    (f"{LATER_V5}/llama31_8b/implementations/nemo/config_GB200_2x4x2.sh", {**NEMO, "CONTEXT_PARALLEL": 4}),
    (f"{LATER_V5}/llama3_8b/implementations/nemo/config_GB200_2x4x2.sh", NEMO),
    (f"{LATER_V5}/llama2_70b_lora/implementations/nemo2/config_GB200_2x4x2.sh", LORA),
    (f"{LATER_V5}/llama2_70b_lora/implementations/nemo1/config_GB200_2x4x2.sh", LORA),
    (f"{LATER_V4}/llama2_70b_lora/implementations/nemo/config_DGXH200_1x8x2.sh", LORA),
    (f"{LATER_V4}/llama2_70b/implementations/nemo/config_DGXH200_1x8x2.sh", {**LORA, "PP": 2}),
    (
        "training_results_v4.0/M/benchmark/llama2-70b_lora/implementations/nemo/config_H_1x8x2.sh",
        {**LORA, "TP": 2, "CP": 1, "MAX_STEPS": 1024},
    ),
    (f"{LATER_V6}/llama31_8b/implementations/primus/config_MI350X_1x8x1.sh", PRIMUS),
    (f"{LATER_V6}/llama31_8b/implementations/primus/config_MI350X_8x8x1.sh", PRIMUS),
    (f"{LATER_V6}/gpt_oss_20b/implementations/primus/config_MI350X_8x8x1.sh", PRIMUS),
    (
        f"{LATER_V6}/gpt_oss_20b/primus/config_MI350X_1x8x1.sh",
        {**PRIMUS, "EVAL_ITERS": 32, "PRIMUS_EP": 1, "PRIMUS_GRAD_REDUCE_IN_BF16": "false"},
    ),
    (f"{LATER_V6}/gpt_oss_20b/implementations/nemo/config_MI350X_1x8x1.sh", GPT_OSS),
    # NeMo's default of TP is 1, which v6.0's scripts do not set. Primus does not read MINIBS and MAX_STEPS.
    (
        f"{LATER_V6}/llama2_70b_lora/implementations/x/config_MI350X_1x8x1.sh",
        {"MINIBS": 1, "CP": 1, "MAX_STEPS": 550, "LR": 0.0006},
    ),
    (
        f"{LATER_V6}/llama2_70b_lora/implementations/x/config_MI350X_1x8x1.sh",
        {"PRIMUS_PATH": "/a", "PRETRAINED_CHECKPOINT": "/b", "MINIBS": 4, "MAX_STEPS": 9, "LR": 0.0006},
    ),
    # A variable that is known on the submitter's machine only has no default.
    (
        "training_results_v6.0/MiTAC/benchmarks/llama31_8b/implementations/MI325X_1node/config_MI325X_1x8x1.sh",
        {**PRIMUS, "PRIMUS_MIN_LR": '$(awk "BEGIN { print $PRIMUS_LR * 0.1 }")'},
    ),
)


def test_configurations_of_variables(tmp_path: Path, recorded: Recorded) -> None:
    results = []
    for number, (place, variables) in enumerate(CONFIGURATIONS):
        exports = "".join(f"export {variable}={value}\n" for variable, value in variables.items())
        text = f"source $(dirname ${{BASH_SOURCE[0]}})/config_common.sh\n{exports}unset LOAD_CHECKPOINT\n"
        common = {f"{Path(place).parent}/config_common.sh": "export LOAD_CHECKPOINT=x\n"}
        if "nemo1" in place:
            common[f"{Path(place).parent}/src/train.py"] = (
                "trainer = MegatronLMPPTrainerBuilder(cfg).create_trainer()\n"
            )
        result = read((write_files(tmp_path / str(number), {place: text, **common}) / place).parent)
        results.append({
            "place": place, "refused": result.refused, "missing": result.missing, "is_checked": result.is_checked,
            "system": result.system and result.system.system, "nearest": result.nearest and result.nearest.system,
            "differences": [key.name for key in result.differences],
            "known": [option.name for option in result.known_left],
            "unknown": [option.name for option in result.unknown_left],
            "values": {mapped.key: mapped.value for mapped in result.mapped},
        })  # fmt: skip
    recorded("configurations.json", results)


LOGGED = sorted(name for name, table in option_mapping.submitted().items() if table.log)


def mlperf_log(choice: Choice, system: System) -> str:
    # The hyperparameters that a run of the system logs, without the first line of the file
    resolved = configuration.resolve(choice, system, system.nodes, system.gpus_per_node, [])
    config = importlib.import_module(f"{choice.implementation.module}.config").Config(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in resolved.plain().items()}
    )
    folder = choice.folder.parent.name
    package = "llama" if folder in ("llama31_8b", "gpt_oss_20b") else folder
    values = importlib.import_module(f"benchmarks.{package}.mlperf").hyperparameters(
        config, system.nodes * system.gpus_per_node, *{"resnet": (100,), "bert": (76,)}.get(folder, ())
    )
    events = {"submission_benchmark": folder, **{key: getattr(value, "value", value) for key, value in values.items()}}
    return "".join(mllog(key, value, 1) for key, value in events.items()).rstrip()


@pytest.mark.parametrize("folder", LOGGED)
def test_log_of_a_system_has_its_configuration(folder: str, tmp_path: Path) -> None:
    choice = next(choice for choice in catalogue.choices().values() if choice.folder.parent.name == folder)
    systems = [
        system
        for system in catalogue.systems(choice)
        if system.kind in ("submitted", "later") and system.framework in (choice.implementation.framework, "")
    ]
    # gpt-oss-20b has no submitted system: none is near, but the values are read
    for system in systems or [catalogue.find_system(choice, "reference_b200", "v6.0")]:
        write_set(tmp_path, [f"a line of another program\n{mlperf_log(choice, system)}\n"])
        result = reproduce_log(tmp_path / "result_0.txt", system.round, system.nodes, system.gpus_per_node)
        assert (result.refused, result.missing, result.differences) == ("", {}, ())
        resolved = configuration.resolve(choice, system, system.nodes, system.gpus_per_node, [])
        mapped = {mapping.key: mapping.value for mapping in result.mapped}
        assert mapped == {key: resolved.get(key) for key in mapped}


def test_reproduced_log_states_lines_and_assumed_keys(tmp_path: Path) -> None:
    choice = catalogue.choose("llama31-8b")
    system = catalogue.find_system(choice, "hpf_n8", "v5.1")
    unknown = mllog("submission_benchmark", "unet3d", 1)
    write_set(tmp_path, [f"\n{mlperf_log(choice, system)}\n".replace("0.0008", "0.0009"), unknown])
    arguments = ("--round", "v5.1", "--nodes", "8", "--gpus-per-node", "8")
    output = encore(tmp_path / "result_0.txt", *arguments, "-o", tmp_path / "new.toml")
    assert "--set learning_rate=0.0009" in output and "not in the log, from hpf_n8: micro_batch=1, " in output
    assert re.search(r"learning_rate +0\.0009 +--opt_base_learning_rate +line ", output)
    written = catalogue.parse(System, tmp_path / "new.toml")
    assert written.config == {**system.config, **written.config, "learning_rate": 0.0009}
    assert "unet3d" in str(error_of("reproduce", tmp_path / "result_1.txt"))


NEMO_DUMP = """+ srun -l --ntasks=8 slurm2pytorch ./run_and_time.sh
0:     ***** Experiment configuration *****
0:     model:
0:       data:
0:         train_ds:
0:           file_names:
0:           - /data/train.npy
0:           micro_batch_size: 4
1: other text
0:     model:
0:       tensor_model_parallel_size: 2
0:       micro_batch_size: 1
0:     optim:
0:       sched:
0:         warmup_steps: 0
"""


@pytest.mark.parametrize(
    ("printed", "lines"),
    [
        (NEMO_DUMP, {"micro_batch": 12, "tensor_parallelism": 11, "warmup_steps": 15}),
        (":::DLPAL image 5 1 node 'unknown' DGXH200_1x8x2xtp2pp1cp1\n", {"tensor_parallelism": 1, "micro_batch": 1}),
    ],
)
def test_configuration_of_nemo_in_a_log(printed: str, lines: dict[str, int], tmp_path: Path) -> None:
    choice = catalogue.choose("llama2-70b-lora")
    system = catalogue.find_system(choice, "h200", "v4.0")
    (tmp_path / "result_0.txt").write_text(f"{printed}{mlperf_log(choice, system)}\n")
    result = reproduce_log(tmp_path / "result_0.txt", "v4.0", 1, 8)
    mapped = {mapping.key: mapping for mapping in result.mapped}
    resolved = configuration.resolve(choice, system, 1, 8, [])
    found = {key: (f"line {line}" in mapped[key].sources, mapped[key].value) for key, line in lines.items()}
    assert found == {key: (True, resolved.get(key)) for key in lines}
    assert (result.nearest.system, result.differences) == ("h200", ())


def test_command_and_arguments_of_a_program_in_a_log(tmp_path: Path) -> None:
    choice = catalogue.choose("bert")
    system = catalogue.find_system(choice, "dgxa100", "v0.7")
    words = shlex.split(bert_script().partition("=")[2])[0].split()
    # srun cuts long lines; the second rank prints its arguments in between
    arguments = ", ".join(word.lstrip("-") for word in words[2:]) + ", fp16=True, resume=False, eps='1e-6')"
    texts = (
        f"0: Namespace({arguments[:200]}\n1: Namespace({arguments[:9]}\n0: {arguments[200:]}\n",
        f"+ {shlex.join(words)} --fp16 | tee log\n",
        f"1: ++ export INIT_LOSS_SCALE=4096.0\n1: ++ INIT_LOSS_SCALE=4096.0\n+ {shlex.join(words)}\n",
    )
    folder = write_set(tmp_path, [f"{text}{mlperf_log(choice, system)}\n" for text in texts])
    by_namespace, by_command, traced = (
        {key.key: key for key in reproduce_log(folder / f"result_{number}.txt", "v0.7", 1, 8).mapped}
        for number in range(3)
    )
    # MLPerf keys come first: global_batch_size is that of the system
    values = {"batch_size": 32, "max_samples": 10**6, "precision": "fp16", "eval_batch_size": 16}
    for mapped, line in ((by_namespace, "line 3"), (by_command, "line 1")):
        assert {key: mapped[key].value for key in values} == values
        # The loss scale is a variable of the environment
        assert (mapped["eval_batch_size"].sources, "loss_scale" in mapped) == ({line}, False)
    assert (traced["loss_scale"].value, traced["loss_scale"].sources) == (4096.0, {"line 2", "INIT_LOSS_SCALE"})


def test_flag_files_named_in_a_log_of_minigo(tmp_path: Path) -> None:
    choice = catalogue.choose("minigo")
    system = catalogue.find_system(choice, "dgxa100", "v0.7")
    implementation = "Maker/benchmarks/minigo/implementations/tensorflow"
    flags = f"{implementation}/minigo/ml_perf/flags/19"
    write_files(
        tmp_path / "training_results_v0.7",
        {
            f"{implementation}/config_DGXA100.sh": "export DGXNNODES=1 DGXNGPU=8\n",
            f"{flags}/train.flags": "# widths\n--conv_width=64\n--lr_rates=0.1\n--lr_rates=1\n",
            f"{flags}/train_loop.flags": "--conv_width=32\n",
            "Maker/systems/dgxa100.json": '{"number_of_nodes": 1, "accelerators_per_node": 8}',
            "Maker/results/dgxa100/minigo/result_0.txt": "+ python3 train_loop.py --num_gpus_train=4 --procs_per_gpu=4"
            f" --flagfile=ml_perf/flags/19/train_loop.flags\n{mlperf_log(choice, system)}\n",
        },
    )
    log = tmp_path / "training_results_v0.7/Maker/results/dgxa100/minigo/result_0.txt"
    mapped = {key.key: key for key in reproduce_log(log, "v0.7", 1, 8).mapped}
    width, rate = mapped["conv_width"], mapped["learning_rate"].value  # MLPerf's lines have rates
    assert (width.value, width.sources, rate) == (32, {"minigo/ml_perf/flags/19/train_loop.flags"}, 0.16)
    log.write_text(log.read_text().replace("--flagfile", "--file"))
    assert "conv_width" not in {key.key for key in reproduce_log(log, "v0.7", 1, 8).mapped}


def test_options_in_damaged_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "result_0.txt"
    log.write_bytes(
        b"python train.py --lr 'x\n" + b"a" * 200_000 + b"\n  micro_batch_size ........ 2\nNamespace(x=1, y=0."
    )
    assert [(option.text, *option.sources) for option in printed_options(log, {"train.py"})] == [
        ("--micro_batch_size=2", "line 3"), ("--lr", "line 1"), ("'x", "line 1"), ("--x=1", "line 4"),
    ]  # fmt: skip


def test_links_and_paths_out_of_the_folder_are_not_followed(folder: Path, tmp_path: Path) -> None:
    secret = write_files(tmp_path, {"secret.sh": "export BATCHSIZE=1"}) / "secret.sh"
    (folder / "linked.sh").symlink_to(secret)
    os.mkfifo(folder / "config_PIPE.sh")
    (folder / "config_DGXA100.sh").write_text(f"{CONFIG}source linked.sh\nsource {secret}\nsource ../../../x.sh\n")
    result = read(folder, "DGXA100")
    assert ([note.line for note in result.notes], result.equals) == ([6, 7, 8], True)
