"""Everything around a training loop that is the same for every algorithm.

A trainer tells the session what happened (a step, the end of a collect phase, an update, the end of an iteration); the
session counts, reports, saves, calls back and decides whether to go on.
"""

import contextlib
import logging
import math
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from rl_training.envs.normalization import Normalizer
from rl_training.envs.training_envs import EnvStep, Episode, TrainingEnvs
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.numerics import require_finite
from rl_training.runtime.callbacks import Callback, CallbackList, standard_callbacks
from rl_training.runtime.exactness import (
    inexact_warning,
    keep_update_path,
    numeric_paths,
    numeric_platform,
    platform_changes,
)
from rl_training.runtime.metrics import mean_metrics
from rl_training.runtime.reporting import Reporter
from rl_training.runtime.run_card import update_run_card
from rl_training.runtime.run_utils import (
    TrainingRun,
    begin_resumed_run,
    restore_training_state,
    save_training_checkpoint,
)
from rl_training.runtime.system import Signals, launcher
from rl_training.runtime.trainer import (
    Agent,
    CollectResult,
    Experience,
    Stateful,
    TrainerState,
    TrainResult,
    UpdateResult,
)

log = logging.getLogger(__name__)


class TrainingInterrupted(KeyboardInterrupt):
    """A signal ended the run after it was saved; `exit_code` is what a shell expects."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def crossings(before: int, after: int, every: int | None) -> int:
    """Count the multiples of `every` in (before, after]: the cadence test that survives jumps and restarts.

    None is never.
    """
    return 0 if every is None else after // every - before // every


class TrainingSession:
    """One run from its first step, or its checkpoint, to its result. Use it as a context manager."""

    def __init__(
        self,
        run: TrainingRun,
        *,
        agent: Agent,
        envs: TrainingEnvs,
        normalizer: Normalizer,
        data: Stateful,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Bring the parts together; a restored checkpoint is handed back to each of them."""
        self.state = TrainerState(config=run.config, run_dir=run.run_dir, agent=agent)
        self._run, self._envs = run, envs
        self._experience = data if isinstance(data, Experience) else None
        self._callbacks = CallbackList([*standard_callbacks(run.config), *callbacks])
        self._signals = Signals()
        self._catching = self._signals.caught()
        self._reporter = Reporter(run, self.state, normalizer, self._callbacks)
        self._phase_episodes: list[Episode] = []
        self._phase_start = self._iteration_start = 0
        # These stay the same during a session; the loop asks for them at every step.
        self._budget = run.config.total_timesteps
        self._stop_at_step = math.inf if run.config.stop_at_step is None else run.config.stop_at_step
        self._pause_between_saves = run.config.checkpoint.every_seconds or math.inf
        self._save_at = time.monotonic() + self._pause_between_saves
        self._next_cadence = 0
        self._directory_taken = not self.resumed
        self._parts: dict[str, Stateful] = {
            "session": self,
            "agent": agent,
            "envs": envs,
            "normalizer": normalizer,
            "data": data,
            "callbacks": self._callbacks,
        }

    def __enter__(self) -> "TrainingSession":
        self._catching.__enter__()
        try:
            if self.resumed:
                self._resume()
            else:
                update_run_card(self.state.run_dir, **numeric_paths(self.state.agent))
            if self._callbacks.on_train_start is not None:
                self._callbacks.on_train_start(self.state)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _resume(self) -> None:
        """Hand the checkpoint to every part, and only then touch the run directory."""
        restore_training_state(self._run, self._parts)
        assert self._run.restored is not None
        before = self._run.restored["platform"]
        keep_update_path(self.state.agent, before, self._run.saved_compile)
        reasons = platform_changes(before, numeric_platform(self.state.config, self._run.device, self.state.agent))
        if self._envs.inexact_reason is not None:
            reasons.append(self._envs.inexact_reason)
        if reasons and self.state.config.resume_strict:
            raise UserError(f"resume_strict=true: {'; '.join(reasons)}. Nothing was changed.")
        if reasons:
            log.warning(inexact_warning(reasons))
        begin_resumed_run(self._run, reasons)
        self._directory_taken = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is not None and self._directory_taken and not isinstance(error, TrainingInterrupted):
                self._record_failure(error)
        finally:
            self._catching.__exit__(kind, error, traceback)
            self._run.close()
            self._envs.close()

    def _record_failure(self, error: BaseException) -> None:
        """Save the last complete state if an environment failed, and write down what happened."""
        log.info("run failed at step %d", self.state.global_step, exc_info=error)
        if isinstance(error, EnvironmentFailure) and self.state.global_step:
            path = self._save()
            error.args = (f"{error}. The state before it is saved as {path.name}; resume= goes on from there.",)
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        with contextlib.suppress(OSError):  # a full disk must not hide what happened
            update_run_card(self.state.run_dir, status=status, error=f"{type(error).__name__}: {error}")

    @property
    def resumed(self) -> bool:
        """Whether the run continues from a checkpoint."""
        return self._run.restored is not None

    @property
    def global_step(self) -> int:
        """Return the env steps so far, over all environments."""
        return self.state.global_step

    @property
    def vector_step(self) -> int:
        """Return the vector steps so far, which number the exploration noise."""
        return self._envs.vector_steps

    @property
    def progress_before(self) -> float:
        """Return the share of the budget that was spent when this iteration began, so that no schedule ends early."""
        return self._iteration_start / self._budget

    @property
    def done(self) -> bool:
        """Whether the budget is spent, which only the end of an iteration decides, or a callback asked to stop."""
        return self._iteration_start >= self._budget or self.state.stop_reason is not None

    @property
    def leaving(self) -> bool:
        """Whether to save and leave at the next step: a signal came, or `stop_at_step` is reached."""
        return self._signals.stop is not None or self.state.global_step >= self._stop_at_step

    @property
    def running(self) -> bool:
        """Whether to begin another iteration: not `done` and not `leaving`, in one look."""
        state = self.state
        return (
            self._iteration_start < self._budget
            and state.stop_reason is None
            and self._signals.stop is None
            and state.global_step < self._stop_at_step
        )

    def record_step(self, step: EnvStep) -> None:
        """Count one vector step and the episodes that ended in it."""
        self.state.global_step += self._envs.num_envs
        if step.episodes:
            self.state.episodes += len(step.episodes)
            self._reporter.metrics.add_episodes(step.episodes)
            self._phase_episodes.extend(step.episodes)

    def check_finite(self) -> None:
        """Refuse NaN and infinity in what was collected since the last update."""
        if self._experience is not None:
            self._experience.check_finite(self._phase_start)
        require_finite("observation", self._envs.observations[None], self.vector_step - 1, self._envs.num_envs)

    def end_collect(self) -> None:
        """Check what a collect phase has brought, and tell callbacks that it is complete."""
        self.check_finite()
        if self._callbacks.on_collect_end is not None:
            env_steps = self.state.global_step - self._phase_start
            self._callbacks.on_collect_end(self.state, CollectResult(env_steps, tuple(self._phase_episodes)))
        self._phase_start = self.state.global_step
        self._phase_episodes.clear()

    def end_update(self, metrics: Sequence[Mapping[str, Tensor]], **schedule: float) -> None:
        """Count the gradient steps of an update; `metrics` has one mapping for each, `schedule` the values in force."""
        self.state.gradient_steps += len(metrics)
        self._reporter.metrics.set_update(metrics, schedule)
        if self._callbacks.on_update_end is not None:
            self._callbacks.on_update_end(self.state, UpdateResult(len(metrics), mean_metrics(metrics)))

    def end_iteration(self) -> None:
        """Log, evaluate and save where their cadences say so; the end of the run is left to `finish`."""
        before, after = self._iteration_start, self.state.global_step
        self._iteration_start = after
        if not self._anything_due(after) or self.done:
            return
        config = self.state.config
        self._reporter.report(
            training=crossings(before, after, config.logging.every) > 0,
            evaluation=config.eval.episodes > 0 and crossings(before, after, config.eval.every) > 0,
        )
        if not self.done and (self.state.checkpoint_requested or self._checkpoint_due(before, after)):
            self._save()

    def _anything_due(self, step: int) -> bool:
        """Whether a cadence may be crossed or a request is open: one look that spares most iterations the rest."""
        if step < self._next_cadence and not self.state.checkpoint_requested and not self._signals.save_requested:
            return time.monotonic() >= self._save_at
        config = self.state.config
        cadences = (config.logging.every, config.eval.every, config.checkpoint.every)
        self._next_cadence = min((step // every + 1) * every for every in cadences if every is not None)
        return True

    def finish(self) -> TrainResult:
        """End the run: at the end of the budget evaluate and save, before it save only; after a signal, raise."""
        if self.done and not self._reporter.up_to_date:
            self._reporter.report(training=True, evaluation=self.state.config.eval.episodes > 0)
        path = self._save()
        result = TrainResult(self.state.run_dir, path, dict(self.state.metrics))
        if self.done:
            self._close_run_card("finished", result=result.metrics, stop_reason=self.state.stop_reason)
        elif self._signals.stop is not None:
            self._close_run_card("interrupted")
            raise self._interruption(self._signals.stop)
        else:
            self.state.paused = True
            self._close_run_card("paused")
        if self._callbacks.on_train_end is not None:
            self._callbacks.on_train_end(self.state, result)
        return result

    def _interruption(self, received: signal.Signals) -> TrainingInterrupted:
        log.info("%s: saved and left at step %d", received.name, self.state.global_step)
        message = (
            f"{received.name}: saved at step {self.state.global_step:,}. Continue with: "
            f"{launcher()} resume={_shortest_path(self.state.run_dir)}"
        )
        return TrainingInterrupted(message, 128 + received.value)

    def _close_run_card(self, status: str, **entries: Any) -> None:
        update_run_card(
            self.state.run_dir,
            status=status,
            global_step=self.state.global_step,
            wall_seconds=round(self._reporter.seconds(), 3),
            **numeric_paths(self.state.agent),
            **entries,
        )

    def save_if_asked(self) -> None:
        """Save if a signal asked for it; for loops in which an iteration may take long."""
        if self._signals.save_requested:
            self._save()

    def _checkpoint_due(self, before: int, after: int) -> bool:
        config = self.state.config.checkpoint
        if self._signals.save_requested:
            return True
        if crossings(before, after, config.every):
            return True
        return time.monotonic() >= self._save_at

    def _save(self) -> Path:
        self.check_finite()
        labels = sorted(self.state.checkpoint_labels)
        self.state.checkpoint_labels.clear()
        self.state.checkpoint_requested = self._signals.save_requested = False
        path = save_training_checkpoint(self._run, self.state.global_step, self._parts, labels)
        self._save_at = time.monotonic() + self._pause_between_saves
        return path

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and whatever the next metric row depends on."""
        return {
            "global_step": self.state.global_step,
            "gradient_steps": self.state.gradient_steps,
            "episodes": self.state.episodes,
            "iteration_start": self._iteration_start,
            "phase_start": self._phase_start,
            "phase_episodes": [[episode.episode_return, episode.length] for episode in self._phase_episodes],
            **self._reporter.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.state.global_step = state["global_step"]
        self.state.gradient_steps = state["gradient_steps"]
        self.state.episodes = state["episodes"]
        self._iteration_start = state["iteration_start"]
        self._phase_start = state["phase_start"]
        self._phase_episodes = [Episode(*values) for values in state["phase_episodes"]]
        self._reporter.load_state_dict(state)


def _shortest_path(path: Path) -> Path:
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path
