"""Go as its rules read, slow and obvious, to hold the compiled engine against."""

from __future__ import annotations

from dataclasses import dataclass, field

EMPTY, BLACK, WHITE = 0, 1, 2


@dataclass
class SlowGo:
    """A board as a tuple of colours; every question is answered by looking at the whole of it."""

    size: int
    superko: bool = True
    board: tuple[int, ...] = ()
    to_play: int = BLACK
    ko: int | None = None
    passes: int = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.board = self.board or (EMPTY,) * self.size**2
        self.seen.add(self.board)

    def neighbors(self, point: int) -> list[int]:
        row, column = divmod(point, self.size)
        around = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
        return [y * self.size + x for y, x in around if 0 <= y < self.size and 0 <= x < self.size]

    def group(self, board: tuple[int, ...] | list[int], start: int, inside: set[int] | None = None) -> set[int]:
        """The connected points of the colour of ``start``, or of the colours in ``inside``."""
        inside = {board[start]} if inside is None else inside
        found, todo = {start}, [start]
        while todo:
            for point in self.neighbors(todo.pop()):
                if point not in found and board[point] in inside:
                    found.add(point)
                    todo.append(point)
        return found

    def border(self, group: set[int]) -> set[int]:
        return {other for point in group for other in self.neighbors(point)} - group

    def liberties(self, board: tuple[int, ...] | list[int], start: int) -> set[int]:
        return {point for point in self.border(self.group(board, start)) if board[point] == EMPTY}

    def after(self, move: int) -> tuple[tuple[int, ...], list[set[int]]]:
        """The board after a stone, with its captures made, and the groups that were captured."""
        board = list(self.board)
        board[move] = self.to_play
        captured = []
        for point in self.neighbors(move):
            if board[point] == 3 - self.to_play and not self.liberties(board, point):
                captured.append(self.group(board, point))
                for stone in captured[-1]:
                    board[stone] = EMPTY
        return tuple(board), captured

    def legal(self, move: int) -> bool:
        if move == self.size**2:
            return True
        if self.board[move] != EMPTY or move == self.ko:
            return False
        board, _ = self.after(move)
        return bool(self.liberties(board, move)) and not (self.superko and board in self.seen)

    def play(self, move: int) -> None:
        self.ko = None
        self.passes += 1
        if move < self.size**2:
            self.passes = 0
            surrounded = all(self.board[point] == 3 - self.to_play for point in self.neighbors(move))
            self.board, captured = self.after(move)
            if surrounded and len(captured) == 1 and len(captured[0]) == 1:
                (self.ko,) = captured[0]
        self.seen.add(self.board)
        self.to_play = 3 - self.to_play

    def area(self, board: tuple[int, ...] | list[int] | None = None) -> int:
        board = self.board if board is None else board
        total = board.count(BLACK) - board.count(WHITE)
        for point in range(self.size**2):
            if board[point] == EMPTY:
                owners = {board[each] for each in self.border(self.group(board, point))}
                total += {frozenset({BLACK}): 1, frozenset({WHITE}): -1}.get(frozenset(owners), 0)
        return total

    def held(self, color: int) -> set[int]:
        """Benson's unconditional life as his paper has it: chains with two vital regions, again and again."""
        points = range(self.size**2)
        chains = {frozenset(self.group(self.board, p)) for p in points if self.board[p] == color}
        regions = {frozenset(self.group(self.board, p, {EMPTY, 3 - color})) for p in points if self.board[p] != color}

        def empty(region: frozenset[int]) -> set[int]:
            return {point for point in region if self.board[point] == EMPTY}

        regions = {each for each in regions if all(self._touches(point, color) for point in empty(each))}
        while True:
            vital = {
                chain: [each for each in regions if self.border(set(each)) & chain
                        and empty(each) <= self.border(set(chain))]
                for chain in chains
            }  # fmt: skip
            alive = {chain for chain in chains if len(vital[chain]) >= 2}
            stones = set().union(*alive)
            closed = {each for each in regions if self.border(set(each)) <= stones}
            if alive == chains and closed == regions:
                return stones.union(*regions)
            chains, regions = alive, closed

    def _touches(self, point: int, color: int) -> bool:
        return any(self.board[other] == color for other in self.neighbors(point))

    def score(self) -> int:
        """Area, with what is held by unconditional life given to its owner first."""
        board = list(self.board)
        for color in (BLACK, WHITE):
            for point in self.held(color):
                board[point] = color
        return self.area(board)
