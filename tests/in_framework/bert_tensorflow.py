"""Write a checkpoint with TensorFlow as google-research/bert does, and its tensors for the reader to compare."""

import json
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

VOCABULARY, WIDTH, INNER, LAYERS, POSITIONS = 101, 64, 128, 2, 64
PRODUCTS = {
    "attention/self/query": (WIDTH, WIDTH),
    "attention/self/key": (WIDTH, WIDTH),
    "attention/self/value": (WIDTH, WIDTH),
    "attention/output/dense": (WIDTH, WIDTH),
    "intermediate/dense": (WIDTH, INNER),
    "output/dense": (INNER, WIDTH),
}


def shapes():
    found = {
        "bert/embeddings/word_embeddings": (VOCABULARY, WIDTH),
        "bert/embeddings/position_embeddings": (POSITIONS, WIDTH),
        "bert/embeddings/token_type_embeddings": (2, WIDTH),
        "cls/predictions/output_bias": (VOCABULARY,),
        "cls/seq_relationship/output_weights": (2, WIDTH),
        "cls/seq_relationship/output_bias": (2,),
        "global_step": (),
        # Larger than the lanes in which a CRC is computed.
        "bert/big/adam_m": (1000, 77),
    }
    dense = {"bert/pooler/dense": (WIDTH, WIDTH), "cls/predictions/transform/dense": (WIDTH, WIDTH)}
    norms = ["bert/embeddings/LayerNorm", "cls/predictions/transform/LayerNorm"]
    for layer in range(LAYERS):
        base = f"bert/encoder/layer_{layer}"
        dense.update({f"{base}/{name}": sizes for name, sizes in PRODUCTS.items()})
        norms += [f"{base}/attention/output/LayerNorm", f"{base}/output/LayerNorm"]
    for name, (inputs, outputs) in dense.items():
        found.update({f"{name}/kernel": (inputs, outputs), f"{name}/bias": (outputs,)})
    for name in norms:
        found.update({f"{name}/gamma": (WIDTH,), f"{name}/beta": (WIDTH,)})
    return found


def main(folder):
    v1 = tf.compat.v1
    v1.disable_eager_execution()
    random = np.random.RandomState(0)
    values = {name: np.asarray(random.randn(*shape), np.float32) for name, shape in shapes().items()}
    variables = [v1.get_variable(name, initializer=value) for name, value in values.items()]
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        v1.train.Saver(variables).save(session, str(folder / "model.ckpt-3"), write_meta_graph=False)
    np.savez(folder / "values.npz", **{name.replace("/", "|"): value for name, value in values.items()})
    print(json.dumps({"tensors": len(values)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
