"""The evaluations of one log, in bounded memory whatever their number."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from encore.results.logs.reader import Event, number_of
from encore.results.rules import Target, every_target

_FIRST = 4096
_MET = 64
_LAST = 16
_NAMES = 64
_VALUES = 16
_TEXT_LIMIT = 400
_BOX_AND_MASK = ("BBOX", "SEGM")
_Position = tuple[float | None, float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One evaluation: values by name ("value"; Mask R-CNN's "BBOX" and "SEGM", Stable Diffusion's "FID" and "CLIP")."""

    epoch: float | None
    samples: float | None
    time_s: float | None
    line: int
    values: Mapping[str, float]


@dataclass(kw_only=True)
class Evaluations:
    """Keeps the first evaluations of a log; of those after them the best, some that meet a target, and the last."""

    first: list[Quality] = field(default_factory=list)
    numberless: int | None = None
    """Line of the first evaluation without a number, such as NaN."""
    _best: dict[tuple[str, bool], Quality] = field(default_factory=dict)
    _met: list[Quality] = field(default_factory=list)
    _last: deque[Quality] = field(default_factory=lambda: deque(maxlen=_LAST))
    _newest: dict[_Position, int] = field(default_factory=dict)
    _targets: Sequence[tuple[Target, ...]] | None = None

    def add(self, event: Event, benchmark: str | None, batch: float | None) -> None:
        """Note an evaluation, unless it repeats one of those before it, as several ranks' logs do."""
        metadata, value = event.metadata, event.value
        if isinstance(value, dict) and event.dialect in ("v0.5", "mlperf"):
            metadata = value
        steps, samples = number_of(metadata.get("step_num")), number_of(metadata.get("samples_count"))
        if samples is None and steps is not None and batch is not None:
            samples = steps * batch
        metric = metadata.get("metric")
        point = Quality(
            epoch=number_of(metadata.get("epoch_num", metadata.get("epoch"))),
            samples=samples,
            time_s=event.time_s,
            line=event.line,
            values=_values(value, str(metric or "value")),
        )
        recent = self._last if len(self.first) == _FIRST else self.first[-8:]
        if not point.values:
            self.numberless = self.numberless or event.line
            return
        if any(point.epoch == old.epoch and point.values == old.values for old in recent):
            return
        if metric is None or not self._joined(point, (point.epoch, samples, steps)):
            self._keep(point, benchmark)

    def kept(self) -> list[Quality]:
        """Return the evaluations that were kept, in file order."""
        later = {id(point): point for point in (*self._best.values(), *self._met, *self._last)}
        return [*self.first, *sorted(later.values(), key=lambda point: point.line)]

    def _joined(self, point: Quality, position: _Position) -> bool:
        """Join metrics of one checkpoint that are logged one by one, as Stable Diffusion's; return whether it was."""
        at = self._newest.get(position)
        if at is not None and self.first[at].values.keys().isdisjoint(point.values):
            values = {**self.first[at].values, **point.values}
            times = [each for each in (self.first[at].time_s, point.time_s) if each is not None]
            self.first[at] = replace(point, values=values, time_s=max(times, default=None))
            return True
        if len(self.first) < _FIRST:
            self._newest[position] = len(self.first)
        return False

    def _keep(self, point: Quality, benchmark: str | None) -> None:
        if len(self.first) < _FIRST:
            self.first.append(point)
            return
        if self._targets is None:
            self._targets = every_target(benchmark)
        for name, value in point.values.items():
            for sign in (True, False):
                best = self._best.get((name, sign))
                if (best is None and len(self._best) < _NAMES) or (
                    best is not None and (value > best.values[name] if sign else value < best.values[name])
                ):
                    self._best[name, sign] = point
        if len(self._met) < _MET and any(all(each.met_by(point.values) for each in them) for them in self._targets):
            self._met.append(point)
        self._last.append(point)


def _values(value: object, name: str) -> dict[str, float]:
    """Return numbers of an evaluation; Mask R-CNN's of v0.6 are a pair, or lie deeper, under "accuracy"."""
    if isinstance(value, list) and len(value) == len(_BOX_AND_MASK):
        value = dict(zip(_BOX_AND_MASK, value, strict=True))
    if isinstance(value, dict):
        inner = value.get("accuracy", value.get("value", value))
        if isinstance(inner, dict):
            return dict(_numbers(inner))
        value = inner
    number = number_of(value)
    return {} if number is None else {name[:_TEXT_LIMIT]: number}


def _numbers(values: Mapping[object, object]) -> Iterator[tuple[str, float]]:
    for key, each in [(key, each) for key, each in values.items() if key != "epoch"][:_VALUES]:
        number = number_of(each)
        if number is not None:
            yield str(key)[:_TEXT_LIMIT], number
