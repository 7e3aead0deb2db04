"""Mask R-CNN's network: its precisions, shapes, trained weights, choice of operators, checkpoints and order."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks.common.export.export import largest_difference
from benchmarks.common.export.torch import inferring
from benchmarks.common.run.ranks import Ranks
from benchmarks.detection.pytorch.nms import nms
from benchmarks.maskrcnn import order
from benchmarks.maskrcnn.pytorch import backbone, choice, export, operators
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.maskrcnn.pytorch.data import EvaluationBatch, batch_of, read_objects, synthetic_batch
from benchmarks.maskrcnn.pytorch.evaluation import detections, in_images
from benchmarks.maskrcnn.pytorch.proposals import Found
from benchmarks.maskrcnn.pytorch.served import Served
from benchmarks.maskrcnn.pytorch.train import EDGES, build, content, train_step, whole_step
from benchmarks.maskrcnn.schedule import Rates

torch.set_num_threads(1)
CPU = Ranks(0, 1, 0, 1, torch.device("cpu"))
CONFIG = Config(device="cpu", precision="fp32", stages=(1, 1, 1, 1), stem_width=8, frozen_stages=0, fpn_width=16,
                box_width=16, mask_width=16, mask_layers=1, anchor_sizes=(8, 16, 24, 32, 48), anchors_per_image=32,
                candidates_train=40, candidates_test=20, proposals_train=60, proposals_test=15, rois_per_image=16,
                detections=5, batch_size=2, optimizer_kernel="fused", gradient_clip=3.0, learning_rate=0.02,
                warmup_steps=0, pixel_mean=(120.0,) * 3, pixel_std=(57.0,) * 3, short_side=64, long_side=96,
                bucket_step=32, warm_up_steps=0, objects=6, score_threshold=0.01)  # fmt: skip
SHAPE = (64, 96)
RATES = Rates(0.01, 0.02)


def steps(**changes):
    config = dataclasses.replace(CONFIG, **changes)
    training = build(config, 5, CPU, {})
    batch = synthetic_batch(config, 5, SHAPE, CPU.context)
    return training, [float(train_step(training, batch, RATES)) for _ in range(5)]


def precisions():
    found = {}
    for precision in ("fp32", "bf16", "fp16"):
        training, found[precision] = steps(precision=precision, loss_scale=1024.0, loss_scale_interval=3)
        batch = synthetic_batch(training.config, 5, SHAPE, CPU.context)
        detected, drawn = training.model.detect(EvaluationBatch(batch.images, batch.sizes, np.arange(2)))
        counts = detected.images.bincount(minlength=2)
        found[f"{precision} detects"] = bool(
            drawn.shape == (len(detected.images), 28, 28)
            and (counts <= 5).all()
            and drawn.isfinite().all()
            and all((torch.diff(detected.scores[detected.images == image]) <= 0).all() for image in (0, 1))
        )
    # What is trained before the clock changes nothing behind it, the dynamic scale neither.
    found["warmed"] = steps(precision="fp16", loss_scale=1024.0, loss_scale_interval=3, warm_up_steps=2)[1]
    return found


def fixed_shapes():
    """What a GPU computes: empty slots and unused proposals change no loss."""
    training, _ = steps()
    batch = synthetic_batch(training.config, 5, SHAPE, CPU.context)
    found = {name: float(loss.detach()) for name, loss in training.model.losses(batch).items()}
    training.model._is_static = True
    again = {name: float(loss.detach()) for name, loss in training.model.losses(batch).items()}
    return max(abs(found[name] - again[name]) for name in found)


class Waits(TorchDispatchMode):
    """Notes the operators for which Python would wait for a GPU: their results, or the sizes of them, are needed."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "repeat_interleave", "unique")

    def __init__(self):
        super().__init__()
        self.found, self.count = set(), 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket.__name__
        self.count += 1
        places = arguments[1] if name in ("index", "index_put", "index_put_") else ()
        of_bools = any(torch.is_tensor(place) and place.dtype is torch.bool for place in places)
        # lift_fresh: numbers of Python that become a tensor, and would be copied to the GPU.
        if name in self.NAMES or name.startswith("unique") or name == "lift_fresh" or of_bools:
            self.found.add(name)
        return function(*arguments, **(options or {}))


def as_one_kernel(operator):
    """What a Triton kernel is to PyTorch: nothing of it is seen."""

    def call(*given):
        with _disable_current_modes():
            return operator(*given)

    return call


