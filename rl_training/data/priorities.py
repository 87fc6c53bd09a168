"""Prioritised sampling (Schaul et al., 2016): transitions with large errors are drawn more often, and weigh less."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_PRIORITY = 1e-6


class SumTree:
    """A binary tree of sums over `capacity` leaves: drawing and changing a leaf take logarithmic time.

    Every inner node is the sum of its two children, so the tree follows from its leaves bit by bit, in whatever order
    they were set.
    """

    def __init__(self, capacity: int) -> None:
        self._leaves = 1 << max(0, capacity - 1).bit_length()
        self._nodes = np.zeros(2 * self._leaves)

    @property
    def total(self) -> float:
        """The sum of all leaves."""
        return float(self._nodes[1])

    def __getitem__(self, rows: Any) -> NDArray[np.float64]:
        return self._nodes[self._leaves :][rows]

    def set(self, rows: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Set some leaves; of a row that comes twice, the last value stays."""
        nodes = rows + self._leaves
        self._nodes[nodes] = values
        while self._leaves > 1 and nodes[0] > 1:
            nodes = np.unique(nodes >> 1)
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def find(self, sums: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return for each number in [0, total) the leaf at which the running sum of the leaves passes it."""
        nodes = np.ones(len(sums), np.int64)
        remaining = sums.copy()
        while nodes[0] < self._leaves:
            left = 2 * nodes
            to_the_right = remaining >= self._nodes[left]
            # Rounding may lead past the last leaf that has a share; there is always one on the left then.
            to_the_right &= self._nodes[left + 1] > 0.0
            remaining -= np.where(to_the_right, self._nodes[left], 0.0)
            nodes = left + to_the_right
        return nodes - self._leaves


class Priorities:
    """How often each transition of a replay buffer is drawn: its error to the power `exponent`."""

    def __init__(self, capacity: int, exponent: float) -> None:
        self._capacity, self._exponent = capacity, exponent
        self._tree = SumTree(capacity)
        self._highest = 1.0

    def add(self, rows: NDArray[np.int64]) -> None:
        """Give new transitions the highest priority so far, so that each is drawn soon."""
        self._tree.set(rows, np.full(len(rows), self._highest))

    def remove(self, rows: NDArray[np.int64]) -> None:
        """Let transitions never be drawn again."""
        self._tree.set(rows, np.zeros(len(rows)))

    def draw(
        self, uniform: NDArray[np.float64], size: int, weight_exponent: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Draw one transition from each equal share of the sum; returns rows and importance weights.

        The weights (size x probability) ^ -weight_exponent undo the preference; they are scaled so that the largest
        of the batch is 1.
        """
        rows = self._tree.find((np.arange(len(uniform)) + uniform) * (self._tree.total / len(uniform)))
        probabilities = self._tree[rows] / self._tree.total
        weights = (size * probabilities) ** -weight_exponent
        return rows, (weights / weights.max()).astype(np.float32)

    def update(self, rows: NDArray[np.int64], errors: NDArray[np.float32]) -> None:
        """Set the priorities of transitions from their temporal-difference errors."""
        values = (np.abs(errors.astype(np.float64)) + MIN_PRIORITY) ** self._exponent
        self._highest = max(self._highest, float(values.max()))
        self._tree.set(rows, values)

    def state_dict(self, size: int) -> dict[str, Any]:
        """Return the priorities of the first `size` rows; the tree follows from them."""
        return {"leaves": self._tree[:size].copy(), "highest": self._highest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        leaves = state["leaves"]
        self._tree = SumTree(self._capacity)
        if len(leaves):
            self._tree.set(np.arange(len(leaves)), leaves)
        self._highest = state["highest"]
