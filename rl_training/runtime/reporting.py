"""What a run reports: rows of metrics, evaluations, and a word to the callbacks about each evaluation."""

import math
import time
from typing import Any

from rl_training.envs.normalization import Normalizer
from rl_training.errors import EnvironmentFailure, NonFiniteError, UserError
from rl_training.runtime.callbacks import CallbackList
from rl_training.runtime.evaluation import evaluate_agent
from rl_training.runtime.metrics import TrainingMetrics
from rl_training.runtime.run_utils import TrainingRun
from rl_training.runtime.trainer import EvalResult, TrainerState


class Reporter:
    """Writes the rows of one run; `metrics` gathers what the next one says about training."""

    def __init__(self, run: TrainingRun, state: TrainerState, normalizer: Normalizer, callbacks: CallbackList) -> None:
        self.metrics = TrainingMetrics()
        self._run, self._state, self._normalizer, self._callbacks = run, state, normalizer, callbacks
        self._last_row_step = -1
        self._seconds_before = 0.0

    @property
    def up_to_date(self) -> bool:
        """Whether the newest row is of this very step."""
        return self._last_row_step == self._state.global_step

    def seconds(self) -> float:
        """Return how long the run has taken, before its checkpoint and since."""
        return self._seconds_before + time.monotonic() - self._run.started

    def report(self, *, training: bool, evaluation: bool) -> None:
        """Write what is asked for as one row; callbacks hear of an evaluation when its row is written."""
        row = self._training_row() if training else {}
        result = self._evaluate() if evaluation else None
        if result is not None:
            row.update(result.metrics())
        if row:
            self._write(row)
        if result is not None and self._callbacks.on_eval_end is not None:
            self._callbacks.on_eval_end(self._state, result)

    def _training_row(self) -> dict[str, float]:
        seconds = self.seconds()
        return {
            "train/gradient_steps": self._state.gradient_steps,
            "train/episodes": self._state.episodes,
            **self.metrics.values(),
            "time/seconds": seconds,
            "time/steps_per_second": self._state.global_step / seconds,
        }

    def _evaluate(self) -> EvalResult:
        config, step = self._state.config, self._state.global_step
        try:
            evaluation = evaluate_agent(
                self._state.agent,
                config,
                self._normalizer,
                episodes=config.eval.episodes,
                seed=config.eval.seed,
                global_step=step,
            )
        except EnvironmentFailure as error:
            # Not a failure of the training environments: there is no state between two steps to save.
            raise UserError(f"In the evaluation at step {step:,}: {error}") from error
        self._run.writer.write_evaluation(step, evaluation.record())
        return evaluation

    def _write(self, row: dict[str, float]) -> None:
        for key, value in row.items():
            if not math.isfinite(value):
                raise NonFiniteError(f"{key} is {value} at step {self._state.global_step:,}.")
        self._state.metrics.update(row)
        self._run.writer.write(self._state.global_step, row)
        self._last_row_step = self._state.global_step

    def state_dict(self) -> dict[str, Any]:
        """Return whatever the next row depends on, and the newest values."""
        return {
            "last_row_step": self._last_row_step,
            "next_row": self.metrics.state_dict(),
            "metrics": self._state.metrics,
            "seconds": self.seconds(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._last_row_step = state["last_row_step"]
        self.metrics.load_state_dict(state["next_row"])
        self._state.metrics = state["metrics"]
        self._seconds_before = state["seconds"]
