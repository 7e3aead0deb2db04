"""Arguments of the DALI operators on a GPU: the graph is defined and its arguments checked, but no GPU is needed."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from nvidia.dali import backend

from benchmarks.common.data import dali
from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet import pipeline
from benchmarks.resnet.config import Hyperparameters


def operators(definition, config):
    """Arguments of each operator by its name, as DALI prints them."""
    graph = definition(config, Path("/data"), Ranks(3, 8, 3, 8, None), batch_size=8, num_threads=3, device_id=3)
    graph._build_graph()
    found = {}
    for each in graph._ops:
        text = str(each.spec)
        found[text.split()[2].rstrip(":")] = dict(re.findall(r"^    (\w+): (.*)$", text.split("Arguments:")[1], re.M))
    found["outputs"] = [output.device for output in graph._graph_outputs]
    return found


def of_both(config):
    definitions = {"training": pipeline._training, "evaluation": pipeline._evaluation}
    return {name: operators(definition, config) for name, definition in definitions.items()}


plain = Hyperparameters(dali_nvjpeg_padding_mb=64, dali_hw_decoder_load=0.5)
cached = replace(
    plain, dali_decoder_cache_mb=6144, dali_decoder_hint=1315942, dali_crop_hint=165581, dali_normalize_hint=441549,
    dali_temp_hint=355568328, dali_preallocate_width=0, dali_mmap=False, antialias=True,
)  # fmt: skip
found = {"plain": of_both(plain), "cached": of_both(cached)}

# DALI 2.2's decoder has arguments that older ones lack; all else of it is the installed one's.
names = [*backend.GetSchema("decoders__Image").GetArgumentNames(), "adjust_orientation", "dtype"]
schema = SimpleNamespace(GetArgumentNames=lambda: names)
pipeline.backend = SimpleNamespace(GetSchema=lambda name: schema)
found["nvImageCodec"] = of_both(cached)

# DALI before 1.16 resizes without the argument.
old = SimpleNamespace(GetArgumentNames=lambda: ["resize_x", "min_filter"])
dali.backend = SimpleNamespace(GetSchema=lambda name: old)
before = [{name: str(value) for name, value in dali.resampling(smooth).items()} for smooth in (False, True)]
print(json.dumps({**found, "resizing before 1.16": before}))