def on_a_gpu(precision, saved=None):
    """What a GPU trains with, as far as a CPU can: fixed shapes, the rates in tensors, hidden kernels."""
    config = dataclasses.replace(CONFIG, precision=precision, loss_scale=1024.0)
    made = build(config, 5, CPU, saved or {})
    made.model._is_static, made.rates = True, [torch.zeros(()), torch.zeros(())]
    chosen = made.model.operators
    made.model.operators = chosen._replace(
        **{name: as_one_kernel(getattr(chosen, name)) for name in chosen._fields[1:]}
    )
    return made


def served():
    """How far what is exported is from ``detect``, where it finds more than there is room for, and where less."""
    training, _ = steps()
    batch = synthetic_batch(training.config, 5, SHAPE, CPU.context)
    inputs = [batch.images.numpy(), batch.sizes.numpy()]
    found = {}
    for kind, changes in (("full", {}), ("sparse", {"detections": 60, "score_threshold": 0.2})):
        model = training.model
        model.config = dataclasses.replace(model.config, **changes)
        wanted = export.original(model)(*inputs)
        outputs = inferring(Served(model.network, model.config).eval())(*inputs)
        difference = max(largest_difference(one, other) for one, other in zip(outputs, wanted, strict=True))
        labels = outputs[2]
        found[kind] = {"difference": difference, "detections": int((labels > 0).sum()), "places": labels.size}
    return found


def waiting():
    """For what a step on a GPU would wait, and that the watch sees what does."""
    training = on_a_gpu("fp16")
    batch = synthetic_batch(training.config, 5, SHAPE, CPU.context)
    train_step(training, batch, RATES)  # makes what is kept from one step to the next one
    found = {}
    for training.model._is_static in (True, False):
        with Waits() as watch:
            whole_step(training, batch)
        found[training.model._is_static] = sorted(watch.found)
    return {**found, "operators": watch.count}


def captured():
    """Memory as a graph holds it: outlines with more room, rates in tensors, what a shorter batch leaves behind."""
    made = {}
    for held in (False, True):
        training = on_a_gpu("fp32")
        batches = [synthetic_batch(CONFIG, 5, SHAPE, CPU.context, objects) for objects in (6, 3, 4)]
        memory = synthetic_batch(CONFIG, 5, SHAPE, CPU.context, edges=100).tensors()
        made[held] = []
        for batch, rate in zip(batches, (0.0, 0.02, 0.01), strict=True):
            if held:
                for place, new in zip(memory, batch.tensors(), strict=True):
                    place[: len(new)].copy_(new)
                batch = batch_of(memory)
            made[held].append(float(train_step(training, batch, Rates(rate, 2 * rate))))
    training.graphs[SHAPE] = "graph"
    fits = [synthetic_batch(CONFIG, 5, SHAPE, CPU.context, edges=edges) for edges in (EDGES, EDGES + 1)]
    other = synthetic_batch(CONFIG, 5, (96, 64), CPU.context)
    return {"losses": [made[False], made[True]], "graphs": [training.graph_of(each) for each in (*fits, other)]}


def doubled():
    """Values and gradient of what a GPU has for functional.interpolate."""
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
    weights = torch.randn(2, 5, 6, 8, dtype=torch.float64)
    found = [backbone.doubled(x), functional.interpolate(x, size=(6, 8), mode="nearest")]
    gradients = [torch.autograd.grad((each * weights).sum(), x)[0] for each in found]
    return [torch.equal(*found), float((gradients[0] - gradients[1]).abs().max())]


def frozen():
    training, _ = steps(frozen_stages=2)
    network = training.network.backbone
    first = build(dataclasses.replace(CONFIG, frozen_stages=2), 5, CPU, {}).network.backbone
    return {
        "same": all(
            torch.equal(a, b) for a, b in zip(network.conv1.parameters(), first.conv1.parameters(), strict=True)
        )
        and all(
            torch.equal(a, b) for a, b in zip(network.layers[0].parameters(), first.layers[0].parameters(), strict=True)
        ),
        "trained": not torch.equal(network.layers[1][0].conv1.weight, first.layers[1][0].conv1.weight),
    }


