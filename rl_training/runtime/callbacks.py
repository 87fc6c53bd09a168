"""The five lifecycle events, the fan-out to listeners, and the callbacks that every run has.

A callback sees the typed `TrainerState` and a typed result. It may call `state.request_stop(reason)` and
`state.request_checkpoint(label)`; if it has state of its own it goes into the checkpoint through `state_dict`.
"""

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from rl_training.config import TrainConfig
from rl_training.runtime.trainer import CollectResult, EvalResult, TrainerState, TrainResult, UpdateResult


class CallbackError(RuntimeError):
    """An exception inside a callback; the message names the callback and the event."""


class Callback:
    """Base class: override the events you need; those left alone cost nothing."""

    def on_train_start(self, state: TrainerState) -> None:
        """Called once before the first step, after a checkpoint was restored."""

    def on_collect_end(self, state: TrainerState, result: CollectResult) -> None:
        """Called after each collect phase: a rollout, or the env steps between two updates."""

    def on_update_end(self, state: TrainerState, result: UpdateResult) -> None:
        """Called after the gradient steps that follow a collect phase."""

    def on_eval_end(self, state: TrainerState, result: EvalResult) -> None:
        """Called after each evaluation."""

    def on_train_end(self, state: TrainerState, result: TrainResult) -> None:
        """Called once after the last checkpoint, also when `stop_at_step` paused the run; not after a signal."""

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""


