"""Measure how often the audit rules above_published and below_published detect planted errors, and fire without one.

    python -m tools.planted_speeds

Reads the digests of the public sets. A set is compared with the rest, as if it was unpublished.
"""

from collections import Counter
from collections.abc import Iterator

from encore.results.audit.plausibility import MARGIN
from encore.results.audit.published_runs import PublicSpeed, public_speeds, speed_range
from tools import run

FACTORS = (2, 4, 8)
Key = tuple[str, str]


def planted(key: Key, speed: PublicSpeed, best: dict[Key, float]) -> Iterator[tuple[str, Key, int, float]]:
    # Yield error, and stated key, number of accelerators and rate
    for factor in FACTORS:
        yield f"speed or unit {factor} times overstated", key, speed.accelerators, factor * speed.rate
        yield f"speed or unit {factor} times understated", key, speed.accelerators, speed.rate / factor
        if speed.accelerators >= factor:
            yield f"accelerators / {factor}", key, speed.accelerators // factor, factor * speed.rate
        yield f"accelerators x {factor}", key, speed.accelerators * factor, speed.rate / factor
        for other, rate in best.items():
            if other[0] == key[0] and 1 / 2 < rate * factor / best[key] <= 1:
                yield f"platform {factor} to {2 * factor} times slower", other, speed.accelerators, speed.rate


def main() -> None:
    tries, above, below = (Counter[str]() for _ in range(3))
    speeds = public_speeds()
    best = {key: max(speed.rate for speed in group) for key, group in speeds.items()}
    for key, group in speeds.items():
        for speed in group:
            no_error = ("no error", key, speed.accelerators, speed.rate)
            for name, stated, accelerators, rate in (no_error, *planted(key, speed, best)):
                slowest, fastest = speed_range(stated, accelerators, without=speed.name)
                tries[name] += 1
                above[name] += fastest is not None and rate > MARGIN * fastest.rate
                below[name] += slowest is not None and rate * MARGIN < slowest.rate
    for name, count in tries.items():
        print(f"| {name} | {count} | {above[name] / count:.1%} | {below[name] / count:.1%} |")


if __name__ == "__main__":
    run(main, __doc__)
