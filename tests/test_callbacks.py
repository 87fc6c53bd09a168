"""The five events, what callbacks may ask for, and the callbacks that every run has."""

import dataclasses
import io
import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli_helpers import checkpoint_steps, metric_rows, run_card, tiny_algo, tiny_run_config

from rl_training.envs.training_envs import Episode
from rl_training.runtime import callbacks as callbacks_module
from rl_training.runtime.callbacks import (
    Callback,
    CallbackError,
    CallbackList,
    KeepBestCheckpoint,
    Progress,
    StopAfterNoImprovement,
    StopAtReturn,
    standard_callbacks,
)
from rl_training.runtime.checkpointing import find_checkpoint, read_checkpoint
from rl_training.runtime.dqn_trainer import train_dqn
from rl_training.runtime.ppo_trainer import train_ppo
from rl_training.runtime.trainer import CollectResult, EvalResult, TrainerState, TrainResult, UpdateResult
from rl_training.runtime.workflows import resume_training


class Recorder(Callback):
    """Notes every event with the step at which it came, and what it brought."""

    def __init__(self):
        self.events: list[tuple[str, int]] = []
        self.results: dict[str, list] = {}

    def note(self, event, state, result=None):
        assert isinstance(state, TrainerState)
        self.events.append((event, state.global_step))
        self.results.setdefault(event, []).append(result)

    def on_train_start(self, state):
        self.note("start", state)

    def on_collect_end(self, state, result):
        self.note("collect", state, result)

    def on_update_end(self, state, result):
        self.note("update", state, result)

    def on_eval_end(self, state, result):
        self.note("eval", state, result)

    def on_train_end(self, state, result):
        self.note("end", state, result)


class Counter(Callback):
    """Counts collect phases, also over a restart."""

    def __init__(self):
        self.count = 0

    def on_collect_end(self, state, result):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def at(event, step, action):
    """Return a callback that calls `action(state)` in an event at a step."""

    def method(self, state, result=None):
        if state.global_step == step:
            action(state)

    return type("AtStep", (Callback,), {event: method})()


# Events


def test_ppo_fires_the_events_of_each_iteration_in_order(tmp_path):
    recorder = Recorder()
    result = train_ppo(tiny_run_config("ppo"), run_dir=tmp_path / "run", callbacks=[recorder])
    assert recorder.events == [
        ("start", 0),
        ("collect", 16),
        ("update", 16),
        ("collect", 32),
        ("update", 32),
        ("eval", 32),
        ("collect", 48),
        ("update", 48),
        ("collect", 64),
        ("update", 64),
        ("eval", 64),
        ("end", 64),
    ]
    collects, updates = recorder.results["collect"], recorder.results["update"]
    assert all(isinstance(collect, CollectResult) for collect in collects)
    assert [collect.env_steps for collect in collects] == [16, 16, 16, 16]
    assert all(isinstance(update, UpdateResult) for update in updates)
    # Two epochs over 16 transitions in minibatches of 16.
    assert [update.gradient_steps for update in updates] == [2, 2, 2, 2]
    assert isinstance(updates[0].metrics["loss/policy"], torch.Tensor)
    assert not updates[0].metrics["loss/policy"].requires_grad
    assert [evaluation.global_step for evaluation in recorder.results["eval"]] == [32, 64]
    assert all(isinstance(evaluation, EvalResult) for evaluation in recorder.results["eval"])
    assert recorder.results["end"] == [result]
    assert isinstance(result, TrainResult)


def test_dqn_fires_a_collect_for_each_training_interval_and_updates_once_learning_starts(tmp_path):
    recorder = Recorder()
    config = tiny_run_config(
        "dqn",
        algo_config=tiny_algo("dqn", learning_starts=20, train_every=10),
        total_timesteps=50,
        eval={"every": 25},
    )
    train_dqn(config, run_dir=tmp_path / "run", callbacks=[recorder])
    assert recorder.events == [
        ("start", 0),
        ("collect", 10),
        ("collect", 20),
        ("eval", 25),
        ("collect", 30),
        ("update", 30),
        ("collect", 40),
        ("update", 40),
        ("collect", 50),
        ("update", 50),
        ("eval", 50),
        ("end", 50),
    ]
    assert [collect.env_steps for collect in recorder.results["collect"]] == [10, 10, 10, 10, 10]
    assert [update.gradient_steps for update in recorder.results["update"]] == [1, 1, 1]