class CallbackList:
    """Calls every listener of an event, in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = list(callbacks)
        self.on_train_start = self._fan_out("on_train_start")
        self.on_collect_end = self._fan_out("on_collect_end")
        self.on_update_end = self._fan_out("on_update_end")
        self.on_eval_end = self._fan_out("on_eval_end")
        self.on_train_end = self._fan_out("on_train_end")

    def _fan_out(self, event: str) -> Callable[..., None] | None:
        """Return a function that calls the listeners of an event, or None if nobody listens."""
        listeners = [callback for callback in self.callbacks if _overrides(callback, event)]
        return functools.partial(_call_all, listeners, event) if listeners else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every callback that has one, by class name and position."""
        states = {key: callback.state_dict() for key, callback in self._keyed()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand back each state to its callback; one that was not there before starts afresh."""
        for key, callback in self._keyed():
            if key in state:
                callback.load_state_dict(state[key])

    def _keyed(self) -> list[tuple[str, Callback]]:
        """Number the callbacks of each class, so that switching another one on or off moves no key."""
        seen: dict[str, int] = {}
        keyed = []
        for callback in self.callbacks:
            name = type(callback).__name__
            seen[name] = seen.get(name, 0) + 1
            keyed.append((f"{name} {seen[name]}", callback))
        return keyed


def _overrides(callback: Callback, event: str) -> bool:
    return getattr(type(callback), event) is not getattr(Callback, event)


def _call_all(listeners: list[Callback], event: str, *arguments: Any) -> None:
    for callback in listeners:
        try:
            getattr(callback, event)(*arguments)
        except Exception as error:
            message = f"callback {type(callback).__name__} failed in {event}: {type(error).__name__}: {error}"
            raise CallbackError(message) from error


def standard_callbacks(config: TrainConfig) -> list[Callback]:
    """Return the callbacks that the config asks for."""
    callbacks: list[Callback] = []
    if config.checkpoint.keep_best:
        callbacks.append(KeepBestCheckpoint())
    if config.eval.stop_at_return is not None:
        callbacks.append(StopAtReturn(config.eval.stop_at_return))
    if config.eval.stop_after_no_improvement is not None:
        callbacks.append(StopAfterNoImprovement(config.eval.stop_after_no_improvement))
    if config.logging.progress:
        callbacks.append(Progress())
    return callbacks


class KeepBestCheckpoint(Callback):
    """Asks for a checkpoint labelled best whenever an evaluation beats all before it."""

    def __init__(self) -> None:
        self.best: float | None = None

    def on_eval_end(self, state: TrainerState, result: EvalResult) -> None:
        """Compare with the best so far."""
        mean = result.summary.mean
        if self.best is None or mean > self.best:
            self.best = mean
            state.request_checkpoint("best")

    def state_dict(self) -> dict[str, Any]:
        """Return the best mean return."""
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.best = state["best"]


class StopAtReturn(Callback):
    """Stops when an evaluation's mean return reaches a threshold."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def on_eval_end(self, state: TrainerState, result: EvalResult) -> None:
        """Compare with the threshold."""
        if result.summary.mean >= self.threshold:
            state.request_stop(f"evaluation return {result.summary.mean:.1f} reached {self.threshold:g}")


class StopAfterNoImprovement(Callback):
    """Stops after `patience` evaluations in a row without a new best."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.best: float | None = None
        self.rounds = 0

    def on_eval_end(self, state: TrainerState, result: EvalResult) -> None:
        """Count the rounds since the last improvement."""
        mean = result.summary.mean
        if self.best is None or mean > self.best:
            self.best, self.rounds = mean, 0
            return
        self.rounds += 1
        if self.rounds >= self.patience:
            state.request_stop(f"no better evaluation in {self.rounds} rounds")

    def state_dict(self) -> dict[str, Any]:
        """Return the best mean return and the rounds since."""
        return {"best": self.best, "rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self.best, self.rounds = state["best"], state["rounds"]


class Progress(Callback):
    """One line that is redrawn on a terminal, and now and then a plain line elsewhere."""

    TERMINAL_SECONDS, PLAIN_SECONDS = 0.2, 10.0

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._on_terminal = self._stream.isatty()
        self._pause = self.TERMINAL_SECONDS if self._on_terminal else self.PLAIN_SECONDS
        self._next_draw = 0.0
        self._start_step, self._start_time = 0, 0.0

    def on_train_start(self, state: TrainerState) -> None:
        """Say what is trained and where."""
        config = state.config
        self._start_step, self._start_time = state.global_step, time.monotonic()
        self._next_draw = self._start_time + self._pause
        preset = f"preset {config.preset}" if config.preset else "no preset"
        resumed = f", from step {state.global_step:,}" if state.global_step else ""
        self._print(f"{config.algo.name} on {config.env.id}, seed {config.seed}, {preset}{resumed}\n{state.run_dir}")
        compiled = getattr(state.agent, "compiled_update", None)
        if compiled is not None:
            # Only the compiler knows whether it finds the code of an earlier run, so the words fit both.
            compiled.before_compiling = lambda: self._draw("preparing the compiled update, longest the first time…")

    def on_collect_end(self, state: TrainerState, result: CollectResult) -> None:
        """Redraw if enough time has passed."""
        now = time.monotonic()
        if now < self._next_draw:
            return
        self._next_draw = now + self._pause
        self._draw(self._line(state, now))

    def _draw(self, line: str) -> None:
        if self._on_terminal:
            self._stream.write(f"\r\x1b[K{line}")
            self._stream.flush()
        else:
            self._print(line)

    def _line(self, state: TrainerState, now: float) -> str:
        total = state.config.total_timesteps
        speed = (state.global_step - self._start_step) / max(now - self._start_time, 1e-9)
        parts = [f"{state.global_step:,}/{total:,} steps {100 * state.progress:3.0f}%", f"{speed:,.0f}/s"]
        for key, label in _SHOWN.items():
            if key in state.metrics:
                parts.append(f"{label} {state.metrics[key]:.4g}")
        parts.append(f"{_duration((total - state.global_step) / speed if speed else 0.0)} left")
        return " | ".join(parts)

    def on_eval_end(self, state: TrainerState, result: EvalResult) -> None:
        """Print the evaluation on a line of its own."""
        summary = result.summary
        spread = f" ± {summary.std:.1f}" if summary.count > 1 else ""
        self._print(f"step {result.global_step:,}: return {summary.mean:.1f}{spread} over {summary.count} episodes")

    def on_train_end(self, state: TrainerState, result: TrainResult) -> None:
        """Say how it ended and what to type next."""
        seconds = time.monotonic() - self._start_time
        if state.paused:
            self._print(f"paused at step {state.global_step:,} in {_duration(seconds)}; resume= goes on from here")
            return
        reason = f" ({state.stop_reason})" if state.stop_reason else ""
        self._print(f"finished at step {state.global_step:,} in {_duration(seconds)}{reason}")

    def _print(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}\n" if self._on_terminal else f"{text}\n")
        self._stream.flush()


_SHOWN = {
    "episode/return_mean": "return",
    "episode/length_mean": "length",
    "loss/policy": "policy loss",
    "loss/value": "value loss",
}


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
