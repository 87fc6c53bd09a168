"""DefaultExperimentManager: new runs, resumed runs, callbacks, and what it refuses before anything is made."""

import dataclasses
import gc

import pytest
import torch
from cli_helpers import checkpoint_steps, metric_rows, run_card, tiny_algo, tiny_env, tiny_run_config

from rl_training.config import DeviceConfig, TrainConfig
from rl_training.errors import ConfigError, UserError
from rl_training.experiment.default_manager import DefaultExperimentManager
from rl_training.runtime.callbacks import Callback

MANAGER = DefaultExperimentManager()


class Recorder(Callback):
    def __init__(self):
        self.started_at: list[int] = []
        self.ended_at: list[int] = []

    def on_train_start(self, state):
        self.started_at.append(state.global_step)

    def on_train_end(self, state, result):
        self.ended_at.append(state.global_step)


def longer(algo, total_timesteps):
    return dataclasses.replace(tiny_run_config(algo), total_timesteps=total_timesteps)


@pytest.mark.parametrize("algo", ["ppo", "dqn", "sac"])
def test_setup_and_train_end_at_the_budget_with_a_checkpoint(algo, tmp_path):
    result = MANAGER.setup(tiny_run_config(algo), run_dir=tmp_path / "run").train()
    assert result.run_dir == tmp_path / "run"
    assert result.checkpoint_path == tmp_path / "run" / "checkpoints" / "step_000000000064"
    assert result.checkpoint_path.is_dir()
    assert result.metrics["eval/return_mean"] == metric_rows(result.run_dir)[-1]["eval/return_mean"]
    assert result.metrics["train/gradient_steps"] == {"ppo": 8, "dqn": 11, "sac": 11}[algo]
    assert run_card(result.run_dir)["status"] == "finished"


@pytest.mark.parametrize("algo", ["ppo", "dqn", "sac"])
def test_resume_of_a_run_directory_advances(algo, tmp_path):
    MANAGER.setup(tiny_run_config(algo), run_dir=tmp_path / "run").train()
    recorder = Recorder()
    result = MANAGER.resume(tmp_path / "run", [recorder], config=longer(algo, 96)).train()
    assert (recorder.started_at, recorder.ended_at) == ([64], [96])
    assert result.checkpoint_path.name == "step_000000000096"
    assert [row["step"] for row in metric_rows(result.run_dir)] == [16, 32, 48, 64, 80, 96]


@pytest.mark.parametrize("algo", ["ppo", "dqn", "sac"])
def test_resume_of_one_checkpoint_goes_on_from_that_checkpoint(algo, tmp_path):
    config = tiny_run_config(algo, checkpoint={"every": 32, "keep_last": 5}, eval={"every": None})
    MANAGER.setup(config, run_dir=tmp_path / "run").train()
    assert checkpoint_steps(tmp_path / "run") == [32, 64]
    recorder = Recorder()
    result = MANAGER.resume(str(tmp_path / "run" / "checkpoints" / "step_000000000032"), [recorder]).train()
    assert (recorder.started_at, recorder.ended_at) == ([32], [64])
    assert [row["step"] for row in metric_rows(result.run_dir)] == [16, 32, 48, 64]
    assert [entry["from_step"] for entry in run_card(result.run_dir)["resumes"]] == [32]


def test_resume_without_more_to_do_is_refused_and_changes_nothing(tmp_path):
    first = MANAGER.setup(tiny_run_config("ppo"), run_dir=tmp_path / "run").train()
    rows = metric_rows(first.run_dir)
    with pytest.raises(UserError, match="is finished at step 64"):
        MANAGER.resume(tmp_path / "run").train()
    assert metric_rows(first.run_dir) == rows


def test_callbacks_reach_the_trainer(tmp_path):
    recorder = Recorder()
    MANAGER.setup(tiny_run_config("dqn"), [recorder], run_dir=tmp_path / "run").train()
    assert (recorder.started_at, recorder.ended_at) == ([0], [64])


def test_without_a_directory_one_is_made_below_rl_outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_OUTPUTS", str(tmp_path / "elsewhere"))
    config = tiny_run_config("ppo")
    first, second = MANAGER.setup(config).train(), MANAGER.setup(config).train()
    assert first.run_dir.parent == second.run_dir.parent == tmp_path / "elsewhere" / "ppo" / "cartpole"
    assert first.run_dir != second.run_dir


@pytest.mark.parametrize(
    ("algo", "env", "message"),
    [
        ("sac", "dqn", "algo=sac cannot train on CartPole-v1, which has 2 discrete actions"),
        ("dqn", "sac", "algo=dqn cannot train on Pendulum-v1, which has continuous actions"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_before_anything_is_made(algo, env, message, tmp_path):
    config = tiny_run_config(algo, env=tiny_env(env), algo_config=tiny_algo(algo))
    with pytest.raises(UserError, match=message):
        MANAGER.setup(config, run_dir=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused_before_anything_is_made(tmp_path):
    config = dataclasses.replace(tiny_run_config("ppo"), device=DeviceConfig(kind="cuda"))
    with pytest.raises(UserError, match="device=cuda: torch sees no CUDA device here"):
        MANAGER.setup(config, run_dir=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_algorithm_is_refused():
    config = TrainConfig()
    config.algo.name = "spa"
    with pytest.raises(ConfigError, match=r"Unknown algorithm 'spa'\."):
        MANAGER.setup(config)


def test_resume_of_something_that_is_no_run_is_refused_at_once(tmp_path):
    with pytest.raises(UserError, match="does not exist; name a run directory"):
        MANAGER.resume(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"is not a run directory: it has no config\.yaml"):
        MANAGER.resume(tmp_path)


def test_resume_refuses_a_config_that_would_be_another_run(tmp_path):
    MANAGER.setup(tiny_run_config("ppo"), run_dir=tmp_path / "run").train()
    other = dataclasses.replace(tiny_run_config("ppo"), seed=2)
    with pytest.raises(ConfigError, match="A resumed run cannot change seed: 1 -> 2"):
        MANAGER.resume(tmp_path / "run", config=other).train()


def test_a_new_run_refuses_a_directory_that_holds_another_one(tmp_path):
    first = MANAGER.setup(tiny_run_config("ppo"), run_dir=tmp_path / "run").train()
    rows = metric_rows(first.run_dir)
    with pytest.raises(UserError, match="run"):
        MANAGER.setup(tiny_run_config("ppo", seed=2), run_dir=tmp_path / "run").train()
    assert metric_rows(first.run_dir) == rows
    assert run_card(first.run_dir)["seed"] == 1


def test_a_run_that_fails_while_it_is_set_up_lets_go_of_its_directory_and_says_so(tmp_path):
    config = tiny_run_config("dqn", algo_config=tiny_algo("dqn", buffer_size=10**13))
    with pytest.raises(UserError, match=r"A replay buffer of algo\.buffer_size=10000000000000 needs"):
        MANAGER.setup(config, run_dir=tmp_path / "run").train()
    gc.collect()  # a file left open would be a warning, and warnings are errors
    assert not (tmp_path / "run").exists() or run_card(tmp_path / "run")["status"] == "failed"