def test_collect_results_hand_over_every_finished_episode_once(tmp_path):
    recorder = Recorder()
    config = tiny_run_config("ppo", total_timesteps=320, eval={"episodes": 0})
    train_ppo(config, run_dir=tmp_path / "run", callbacks=[recorder])
    episodes = [episode for collect in recorder.results["collect"] for episode in collect.episodes]
    assert all(isinstance(episode, Episode) for episode in episodes)
    assert len(episodes) == metric_rows(tmp_path / "run")[-1]["train/episodes"] > 3
    # CartPole pays 1 for each step.
    assert [episode.episode_return for episode in episodes] == [episode.length for episode in episodes]
    assert 320 - 100 < sum(episode.length for episode in episodes) <= 320


def test_listeners_are_called_in_the_order_in_which_they_were_given(tmp_path):
    order = []
    first, second = (at("on_train_start", 0, lambda state, name=name: order.append(name)) for name in ("a", "b"))
    train_ppo(tiny_run_config("ppo", total_timesteps=16), run_dir=tmp_path / "run", callbacks=[first, second])
    assert order == ["a", "b"]


def test_an_event_without_listeners_costs_nothing():
    events = CallbackList([Counter(), StopAtReturn(1.0)])
    assert events.on_train_start is None
    assert events.on_update_end is None
    assert events.on_train_end is None
    assert events.on_collect_end is not None
    assert events.on_eval_end is not None
    assert CallbackList([]).on_collect_end is None


# Requests


def test_request_stop_ends_the_run_after_the_iteration_with_its_reason(tmp_path):
    stopper = at("on_collect_end", 32, lambda state: state.request_stop("enough"))
    recorder = Recorder()
    result = train_ppo(tiny_run_config("ppo"), run_dir=tmp_path / "run", callbacks=[stopper, recorder])
    assert recorder.events[-3:] == [("update", 32), ("eval", 32), ("end", 32)]
    assert result.checkpoint_path.name == "step_000000000032"
    card = run_card(result.run_dir)
    assert (card["status"], card["stop_reason"], card["global_step"]) == ("finished", "enough", 32)


def test_request_stop_in_an_evaluation_evaluates_once(tmp_path):
    stopper = at("on_eval_end", 32, lambda state: state.request_stop("good enough"))
    recorder = Recorder()
    train_ppo(tiny_run_config("ppo"), run_dir=tmp_path / "run", callbacks=[stopper, recorder])
    assert [event for event in recorder.events if event[0] in ("eval", "end")] == [("eval", 32), ("end", 32)]
    assert [row["step"] for row in metric_rows(tmp_path / "run")] == [16, 32]


def test_the_first_reason_to_stop_is_kept():
    state = new_state()
    state.request_stop("first")
    state.request_stop("second")
    assert state.stop_reason == "first"


def test_request_checkpoint_saves_after_the_iteration_under_its_label(tmp_path):
    saver = at("on_collect_end", 32, lambda state: state.request_checkpoint("mine"))
    config = tiny_run_config("ppo", checkpoint={"keep_best": False}, eval={"every": None})
    train_ppo(config, run_dir=tmp_path / "run", callbacks=[saver])
    assert checkpoint_steps(tmp_path / "run") == [32, 64]
    labels = [
        json.loads((tmp_path / "run" / "checkpoints" / f"step_{step:012d}" / "manifest.json").read_text())["labels"]
        for step in (32, 64)
    ]
    assert labels == [["mine"], []]


# Failures


@pytest.mark.parametrize("event", ["on_train_start", "on_collect_end", "on_update_end", "on_eval_end", "on_train_end"])
def test_a_failing_callback_is_named_with_its_event_and_leaves_nothing_open(event, tmp_path):
    def fail(self, state, result=None):
        raise ZeroDivisionError("one over nought")

    broken = type("Broken", (Callback,), {event: fail})()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(CallbackError) as error:
        train_ppo(tiny_run_config("ppo"), run_dir=tmp_path / "run", callbacks=[broken])
    assert str(error.value) == f"callback Broken failed in {event}: ZeroDivisionError: one over nought"
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    found = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, handler)  # so that Ctrl-C works in the tests that follow
    assert found is handler
    assert run_card(tmp_path / "run")["status"] == "failed"
    assert run_card(tmp_path / "run")["error"].endswith(str(error.value))


# State


