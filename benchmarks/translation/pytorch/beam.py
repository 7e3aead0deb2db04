"""Batched beam search, with both treatments of finished hypotheses in the submissions.

Greedy search is a beam of 1. Finished sentences leave the batch. For equal scores, the better hypothesis and the
smaller token come first, on all devices, and a sentence's result is independent of the rest of the batch.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from benchmarks.translation.pytorch.batches import SourceBatch
from benchmarks.translation.vocabulary import BOS, EOS, PAD

NEVER = float("-inf")

Step = Callable[[torch.Tensor, int, Any], Tuple[torch.Tensor, Optional[torch.Tensor]]]
Normalize = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Coverage = Callable[[torch.Tensor], torch.Tensor]


class Rules(NamedTuple):
    # Search settings except the beam size.

    normalize: Normalize  # final score from sums of log-probabilities and numbers of tokens, EOS included
    # Penalty to add, from the accumulated attention per source position (..., S), with ``ended_stay``. The sums keep
    # their index in the beam when hypotheses are reordered, as in GNMT's submission; in the paper they follow their
    # hypotheses (Wu et al. 2016, equation 14).
    coverage: Optional[Coverage] = None
    # Whether a finished hypothesis stays in the beam with its score, and the search stops when all are finished (GNMT,
    # v0.7 NVIDIA seq2seq/inference/beam_search.py). Otherwise it leaves the beam if it is among the best ``beam``
    # continuations, and the search stops after ``beam`` finished hypotheses (Transformer, v0.7 NVIDIA
    # fairseq/sequence_generator.py with the default stop_early).
    ended_stay: bool = False
    shortest: int = 0  # tokens that come before EOS at least (Transformer: 1)
    vocabulary: Optional[int] = None  # number of valid tokens; the rest of the logits is padding


def length_penalty(power: float, offset: float) -> Normalize:
    """Return a division by ((offset + L) / 6) ** power, for L tokens including EOS (Wu et al. 2016, equation 14).

    Both submissions use power 0.6. GNMT's also counts BOS: offset 6; the Transformer's does not: 5.
    """
    return lambda scores, lengths: scores / ((offset + lengths) / 6) ** power


def coverage_penalty(factor: float) -> Coverage:
    """Return factor * sum over the source of log(min(attention, 1)), without positions that lack attention.

    GNMT's submission uses factor 0.1 (Wu et al. 2016, equation 14).
    """

    def penalty(attention: torch.Tensor) -> torch.Tensor:
        logarithms = attention.clamp(0, 1).log()
        return factor * logarithms.masked_fill(attention <= 0, 0).sum(-1)

    return penalty


class _Hypotheses(NamedTuple):
    # Hypotheses of the n unfinished sentences.

    sentences: torch.Tensor  # (n,) indices in the batch
    limits: torch.Tensor  # (n,) maximum tokens
    tokens: torch.Tensor  # (n, beam, longest), padded with PAD
    scores: torch.Tensor  # (n, beam) sums of log-probabilities
    lengths: torch.Tensor  # (n, beam) tokens
    ended: torch.Tensor  # (n, beam)
    attention: Optional[torch.Tensor]  # (n, beam, S) sums, where they count
    ends: torch.Tensor  # (n,) number of hypotheses that left the beam

    def keep(self, indices: torch.Tensor) -> _Hypotheses:
        # Select the sentences at ``indices``.
        return _Hypotheses(*(None if tensor is None else tensor.index_select(0, indices) for tensor in self))


class _Best(NamedTuple):
    # The best finished hypothesis per sentence.

    scores: torch.Tensor  # (batch,)
    tokens: torch.Tensor  # (batch, longest)

    def offer(self, sentences: torch.Tensor, scores: torch.Tensor, tokens: torch.Tensor) -> None:
        # Update with the best of ``scores`` (n, hypotheses) where it is higher; the first of equal scores.
        best, indices = smallest(-scores, 1)
        better = best[:, 0].neg() > self.scores[sentences]
        selected = tokens.gather(1, indices[:, :, None].expand(-1, -1, tokens.shape[2]))[:, 0]
        self.scores[sentences] = torch.where(better, best[:, 0].neg(), self.scores[sentences])
        self.tokens[sentences] = torch.where(better[:, None], selected, self.tokens[sentences])


def smallest(values: torch.Tensor, count: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` smallest values per row of ``values`` >= 0 in order, and their indices, in stable order.

    topk is unstable for equal values. If the first excluded value equals the last selected one, repeat with unique
    keys; doing that for all rows would take as long as the logits.
    """
    least, indices = values.topk(min(count + 1, values.shape[1]), largest=False)
    indices = indices[:, :count]
    chosen_freely = (least[:, count - 1 : count] == least[:, count:]).any(1)
    if bool(chosen_freely.any()):
        positions = torch.arange(values.shape[1], device=values.device)
        indices[chosen_freely] = _keys(values[chosen_freely], positions).topk(count, largest=False).indices
    indices = indices.gather(1, _keys(values.gather(1, indices), indices).sort(1).indices)
    return values.gather(1, indices), indices


