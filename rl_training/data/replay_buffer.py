"""What DQN and SAC learn from: the last `capacity` transitions, sampled uniformly or by priority."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.data.frame_history import FrameHistory
from rl_training.data.priorities import Priorities
from rl_training.errors import UserError
from rl_training.numerics import all_finite, require_finite
from rl_training.runtime.system import available_memory
from rl_training.spaces import ActionSpec, ObservationSpec, action_layout
from rl_training.transfer import to_device


class Transitions(NamedTuple):
    """A batch of transitions; `next_observations` are true even where an episode ended."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    next_observations: Tensor
    terminated: Tensor
    discounts: Tensor | None = None
    """With n-step returns: the discount of what follows, gamma to the number of steps summed up in `rewards`."""
    weights: Tensor | None = None
    """With priorities: how much each transition counts in the loss."""


Scaling = Callable[[NDArray[Any]], NDArray[Any]]


class ReplayBuffer:
    """A ring of transitions in CPU memory, with its own random generator.

    Observations and rewards are stored raw; `sample` scales them, so that old transitions follow the statistics of now.
    Images are stored frame by frame (see `FrameHistory`).
    """

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        observation: ObservationSpec,
        actions: ActionSpec,
        *,
        seed: int,
        device: torch.device | None = None,
        n_step: int = 1,
        gamma: float = 1.0,
        priority_exponent: float | None = None,
        masked: bool = False,
    ) -> None:
        """Allocate after checking free memory.

        With `n_step` above 1, samples sum up that many rewards, discounted by `gamma`. With a priority exponent,
        samples are drawn by their errors, which `set_errors` reports. `masked` if some rows may be no transitions:
        these are stored, and never sampled.
        """
        self.capacity = capacity - capacity % num_envs  # a vector step is never split at the end of the ring
        self.num_envs = num_envs
        self._observation = observation
        self.device = device or torch.device("cpu")
        vector = ((observation.size,), np.float32)
        frame = ((observation.row_size // observation.frame_stack,), np.uint8)
        columns: dict[str, tuple[tuple[int, ...], Any]] = {
            **({"frames": frame, "ages": ((), np.uint8)} if observation.images else {"observations": vector}),
            "actions": action_layout(actions),
            "rewards": ((), np.float32),
            **({} if observation.images else {"next_observations": vector}),
            "terminated": ((), np.float32),
        }
        self.n_step, self._gamma = n_step, gamma
        if n_step > 1 or observation.images:
            columns["ended"] = ((), np.bool_)  # where an n-step return must stop: truncation counts too
        if masked:
            columns["valid"] = ((), np.bool_)
        self.row_dtype = np.dtype([(name, dtype, shape) for name, (shape, dtype) in columns.items()])
        _check_memory(capacity, self.row_dtype.itemsize)
        self._history = FrameHistory(self.capacity, num_envs, observation) if observation.images else None
        kept = {} if self._history is None else {"frames": self._history.frames, "ages": self._history.ages}
        # All float32 columns lie side by side in one table, so that a sample is one gather; the names are views of it.
        self._table, self._slices = _table_for(columns, self.capacity)
        self._columns: dict[str, NDArray[Any]] = {
            name: self._table[:, self._slices[name]]
            if name in self._slices
            else kept[name]
            if name in kept
            else np.zeros((self.capacity, *shape), dtype)
            for name, (shape, dtype) in columns.items()
        }
        self._sampler = np.random.Generator(np.random.PCG64(seed))
        self._masked = masked
        reach = 0 if self._history is None else self._history.reach
        if masked and self.capacity < reach + 2 * num_envs:
            # Of two successive rows of an environment, one is a transition.
            raise UserError(
                f"algo.buffer_size={capacity} is too small for env.num_envs={num_envs} environments with late resets: "
                f"it must be at least {reach + 2 * num_envs}."
            )
        self._priorities = None if priority_exponent is None else Priorities(self.capacity, priority_exponent)
        self._drawn = np.zeros(0, np.int64)
        self.added = 0

    def __len__(self) -> int:
        """Return how many transitions can be sampled."""
        return self.added - self._first

    def add(
        self,
        observations: NDArray[Any],
        actions: NDArray[Any],
        rewards: NDArray[np.float32],
        next_observations: NDArray[Any],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_] | None = None,
        valid: NDArray[np.bool_] | None = None,
    ) -> None:
        """Store one vector step of `num_envs` transitions over the oldest ones; without `truncated`, none was cut.

        Rows that are not `valid` hold no transition; the next one of their environment begins an episode.
        """
        if truncated is None:
            truncated = np.zeros_like(terminated)
        start = self.added % self.capacity
        rows = slice(start, start + self.num_envs)
        columns = self._columns
        if self._history is None:
            columns["observations"][rows] = observations
            columns["next_observations"][rows] = next_observations
        else:
            over = terminated if valid is None else terminated | ~valid
            self._history.add(self.added, observations, next_observations, over, truncated)
        columns["actions"][rows] = actions
        columns["rewards"][rows] = rewards
        columns["terminated"][rows] = terminated
        if "ended" in columns:
            columns["ended"][rows] = terminated | truncated
        if valid is not None:
            columns["valid"][rows] = valid
        self.added += self.num_envs
        if self._priorities is not None:
            self._priorities.add(np.arange(start, start + self.num_envs))
            if valid is not None and not valid.all():
                self._priorities.remove(start + np.flatnonzero(~valid))
            if self._oldest < self._first:
                self._priorities.remove(np.arange(self._oldest, self._first) % self.capacity)

    @property
    def _oldest(self) -> int:
        """The oldest transition that is stored."""
        return max(0, self.added - self.capacity)

    @property
    def _first(self) -> int:
        """The oldest transition that can be sampled: in a full ring, one whose stack of frames is whole."""
        return self._oldest + (self._history.reach if self._history is not None and self._oldest else 0)

    def end_episodes(self, envs: Sequence[int]) -> None:
        """Let neither n-step returns nor stacks of frames cross the newest transition of these, which began anew."""
        if "ended" in self._columns and self.added:
            newest = (self.added - self.num_envs) % self.capacity
            self._columns["ended"][[newest + env for env in envs]] = True
        if self._history is not None:
            self._history.begin_episodes(list(envs), self.added)

    def check_finite(self, since: int) -> None:
        """Refuse NaN and infinity in the transitions added since env step `since`, naming step and environment."""
        first = max(since, self.added - self.capacity)
        start, end = first % self.capacity, first % self.capacity + self.added - first
        # The usual case, in one look: what is new lies in one piece and is finite.
        if end <= self.capacity and all_finite(self._table[start:end], self._vectors_of_images(slice(start, end))):
            return
        for name, label in (
            ("frames", "observation"),
            ("observations", "observation"),
            ("next_observations", "observation"),
            ("rewards", "reward"),
        ):
            if name not in self._columns:
                continue
            began = name in ("frames", "observations")  # of what the step before led to
            for row, stored in self._rows(name, first):
                values = self._observation.vectors(stored) if name == "frames" else stored
                by_step = values.reshape(len(values) // self.num_envs, self.num_envs, *values.shape[1:])
                require_finite(label, by_step, row // self.num_envs - began, self.num_envs)

    def _vectors_of_images(self, rows: slice) -> NDArray[Any]:
        """Return the numbers that lie beside pixels."""
        frames = self._columns.get("frames")
        return np.zeros(0, np.float32) if frames is None else self._observation.vectors(frames[rows])

    def _rows(self, name: str, first: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield the values of a column from transition `first` on, in the one or two pieces that the ring has."""
        column = self._columns[name]
        while first < self.added:
            start = first % self.capacity
            piece = column[start : min(start + self.added - first, self.capacity)]
            yield first, piece
            first += len(piece)

    def sample(
        self,
        batch_size: int,
        scale_observations: Scaling | None = None,
        scale_rewards: Scaling | None = None,
        *,
        weight_exponent: float = 1.0,
    ) -> Transitions:
        """Draw transitions with replacement: each stored one equally likely, or by priority.

        `weight_exponent` says how far weights undo the preference of priorities: 0 not at all, 1 fully.
        """
        weights = None
        if self._priorities is None:
            rows = self._drawn_rows(batch_size)
            if self._masked:
                while len(again := np.flatnonzero(~self._columns["valid"][rows])):
                    rows[again] = self._drawn_rows(len(again))
        else:
            rows, weights = self._priorities.draw(self._sampler.random(batch_size), len(self), weight_exponent)
            self._drawn = rows
        batch = self._transitions(rows) if self.n_step == 1 else self._n_step_transitions(rows, scale_rewards)
        if weights is not None:
            batch["weights"] = weights
        if scale_observations is not None:
            batch["observations"] = scale_observations(batch["observations"])
            batch["next_observations"] = scale_observations(batch["next_observations"])
        if scale_rewards is not None and self.n_step == 1:
            batch["rewards"] = scale_rewards(batch["rewards"])
        return Transitions(**{name: to_device(values, self.device) for name, values in batch.items()})

    def _drawn_rows(self, count: int) -> NDArray[np.int64]:
        rows = self._sampler.integers(0, len(self), size=count)
        return rows if self._history is None else (rows + self._first) % self.capacity

    def _transitions(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        packed = self._table.take(rows, axis=0)
        batch = {name: packed[:, where] for name, where in self._slices.items()}
        if "actions" not in batch:
            batch["actions"] = self._columns["actions"].take(rows, axis=0)
        if self._history is not None:
            batch |= self._images(rows, rows)
        return batch

    def _numbers(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers, since the start of the run, of the transitions in these rows."""
        return rows + (self.added - 1 - rows) // self.capacity * self.capacity

    def _images(self, rows: NDArray[np.int64], last: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return the observations of `rows`, and those that the transitions in the rows `last` led to."""
        assert self._history is not None
        observations = self._history.observations(self._numbers(rows))
        before = observations if last is rows else self._history.observations(self._numbers(last))
        following = self._history.next_observations(
            self._numbers(last), before, self._columns["ended"][last], self.added
        )
        return {"observations": observations, "next_observations": following}

    def _n_step_transitions(self, rows: NDArray[np.int64], scale_rewards: Scaling | None) -> dict[str, NDArray[Any]]:
        """Sum up to `n_step` rewards from each row on, to the end of its episode or of what is stored."""
        columns = self._columns
        newest, transitions = self.added - 1, self._numbers(rows)
        rewards = np.zeros(len(rows), np.float32)
        discounts = np.ones(len(rows), np.float32)
        last = rows.copy()
        going = np.ones(len(rows), np.bool_)
        for step in range(self.n_step):
            ahead = transitions + step * self.num_envs
            going &= ahead <= newest
            here = ahead % self.capacity
            reward = columns["rewards"][here]
            rewards += np.where(going, discounts * (reward if scale_rewards is None else scale_rewards(reward)), 0.0)
            discounts = np.where(going, discounts * np.float32(self._gamma), discounts)
            last = np.where(going, here, last)
            going &= ~columns["ended"][here]
        observations = (
            {
                "observations": columns["observations"].take(rows, axis=0),
                "next_observations": columns["next_observations"].take(last, axis=0),
            }
            if self._history is None
            else self._images(rows, last)
        )
        return {
            **observations,
            "actions": columns["actions"].take(rows, axis=0),
            "rewards": rewards,
            "terminated": columns["terminated"].take(last, axis=0),
            "discounts": discounts,
        }

    def set_errors(self, errors: NDArray[np.float32]) -> None:
        """Report the temporal-difference errors of the transitions drawn last, which decide their priorities."""
        if self._priorities is not None:
            self._priorities.update(self._drawn, errors)

    def packed(self, first: int, end: int) -> NDArray[Any]:
        """Return transitions `first` to `end` (numbered since the start of the run) as packed rows."""
        where = np.arange(first, end) % self.capacity
        rows = np.empty(end - first, self.row_dtype)
        for name, column in self._columns.items():
            rows[name] = column[where]
        return rows

    def unpack(self, first: int, rows: NDArray[Any]) -> None:
        """Store packed rows, the first of which is transition `first`; rows older than the ring holds are skipped."""
        skipped = max(0, self.added - self.capacity - first)
        rows = rows[skipped:]
        where = np.arange(first + skipped, first + skipped + len(rows)) % self.capacity
        for name, column in self._columns.items():
            column[where] = rows[name]

    def counters(self) -> dict[str, Any]:
        """Return all of the buffer's state but the transitions."""
        counters = {"added": self.added, "capacity": self.capacity, "sampler": self._sampler.bit_generator.state}
        if self._priorities is not None:
            counters["priorities"] = self._priorities.state_dict(min(self.added, self.capacity))
        if self._history is not None:
            counters["frames"] = self._history.state_dict()
        return counters

    def set_counters(self, state: dict[str, Any]) -> None:
        """Take back what `counters` gave."""
        self.added = state["added"]
        self._sampler.bit_generator.state = state["sampler"]
        if self._priorities is not None:
            self._priorities.load_state_dict(state["priorities"])
        if self._history is not None:
            self._history.load_state_dict(state["frames"])


def _table_for(
    columns: dict[str, tuple[tuple[int, ...], Any]], capacity: int
) -> tuple[NDArray[np.float32], dict[str, int | slice]]:
    """Return a table for the float32 columns, and where each of them lies in it: a position, or a range of them."""
    slices: dict[str, int | slice] = {}
    width = 0
    for name, (shape, dtype) in columns.items():
        if dtype is np.float32:
            slices[name] = slice(width, width + shape[0]) if shape else width
            width += shape[0] if shape else 1
    return np.zeros((capacity, width), np.float32), slices


def _check_memory(capacity: int, row_bytes: int) -> None:
    needed = capacity * row_bytes
    free = available_memory()
    if free is not None and needed > free:
        fitting = int(capacity * 0.8 * free / needed)
        raise UserError(
            f"A replay buffer of algo.buffer_size={capacity} needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB of "
            f"memory are free. Try algo.buffer_size={fitting}."
        )
