"""Every submitted system against the scripts that were submitted: hyperparameters, DALI's settings, environment.

The scripts' side is tests/samples/submitted_configurations.toml, which tools/submitted_configurations.py wrote by
executing them; it knows nothing of our systems.
"""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import ValidationError

from encore import catalogue, configuration, paths
from encore.catalogue import Choice, System
from encore.configuration import Configuration
from encore.job import rank_environment
from encore.launchers import Launch

SAMPLES = paths.ROOT / "tests" / "samples"
CHOICES = {
    "image_classification": "resnet",
    "resnet": "resnet",
    "bert": "bert",
    "recommendation": "ncf",
    "dlrm": "dlrm",
    "rnn_translator": "gnmt",
    "gnmt": "gnmt",
    "object_detection": "maskrcnn",
    "maskrcnn": "maskrcnn",
    "single_stage_detector": "ssd",
    "ssd": "ssd",
    "minigo": "minigo",
    "translation": "transformer",
    "transformer": "transformer",
}
"""Our benchmark for a submitted folder, by the part of its path that names the task."""

NOT_SET = {
    "NCCL_SOCKET_IFNAME": "the submitter's own network; Encore looks for the interfaces",
    "MXNET_HOROVOD_NUM_GROUPS": "read by the submitted common/fit.py alone; here the key gradient_groups",
    "NCCL_TOPO_FILE": "describes the submitter's own nodes",
    "LD_PRELOAD": "tcmalloc of one image; where the file is not there, every process complains",
    "MXNET_ASYNC_GPU_ENGINE": "an operation counts as done before it is, and DALI's buffers are protected by that",
    "TF_ENABLE_DEPRECATION_WARNINGS": "read by NVIDIA's TensorFlow 1 alone",
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "belongs to MXNET_ASYNC_GPU_ENGINE",
}
"""Variables of the submissions that no system of ours sets, with the reason."""


@dataclass(frozen=True)
class Submitted:
    """One submitted configuration, as the scripts have it."""

    choice: Choice
    round: str
    system: str
    folder: str
    config: str
    arguments: dict[str, str]
    flags: tuple[str, ...]
    environment: dict[str, dict[str, str]]
    """By the file that has the last word."""

    @property
    def variables(self) -> dict[str, str]:
        return {name: value for variables in self.environment.values() for name, value in variables.items()}

    @property
    def ours(self) -> System:
        found = catalogue.systems(self.choice)
        return next(s for s in found if s.system == self.system and self.folder in s.source and self.round in s.source)