def folded():
    """Batch-norm by hand behind each convolution, for a file of torchvision's and one of Detectron's."""
    torch.manual_seed(5)
    network = backbone.ResNet((1, 1, 1, 1), 4, False, 0).double()
    theirs, detectron = {}, {}
    for (ours, weight, norm), (_, blob, affine) in zip(
        backbone._names(network, False), backbone._names(network, True), strict=True
    ):
        shape = network.get_submodule(ours).weight.shape
        theirs[weight] = detectron[blob] = torch.randn(shape, dtype=torch.float64) * 0.2
        for name in ("weight", "bias", "running_mean"):
            theirs[f"{norm}.{name}"] = torch.randn(shape[0], dtype=torch.float64)
        theirs[f"{norm}.running_var"] = torch.rand(shape[0], dtype=torch.float64) + 0.5
        scale = theirs[f"{norm}.weight"] / (theirs[f"{norm}.running_var"] + 1e-5).sqrt()
        detectron[f"{affine}_s"] = scale
        detectron[f"{affine}_b"] = theirs[f"{norm}.bias"] - theirs[f"{norm}.running_mean"] * scale
    backbone.load(network, theirs)
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    found = network(x)
    other = backbone.ResNet((1, 1, 1, 1), 4, False, 0).double()
    backbone.load(other, detectron)

    def norm(y, name):
        values = [theirs[f"{name}.{each}"] for each in ("running_mean", "running_var", "weight", "bias")]
        return functional.batch_norm(y, *values, eps=1e-5)

    y = functional.max_pool2d(norm(functional.conv2d(x, theirs["conv1.weight"], None, 2, 3), "bn1").relu(), 3, 2, 1)
    worst = 0.0
    for stage in range(1, 5):
        prefix, stride = f"layer{stage}.0.", 1 if stage == 1 else 2
        a = norm(functional.conv2d(y, theirs[f"{prefix}conv1.weight"]), f"{prefix}bn1").relu()
        b = norm(functional.conv2d(a, theirs[f"{prefix}conv2.weight"], None, stride, 1), f"{prefix}bn2").relu()
        c = norm(functional.conv2d(b, theirs[f"{prefix}conv3.weight"]), f"{prefix}bn3")
        shortcut = norm(
            functional.conv2d(y, theirs[f"{prefix}downsample.0.weight"], None, stride), f"{prefix}downsample.1"
        )
        y = (c + shortcut).relu()
        worst = max(worst, float((found[stage - 1] - y).detach().abs().max() / y.detach().abs().max()))
    worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in zip(found, other(x), strict=True)))
    return {"largest error": worst, "shifts": any(each.shift.requires_grad for each in (network.conv1,))}


def with_torchvision():
    """The choice with torchvision's operators in place of which stand our own, and with wrong ones."""

    class Operators:
        @staticmethod
        def batched_nms(boxes, scores, groups, threshold):
            return nms(boxes, scores, groups, threshold)

        @staticmethod
        def roi_align(feature, rois, bins, scale, samples, aligned):
            assert samples == 2 and not aligned
            where = operators.Placed(
                rois[:, 0].long() * feature.shape[2] * feature.shape[3],
                torch.full((len(rois),), feature.shape[2]),
                torch.full((len(rois),), feature.shape[3]),
                torch.full((len(rois),), scale, dtype=rois.dtype),
            )
            places, weights = operators.taps(rois[:, 1:], where, bins)
            values = operators.pixels([feature])[places] * weights.unsqueeze(-1).to(feature.dtype)
            return values.sum(3).permute(0, 3, 1, 2)

    class Wrong(Operators):
        @staticmethod
        def roi_align(*given, **options):
            return 1.1 * Operators.roi_align(*given, **options)

    wanted = choice.choose(dataclasses.replace(CONFIG, kernels="torchvision"), CPU, {}, Operators)
    error = max(
        choice.kernels.distance_of(choice.OPERATORS[name], function, CPU.context, torch.float32)
        for name, function in choice.torchvision_operators(Operators).items()
    )
    wrong = choice.choose(CONFIG, CPU, {}, Wrong)
    resumed = choice.choose(CONFIG, CPU, wanted.names, Operators)
    return {
        "wanted": wanted.names,
        "error": error,
        "wrong": wrong.names["roi_align"],
        "resumed": resumed.names == wanted.names,
    }


def resumed():
    training, _ = steps()
    saved = {**content(training)}
    saved = {name: (value if not isinstance(value, dict) else dict(value)) for name, value in saved.items()}
    batch = synthetic_batch(CONFIG, 5, SHAPE, CPU.context)
    again = build(CONFIG, 5, CPU, json_free(saved))
    return [float(train_step(each, batch, RATES)) for each in (training, again)]


def json_free(saved):
    return torch.utils._pytree.tree_map(lambda value: value.clone() if torch.is_tensor(value) else value, saved)