def train_counted(run_dir, total_timesteps, **settings):
    counter = Counter()
    config = tiny_run_config("ppo", total_timesteps=total_timesteps, **settings)
    if (run_dir / "config.yaml").exists():
        resume_training(run_dir, config=config, callbacks=[counter])
    else:
        train_ppo(config, run_dir=run_dir, callbacks=[counter])
    return counter.count


def test_the_state_of_a_callback_survives_a_resume(tmp_path):
    assert train_counted(tmp_path / "run", 32) == 2
    assert train_counted(tmp_path / "run", 64) == 4


@pytest.mark.parametrize(
    "change", [{"logging": {"progress": True}}, {"checkpoint": {"keep_best": False}}, {"eval": {"stop_at_return": 1e9}}]
)
def test_the_state_of_a_callback_survives_a_resume_that_changes_the_standard_callbacks(change, tmp_path):
    assert train_counted(tmp_path / "run", 32) == 2
    assert train_counted(tmp_path / "run", 64, **change) == 4


def test_a_callback_that_was_not_there_before_starts_afresh(tmp_path):
    train_ppo(tiny_run_config("ppo", total_timesteps=32), run_dir=tmp_path / "run")
    assert train_counted(tmp_path / "run", 64) == 2


def test_two_callbacks_of_one_class_keep_their_states_apart():
    first, second = Counter(), Counter()
    first.count, second.count = 3, 5
    saved = CallbackList([first, second]).state_dict()
    restored = Counter(), Counter()
    CallbackList(restored).load_state_dict(saved)
    assert [counter.count for counter in restored] == [3, 5]


def test_only_callbacks_with_state_are_saved():
    assert list(CallbackList([StopAtReturn(1.0), Recorder()]).state_dict()) == []


def test_the_best_evaluation_is_in_the_checkpoint(tmp_path):
    train_ppo(tiny_run_config("ppo"), run_dir=tmp_path / "run")
    keeper = KeepBestCheckpoint()
    CallbackList([keeper]).load_state_dict(read_checkpoint(find_checkpoint(tmp_path / "run"))["callbacks"])
    assert keeper.best == max(
        row["eval/return_mean"] for row in metric_rows(tmp_path / "run") if "eval/return_mean" in row
    )


# Best keeping and early stopping, with evaluations written by hand


def new_state(**settings):
    config = tiny_run_config("ppo", total_timesteps=100, **settings)
    return TrainerState(config=config, run_dir=Path("runs/x"), agent=None)


def evaluation(*returns):
    return EvalResult(global_step=10, returns=returns, lengths=(1,) * len(returns), first_seed=0)


def test_keep_best_asks_for_a_checkpoint_only_when_the_mean_rises():
    keeper, asked = KeepBestCheckpoint(), []
    for returns in [(1.0, 3.0), (2.0,), (1.0,), (2.5, 2.7), (2.6,)]:
        state = new_state()
        keeper.on_eval_end(state, evaluation(*returns))
        assert state.checkpoint_requested == ("best" in state.checkpoint_labels)
        asked.append(state.checkpoint_requested)
    assert asked == [True, False, False, True, False]
    assert keeper.best == 2.6


def test_keep_best_goes_on_from_its_saved_best():
    keeper = KeepBestCheckpoint()
    keeper.load_state_dict({"best": 5.0})
    state = new_state()
    keeper.on_eval_end(state, evaluation(4.9))
    assert not state.checkpoint_requested
    assert keeper.state_dict() == {"best": 5.0}


@pytest.mark.parametrize(
    ("returns", "reason"), [((9.0, 10.9), None), ((9.0, 11.0), "evaluation return 10.0 reached 10")]
)
def test_stop_at_return_compares_the_mean(returns, reason):
    state = new_state()
    StopAtReturn(10.0).on_eval_end(state, evaluation(*returns))
    assert state.stop_reason == reason


def test_stop_after_no_improvement_counts_rounds_in_a_row():
    stopper, state, stopped_at = StopAfterNoImprovement(patience=2), new_state(), None
    for round_number, mean in enumerate([1.0, 0.5, 1.5, 1.5, 1.4, 2.0]):
        if stopped_at is None:
            stopper.on_eval_end(state, evaluation(mean))
            stopped_at = round_number if state.stop_reason else None
    assert stopped_at == 4
    assert state.stop_reason == "no better evaluation in 2 rounds"


