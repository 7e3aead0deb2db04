"""The evaluations of one log, each with its place in the training."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from encore.results.logs.reader import Event, number_of

_MOST = 100_000  # Public logs have up to some hundred evaluations; what comes after this many is no training
_RECENT = 8
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
    """The evaluations of a log, without those that repeat one before them."""

    kept: list[Quality] = field(default_factory=list)  # In file order; as many as a log can mean
    numberless: int | None = None  # Line of the first evaluation without a number, such as NaN
    _newest: dict[_Position, int] = field(default_factory=dict)

    def add(self, event: Event, batch: float | None) -> None:
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
        if not point.values or len(self.kept) == _MOST:
            self.numberless = self.numberless or event.line
            return
        if any(point.epoch == old.epoch and point.values == old.values for old in self.kept[-_RECENT:]):
            return
        if metric is None or not self._joined(point, (point.epoch, samples, steps)):
            self.kept.append(point)

    # Join metrics of one checkpoint that are logged one by one, as Stable Diffusion's; return whether it was.
    def _joined(self, point: Quality, position: _Position) -> bool:
        at = self._newest.get(position)
        if at is not None and self.kept[at].values.keys().isdisjoint(point.values):
            values = {**self.kept[at].values, **point.values}
            times = [each for each in (self.kept[at].time_s, point.time_s) if each is not None]
            self.kept[at] = replace(point, values=values, time_s=max(times, default=None))
            return True
        self._newest[position] = len(self.kept)
        return False


# Numbers of an evaluation; Mask R-CNN's of v0.6 are a pair, or are deeper, under "accuracy".
def _values(value: object, name: str) -> dict[str, float]:
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
