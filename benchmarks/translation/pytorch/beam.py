"""Beam search over a batch of sentences, with both ways in which the submissions treat hypotheses that have ended.

Greedy search is a beam of 1. Sentences whose search is over leave the batch. Of equal scores the one of the better
hypothesis and smaller token comes first, on any device, and a sentence's result depends on no other one of its batch.
"""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from benchmarks.translation.pytorch.batches import SourceBatch
from benchmarks.translation.vocabulary import BOS, EOS, PAD

NEVER = float("-inf")

Step = Callable[[torch.Tensor, int, Any], Tuple[torch.Tensor, Optional[torch.Tensor]]]
Normalize = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Coverage = Callable[[torch.Tensor], torch.Tensor]


class Rules(NamedTuple):
    # What is searched for, apart from the beam's width.

    normalize: Normalize  # final score from sums of log-probabilities and numbers of tokens, EOS included
    # Penalty to add to it, from the sums over the tokens of the attention to each source position (..., S), where ended
    # hypotheses stay. The sums keep their place in the beam when hypotheses change places, as in GNMT's submission; the
    # paper means that they follow their hypotheses (Wu et al. 2016, equation 14).
    coverage: Optional[Coverage] = None
    # Whether a hypothesis that has ended keeps its place in the beam by its sum, and the search ends when all have
    # (GNMT, v0.7 NVIDIA seq2seq/inference/beam_search.py). Else it leaves the beam when it is among the best ``beam``
    # continuations, and the search ends when ``beam`` have (Transformer, v0.7 NVIDIA fairseq/sequence_generator.py with
    # its default stop_early).
    ended_stay: bool = False
    shortest: int = 0  # tokens that come before EOS at least (Transformer: 1)
    vocabulary: Optional[int] = None  # tokens that can be chosen; what is behind them pads the weights


def length_penalty(power: float, offset: float) -> Normalize:
    """Return a division by ((offset + L) / 6) ** power, for L tokens with EOS (Wu et al. 2016, equation 14).

    Both submissions have power 0.6. GNMT's counts BOS too: offset 6; Transformer's does not: 5.
    """
    return lambda scores, lengths: scores / ((offset + lengths) / 6) ** power


def coverage_penalty(factor: float) -> Coverage:
    """Return factor * sum over the source of log(min(attention, 1)), without what has no attention at all.

    GNMT's submission has the factor 0.1 (Wu et al. 2016, equation 14).
    """

    def penalty(attention: torch.Tensor) -> torch.Tensor:
        logarithms = attention.clamp(0, 1).log()
        return factor * logarithms.masked_fill(attention <= 0, 0).sum(-1)

    return penalty


class _Hypotheses(NamedTuple):
    # Those of the n sentences that are still searched.

    sentences: torch.Tensor  # (n,) places in the batch
    limits: torch.Tensor  # (n,) most tokens
    tokens: torch.Tensor  # (n, beam, longest), PAD behind the end
    scores: torch.Tensor  # (n, beam) sums of log-probabilities
    lengths: torch.Tensor  # (n, beam) tokens
    ended: torch.Tensor  # (n, beam)
    attention: Optional[torch.Tensor]  # (n, beam, S) sums, where they count
    ends: torch.Tensor  # (n,) hypotheses that have left the beam

    def keep(self, indices: torch.Tensor) -> _Hypotheses:
        # Return those of the sentences at ``indices``.
        return _Hypotheses(*(None if tensor is None else tensor.index_select(0, indices) for tensor in self))


class _Best(NamedTuple):
    # The best hypothesis of each sentence of the batch that has ended.

    scores: torch.Tensor  # (batch,)
    tokens: torch.Tensor  # (batch, longest)

    def offer(self, sentences: torch.Tensor, scores: torch.Tensor, tokens: torch.Tensor) -> None:
        # Take the best of ``scores`` (n, hypotheses), of equal ones the first, where it beats what is there.
        best, indices = smallest(-scores, 1)
        better = best[:, 0].neg() > self.scores[sentences]
        selected = tokens.gather(1, indices[:, :, None].expand(-1, -1, tokens.shape[2]))[:, 0]
        self.scores[sentences] = torch.where(better, best[:, 0].neg(), self.scores[sentences])
        self.tokens[sentences] = torch.where(better[:, None], selected, self.tokens[sentences])