def test_stop_after_no_improvement_goes_on_from_its_saved_count():
    stopper, state = StopAfterNoImprovement(patience=3), new_state()
    stopper.load_state_dict({"best": 1.0, "rounds": 2})
    stopper.on_eval_end(state, evaluation(0.9))
    assert state.stop_reason == "no better evaluation in 3 rounds"
    assert stopper.state_dict() == {"best": 1.0, "rounds": 3}


def test_the_config_chooses_the_standard_callbacks():
    def chosen(**settings):
        return [type(callback).__name__ for callback in standard_callbacks(tiny_run_config("ppo", **settings))]

    assert chosen() == ["KeepBestCheckpoint"]
    assert chosen(checkpoint={"keep_best": False}) == []
    assert chosen(eval={"stop_at_return": 5.0, "stop_after_no_improvement": 3}, logging={"progress": True}) == [
        "KeepBestCheckpoint",
        "StopAtReturn",
        "StopAfterNoImprovement",
        "Progress",
    ]


def test_stop_at_return_ends_a_run_by_itself(tmp_path):
    config = tiny_run_config("ppo", eval={"stop_at_return": 1.0})
    result = train_ppo(config, run_dir=tmp_path / "run")
    assert result.checkpoint_path.name == "step_000000000032"
    assert run_card(result.run_dir)["stop_reason"].startswith("evaluation return ")


# Progress


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that stands at 100 seconds until a test moves it."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(callbacks_module, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def show(stream, clock, *moments):
    """Start a progress display and end a collect phase at each (second, step)."""
    progress, state = Progress(stream), new_state()
    progress.on_train_start(state)
    for second, step in moments:
        clock.seconds, state.global_step = second, step
        state.metrics["episode/return_mean"] = 12.5
        progress.on_collect_end(state, CollectResult(1, ()))
    return progress, state


def test_on_a_terminal_one_line_is_redrawn(clock):
    stream = FakeTerminal()
    show(stream, clock, (100.1, 5), (101.0, 50), (101.1, 60), (102.0, 80))
    assert stream.getvalue() == (
        "\r\x1b[Kppo on CartPole-v1, seed 1, no preset\nruns/x\n"
        "\r\x1b[K50/100 steps  50% | 50/s | return 12.5 | 0:01 left"
        "\r\x1b[K80/100 steps  80% | 40/s | return 12.5 | 0:00 left"
    )


def test_elsewhere_a_plain_line_is_written_now_and_then(clock):
    stream = io.StringIO()
    show(stream, clock, (101.0, 5), (109.9, 40), (110.0, 50), (119.0, 60))
    assert stream.getvalue() == (
        "ppo on CartPole-v1, seed 1, no preset\nruns/x\n50/100 steps  50% | 5/s | return 12.5 | 0:10 left\n"
    )


def test_progress_prints_evaluations_and_the_end(clock):
    stream = io.StringIO()
    progress, state = show(stream, clock)
    progress.on_eval_end(state, evaluation(1.0, 3.0))
    progress.on_eval_end(state, evaluation(7.0))
    clock.seconds, state.global_step = 100.0 + 3725.0, 100
    state.request_stop("solved")
    progress.on_train_end(state, TrainResult(Path("runs/x"), Path("runs/x/checkpoints/step_000000000100"), {}))
    assert stream.getvalue().splitlines()[2:] == [
        "step 10: return 2.0 ± 1.4 over 2 episodes",
        "step 10: return 7.0 over 1 episodes",
        "finished at step 100 in 1:02:05 (solved)",
    ]


def test_progress_names_the_preset_and_the_step_of_a_resumed_run(clock):
    stream, state = io.StringIO(), new_state()
    state.config = dataclasses.replace(state.config, preset="ppo_cartpole")
    state.global_step = 1234
    Progress(stream).on_train_start(state)
    assert stream.getvalue() == "ppo on CartPole-v1, seed 1, preset ppo_cartpole, from step 1,234\nruns/x\n"


def test_the_speed_of_a_resumed_run_counts_its_own_steps(clock):
    stream, state = FakeTerminal(), new_state()
    state.global_step = 40
    progress = Progress(stream)
    progress.on_train_start(state)
    clock.seconds, state.global_step = 101.0, 60
    progress.on_collect_end(state, CollectResult(20, ()))
    assert stream.getvalue().endswith("\r\x1b[K60/100 steps  60% | 20/s | 0:02 left")
