"""Images in a replay buffer, each stored once: stacks of frames and next observations are put together when sampled.

An observation of four stacked frames shares three of them with the one before, and is itself the next observation of
the transition before. Stored as they come, a million transitions of 84 x 84 pixels take 56 GB; one new frame for each
takes 7 GB.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_training.spaces import ObservationSpec

Rows = NDArray[np.uint8]


class FrameHistory:
    """Gives the observations of a ring of transitions, of which each row holds the newest frame.

    Transitions are numbered since the start of the run; number i lies in row i % capacity, and the one before it in
    the same environment is i - num_envs.
    """

    def __init__(self, capacity: int, num_envs: int, observation: ObservationSpec) -> None:
        self._capacity, self._num_envs, self._stack = capacity, num_envs, observation.frame_stack
        self.frame_size = observation.row_size // observation.frame_stack
        self.frames: Rows = np.zeros((capacity, self.frame_size), np.uint8)
        self.ages: Rows = np.zeros(capacity, np.uint8)
        """How many frames of the same episode lie before each, up to what a stack needs."""
        self._next_ages = np.zeros(num_envs, np.uint8)
        # Frames that no later transition begins with: those after the newest transitions, and where episodes were cut.
        self._newest: Rows = np.zeros((num_envs, self.frame_size), np.uint8)
        self._cut: dict[int, Rows] = {}

    @property
    def reach(self) -> int:
        """How many of the oldest transitions may have lost frames of their stack to newer ones, once the ring is full.

        A row's oldest frame may be (stack - 1) vector steps older than itself.
        """
        return (self._stack - 1) * self._num_envs

    def add(
        self,
        first: int,
        observations: Rows,
        next_observations: Rows,
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
    ) -> None:
        """Store the newest frames of a vector step, whose first transition is number `first`."""
        rows = slice(first % self._capacity, first % self._capacity + self._num_envs)
        self.frames[rows] = observations[:, -self.frame_size :]
        self.ages[rows] = self._next_ages
        self._next_ages = np.where(terminated | truncated, 0, np.minimum(self._next_ages + 1, self._stack - 1)).astype(
            np.uint8
        )
        self._newest[:] = next_observations[:, -self.frame_size :]
        for env in np.flatnonzero(truncated & ~terminated):
            self._cut[first + int(env)] = self._newest[env].copy()
        while self._cut and next(iter(self._cut)) < first + self._num_envs - self._capacity:
            del self._cut[next(iter(self._cut))]

    def begin_episodes(self, envs: list[int], added: int) -> None:
        """Cut the episodes of these environments off, so that their next frame is the first of a new one."""
        self._next_ages[envs] = 0
        if added:
            for env in envs:
                self._cut[added - self._num_envs + env] = self._newest[env].copy()

    def observations(self, transitions: NDArray[np.int64]) -> Rows:
        """Return stacked observations; before an episode's first frame, that frame stands in, as the wrapper has it."""
        ages = self.ages[transitions % self._capacity].astype(np.int64)
        back = np.minimum(np.arange(self._stack - 1, -1, -1), ages[:, None])
        rows = (transitions[:, None] - back * self._num_envs) % self._capacity
        return self.frames[rows].reshape(len(transitions), -1)

    def next_observations(
        self, transitions: NDArray[np.int64], observations: Rows, ended: NDArray[np.bool_], added: int
    ) -> Rows:
        """Return what followed: the same stack without its oldest frame, and one frame more.

        After a termination nothing follows that a target could look at: the last frame stands in for it.
        """
        following = np.where(ended, transitions, transitions + self._num_envs)
        frames = self.frames[following % self._capacity]
        for sample in np.flatnonzero((following >= added) | ended):
            number = int(transitions[sample])
            if number in self._cut:
                frames[sample] = self._cut[number]
            elif not ended[sample]:
                frames[sample] = self._newest[number % self._num_envs]
        return np.concatenate([observations[:, self.frame_size :], frames], axis=1)

    def state_dict(self) -> dict[str, Any]:
        """Return what the rows do not hold."""
        return {
            "next_ages": self._next_ages.copy(),
            "newest": self._newest.copy(),
            "cut": np.array(list(self._cut), np.int64),
            "cut_frames": np.array(list(self._cut.values()), np.uint8),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._next_ages, self._newest = state["next_ages"].copy(), state["newest"].copy()
        self._cut = dict(zip(state["cut"].tolist(), state["cut_frames"], strict=True))