def assignments(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


def effective(tables: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return the tables without what a later one sets again: Dockerfile, then what the configuration includes."""
    later: set[str] = set()
    found = {}
    for file in sorted(tables, key=lambda file: (file == "Dockerfile", "_common" in file, file != "run_and_time.sh")):
        found[file] = {name: value for name, value in tables[file].items() if name not in later}
        later |= set(tables[file])
    return found


def submitted() -> list[Submitted]:
    table = catalogue.read_toml(SAMPLES / "submitted_configurations.toml")
    found = []
    for each in table["submission"]:
        for entry in each["configuration"]:
            command = shlex.split(entry["command"])
            options = re.findall(r" (--?[a-z][\w-]*)((?: (?!--?[a-z])\S+)*)", f" {' '.join(command)}")
            found.append(
                Submitted(
                    choice=catalogue.choose(
                        next(CHOICES[part] for part in each["folder"].split("/") if part in CHOICES)
                    ),
                    round=each["repository"].rpartition("_")[2],
                    system=entry["system"],
                    folder=each["folder"],
                    config=entry["config"],
                    arguments={name.lstrip("-").replace("-", "_"): value.strip() for name, value in options},
                    flags=tuple(word.lstrip("-") for word in command if word.startswith("--")),
                    environment=effective(
                        {
                            "Dockerfile": assignments(each["dockerfile"]),
                            **{file: assignments(text) for file, text in entry.get("environment", {}).items()},
                        }
                    ),
                )
            )
    return found


SUBMITTED = submitted()
RESNETS = [each for each in SUBMITTED if each.choice.name == "resnet"]


def name_of(each: Submitted) -> str:
    return f"{each.choice.name}-{each.round}-{each.system}"


def resolved(system: System, choice: Choice) -> Configuration:
    return configuration.resolve(choice, system, system.nodes, system.gpus_per_node, [])


def expected_of_resnet(each: Submitted) -> dict[str, Any]:
    """Return our keys with the values of the submitted command; a flag that a round lacks has its code's default."""
    given = {
        "mom": "0.9",
        "wd": "1e-4",
        "label_smoothing": "0",
        "lars_eta": "0.001",
        "dali_threads": "3",
    } | each.arguments
    steps = given["lr_step_epochs"]
    gpus = each.ours.gpus_per_node if given["kv_store"] == "device" else 1  # there --batch-size is of the node

    def number(name: str) -> float:
        return float(given.get(f"dali_{name}", 0))

    return {
        "batch_size": int(given["batch_size"]) // gpus,
        "learning_rate": float(given["lr"]),
        "schedule": "pow2" if steps == "pow2" else "step",
        "decay_epochs": () if steps == "pow2" else tuple(map(int, steps.split(","))),
        "epochs": int(given["num_epochs"]),
        "warmup_epochs": float(given["warmup_epochs"]),
        "weight_decay": float(given["wd"]),
        "momentum": float(given["mom"]),
        "label_smoothing": float(given["label_smoothing"]),
        "quality_target": float(given["accuracy_threshold"]),
        "eval_period": int(given["eval_period"]),
        "eval_offset": int(given["eval_offset"]),
        "depth": int(given["num_layers"]),
        "precision": {"float16": "fp16"}[given["dtype"]],
        "pad_channels": given["image_shape"].startswith("4,"),
        "layout": given["input_layout"],
        "crop_area": (float(given["min_random_area"]), float(given["max_random_area"])),
        "batch_norm_momentum": float(given["batchnorm_mom"]),
        "batch_norm_epsilon": float(given["batchnorm_eps"]),
        "dali_threads": number("threads"),
        "dali_prefetch": number("prefetch_queue"),
        "dali_decoder_cache_mb": number("cache_size"),
        "dali_hw_decoder_load": number("hw_decoder_load"),
        "dali_nvjpeg_padding_mb": number("nvjpeg_memory_padding"),
        "dali_preallocate_width": number("preallocate_width"),
        "dali_preallocate_height": number("preallocate_height"),
        "dali_decoder_hint": number("decoder_buffer_hint"),
        "dali_crop_hint": number("crop_buffer_hint"),
        "dali_normalize_hint": number("normalize_buffer_hint"),
        "dali_temp_hint": number("tmp_buffer_hint"),
        "dali_mmap": not number("dont_use_mmap"),
        "dali_shuffle_buffer": 1024,  # DALI's default of initial_fill, which no round passes
        "gradient_groups": int(each.variables.get("MXNET_HOROVOD_NUM_GROUPS", 0)),
    }


@pytest.mark.parametrize("each", RESNETS, ids=name_of)
def test_resnet_has_the_submitted_values(each: Submitted) -> None:
    found = resolved(each.ours, each.choice).plain()
    expected = expected_of_resnet(each)
    assert {name: found[name] for name in expected} == expected
    assert (found["optimizer"] == "sgd") == (each.arguments["optimizer"] == "sgd")


@pytest.mark.parametrize("each", [each for each in SUBMITTED if each.choice.name == "dlrm"], ids=name_of)
def test_dlrm_has_the_submitted_values(each: Submitted) -> None:
    given, ours = each.arguments, each.ours
    found = resolved(ours, each.choice)
    assert found.get("batch_size") * found.ranks == int(given["batch_size"])
    expected = {
        "learning_rate": float(given["lr"]),
        "end_learning_rate": float(given["decay_end_lr"]),
        "warmup_steps": int(given["warmup_steps"]),
        "decay_steps": int(given["decay_steps"]),
        "decay_start_step": int(given["decay_start_step"]),
        "quality_target": float(given["auc_threshold"]),
        "eval_interval": int(given["test_freq"]),
        "cache_eval_data": "cache_eval_data" in each.flags,
    }
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize("each", [each for each in SUBMITTED if each.choice.name == "bert"], ids=name_of)
def test_bert_has_the_submitted_values(each: Submitted) -> None:
    given = dict(flag.split("=", 1) for flag in each.flags if "=" in flag)
    found = resolved(each.ours, each.choice)
    expected = {
        "batch_size": int(given["train_batch_size"]),
        "accumulation": int(given["gradient_accumulation_steps"]),
        "learning_rate": float(given["learning_rate"]),
        # warmup_proportion is read where there are no warmup_steps, and is 0 in each.
        "warmup_steps": int(float(given["warmup_steps"])),
        "start_warmup_step": int(float(given["start_warmup_step"])),
        "max_steps": int(given["max_steps"]),
        "max_samples": int(given["max_samples_termination"]),
        "beta1": float(given["opt_lamb_beta_1"]),
        "beta2": float(given["opt_lamb_beta_2"]),
        "weight_decay": float(given["weight_decay_rate"]),
        "quality_target": float(given["target_mlm_accuracy"]),
        "eval_start_samples": int(given["eval_iter_start_samples"]),
        "eval_interval_samples": int(given["eval_iter_samples"]),
        "eval_batch_size": int(given["eval_batch_size"]),
        "positions": int(given["max_seq_length"]),
        "precision": "fp16" if "fp16" in each.flags else "fp32",
    }
    assert float(given["warmup_proportion"]) == 0
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize("each", [each for each in SUBMITTED if each.choice.name == "ncf"], ids=name_of)
def test_ncf_has_the_submitted_values(each: Submitted) -> None:
    given, found = each.arguments, resolved(each.ours, each.choice)
    assert found.get("batch_size") * found.ranks == int(given["b"])
    assert f"nproc_per_node={found.ranks}" in each.flags
    expected = {
        "learning_rate": float(given["l"]),
        "beta1": float(given["b1"]),
        "beta2": float(given["b2"]),
        "epsilon": float(given["eps"]),
        "eval_batch_size": int(given["valid_batch_size"]),
        "loss_scale": float(given["loss_scale"]),
        "layers": tuple(map(int, given["layers"].split())),
        "factors": int(given["f"]),
        "quality_target": float(given["threshold"]),
        "precision": "fp16" if "fp16" in each.flags else "fp32",
    }
    assert {name: found.get(name) for name in expected} == expected


def words(dictionary: str) -> dict[str, str]:
    return dict(pair.split(":") for pair in dictionary.strip("{}").split(","))


def expected_of_gnmt(each: Submitted) -> dict[str, Any]:
    """Return our keys with the values of the submitted command; in v0.5 three of its options are dictionaries."""
    given = each.arguments
    if each.round == "v0.5":
        inside = {name: value for key in given if key.endswith("_config") for name, value in words(given[key]).items()}
        expected = {
            "width": int(inside["hidden_size"]),
            "layers": int(inside["num_layers"]),
            "dropout": float(inside["dropout"]),
            "batch_size": int(given["batch_size"]),
            "warmup_steps": int(inside["warmup_iters"]),
            "decay_interval": int(inside["decay_steps"]),
            "max_length_train": 50,  # train.py's default, which no configuration of v0.5 sets
        }
        given = given | inside
    else:
        expected = {
            "batch_size": int(given["train_batch_size"]),
            "warmup_steps": int(given["warmup_steps"]),
            "decay_interval": int(given["decay_interval"]),
            "max_length_train": int(given["max_length_train"]),
        }
    return expected | {
        "learning_rate": float(given["lr"]),
        "remain_steps": int(given["remain_steps"]),
        "epochs": int(given["epochs"]),
        "eval_batch_size": int(given["test_batch_size"]),
        "quality_target": float(given["target_bleu"]),
        "precision": {"fp16": "fp16", "amp_fp16": "fp16"}[given["math"]],
        "optimizer": {"FusedAdam": "adam"}[given["optimizer"]],
        "split_optimizer": given.get("distributed_weight_update", "0") == "2",
    }


@pytest.mark.parametrize("each", [each for each in SUBMITTED if each.choice.name == "gnmt"], ids=name_of)
def test_gnmt_has_the_submitted_values(each: Submitted) -> None:
    found, expected = resolved(each.ours, each.choice), expected_of_gnmt(each)
    assert {name: found.get(name) for name in expected} == expected


def expected_of_transformer(each: Submitted) -> dict[str, Any]:
    """Return our keys with the values of the submitted command; what v0.5 leaves out has fairseq's default."""
    given = {
        "max_source_positions": "1024",
        "max_target_positions": "1024",
        "seq_len_multiple": "1",
        "lenpen": "1",
        "max_len_a": "0",
        "max_len_b": "200",
    } | each.arguments
    assert given["max_source_positions"] == given["max_target_positions"]
    # Ours has no such keys: there is no penalty on weights, and BLEU ignores case.
    assert float(given["weight_decay"]) == 0 and "ignore-case" in each.flags
    beta1, beta2 = map(float, given["adam_betas"].strip("()").split(","))
    return {
        "split_optimizer": given.get("distributed_weight_update", "0") == "2",
        "batch_size": int(given["max_tokens"]),
        "learning_rate": float(given["lr"]),
        "warmup_steps": int(given["warmup_updates"]),
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": float(given["adam_eps"]),
        "gradient_clip": float(given["clip_norm"]),
        "dropout": float(given["dropout"]),
        "label_smoothing": float(given["label_smoothing"]),
        "epochs": int(given["max_epoch"]),
        "quality_target": float(given["target_bleu"]),
        "max_length": int(given["max_source_positions"]),
        "length_multiple": int(given["seq_len_multiple"]),
        "length_penalty": float(given["lenpen"]),
        "length_constant": 0.0 if each.round == "v0.5" else 5.0,  # fairseq/sequence_generator.py
        "longest_factor": float(given["max_len_a"]),
        "longest_offset": int(given["max_len_b"]),
        "precision": "fp16" if "fp16" in each.flags else "fp32",
    }


@pytest.mark.parametrize("each", [each for each in SUBMITTED if each.choice.name == "transformer"], ids=name_of)
def test_the_transformer_has_the_submitted_values(each: Submitted) -> None:
    found, expected = resolved(each.ours, each.choice), expected_of_transformer(each)
    assert {name: found.get(name) for name in expected} == expected
    # train.py: 1,024 sentences over the ranks, at least 8 and at most 128 each; in v0.7 whole multiples of 4.
    share = math.ceil(1024 / found.ranks)
    assert found.get("eval_batch_size") == max(8, min(share // 4 * 4 if each.round == "v0.7" else share, 128))


def options_of_ssd(each: Submitted) -> dict[str, str]:
    """Return the options of a submitted command, some of which have an equals sign, with the defaults of its code."""
    joined = dict(flag.split("=", 1) for flag in each.flags if "=" in flag)
    given = each.arguments | {name.replace("-", "_"): value for name, value in joined.items()}
    if each.folder.endswith("mxnet"):  # ssd_main.py; its target is in percent
        defaults = {
            "eval_batch_size": given["batch_size"],
            "dali_workers": "6",
            "input_jpg_decode": "gpu",
            "lr_decay_epochs": "44 55",
            "threshold": "0.23",
        }
        steps = int(given["lr_warmup_epoch"]) * 117266 // (each.ours.nodes * each.ours.gpus_per_node)
        given = defaults | given | {"warmup": str(steps // int(given["batch_size"])), "wd": given["weight_decay"]}
        return given | {"num_workers": given["dali_workers"]}
    return {"eval_batch_size": "32", "num_workers": "4", "wd": "5e-4", "lr_decay_epochs": "44 55"} | given


def expected_of_ssd(each: Submitted) -> dict[str, Any]:
    """Return our keys with the values of the submitted command."""
    given, mxnet = options_of_ssd(each), each.folder.endswith("mxnet")
    in_steps = each.round != "v0.7"  # train.py's --decay1 and --decay2; v0.5 leaves --evaluation out as well
    points = given.get("evaluation", "120000 160000 180000 200000 220000 240000") if in_steps else ""
    cached = given.get("input_jpg_decode") == "cache"
    on_gpu = mxnet or "use-nvjpeg" in each.flags
    nhwc = mxnet or "nhwc" in each.flags
    return {
        "batch_size": int(given["batch_size"]),
        "learning_rate": float(given["lr"]),
        "warmup_steps": int(given["warmup"]),
        "warmup_factor": int(given.get("warmup_factor", 0)),
        "weight_decay": float(given["wd"]),
        "epochs": int(given["epochs"]),
        "quality_target": float(given["threshold"]),
        "decay_steps": (160000, 200000) if in_steps else (),
        "decay_epochs": tuple(map(int, given["lr_decay_epochs"].split())),
        "eval_steps": tuple(map(int, points.split())),
        "eval_epochs": (40, 50, 55, 60, 65, 70, 75, 80),  # parse_config.py; it evaluates at 85 epochs of 80, too
        "eval_batch_size": int(given["eval_batch_size"]),
        "concurrent_evaluation": not in_steps,
        "bn_group": int(given.get("bn_group", 1)),
        "layout": "NHWC" if nhwc else "NCHW",
        "pad_channels": nhwc,
        "precision": "fp16" if mxnet or "use-fp16" in each.flags else "fp32",
        "decoder": "gpu" if on_gpu else "cpu",
        "dali_threads": int(given["num_workers"]),
        "dali_batches": int(given.get("input_batch_multiplier", 1)),
        "dali_decoder_cache_mb": -(-100 * 1024 // (each.ours.nodes * each.ours.gpus_per_node)) if cached else 0,
    }


@pytest.mark.parametrize("each", [each for each in SUBMITTED if each.choice.name == "ssd"], ids=name_of)
def test_ssd_has_the_submitted_values(each: Submitted) -> None:
    found, expected = resolved(each.ours, each.choice), expected_of_ssd(each)
    assert {name: found.get(name) for name in expected} == expected


def expected_of_maskrcnn(each: Submitted) -> dict[str, Any]:
    """Return our keys with the values of the submitted command, which overrides those of its configuration file."""
    words = each.arguments["config_file"].split()[1:]
    given = dict(zip(words[::2], words[1::2], strict=True))
    ranks = each.ours.nodes * each.ours.gpus_per_node
    assert given["SOLVER.WARMUP_METHOD"] == "mlperf_linear"
    per_rank = given.get("DATALOADER.IMAGES_PER_BATCH_TRAIN")
    batch = int(per_rank) if per_rank else int(given["SOLVER.IMS_PER_BATCH"]) // ranks
    expected = {
        "batch_size": batch,
        "learning_rate": float(given["SOLVER.BASE_LR"]),
        "warmup_steps": int(given["SOLVER.WARMUP_ITERS"]),
        "warmup_factor": float(given["SOLVER.WARMUP_FACTOR"]),
        "decay_steps": tuple(map(int, given["SOLVER.STEPS"].strip("()").split(","))),
        "proposals_train": int(given["MODEL.RPN.FPN_POST_NMS_TOP_N_TRAIN"]),
        # Whole epochs that hold the submitted number of updates.
        "epochs": math.ceil(int(given["SOLVER.MAX_ITER"]) * batch * ranks / 117_266),
        "precision": {"float16": "fp16"}[given["DTYPE"]] if "DTYPE" in given else "fp16",
        "box_target": float(each.arguments.get("min_bbox_map", 0.377)),
        "mask_target": float(each.arguments.get("min_mask_map", 0.339)),
    }
    if "TEST.IMS_PER_BATCH" in given:
        expected["eval_batch_size"] = int(given["TEST.IMS_PER_BATCH"]) // ranks
    return expected


@pytest.mark.parametrize("each", [each for each in SUBMITTED if each.choice.name == "maskrcnn"], ids=name_of)
def test_mask_rcnn_has_the_submitted_values(each: Submitted) -> None:
    found, expected = resolved(each.ours, each.choice), expected_of_maskrcnn(each)
    assert "DTYPE" in each.arguments["config_file"] or "fp16" in each.flags
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize("each", SUBMITTED, ids=name_of)
def test_the_environment_is_the_submitted_one(each: Submitted) -> None:
    wanted = {
        file: {name: value for name, value in variables.items() if name not in NOT_SET}
        for file, variables in each.environment.items()
    }
    assert each.ours.environment == {file: variables for file, variables in wanted.items() if variables}


def test_every_system_that_was_submitted_is_compared() -> None:
    compared = {(each.choice.name, each.ours.file) for each in SUBMITTED}
    ours = {
        (choice.name, system.file)
        for choice in map(catalogue.choose, set(CHOICES.values()))
        for system in catalogue.systems(choice)
        if system.kind in ("submitted", "later")
    }
    assert compared == ours


# Minigo's save all of theirs with each generation's model (run() in train.py of v0.7).
@pytest.mark.parametrize("each", [each for each in SUBMITTED if each.choice.name != "minigo"], ids=name_of)
def test_a_submitted_system_keeps_no_checkpoint(each: Submitted) -> None:
    assert resolved(each.ours, each.choice).get("checkpoint_interval") == 0


def environment_of(name: str, system: str, *settings: str, extra: dict[str, str] | None = None) -> dict[str, str]:
    choice = catalogue.choose(name)
    found = catalogue.find_system(choice, system, None)
    made = configuration.resolve(choice, found, found.nodes, found.gpus_per_node, list(settings))
    return rank_environment(made, Launch("horovodrun"), extra or {}, 16)


def test_ranks_get_the_systems_environment_and_the_user_has_the_last_word() -> None:
    assert environment_of("resnet", "dgx1")["HOROVOD_CYCLE_TIME"] == "0.1"
    assert environment_of("resnet", "dgx1", extra={"HOROVOD_CYCLE_TIME": "1"})["HOROVOD_CYCLE_TIME"] == "1"


def test_a_systems_environment_is_for_its_framework_and_for_gpus() -> None:
    assert "HOROVOD_CYCLE_TIME" not in environment_of("resnet-tensorflow", "dgx1")
    on_cpu = ("device=cpu", "precision=fp32", "layout=NCHW")
    assert set(environment_of("resnet", "dgx1", *on_cpu)) == {"PYTHONUNBUFFERED", "OMP_NUM_THREADS"}


def test_a_variable_set_twice_is_refused() -> None:
    given = catalogue.systems(catalogue.choose("resnet"))[-1].model_dump()
    twice = {"Dockerfile": {"OMP_NUM_THREADS": "1"}, "run.sh": {"OMP_NUM_THREADS": "2"}}
    with pytest.raises(ValidationError, match="set twice: OMP_NUM_THREADS"):
        System.model_validate({**given, "environment": twice})


@pytest.mark.parametrize(
    ("family", "source"), [("v100", "dgx2"), ("a100", "dgxa100"), ("h100", "dgxa100"), ("h200", "dgxa100")]
)
def test_a_system_for_one_gpu_follows_a_submission_in_proportion(family: str, source: str) -> None:
    choice = catalogue.choose("resnet")
    whole = resolved(catalogue.find_system(choice, source, "v0.7"), choice)
    rate = whole.get("learning_rate") / (whole.get("batch_size") * whole.ranks)
    found = [s for s in catalogue.systems(choice) if s.kind == "derived" and s.system.startswith(family)]
    assert found
    for system in found:
        one = resolved(system, choice)
        assert one.get("learning_rate") == pytest.approx(rate * one.get("batch_size"), rel=1e-4)
        for name in ("optimizer", "epochs", "warmup_epochs", "weight_decay", "momentum", "schedule"):
            assert one.get(name) == whole.get(name)
        assert not one.is_submitted
        assert one.division == "open"


@pytest.mark.parametrize("name", catalogue.choices())
def test_every_system_runs_on_another_number_of_gpus(name: str) -> None:
    choice = catalogue.choose(name)
    for system in catalogue.systems(choice):
        found = configuration.resolve(choice, system, 1, 2 * system.gpus_per_node, [])
        assert found.get("batch_size") >= 1 and found.get("learning_rate") > 0
