"""Rows of metrics and evaluations: what is written, in which order, and what a checkpoint keeps of it."""

import math
import time
from types import SimpleNamespace

import pytest
from cli_helpers import tiny_run_config

from rl_training.envs.training_envs import Episode
from rl_training.errors import EnvironmentFailure, NonFiniteError, UserError
from rl_training.runtime import reporting
from rl_training.runtime.reporting import Reporter
from rl_training.runtime.session import crossings
from rl_training.runtime.trainer import EvalResult, TrainerState


class Desk:
    """A reporter at step 50 whose writer and callbacks note what reaches them, in order."""

    def __init__(self, tmp_path):
        self.noted = []
        writer = SimpleNamespace(
            write=lambda step, row: self.noted.append((step, sorted(row))),
            write_evaluation=lambda step, record: self.noted.append((step, record["returns"])),
        )
        callbacks = SimpleNamespace(on_eval_end=lambda state, result: self.noted.append(("callback", result.returns)))
        self.state = TrainerState(tiny_run_config("ppo"), tmp_path, agent=None, global_step=50, gradient_steps=7)
        self.reporter = Reporter(SimpleNamespace(writer=writer, started=time.monotonic()), self.state, None, callbacks)


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.setattr(reporting, "evaluate_agent", lambda *_, **__: EvalResult(50, (3.0, 5.0), (3, 5), 100_000))
    return Desk(tmp_path)


TRAINING = ["time/seconds", "time/steps_per_second", "train/episodes", "train/gradient_steps"]
EVALUATION = ["eval/length_mean", "eval/return_mean", "eval/return_std"]


@pytest.mark.parametrize(
    ("training", "evaluation", "noted"),
    [
        (False, False, []),
        (True, False, [(50, TRAINING)]),
        (False, True, [(50, [3.0, 5.0]), (50, EVALUATION), ("callback", (3.0, 5.0))]),
        (True, True, [(50, [3.0, 5.0]), (50, EVALUATION + TRAINING), ("callback", (3.0, 5.0))]),
    ],
)
def test_a_report_is_one_row_and_callbacks_hear_of_an_evaluation_after_it(desk, training, evaluation, noted):
    desk.reporter.report(training=training, evaluation=evaluation)
    assert desk.noted == noted
    assert desk.reporter.up_to_date is bool(noted)
    assert desk.state.metrics.get("eval/return_mean") == (4.0 if evaluation else None)


def test_the_row_has_what_was_gathered_and_is_out_of_date_one_step_later(desk):
    desk.reporter.metrics.add_episodes([Episode(10.0, 4), Episode(20.0, 8)])
    desk.reporter.report(training=True, evaluation=False)
    shown = {key: value for key, value in desk.state.metrics.items() if not key.startswith("time/")}
    assert shown == {
        "train/gradient_steps": 7,
        "train/episodes": 0,
        "episode/return_mean": 15.0,
        "episode/length_mean": 6.0,
    }
    desk.state.global_step += 1
    assert not desk.reporter.up_to_date


def test_a_row_with_nan_is_refused_and_not_written(desk):
    desk.reporter.metrics.add_episodes([Episode(math.nan, 4)])
    with pytest.raises(NonFiniteError, match=r"^episode/return_mean is nan at step 50\.$"):
        desk.reporter.report(training=True, evaluation=False)
    assert desk.noted == []
    assert desk.state.metrics == {}


def test_an_environment_that_fails_in_an_evaluation_is_told_from_one_that_trains(desk, monkeypatch):
    def fail(*_, **__):
        raise EnvironmentFailure("environment 0 raised ValueError")

    monkeypatch.setattr(reporting, "evaluate_agent", fail)
    with pytest.raises(UserError, match=r"^In the evaluation at step 50: environment 0 raised ValueError$") as caught:
        desk.reporter.report(training=True, evaluation=True)
    assert not isinstance(caught.value, EnvironmentFailure)
    assert desk.noted == []


def test_a_restored_reporter_goes_on_with_the_next_row_and_the_clock(desk, tmp_path):
    desk.reporter.metrics.add_episodes([Episode(10.0, 4)])
    desk.reporter.report(training=True, evaluation=False)
    state = {**desk.reporter.state_dict(), "seconds": 100.0}
    assert sorted(state) == ["last_row_step", "metrics", "next_row", "seconds"]
    restored = Desk(tmp_path)
    restored.reporter.load_state_dict(state)
    assert restored.reporter.up_to_date
    assert restored.state.metrics["episode/return_mean"] == 10.0
    assert restored.reporter.seconds() >= 100.0
    restored.reporter.metrics.add_episodes([Episode(20.0, 8)])
    restored.reporter.report(training=True, evaluation=False)
    assert restored.state.metrics["episode/return_mean"] == 15.0


@pytest.mark.parametrize(
    ("before", "after", "every", "count"),
    [
        (0, 9, 10, 0),
        (0, 10, 10, 1),
        (10, 10, 10, 0),  # the step it stands at was counted when it got there
        (10, 19, 10, 0),
        (9, 31, 10, 3),  # a jump over 10, 20 and 30
        (0, 1_000, None, 0),
    ],
)
def test_a_cadence_counts_the_multiples_that_were_passed(before, after, every, count):
    assert crossings(before, after, every) == count
