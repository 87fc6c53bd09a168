"""Environments in worker processes, for simulators that take longer to step than a message between processes.

Each worker steps a slice of the environments with `SameStepVectorEnv`, so results, snapshots and errors are those of
stepping them here, bit by bit. Observations, rewards, ends and actions lie in memory that all processes map, which has
no name and so cannot be left behind; commands and finished episodes go through a pipe.

What a worker's environments did is also recorded here: when one dies, the run is saved as it was before that step.
"""

import contextlib
import functools
import itertools
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rl_training.config import TrainConfig
from rl_training.envs.snapshots import MAX_RECORDED_STEPS
from rl_training.envs.vector_env import Endings, Rows, Snapshots, VectorStep
from rl_training.envs.worker import Failed, Layout, Setup
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.runtime.system import thread_variables, usable_cores
from rl_training.spaces import ActionSpec, ObservationSpec, action_layout

_START = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from rl_training.envs.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
_SECONDS_TO_CLOSE = 5.0
_FORGET_EVERY = 1_000


class AsyncVectorEnv:
    """`num_envs` environments in `workers` processes, each with an equal share of them."""

    late_resets = False

    def __init__(self, config: TrainConfig, observation: ObservationSpec, actions: ActionSpec) -> None:
        if not hasattr(signal, "pthread_sigmask") or not hasattr(select, "poll"):
            raise UserError("env.vectorization=async needs Linux or macOS. Use env.vectorization=sync.")
        env = config.env
        count = min(env.workers or usable_cores(), env.num_envs)
        bounds = [env.num_envs * number // count for number in range(count + 1)]
        action_shape, action_dtype = action_layout(actions)
        layout = Layout(
            env.num_envs,
            observation.row_size,
            np.dtype(observation.dtype).name,
            action_shape,
            np.dtype(action_dtype).name,
        )
        file = _memory_file(layout.size)
        self._arrays = layout.arrays(mmap(file, layout.size))
        self._record = _Record()
        threads = config.device.threads if isinstance(config.device.threads, int) else 1
        self._workers: list[_Worker] = []
        try:
            registered = gym.registry.get(env.id)
            for number, (first, end) in enumerate(itertools.pairwise(bounds)):
                setup = Setup(env, config.seed, registered, first, end, layout)
                self._workers.append(_Worker(number, setup, file, threads, env.worker_timeout))
            for worker in self._workers:
                worker.answer()
        except BaseException:
            self.close()
            raise
        finally:
            os.close(file)

    def reset(self, seeds: Sequence[int]) -> Rows:
        """Start an episode in every environment."""
        self._ask_all("reset", [(seeds[worker.mine],) for worker in self._workers])
        self._record.begin([_Episode(seed, None, 0) for seed in seeds], 0)
        return self._arrays["observations"].copy()

    def step(self, actions: NDArray[Any]) -> VectorStep:
        """Step every environment, the slices of all workers at the same time."""
        arrays = self._arrays
        arrays["actions"][:] = actions
        self._record.add(arrays["actions"].copy())
        found = [answer for answer in self._ask_all("step") if answer is not None]
        endings = None
        if found:
            endings = Endings()
            for part, begun in found:
                endings.indices += part.indices
                endings.observations += part.observations
                endings.returns += part.returns
                endings.lengths += part.lengths
                for index, generator in zip(part.indices, begun, strict=True):
                    self._record.new_episode(index, generator)
        return (
            arrays["observations"].copy(),
            arrays["rewards"].copy(),
            arrays["terminated"].copy(),
            arrays["truncated"].copy(),
            endings,
            None,
        )

    def snapshots(self, completed_steps: int) -> Snapshots:
        """Return how to come back to where `completed_steps` steps led; for a dead worker, from the record here."""
        found: Snapshots = []
        for worker in self._workers:
            try:
                worker.send("snapshots", completed_steps)
                found += worker.answer()
            except WorkerDied:
                indices = range(len(self._arrays["rewards"]))[worker.mine]
                found += [self._record.snapshot(index, completed_steps) for index in indices]
        return found

    def restore(
        self, snapshots: Snapshots, observations: Rows, seeds: Sequence[int], completed_steps: int
    ) -> dict[int, tuple[str, Any]]:
        """Replay the snapshots, the slices of all workers at the same time."""
        arguments = [
            (snapshots[worker.mine], observations[worker.mine], seeds[worker.mine], completed_steps)
            for worker in self._workers
        ]
        answers = self._ask_all("restore", arguments, patient=True)  # long episodes take long
        restarted = {index: found for answer in answers for index, found in answer.items()}
        episodes = [
            _Episode(
                snapshot["seed"],
                snapshot["generator_before_reset"],
                completed_steps,
                snapshot["steps"],
                snapshot["actions"],
            )
            for snapshot in snapshots
        ]
        for index in restarted:
            episodes[index] = _Episode(seeds[index], None, completed_steps)
        self._record.begin(episodes, completed_steps)
        return restarted

    def close(self) -> None:
        """End every worker; one that does not end by itself is killed."""
        for worker in self._workers:
            worker.send("close")
        deadline = time.monotonic() + _SECONDS_TO_CLOSE
        for worker in self._workers:
            worker.finish(deadline)
        self._workers, self._arrays = [], {}

    def _ask_all(
        self, command: str, arguments: Sequence[tuple[Any, ...]] | None = None, *, patient: bool = False
    ) -> list[Any]:
        """Give all workers a command and return their answers; waits for all of them before it raises."""
        for number, worker in enumerate(self._workers):
            worker.send(command, *(() if arguments is None else arguments[number]))
        answers, failure = [], None
        for worker in self._workers:
            try:
                answers.append(worker.answer(patient=patient))
            except UserError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return answers


class WorkerDied(EnvironmentFailure):
    """A worker process that has ended, or had to be ended."""


class _Worker:
    """A worker process as the training process sees it."""

    def __init__(self, number: int, setup: Setup, memory_file: int, threads: int, timeout: float | None) -> None:
        self.mine = slice(setup.first, setup.end)
        last = setup.end - 1
        whose = f"environment {last}" if last == setup.first else f"environments {setup.first} to {last}"
        self._name = f"Worker {number} of {setup.env.id} ({whose})"
        self._timeout = timeout
        self._death: str | None = None
        self._connection, theirs = multiprocessing.Pipe()
        with theirs, _signals_held_back():  # the worker inherits that, until it ignores them
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), str(memory_file), *sys.path],
                stdin=subprocess.PIPE,  # never written to: its end tells the worker that this process is gone
                pass_fds=(theirs.fileno(), memory_file),
                env={**os.environ, **thread_variables(threads)},
            )
        self._poll = select.poll()
        self._poll.register(self._connection.fileno(), select.POLLIN)
        with contextlib.suppress(OSError):  # `answer` says that it died
            self._connection.send_bytes(cloudpickle.dumps(setup))

    def send(self, command: str, *arguments: Any) -> None:
        """Give a command; that the worker is dead shows when its answer is asked for."""
        if self._death is None:
            with contextlib.suppress(OSError):
                self._connection.send_bytes(pickle.dumps((command, *arguments)) if arguments else _encoded(command))

    def answer(self, *, patient: bool = False) -> Any:
        """Wait for the answer to a command; unless patient, no longer than the timeout."""
        if self._death is not None:
            raise WorkerDied(self._death)
        if self._timeout is not None and not patient and not self._poll.poll(1000 * self._timeout):
            self._process.kill()
            self._process.wait()
            self._death = f"{self._name} did not answer for {self._timeout:g} seconds (env.worker_timeout)"
            raise WorkerDied(self._death)
        try:
            message = self._connection.recv_bytes()
        except (EOFError, OSError):
            self._death = f"{self._name} died: {_how_it_ended(self._process)}"
            raise WorkerDied(self._death) from None
        answer = pickle.loads(message) if message else None  # noqa: S301 - from a process that we started
        if isinstance(answer, Failed):
            raise EnvironmentFailure(answer.message) if answer.by_environment else UserError(answer.message)
        return answer

    def finish(self, deadline: float) -> None:
        """Wait for the end of a worker that was told to close; after the deadline, kill it."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._connection.close()
        assert self._process.stdin is not None
        self._process.stdin.close()


class _Record:
    """How the episode of each environment began and every action since: enough to rebuild those of a dead worker."""

    def __init__(self) -> None:
        self._episodes: list[_Episode] = []
        # The actions of vector steps number `_first_logged` to `_steps` - 1, each [N, ...].
        self._log: deque[NDArray[Any]] = deque(maxlen=MAX_RECORDED_STEPS)
        self._steps = 0

    def begin(self, episodes: "list[_Episode]", steps: int) -> None:
        """Start from these episodes, after so many vector steps."""
        self._episodes, self._steps = episodes, steps
        self._log.clear()

    def add(self, actions: NDArray[Any]) -> None:
        """Note the actions of a vector step."""
        self._log.append(actions)
        self._steps += 1
        if self._steps % _FORGET_EVERY == 0:
            oldest = min(episode.first_step for episode in self._episodes)
            while self._first_logged < oldest:
                self._log.popleft()

    @property
    def _first_logged(self) -> int:
        return self._steps - len(self._log)

    def new_episode(self, index: int, generator_before_reset: dict[str, Any]) -> None:
        """Note that the last step ended an episode."""
        self._episodes[index] = _Episode(None, generator_before_reset, self._steps)

    def snapshot(self, index: int, completed_steps: int) -> dict[str, Any]:
        """Return what `EpisodeRecorder.snapshot` would, but for what a replay must arrive at."""
        episode = self._episodes[index]
        since = range(episode.first_step, completed_steps)
        logged = [self._log[step - self._first_logged][index] for step in since if step >= self._first_logged]
        return {
            "episode_return": None,
            "seed": episode.seed,
            "generator_before_reset": episode.generator_before_reset,
            "generator": {},
            "steps": episode.earlier_steps + len(since),
            "total_steps": completed_steps,
            "actions": np.asarray([*episode.earlier_actions, *logged]),
        }


@dataclass
class _Episode:
    """How an episode began, in which vector step, and what it had behind it then if it was restored."""

    seed: int | None
    generator_before_reset: dict[str, Any] | None
    first_step: int
    earlier_steps: int = 0
    earlier_actions: Sequence[Any] = ()


@functools.cache
def _encoded(command: str) -> bytes:
    return pickle.dumps((command,))


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_SECONDS_TO_CLOSE)
    except subprocess.TimeoutExpired:
        process.kill()
        return "it closed its pipe"
    if code < 0:
        return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"exit code {code}"


def _memory_file(size: int) -> int:
    """Return an open file of this size that has no name."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("rl_training")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, size)
    return file


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