def smallest(values: torch.Tensor, count: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` smallest of each row of ``values`` >= 0 in order, and where they are; equal ones in place.

    topk chooses among equal values as it likes. Where the first that is left out equals the last, it chooses again
    among keys of which no two are equal; for all rows that would take the time of the logits.
    """
    least, smallest_values = values.topk(min(count + 1, values.shape[1]), largest=False)
    smallest_values = smallest_values[:, :count]
    chosen_freely = (least[:, count - 1 : count] == least[:, count:]).any(1)
    if bool(chosen_freely.any()):
        positions = torch.arange(values.shape[1], device=values.device)
        smallest_values[chosen_freely] = _keys(values[chosen_freely], positions).topk(count, largest=False).indices
    smallest_values = smallest_values.gather(
        1, _keys(values.gather(1, smallest_values), smallest_values).sort(1).indices
    )
    return values.gather(1, smallest_values), smallest_values


def _keys(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    # Return integers in the order of ``values``, then ``positions``: positive floats are in the order of their bits.
    return (values.abs().view(torch.int32).long() << 32) + positions


@torch.no_grad()
def search(
    step: Step,
    state: Any,
    batch: SourceBatch,
    *,
    beam: int,
    longest: Union[int, Sequence[int]],
    rules: Rules,
) -> List[List[int]]:
    """Return the best hypothesis of each sentence of a batch, without BOS and EOS.

    Args:
        step: gives the log-probabilities (rows, V) of the next token, and the attention (rows, S) or None, from the
            last tokens int64 (rows,), their position from 0 (where all are BOS) and ``state``, which it changes. Rows
            are sentences, each ``beam`` times.
        state: of as many rows; its ``select(rows)`` puts other rows in their places, fewer or as many.
        batch: what is translated; the search itself reads its size alone.
        beam: hypotheses of a sentence at a time.
        longest: most tokens with EOS, for all or for each sentence. Where hypotheses leave the beam, the last is EOS,
            whatever its probability; where they stay, what has not ended is cut and counts like the others (GNMT's
            submission compares their sums alone there).
        rules: what is searched for.
    """
    count, device = len(batch.source), batch.source.device
    if count == 0:
        return []
    alive, best = _initial_state(count, beam, torch.as_tensor(longest, device=device).expand(count))
    last = alive.tokens.new_full((count * beam,), BOS)
    grow = _grow_staying if rules.ended_stay else _grow_leaving
    for position in range(alive.tokens.shape[2]):
        probabilities, attention = step(last, position, state)
        if rules.coverage is not None and attention is not None:
            alive = _attend(alive, attention)
        costs = _costs(probabilities, alive, position, rules)
        alive, source, done = grow(alive, best, costs, position, rules)
        active = (~done).nonzero(as_tuple=True)[0]
        if len(active) == 0:
            break
        rows = source + torch.arange(len(source), device=device)[:, None] * beam
        state.select(rows.index_select(0, active).reshape(-1))
        if len(active) < len(done):
            alive = alive.keep(active)
        last = alive.tokens[:, :, position].reshape(-1)
    return [_until_end(tokens) for tokens in best.tokens.tolist()]


def _initial_state(batch: int, beam: int, limits: torch.Tensor) -> Tuple[_Hypotheses, _Best]:
    device, longest = limits.device, int(limits.max())
    scores = torch.full((batch, beam), NEVER, device=device)
    scores[:, 0] = 0  # at first all are the same
    counts = torch.zeros(batch, beam, dtype=torch.int64, device=device)
    alive = _Hypotheses(
        torch.arange(batch, device=device),
        limits,
        torch.full((batch, beam, longest), PAD, device=device),
        scores,
        counts,
        counts.bool(),
        None,
        counts[:, 0],
    )
    return alive, _Best(scores.new_full((batch,), NEVER), alive.tokens[:, 0].clone())


def _attend(alive: _Hypotheses, attention: torch.Tensor) -> _Hypotheses:
    # Add the attention with which the next token is chosen; what has ended chooses none.
    new = attention.float().view(*alive.scores.shape, -1).masked_fill(alive.ended[:, :, None], 0)
    return alive._replace(attention=new if alive.attention is None else alive.attention + new)


def _costs(log_probabilities: torch.Tensor, alive: _Hypotheses, position: int, rules: Rules) -> torch.Tensor:
    # (n, beam, V): the negative sum of each continuation, infinite for what cannot be.
    costs = -log_probabilities[:, : rules.vocabulary].float().reshape(*alive.scores.shape, -1)
    costs[:, :, [PAD, BOS] + [EOS] * (position < rules.shortest)] = -NEVER
    if rules.ended_stay:
        # An end is followed by nothing, at no cost.
        costs.masked_fill_(alive.ended[:, :, None], -NEVER)
        costs[:, :, PAD].masked_fill_(alive.ended, 0)
    else:
        at_limit = (alive.limits == position + 1)[:, None]
        forced = costs[:, :, EOS].clone()
        costs.masked_fill_(at_limit[:, :, None], -NEVER)
        costs[:, :, EOS] = forced
    return costs - alive.scores[:, :, None]


# The hypotheses, of which earlier one each is the continuation (n, beam), which sentences are done (n,).
Grown = Tuple[_Hypotheses, torch.Tensor, torch.Tensor]


def _grow_staying(alive: _Hypotheses, best: _Best, costs: torch.Tensor, position: int, rules: Rules) -> Grown:
    # Continue with the best, among which are those that have ended.
    beam, tokens = costs.shape[1:]
    lowest, indices = smallest(costs.flatten(1), beam)
    source, token = indices // tokens, indices % tokens
    was_ended = alive.ended.gather(1, source)
    lengths = alive.lengths.gather(1, source) + ~was_ended
    # One that cannot be is nothing to wait for.
    is_ended = was_ended | (token == EOS) | torch.isinf(lowest)
    alive = _continued(alive, source, token, -lowest, position)._replace(ended=is_ended, lengths=lengths)
    done = is_ended.all(1) | (alive.limits == position + 1)
    final = rules.normalize(alive.scores, lengths)
    if rules.coverage is not None and alive.attention is not None:
        final = final + rules.coverage(alive.attention)
    # What is not done is offered as no hypothesis, which is never better: no need to wait for the device.
    best.offer(alive.sentences, final.masked_fill(~done[:, None], NEVER), alive.tokens)
    return alive, source, done


def _grow_leaving(alive: _Hypotheses, best: _Best, costs: torch.Tensor, position: int, rules: Rules) -> Grown:
    # Continue with the best that do not end here; offer what ends.
    beam, tokens = costs.shape[1:]
    lowest, indices = smallest(costs.flatten(1), min(2 * beam, beam * tokens))
    source, token = indices // tokens, indices % tokens
    ends = (token == EOS) & ~torch.isinf(lowest)
    now = ends[:, :beam]
    final = rules.normalize(-lowest[:, :beam], alive.lengths[:, :1] + 1).masked_fill(~now, NEVER)
    ended_tokens = alive.tokens.gather(1, source[:, :beam, None].expand(-1, -1, alive.tokens.shape[2]))
    ended_tokens[:, :, position] = EOS
    best.offer(alive.sentences, final, ended_tokens)
    order = torch.arange(lowest.shape[1], device=lowest.device) + ends.long() * lowest.shape[1]
    selected = order.topk(beam, largest=False).indices
    scores = (-lowest).masked_fill(ends, NEVER).gather(1, selected)
    source = source.gather(1, selected)
    count = alive.ends + now.sum(1)
    alive = _continued(alive, source, token.gather(1, selected), scores, position)
    done = (count >= beam) | (alive.limits == position + 1) | torch.isinf(scores).all(1)
    return alive._replace(lengths=alive.lengths + 1, ends=count), source, done


def _continued(
    alive: _Hypotheses, source: torch.Tensor, token: torch.Tensor, scores: torch.Tensor, position: int
) -> _Hypotheses:
    # Return the hypotheses of ``source`` with one more token each.
    tokens = alive.tokens.gather(1, source[:, :, None].expand_as(alive.tokens))
    tokens[:, :, position] = token
    return alive._replace(tokens=tokens, scores=scores)


def _until_end(tokens: List[int]) -> List[int]:
    # Return what is before the first EOS or PAD.
    return tokens[: next((index for index, token in enumerate(tokens) if token in (EOS, PAD)), len(tokens))]