def of_each_rate():
    """How far each group of weights moves in a first step, at rates of its own."""
    found = {}
    for rates in (Rates(0.01, 0.0), Rates(0.0, 0.01), Rates(0.0, 0.02)):
        training = build(dataclasses.replace(CONFIG, gradient_clip=0.0), 5, CPU, {})
        named = dict(training.network.named_parameters())
        before = {name: each.detach().double().clone() for name, each in named.items()}
        train_step(training, synthetic_batch(training.config, 5, SHAPE, CPU.context), rates)
        moved = [(each.dim(), float((each.detach().double() - before[name]).norm())) for name, each in named.items()]
        found[str(tuple(rates))] = [sum(far for dim, far in moved if (dim == 1) == is_bias) for is_bias in (0, 1)]
    return found


def corners():
    """Which boxes are pooled and drawn, and from what area their level is."""
    found = {}
    for inclusive in (True, False):
        training = build(dataclasses.replace(CONFIG, inclusive_corners=inclusive), 5, CPU, {})
        chosen, pooled, drawn = training.model.operators, [], []

        def align(levels, rois, images, bins, edge, pooled=pooled, chosen=chosen):
            pooled.append((rois, edge))
            return chosen.roi_align(levels, rois, images, bins, edge)

        def project(outlines, rois, objects, size, drawn=drawn, chosen=chosen):
            drawn.append(rois)
            return chosen.project_masks(outlines, rois, objects, size)

        training.model.operators = chosen._replace(roi_align=align, project_masks=project)
        sampled = []
        box_losses = training.model._box_losses
        training.model._box_losses = lambda levels, rois, to=sampled, call=box_losses: (
            to.append(rois) or call(levels, rois)
        )
        batch = synthetic_batch(training.config, 5, SHAPE, CPU.context)
        training.model.losses(batch)
        training.model.detect(EvaluationBatch(batch.images, batch.sizes, np.arange(2)))
        (boxes,) = [rois.boxes.flatten(0, 1) for rois in sampled]
        found[str(inclusive)] = {
            "edges": [edge for _, edge in pooled],
            "ends": float((boxes - pooled[0][0])[:, 2:].mean()),
            "begins": float((boxes - pooled[0][0])[:, :2].abs().max()),
            "drawn": torch.equal(drawn[0], pooled[1][0]),
        }
    return found


def objects():
    """Boxes and outlines of an image, resized and mirrored as maskrcnn_benchmark's BoxList does, and back."""
    given = [[10.0, 20, 30, 40], [0, 0, 100, 80], [90, 70, 30, 30], [5, 5, 0.5, 9], [3.25, 7.5, 6.5, 2.25]]
    outline = np.array([[10.0, 20], [40, 20], [25, 60]], np.float32)
    part = SimpleNamespace(offsets=[0, len(given)], crowds=[False] * len(given), sizes=np.array([[100, 80]], np.int32),
                           boxes=np.array(given, np.float32), labels=np.arange(1, 6), image_ids=[7],
                           polygons=lambda number: [outline])  # fmt: skip
    worst, back, kept = 0.0, 0.0, []
    for mirrored in (False, True):
        found = read_objects(part, 0, (250, 200), mirrored, CONFIG)
        wanted = []
        for x, y, width, height in given:
            ends = [x, y, x + max(width - 1, 0), y + max(height - 1, 0)]
            left, top, right, bottom = (min(max(v, 0), most) for v, most in zip(ends, (99, 79, 99, 79), strict=True))
            if right > left and bottom > top:
                left, top, right, bottom = (2.5 * v for v in (left, top, right, bottom))
                wanted.append(
                    [250 - right - 1, top, 250 - left - 1, bottom] if mirrored else [left, top, right, bottom]
                )
        ours = found.boxes.astype(np.float64) - [0, 0, 1, 1]
        worst = max(worst, np.abs(ours - np.array(wanted)).max())
        x = 250 - 2.5 * outline[:, 0] - 1 if mirrored else 2.5 * outline[:, 0]
        worst = max(worst, np.abs(found.polygons[0][0] - np.stack((x, 2.5 * outline[:, 1]), 1)).max())
        kept.append(found.labels.tolist())
        if not mirrored:
            count = len(found.boxes)
            detected = Found(torch.zeros(count).long(), torch.from_numpy(found.boxes), torch.ones(count),
                             torch.arange(count))  # fmt: skip
            batch = EvaluationBatch(None, torch.tensor([[250.0, 200]]), np.array([0]))
            boxes = in_images(SimpleNamespace(val=part), batch, detected, np.ones((count, 28, 28), np.float32), 1.0)
            back = np.abs(boxes.boxes[[0, 1, -1]] - np.array(given)[[0, 1, -1]]).max()
    return {"error": float(worst), "kept": kept, "back": float(back)}


