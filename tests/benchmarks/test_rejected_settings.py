"""Settings that a benchmark rejects before anything starts, and the limits that it accepts."""

import json
import re

import pytest

from encore import catalogue, configuration
from encore.errors import EncoreError


def resolve(name: str, settings: str) -> configuration.Configuration:
    choice = catalogue.choose(name)
    system = catalogue.find_system(choice, "cpu", None)
    return configuration.resolve(choice, system, 1, 1, settings.split("; "))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gnmt", "beta1=1.0", "beta1 and beta2 must be in 0..1"),
        ("gnmt", "layers=1", "layers"),
        ("gnmt", "loss_scale=10000.0", "loss_scale must not be above loss_scale_limit"),
        ("gpt-oss-20b", "chosen_experts=4; experts=2", "chosen_experts=4 must be at most experts=2"),
        ("gpt-oss-20b", "expert_parallelism=5", "expert_parallelism=5 must divide experts=8"),
        ("gpt-oss-20b", "head_size=63", "a head of 63 values has no pairs"),
        ("gpt-oss-20b", "width=100", "multiples of 8"),
        ("gpt-oss-20b", "window=-1", "window must be at least 0"),
        ("ncf", "beta1=1.0", "beta1 and beta2"),
        ("ncf", "beta2=-0.1", "beta1 and beta2"),
        ("ncf", "factors=0", "factors must be at least 1"),
        ("ncf", "layers=[2, 0]", "at least two values"),
        ("ncf", "layers=[2]", "at least two values"),
        ("ncf", "layers=[3, 2]", "must be even"),
        ("ncf", "optimizer_kernel=apex", "device=cpu has no apex"),
        ("resnet", "dali_crop_hint=-1", "dali_crop_hint must be at least 0"),
        ("resnet", "dali_hw_decoder_load=1.5", "dali_hw_decoder_load must be in 0..1"),
        ("resnet-pytorch", "accumulation_steps=3", "must be a multiple of accumulation_steps=3"),
        ("resnet-pytorch", "bucket_mb=0", "bucket_mb must be at least 1"),
        ("resnet-pytorch", "compile=fast", "default"),
        ("resnet-pytorch", "cuda_graph=true", "cuda_graph needs device=gpu"),
        ("resnet-pytorch", "precision=fp16", "set precision=fp32 or precision=bf16"),
        ("resnet-tensorflow", "gradient_groups=-1", "gradient_groups must be at least 0"),
        ("resnet-tensorflow", "layout=NCHW", "one of NHWC"),
        ("resnet-tensorflow", "precision=tf32", "set precision=fp32 or precision=bf16"),
        ("ssd", "blocks=[3, 4]", "blocks needs three numbers"),
        ("ssd", "box_scales=[0.3, 0.2, 0.4, 0.6, 0.8]", "box_scales must rise"),
        ("ssd", "cuda_graph=true", "cuda_graph needs device=gpu"),
        ("ssd", "eval_steps=[10]; concurrent_evaluation=true", "eval_steps needs concurrent_evaluation=false"),
        ("ssd", "nms_threshold=2.0", "nms_threshold must be in 0..1"),
        ("ssd", "optimizer_kernel=apex", "device=cpu has no apex"),
        ("ssd", "precision=tf32", "set precision=fp32 or precision=bf16"),
        ("transformer", "batch_size=39", "must hold a pair of max_length=40"),
        ("transformer", "compile=true", "set compile=false"),
        ("transformer", "heads=3", "width=64 must be a multiple of 2 * heads=6"),
        ("transformer", "precision=tf32", "has no tf32"),
        ("transformer", "relu_dropout=1.0", "relu_dropout must be at least 0 and below 1"),
    ],
)
def test_impossible_settings_are_rejected(name: str, settings: str, message: str) -> None:
    with pytest.raises(EncoreError, match=re.escape(message)) as caught:
        resolve(name, settings)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gnmt", "layers", 2),
        ("gpt-oss-20b", "chosen_experts", 8),
        ("gpt-oss-20b", "window", 0),
        ("ncf", "beta1", 0.0),
        ("ncf", "beta2", 0.0),
        ("ncf", "factors", 1),
        ("ncf", "layers", [2, 1]),
        ("resnet", "dali_crop_hint", 0),
        ("resnet", "dali_hw_decoder_load", 0.0),
        ("resnet", "dali_hw_decoder_load", 1.0),
        ("resnet-pytorch", "bucket_mb", 1),
        ("resnet-tensorflow", "gradient_groups", 0),
        ("ssd", "nms_threshold", 1.0),
        ("transformer", "batch_size", 40),
        ("transformer", "relu_dropout", 0.0),
    ],
)
def test_settings_at_their_limits_are_accepted(name: str, key: str, value: object) -> None:
    assert json.dumps(resolve(name, f"{key}={value}").plain()[key]) == json.dumps(value)
