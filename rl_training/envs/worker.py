"""A process that steps some of a run's environments for `AsyncVectorEnv`, which starts it and tells it what to do.

It answers commands from a pipe; numbers go through memory that both processes map. It ends when the pipe or its
standard input ends, and so never outlives the training process, however that died.
"""

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from mmap import mmap
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rl_training.config import TrainConfig
from rl_training.envs.factory import make_env
from rl_training.envs.sync_vector_env import SameStepVectorEnv
from rl_training.envs.vector_env import Endings
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.seeding import derive_seed


class Layout(NamedTuple):
    """Where the numbers of a vector step lie in shared memory: arrays one after the other, each [N, ...]."""

    num_envs: int
    row_size: int
    row_dtype: str
    action_shape: tuple[int, ...]
    action_dtype: str

    def _arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {
            "actions": ((self.num_envs, *self.action_shape), self.action_dtype),
            "observations": ((self.num_envs, self.row_size), self.row_dtype),
            "rewards": ((self.num_envs,), "float32"),
            "terminated": ((self.num_envs,), "bool"),
            "truncated": ((self.num_envs,), "bool"),
        }

    @property
    def size(self) -> int:
        """Return the bytes that all arrays take."""
        return sum(_padded(shape, dtype) for shape, dtype in self._arrays().values())

    def arrays(self, memory: mmap) -> dict[str, NDArray[Any]]:
        """Return the arrays in this memory."""
        found, start = {}, 0
        for name, (shape, dtype) in self._arrays().items():
            found[name] = np.ndarray(shape, dtype, memory, start)
            start += _padded(shape, dtype)
        return found


def _padded(shape: tuple[int, ...], dtype: str) -> int:
    return (int(np.prod(shape)) * np.dtype(dtype).itemsize + 63) // 64 * 64


class Setup(NamedTuple):
    """The first message to a worker."""

    env: Any
    """The `EnvConfig`."""
    seed: int
    registered: Any
    """What Gymnasium's registry says about the id in the training process, if anything."""
    first: int
    end: int
    """Its environments, numbered as in the run: `first` to `end` - 1."""
    layout: Layout


class Failed(NamedTuple):
    """An answer: what was asked for ended in an error that has a message for the user."""

    message: str
    by_environment: bool


class Worker:
    """The environments of one process, and a method for each command."""

    def __init__(self, setup: Setup, memory: mmap) -> None:
        if setup.registered is not None:
            gym.registry.setdefault(setup.registered.id, setup.registered)
        config = TrainConfig(env=setup.env, seed=setup.seed)
        self._seed_global_generators(derive_seed(setup.seed, "worker", setup.first))
        self._first, mine = setup.first, slice(setup.first, setup.end)
        self._envs = SameStepVectorEnv(
            [functools.partial(make_env, config, index) for index in range(setup.first, setup.end)]
        )
        self._arrays = {name: array[mine] for name, array in setup.layout.arrays(memory).items()}

    @staticmethod
    def _seed_global_generators(seed: int) -> None:
        import random

        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - environments may draw from it

    def reset(self, seeds: list[int]) -> None:
        """Start an episode in every environment."""
        self._arrays["observations"][:] = self._envs.reset(seeds)

    def step(self) -> tuple[Endings, list[Any]] | None:
        """Step every environment; returns the episodes that ended and, for each, how its successor began."""
        arrays = self._arrays
        # A copy, because an environment may keep the action that it is given.
        observations, rewards, terminated, truncated, endings, _ = self._envs.step(arrays["actions"].copy())
        arrays["observations"][:] = observations
        arrays["rewards"][:] = rewards
        arrays["terminated"][:] = terminated
        arrays["truncated"][:] = truncated
        if endings is None:
            return None
        begun = [self._envs.envs[index].generator_before_reset for index in endings.indices]
        endings.indices = [self._first + index for index in endings.indices]
        return endings, begun

    def snapshots(self, completed_steps: int) -> list[dict[str, Any]]:
        """Return how to come back to where `completed_steps` steps led."""
        return self._envs.snapshots(completed_steps)

    def restore(self, *arguments: Any) -> dict[int, tuple[str, Any]]:
        """Come back to where snapshots were taken."""
        restarted = self._envs.restore(*arguments)
        return {self._first + index: found for index, found in restarted.items()}

    def close(self) -> None:
        """Release the environments."""
        self._envs.close()


def main(connection_number: int, memory_number: int) -> None:
    """Serve commands until told to close, or until nobody is there to give any."""
    for number in ("SIGINT", "SIGTERM", "SIGUSR1"):  # the training process decides what these mean
        signal.signal(getattr(signal, number), signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    connection = Connection(connection_number)
    code = 0
    try:
        setup = connection.recv()
        worker: list[Worker] = []
        _answer(connection, lambda: worker.append(Worker(setup, mmap(memory_number, setup.layout.size))))
        while True:
            command, *arguments = connection.recv()
            _answer(connection, functools.partial(getattr(worker[0], command), *arguments))
            if command == "close":
                break
    except (EOFError, OSError):  # the training process is gone
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the watching thread still reads


def _answer(connection: Connection, command: Callable[[], Any]) -> None:
    try:
        answer = command()
    except UserError as error:
        answer = Failed(str(error), isinstance(error, EnvironmentFailure))
    except Exception as error:
        answer = Failed(f"A worker process failed: {type(error).__name__}: {error}", False)
    if answer is None:
        connection.send_bytes(b"")  # the usual answer to a step, spared the pickling
    else:
        connection.send(answer)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