def tuning():
    """Whether cuDNN may measure: in the steps, in an evaluation's batches, after one that fails."""
    torch.backends.cudnn.benchmark = True  # as frameworks/pytorch.py sets it when a run starts
    found = [torch.backends.cudnn.benchmark]
    data = SimpleNamespace(val=SimpleNamespace(sizes=np.array([[64, 64]])))

    def seen(batches):
        found.append(torch.backends.cudnn.benchmark)
        raise KeyboardInterrupt

    training = SimpleNamespace(config=CONFIG)
    try:
        detections(training, data, SimpleNamespace(watch=seen, ranks=CPU))
    except KeyboardInterrupt:
        found.append(torch.backends.cudnn.benchmark)
    return found


def as_sampled(sizes, positions, batch, epoch, share):
    """The full batches of a rank by the submitted rule, image by image."""
    shuffled = np.random.RandomState([3, epoch]).permutation(positions).tolist()
    each = -(-len(shuffled) // share.ranks)
    mine = list(itertools.islice(itertools.cycle(shuffled), share.rank * each, (share.rank + 1) * each))
    groups, found = {}, []
    for place, image in enumerate(mine):
        group = groups.setdefault(sizes[image][1] / sizes[image][0] >= 1, [])
        group.append((place, image))
        if len(group) == batch:
            found.append((group[0][0], [image for _, image in group]))
            group.clear()
    return [images for _, images in sorted(found)]


def ordering():
    random = np.random.RandomState(0)
    sizes = random.randint(60, 200, (500, 2))
    sizes[::50] = 100  # squares
    resized = order.resized(sizes, 80, 133)
    wanted = order.shapes(resized, 80, 133, 32)
    chosen = np.flatnonzero(random.rand(500) < 0.9)

    def batches(rank, ranks, epoch=0):
        return order.batches(resized, wanted, chosen, 4, 3, epoch, order.Share(rank, ranks))

    found = {"steps": [], "missing": 0, "mixed": [], "as sampled": True, "fits": True, "known": True, "same shapes": []}
    for ranks in (1, 2, 3):
        of_ranks = [batches(rank, ranks) for rank in range(ranks)]
        found["steps"].append([-(-len(chosen) // (4 * ranks)), *map(len, of_ranks)])
        flat = np.concatenate([each.positions for listed in of_ranks for each in listed])
        found["missing"] += len(set(chosen.tolist()) - set(flat.tolist()))
        for rank, listed in enumerate(of_ranks):
            high = [{bool(resized[n][1] >= resized[n][0]) for n in each.positions} for each in listed]
            found["mixed"].append(sum(len(each) > 1 for each in high))
            ours = [each.positions.tolist() for each in listed]
            full = as_sampled(resized, chosen, 4, 0, order.Share(rank, ranks))
            found["as sampled"] &= [each for each in ours if each in full] == full and len(full) >= len(ours) - 2
            found["fits"] &= all((resized[each.positions][:, ::-1] <= np.array(each.shape)).all() for each in listed)
            found["known"] &= {each.shape for each in listed} <= set(order.all_shapes(80, 133, 32))
        found["same shapes"].append(
            all(len({each.shape for each in step}) == 1 for step in zip(*of_ranks, strict=True))
        )
    evaluated = np.concatenate([each.positions for each in order.evaluation(wanted, 16)])
    first, again, other = ([each.positions.tolist() for each in batches(0, 2, epoch)] for epoch in (0, 0, 1))
    return {
        **found,
        "evaluated once": sorted(evaluated.tolist()) == list(range(500)),
        "same": first == again,
        "another epoch": first != other,
        "published": order.resized(np.array([[640, 480], [480, 640], [500, 100]]), 800, 1333).tolist(),
    }


PARTS = (
    precisions,
    fixed_shapes,
    served,
    waiting,
    captured,
    doubled,
    frozen,
    folded,
    with_torchvision,
    resumed,
    of_each_rate,
    corners,
    objects,
    tuning,
    ordering,
)
print(json.dumps({part.__name__: part() for part in PARTS}, default=lambda value: value.item()))
