"""The search and the game of v0.7's reference in plain Python, slow and obvious, to compare the compiled engine with.

Written from SelfplayGame (cc/concurrent_selfplay.cc), MctsTree (cc/mcts_tree.cc) and Evaluator (cc/eval.cc) of NVIDIA's
submission, without symmetries and without a cache. Two things are the engine's: its random numbers (generator.h), so
that both draw the same, and the rules of Go, which test_minigo_rules.py compares with slow ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.minigo.engine import BLACK, Position, Rules
from benchmarks.minigo.engine.native import NativeSearch

Evaluate = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
MASK = (1 << 64) - 1
SLACK = 2e-6
"""Distance of the two best scores below which rounding in fp32 may decide."""


def mixed(x: int) -> int:
    """SplitMix64's step and finalizer (generator.h)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


class Random:
    """The engine's random numbers."""

    def __init__(self, seed: int) -> None:
        self.state = mixed(seed)

    def bits(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        return mixed(self.state)

    def uniform(self) -> float:
        return (self.bits() >> 11) * 2.0**-53

    def normal(self) -> float:
        while True:
            x, y = 2 * self.uniform() - 1, 2 * self.uniform() - 1
            square = x * x + y * y
            if 0 < square < 1:
                return x * math.sqrt(-2 * math.log(square) / square)

    def gamma(self, shape: float) -> float:
        if shape < 1:
            return self.gamma(shape + 1) * self.uniform() ** (1 / shape)
        d = shape - 1 / 3
        while True:
            x = self.normal()
            v = (1 + x / math.sqrt(9 * d)) ** 3
            if v > 0:
                u = self.uniform()
                if u > 0 and math.log(u) < 0.5 * x * x + d - d * v + d * math.log(v):
                    return d * v


@dataclass
class Node:
    """MctsNode: N and W of the moves are the node's own and those of its children."""

    position: Position
    parent: Node | None = None
    move: int = -1
    expanded: bool = False
    children: dict[int, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        moves = self.position.rules.moves
        self.legal = self.position.legal()
        self.counts, self.totals, self.priors = np.zeros(moves, int), np.zeros(moves), np.zeros(moves)
        self.root_count, self.root_total = 0, 0.0

    @property
    def count(self) -> int:
        return self.root_count if self.parent is None else int(self.parent.counts[self.move])

    @property
    def total(self) -> float:
        return self.root_total if self.parent is None else float(self.parent.totals[self.move])

    def add(self, value: float, visits: int) -> None:
        if self.parent is None:
            self.root_count, self.root_total = self.root_count + visits, self.root_total + value
        else:
            self.parent.counts[self.move] += visits
            self.parent.totals[self.move] += value

    def path(self) -> Iterator[Node]:
        """The node and those above it, up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def side(self) -> int:
        return 1 if self.position.to_play == BLACK else -1

    @property
    def mean(self) -> float:
        return self.total / (1 + self.count)

    def scale(self, search: NativeSearch) -> float:
        base = search.c_puct_base
        return 2.0 * (math.log((1 + self.count + base) / base) + search.c_puct_init)

    def scores(self, common: float) -> np.ndarray:
        found = (self.totals * self.side + common * self.priors) / (1 + self.counts)
        return found - 1000.0 * ~self.legal


class Tree:
    """MctsTree, of one side."""

    def __init__(self, rules: Rules, search: NativeSearch, seed: int) -> None:
        self.rules, self.search, self.random = rules, search, Random(seed)
        self.random.bits()  # the engine's mixture for symmetries
        self.root, self.target, self.fast, self.noise = Node(Position(rules)), 0, False, False
        self.smallest_gap = math.inf
        self.target = search.readouts

    def next_move(self) -> None:
        """The end of MaybePlayMove: how many readouts the next search adds, and only then what it forgets."""
        search = self.search
        self.fast = search.fastplay_frequency > 0 and self.random.uniform() < search.fastplay_frequency
        self.noise = not self.fast
        self.target = self.root.count + (search.fastplay_readouts if self.fast else search.readouts)
        if not self.fast and search.fastplay_frequency > 0:
            self.root.children, self.root.expanded = {}, False
            for each in (self.root.counts, self.root.totals, self.root.priors):
                each[:] = 0
            self.root.add(-self.root.total, -self.root.count)

    def select_leaf(self) -> Node:
        node = self.root
        while node.expanded:
            scores = node.scores(node.scale(self.search) * math.sqrt(max(1, node.count - 1)))
            move = int(scores.argmax())
            self.smallest_gap = min(self.smallest_gap, float(scores[move] - np.partition(scores, -2)[-2]))
            if move not in node.children:
                after = node.position.copy()
                after.play(move)
                node.children[move] = Node(after, node, move)
            node = node.children[move]
        return node

    def back_up(self, leaf: Node, value: float) -> None:
        for node in leaf.path():
            node.add(value, 1)

    def virtual_loss(self, leaf: Node, times: int) -> None:
        for node in leaf.path():
            node.add(times * node.side, 0)

    def read(self, evaluate: Evaluate) -> None:
        """SelectLeaves and ProcessInferences: one batch of leaves, of which some may be the same."""
        if self.noise and self.root.expanded:
            self.noise = False
            self.mix_noise()
        leaves: list[Node] = []
        while True:
            leaf = self.select_leaf()
            if leaf.position.over:
                score = leaf.position.score()
                self.back_up(leaf, 1.0 if score > 0 else -1.0)
            else:
                leaves.append(leaf)
                self.virtual_loss(leaf, 1)
                if leaf is self.root:
                    self.noise = not self.fast
                    break
            if len(leaves) >= self.search.parallel_leaves or self.root.count >= self.target:
                break
        for leaf in leaves:
            self.evaluate(leaf, evaluate)
            self.virtual_loss(leaf, -1)

    def evaluate(self, leaf: Node, evaluate: Evaluate) -> None:
        if leaf.expanded:
            return
        size = self.rules.size
        planes = np.zeros((1, size, size, self.rules.planes), np.uint8)
        leaf.position.planes(planes[0])
        policy, value = evaluate(planes)
        black = float(value[0]) * leaf.side
        priors = np.where(leaf.legal, policy[0].astype(float), 0.0)
        leaf.priors[:] = priors / priors.sum()
        leaf.totals += min(1.0, max(-1.0, black - self.search.value_init_penalty * leaf.side))
        leaf.expanded = True
        self.back_up(leaf, black)

    def mix_noise(self) -> None:
        if self.search.noise_mix == 0:
            return
        noise = np.array([self.random.gamma(self.search.dirichlet_alpha) for _ in range(self.rules.moves)])
        noise = np.where(self.root.legal, noise, 0.0)
        mix = self.search.noise_mix
        self.root.priors[:] = (1 - mix) * self.root.priors + mix * noise / noise.sum()

    def most_visited(self, restrict: bool) -> int:
        root, outside = self.root, self.outside(restrict)
        counts = np.where(outside, -1, root.counts)
        best = np.flatnonzero(counts == counts.max())
        scores = root.scores(root.scale(self.search) * math.sqrt(1 + root.count))
        return int(best[scores[best].argmax()])

    def outside(self, restrict: bool) -> np.ndarray:
        """The points that PickMove and ReshapeFinalVisits leave out; never the pass."""
        held = self.root.position.held().ravel() != 0
        return np.append(held & restrict, False)

    def pick(self, restrict: bool) -> int:
        root, search = self.root, self.search
        if len(root.position.moves) >= search.soft_pick_cutoff:
            return self.most_visited(restrict)
        sums = (root.counts[:-1].astype(float) ** search.policy_softmax_temp * (root.counts[:-1] > 0)).cumsum()
        if sums[-1] == 0:
            return self.rules.size**2
        return int(np.searchsorted(sums, self.random.uniform() * sums[-1], side="right"))

    def reshape(self, restrict: bool) -> None:
        """ReshapeFinalVisits, in the tree itself."""
        root, best, outside = self.root, self.most_visited(False), self.outside(restrict)
        score = root.scores(root.scale(self.search) * math.sqrt(1 + root.count))[best]
        for move in range(self.rules.moves):
            if outside[move]:
                root.counts[move] = 0
            elif move != best:
                mean = root.totals[move] / (1 + root.counts[move]) * root.side
                enough = -root.scale(self.search) * root.priors[move] * math.sqrt(root.count) / (mean - score)
                root.counts[move] = max(0, min(int(root.counts[move]), int(enough)))
        if not root.counts.any():
            root.counts[-1] = 1

    def play(self, move: int) -> None:
        if move not in self.root.children:
            after = self.root.position.copy()
            after.play(move)
            self.root.children[move] = Node(after, self.root, move)
        child = self.root.children[move]
        child.root_count, child.root_total = child.count, child.total
        child.parent, self.root = None, child


@dataclass
class Played:
    """What a game leaves: of each move the visits after pruning, zeros where it was a fast one."""

    moves: list[int] = field(default_factory=list)
    visits: list[np.ndarray] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    readouts: list[int] = field(default_factory=list)
    """Evaluations and ends of games that each move's search added."""
    smallest_gap: float = math.inf


def game(rules: Rules, searches: list[NativeSearch], evaluators: list[Evaluate], seed: int, number: int) -> Played:
    """Self-play with one search, or a match with two, until the move limit or the end."""
    random = Random(mixed(seed) ^ mixed(number + 77))
    trees = [Tree(rules, search, random.bits()) for search in searches]
    limit, latch, found = searches[0].move_limit, [0, 0], Played()
    black = number & 1 if len(trees) == 2 else 0
    while len(found.moves) < limit and not trees[0].root.position.over:
        side = len(found.moves) % 2
        tree, evaluate = (each[(black + side) % len(trees)] for each in (trees, evaluators))
        search, before = tree.search, tree.root.count
        while tree.root.count < tree.target:
            tree.read(evaluate)
        # MctsPlayer::SuggestMove, of a match, always restricts.
        restrict = len(trees) == 2 or latch[1 - side] >= search.restrict_pass_alive_play_threshold
        found.readouts.append(tree.root.count - before)
        found.values.append(tree.root.mean)
        move = tree.pick(restrict)
        if search.target_pruning and not tree.fast and len(trees) == 1:
            tree.reshape(restrict)
        found.moves.append(move)
        found.visits.append(np.zeros(rules.moves, int) if tree.fast else tree.root.counts.copy())
        if latch[side] < search.restrict_pass_alive_play_threshold:
            latch[side] = latch[side] + 1 if move == rules.size**2 else 0
        for each in trees:
            each.play(move)
        if settled(rules, trees[0].root.position, len(found.moves)):
            break
        following = trees[(black + len(found.moves) % 2) % len(trees)]
        following.next_move()
    found.smallest_gap = min(tree.smallest_gap for tree in trees)
    return found


def settled(rules: Rules, position: Position, played: int) -> bool:
    """Whether unconditional life owns the whole board, late enough in the game."""
    return played >= rules.size * ((rules.size + 2) // 3) and bool(position.held().all())