def _keys(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    # Return integer keys in the order of ``values``, then ``positions``: positive floats are ordered like their bits.
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
    """Return the best hypothesis per sentence in a batch, without BOS and EOS.

    Args:
        step: returns the log-probabilities (rows, V) of the next token, and the attention (rows, S) or None, from
            the last tokens int64 (rows,), their position from 0 (all are BOS) and ``state``, which it updates.
            There are ``beam`` rows per sentence.
        state: of the same rows; ``select(rows)`` reorders or drops rows.
        batch: the sentences; the search reads only the size.
        beam: hypotheses per sentence.
        longest: maximum tokens including EOS, for all or per sentence. If hypotheses leave the beam, the last token
            is EOS, whatever its probability; if they stay, unfinished hypotheses are truncated and compared like
            the others (GNMT's submission compares sums there).
        rules: search settings.
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
            # Accumulate the attention of the next token; finished hypotheses lack a next token.
            new = attention.float().view(*alive.scores.shape, -1).masked_fill(alive.ended[:, :, None], 0)
            alive = alive._replace(attention=new if alive.attention is None else alive.attention + new)
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
    # The tokens before the first EOS or PAD.
    return [list(takewhile(lambda token: token not in (EOS, PAD), tokens)) for tokens in best.tokens.tolist()]


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


def _costs(log_probabilities: torch.Tensor, alive: _Hypotheses, position: int, rules: Rules) -> torch.Tensor:
    # (n, beam, V): negative log-probability of the continuations, infinite for invalid ones.
    costs = -log_probabilities[:, : rules.vocabulary].float().reshape(*alive.scores.shape, -1)
    costs[:, :, [PAD, BOS] + [EOS] * (position < rules.shortest)] = -NEVER
    if rules.ended_stay:
        # Finished hypotheses continue with PAD at no cost.
        costs.masked_fill_(alive.ended[:, :, None], -NEVER)
        costs[:, :, PAD].masked_fill_(alive.ended, 0)
    else:
        at_limit = (alive.limits == position + 1)[:, None]
        forced = costs[:, :, EOS].clone()
        costs.masked_fill_(at_limit[:, :, None], -NEVER)
        costs[:, :, EOS] = forced
    return costs - alive.scores[:, :, None]


# The hypotheses, the indices of their predecessors (n, beam), finished sentences (n,).
Grown = Tuple[_Hypotheses, torch.Tensor, torch.Tensor]


def _grow_staying(alive: _Hypotheses, best: _Best, costs: torch.Tensor, position: int, rules: Rules) -> Grown:
    # Continue with the best hypotheses, including finished ones.
    beam, tokens = costs.shape[1:]
    lowest, indices = smallest(costs.flatten(1), beam)
    source, token = indices // tokens, indices % tokens
    was_ended = alive.ended.gather(1, source)
    lengths = alive.lengths.gather(1, source) + ~was_ended
    # Do not wait for invalid hypotheses.
    is_ended = was_ended | (token == EOS) | torch.isinf(lowest)
    alive = _continued(alive, source, token, -lowest, position)._replace(ended=is_ended, lengths=lengths)
    done = is_ended.all(1) | (alive.limits == position + 1)
    final = rules.normalize(alive.scores, lengths)
    if rules.coverage is not None and alive.attention is not None:
        final = final + rules.coverage(alive.attention)
    # Offer unfinished hypotheses with the worst score instead of selecting them, which would synchronize.
    best.offer(alive.sentences, final.masked_fill(~done[:, None], NEVER), alive.tokens)
    return alive, source, done


def _grow_leaving(alive: _Hypotheses, best: _Best, costs: torch.Tensor, position: int, rules: Rules) -> Grown:
    # Continue with the best unfinished hypotheses; offer the finished ones.
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
    # Return the hypotheses of ``source``, extended by one token.
    tokens = alive.tokens.gather(1, source[:, :, None].expand_as(alive.tokens))
    tokens[:, :, position] = token
    return alive._replace(tokens=tokens, scores=scores)
