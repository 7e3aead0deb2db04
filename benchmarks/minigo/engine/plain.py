"""The same search in plain Python, as one would write it first: what the speed of the compiled one is compared with."""

from __future__ import annotations

import math
from typing import Dict, List, Optional, Sequence, Set, Tuple

Board = Tuple[int, ...]


class Go:
    """A position on a board as a tuple: 0 empty, 1 black, 2 white."""

    def __init__(self, size: int) -> None:
        self.size = size
        points = [divmod(point, size) for point in range(size**2)]
        self.near = [
            [
                y * size + x
                for y, x in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
                if 0 <= y < size and 0 <= x < size
            ]
            for row, column in points
        ]

    def chain(self, board: List[int], start: int) -> Tuple[Set[int], bool]:
        """Return a chain, and whether it has a liberty; the walk ends at the first."""
        color, found, todo = board[start], {start}, [start]
        while todo:
            for point in self.near[todo.pop()]:
                if board[point] == 0:
                    return found, True
                if board[point] == color and point not in found:
                    found.add(point)
                    todo.append(point)
        return found, False

    def after(self, board: Board, move: int, color: int) -> Optional[Board]:
        """Return the board after a stone, or None where it is suicide."""
        new = list(board)
        new[move] = color
        for point in self.near[move]:
            if new[point] == 3 - color:
                taken, free = self.chain(new, point)
                if not free:
                    for stone in taken:
                        new[stone] = 0
        return tuple(new) if self.chain(new, move)[1] else None


class Node:
    """A position in the tree; the values are the mover's."""

    def __init__(self, board: Board, color: int, passes: int, seen: Set[Board], history: List[Board]) -> None:
        self.board, self.color, self.passes, self.seen, self.history = board, color, passes, seen, history
        self.moves: Dict[int, Optional[Board]] = {}
        self.visits: Dict[int, int] = {}
        self.totals: Dict[int, float] = {}
        self.children: Dict[int, Node] = {}
        self.count = 0


def expand(go: Go, node: Node) -> None:
    """Find the legal moves, with positional superko."""
    for move in range(go.size**2):
        if node.board[move] == 0:
            board = go.after(node.board, move, node.color)
            if board is not None and board not in node.seen:
                node.moves[move] = board
    node.moves[go.size**2] = node.board
    node.visits = dict.fromkeys(node.moves, 0)
    node.totals = dict.fromkeys(node.moves, 0.0)


def planes(go: Go, node: Node) -> List[List[bool]]:
    """Return the network's input, as the compiled engine fills it: eight positions by side, and black to play."""
    own, other, black = node.color, 3 - node.color, node.color == 1
    boards = [node.board, *node.history][:8]
    missing = [False] * (16 - 2 * len(boards))
    return [
        [side == board[point] for board in boards for side in (own, other)] + [*missing, black]
        for point in range(go.size**2)
    ]


def playout(go: Go, root: Node) -> None:
    """Add one leaf by PUCT; the network is free: every move is as likely, and no side is ahead."""
    path, node = [], root
    while node.moves and node.passes < 2:
        common = 2.5 * math.sqrt(max(1, node.count - 1)) / len(node.moves)
        visits, totals = node.visits, node.totals
        move = max(node.moves, key=lambda each: (totals[each] + common) / (1 + visits[each]))
        path.append((node, move))
        if move not in node.children:
            board = node.moves[move]
            passes = node.passes + 1 if move == go.size**2 else 0
            history = [node.board, *node.history[:6]]
            node.children[move] = Node(board or node.board, 3 - node.color, passes, node.seen | {node.board}, history)
        node = node.children[move]
    if node.passes < 2:
        expand(go, node)
        planes(go, node)
    for each, move in path:
        each.visits[move] += 1
        each.count += 1


def search(size: int, playouts: int, moves: Sequence[int] = ()) -> Node:
    """Search the position after some moves."""
    go = Go(size)
    root = Node((0,) * size**2, 1, 0, set(), [])
    for move in moves:
        board = go.after(root.board, move, root.color)
        root = Node(board or root.board, 3 - root.color, 0, root.seen | {root.board}, [root.board, *root.history[:6]])
    for _ in range(playouts):
        playout(go, root)
    return root
