"""Updates with flat tensors, next to PyTorch's own Adam and clipping; on any number of ranks.

Rank 0 prints what it found as JSON.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import optimizers
from benchmarks.common.torch.updates import LossScale, Rates, ScaleRule, Updates

STEPS, ROWS, CLIP = 6, 8, 0.1
RULE = ScaleRule(1024, 2, 4096)


def network() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def rate(step: int) -> float:
    return 0.01 * (step + 1)


def loss_of(layers: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return layers(rows).square().sum()


def expected(ranks: Ranks, clip: float | None) -> list[torch.Tensor]:
    """Weights after training on the rows of all ranks by PyTorch's own functions."""
    layers = network()
    optimizer = torch.optim.Adam(layers.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.zero_grad()
        rows = torch.cat([batch(step, rank) for rank in range(ranks.size)])
        (loss_of(layers, rows) / len(rows)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(layers.parameters(), clip)
        optimizer.step()
    return [parameter.detach() for parameter in layers.parameters()]


def updates(layers: torch.nn.Module, kernel: str, ranks: Ranks, **options: Any) -> Updates:
    candidates = optimizers.adam_candidates(1.0, (0.9, 0.98), 1e-9, None)
    return Updates(list(layers.parameters()), candidates, kernel, ranks, **options)


def train(
    layers: torch.nn.Module,
    update: Updates,
    ranks: Ranks,
    steps: range,
    overflow: tuple[int, ...] = (),
    before: int = 0,
) -> list[float]:
    """Train; at the steps of ``overflow`` the last rank has a gradient that is too large, and the batch comes again.

    A step has the rate of as many as changed the weights; of those ``before`` these so many did not. Return the rates.
    """
    rates, found = Rates(update, rate, STEPS + 3), []
    for step in steps:
        for bad in [True] * overflow.count(step) + [False]:
            loss = update.scaled(loss_of(layers, batch(step, ranks.rank)))
            if bad and ranks.rank == ranks.size - 1:
                loss = loss * float("inf")
            loss.backward()
            # What the caller knows of: the batches.
            found.append(rates.of(steps.start + before + len(found)))
            assert torch.is_tensor(found[-1]) == (update.kernel == "fused" and update.scale is not None)
            update.step(found[-1], ROWS * ranks.size)
    return [float(each) for each in found]


def error(layers: torch.nn.Module, weights: list[torch.Tensor]) -> float:
    pairs = zip(layers.parameters(), weights, strict=True)
    return max(float((ours.detach() - theirs).abs().max()) for ours, theirs in pairs)


def resumed(kernel: str, ranks: Ranks, split: bool) -> bool:
    """Whether a training that is saved and continued ends with the same bits."""
    options: dict[str, Any] = {"clip": CLIP, "scale": RULE, "split": split}
    whole, first, second = network(), network(), network()
    train(whole, updates(whole, kernel, ranks, **options), ranks, range(STEPS), overflow=(1,))
    before = updates(first, kernel, ranks, **options)
    train(first, before, ranks, range(3), overflow=(1,))
    saved = json_free({**before.content(), **before.own_content()})
    second.load_state_dict(first.state_dict())
    after = updates(second, saved["kernel"], ranks, **options)
    after.restore(saved)
    train(second, after, ranks, range(3, STEPS), before=1)
    return error(second, [parameter.detach() for parameter in whole.parameters()]) == 0


def json_free(content: dict[str, Any]) -> dict[str, Any]:
    """Return a copy that shares no tensor."""
    return {
        name: value.clone() if torch.is_tensor(value) else json_free(value) if isinstance(value, dict) else value
        for name, value in content.items()
    }


def scales(rule: ScaleRule, finite: list[bool]) -> list[float]:
    scale, found = LossScale(rule, torch.device("cpu")), []
    for each in finite:
        scale.update(torch.tensor(each))
        found.append(float(scale.value))
    return found


def main() -> None:
    ranks = pytorch.start(SimpleNamespace(device="cpu", precision="fp32"))
    errors, skipped, states, same_bits, rates = {}, {}, {}, {}, {}
    for kernel in ("plain", "fused"):
        for split in (False, True):
            name = f"{kernel}{' split' * split}"
            for clip in (None, CLIP):
                layers = network()
                train(layers, updates(layers, kernel, ranks, clip=clip, split=split), ranks, range(STEPS))
                errors[f"{name} clip {clip}"] = error(layers, expected(ranks, clip))
            layers = network()
            update = updates(layers, kernel, ranks, clip=CLIP, scale=RULE, split=split)
            rates[name] = train(layers, update, ranks, range(STEPS), overflow=(0, 3, 3))
            errors[f"{name} skipping"] = error(layers, expected(ranks, CLIP))
            assert update.scale is not None
            skipped[name] = [update.skipped_since(), update.skipped_since(), update.uncounted]
            states[name] = sum(state["exp_avg"].numel() for state in update.optimizer.state.values())
            same_bits[name] = resumed(kernel, ranks, split)
            apart = torch.cat([parameter.detach().reshape(-1) for parameter in layers.parameters()])
            errors[f"{name} apart"] = abs(pytorch.total(apart[:1].clone())[0] / ranks.size - float(apart[0]))
    found = {
        "errors": errors,
        "skipped": skipped,
        "rates": rates,
        "states": states,
        "same bits": same_bits,
        "gnmt": scales(ScaleRule(1024, 2, 4096), [True, False, True, True, True, True, True, True, True, True]),
        "transformer": scales(ScaleRule(128, 3), [True, True, True, False, True, True, True]),
    }
    if ranks.rank == 0:
        print(json.dumps(found))
    pytorch.finish()


if __name__ == "__main__":
    main()
