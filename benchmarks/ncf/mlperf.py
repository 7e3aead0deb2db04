"""MLPerf log keys of NCF, as in the v0.5 logs.

``config``: the Config of any framework. ``counts``: "facts" in dataset.json.
"""

from typing import Any, Dict

from benchmarks.common.run.mllog import Wording

WORDING = Wording("ncf")


def data(counts: Dict[str, Any], train_pairs: int, global_batch_size: int) -> Dict[str, Any]:
    """Return the values of the data set to log, in the order of the submitted logs."""
    return {
        "preproc_hp_num_eval": counts["negatives"],
        "preproc_hp_sample_eval_replacement": True,
        "input_hp_sample_train_replacement": True,
        "preproc_num_train_examples": train_pairs,
        "preproc_num_eval_examples": counts["users"],
        "input_size": train_pairs,
        "input_batch_size": global_batch_size,
        "input_order": None,
    }


def hyperparameters(config: Any, counts: Dict[str, Any]) -> Dict[str, Any]:
    """Return the values of model, optimizer and evaluation to log."""
    return {
        "model_hp_mf_dim": config.factors,
        "model_hp_mlp_layer_sizes": list(config.layers),
        "opt_learning_rate": config.learning_rate,
        "opt_name": "Adam",
        "opt_hp_Adam_beta1": config.beta1,
        "opt_hp_Adam_beta2": config.beta2,
        "opt_hp_Adam_epsilon": config.epsilon,
        "model_hp_loss_fn": "binary_cross_entropy",
        "eval_hp_num_users": counts["users"],
        "eval_hp_num_neg": counts["negatives"],
    }


def epoch(config: Any) -> Dict[str, Any]:
    """Return the values to log when an epoch starts."""
    return {"input_hp_num_neg": config.negatives, "input_step_train_neg_gen": None}


def evaluation(epoch: int, counts: Dict[str, Any]) -> Dict[str, Any]:
    """Return the values to log for the evaluation after ``epoch``, counted from 0."""
    return {"eval_size": {"epoch": epoch, "value": counts["users"] * counts["negatives"]}}
