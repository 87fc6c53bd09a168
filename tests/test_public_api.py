"""rl_training from a script or a notebook."""

import pytest
from cli_helpers import checkpoint_steps, metric_rows, run_card, tiny_algo, tiny_env, tiny_run_config

import rl_training
from rl_training.config import EvalConfig
from rl_training.config.conversion import load_yaml
from rl_training.errors import ConfigError, UserError

QUIET = {
    "logging": {"progress": False, "tensorboard": False, "every": 16},
    "eval": {"episodes": 1, "every": None},
    "checkpoint": {"every_seconds": None},
}


def test_fit_takes_names(tmp_path):
    result = rl_training.fit("sac", "pendulum", run_dir=tmp_path / "run", total_timesteps=20, **QUIET)
    saved = load_yaml(result.run_dir / "config.yaml")
    assert (saved["env"]["id"], saved["env"]["name"], saved["preset"]) == ("Pendulum-v1", "pendulum", "sac_pendulum")
    assert run_card(result.run_dir)["global_step"] == 20


def test_fit_takes_a_gymnasium_id_and_a_directory_as_text(tmp_path):
    result = rl_training.fit("dqn", "CartPole-v1", run_dir=str(tmp_path / "run"), total_timesteps=20, **QUIET)
    saved = load_yaml(tmp_path / "run" / "config.yaml")
    assert (saved["env"]["name"], saved["preset"]) == ("cartpole", "dqn_cartpole")
    assert isinstance(result, rl_training.TrainResult)


def test_fit_takes_an_id_that_we_ship_no_group_for(tmp_path):
    result = rl_training.fit(tiny_algo("ppo"), "FrozenLake-v1", run_dir=tmp_path / "run", total_timesteps=16, **QUIET)
    saved = load_yaml(result.run_dir / "config.yaml")
    assert (saved["env"]["id"], saved["env"]["name"], saved["preset"]) == ("FrozenLake-v1", "gym", None)


def test_fit_takes_settings_objects_which_no_preset_touches(tmp_path):
    result = rl_training.fit(
        rl_training.PPO(num_steps=16, minibatch_size=8, hidden_sizes=[4]),
        rl_training.EnvConfig(id="CartPole-v1", num_envs=2),
        run_dir=tmp_path / "run",
        total_timesteps=64,
        seed=7,
        **QUIET,
    )
    saved = load_yaml(result.run_dir / "config.yaml")
    assert (saved["algo"]["num_steps"], saved["algo"]["learning_rate"], saved["preset"]) == (16, 3e-4, None)
    assert (saved["env"]["num_envs"], saved["seed"]) == (2, 7)
    assert run_card(result.run_dir)["global_step"] == 64


def test_settings_may_be_dicts_or_objects():
    by_dict = rl_training.make_config("ppo", "cartpole", eval={"episodes": 50})
    by_object = rl_training.make_config("ppo", "cartpole", eval=EvalConfig(episodes=50))
    assert by_dict == by_object
    assert (by_dict.eval.episodes, by_dict.eval.every) == (50, 10_000)


def test_a_preset_applies_by_itself_and_can_be_turned_off():
    tuned, plain = rl_training.make_config("ppo", "cartpole"), rl_training.make_config("ppo", "cartpole", preset=False)
    assert (tuned.preset, plain.preset) == ("ppo_cartpole", None)
    assert tuned.algo.num_steps != plain.algo.num_steps == 2048
    assert plain.total_timesteps == 100_000


def test_settings_win_over_the_preset():
    config = rl_training.make_config("sac", "pendulum", total_timesteps=5, seed=9, tags=["a"])
    assert (config.preset, config.total_timesteps, config.seed, config.tags) == ("sac_pendulum", 5, 9, ["a"])


def test_hyperparameters_and_env_settings_win_over_the_preset_and_over_objects():
    by_name = rl_training.make_config(
        "ppo", "cartpole", hyperparameters={"gamma": 0.5}, env_settings={"num_envs": 16, "env_kwargs": {"a": 1}}
    )
    assert (by_name.preset, by_name.algo.gamma, by_name.env.num_envs) == ("ppo_cartpole", 0.5, 16)
    assert (by_name.env.id, by_name.env.env_kwargs) == ("CartPole-v1", {"a": 1})
    by_object = rl_training.make_config(rl_training.PPO(gamma=0.9), "cartpole", hyperparameters={"clip_range": 0.3})
    assert (by_object.algo.gamma, by_object.algo.clip_range) == (0.9, 0.3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hyperparameters": {"gama": 0.5}}, "Unknown key algo.gama. Did you mean 'algo.gamma'?"),
        ({"env_settings": {"num_env": 2}}, "Unknown key env.num_env. Did you mean 'env.num_envs'?"),
        ({"hyperparameters": {"gamma": 2}}, "algo.gamma must be at least 0 and at most 1, got 2.0."),
    ],
)
def test_a_bad_hyperparameter_or_env_setting_is_named(arguments, message):
    with pytest.raises(ConfigError) as error:
        rl_training.make_config("ppo", "cartpole", **arguments)
    assert str(error.value) == message


def test_making_a_config_does_not_change_the_callers_objects():
    algo, env = rl_training.PPO(), rl_training.EnvConfig(id="CartPole-v1")
    settings = {"eval": {"episodes": 3}}
    config = rl_training.make_config(algo, env, **settings)
    config.algo.hidden_sizes.append(1)
    assert algo == rl_training.PPO()
    assert env == rl_training.EnvConfig(id="CartPole-v1")
    assert settings == {"eval": {"episodes": 3}}


def test_fit_calls_back(tmp_path):
    class Counter(rl_training.Callback):
        collected = 0

        def on_collect_end(self, state, result):
            assert isinstance(state, rl_training.TrainerState)
            self.collected += result.env_steps

    counter = Counter()
    rl_training.fit(
        tiny_algo("ppo"), tiny_env("ppo"), callbacks=[counter], run_dir=tmp_path / "run", total_timesteps=48, **QUIET
    )
    assert counter.collected == 48


def test_without_a_directory_fit_makes_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RL_OUTPUTS", raising=False)
    result = rl_training.fit(tiny_algo("ppo"), tiny_env("ppo"), total_timesteps=16, **QUIET)
    assert result.run_dir.parent == tmp_path / "outputs" / "ppo" / "cartpole"


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    def losses(name, seed):
        result = rl_training.fit(
            tiny_algo("ppo"), tiny_env("ppo"), run_dir=tmp_path / name, total_timesteps=48, seed=seed, **QUIET
        )
        return [row["loss/value"] for row in metric_rows(result.run_dir)]

    first = losses("first", 1)
    assert len(first) == 3
    assert losses("again", 1) == first
    assert losses("other", 2) != first


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sed": 3}, "Unknown key sed. Did you mean 'seed'?"),
        ({"eval": {"episods": 3}}, "Unknown key eval.episods. Did you mean 'eval.episodes'?"),
        ({"learning_rate": 1e-3}, "Unknown key learning_rate. Did you mean 'algo.learning_rate'?"),
        ({"seed": -1}, "seed must be at least 0, got -1."),
        ({"seed": "x"}, "seed: Value 'x' of type 'str' could not be converted to Integer."),
        ({"eval": {"every": 0}}, "eval.every must be at least 1, got 0."),
        ({"device": {"kind": "gpu"}}, "device.kind: "),
        ({"eval": 3}, "eval"),
        ({"tags": object()}, "tags"),
    ],
)
def test_a_bad_setting_raises_a_config_error_that_names_the_key(settings, message, tmp_path):
    with pytest.raises(ConfigError) as error:
        rl_training.fit("ppo", "cartpole", run_dir=tmp_path / "run", **settings)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_config_error_is_a_value_error_and_a_user_error():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, UserError)


def test_unknown_names_are_answered_with_the_closest():
    with pytest.raises(ConfigError, match=r"Unknown algorithm 'pppo'\. Did you mean 'ppo'\?"):
        rl_training.make_config("pppo", "cartpole")
    with pytest.raises(UserError, match=r"Unknown environment env\.id=CartPol-v1\. Did you mean 'CartPole-v1'\?"):
        rl_training.fit("ppo", "CartPol-v1")


def test_evaluate_checkpoint_plays_seeded_episodes(tmp_path):
    result = rl_training.train_ppo(tiny_run_config("ppo"), run_dir=tmp_path / "run")
    played = []
    path, last = result.run_dir, "last"
    first = rl_training.evaluate_checkpoint(path, checkpoint=last, episodes=3, seed=5, on_episode=played.append)
    assert isinstance(first, rl_training.EvalResult)
    assert (first.global_step, first.first_seed, len(first.returns), len(first.lengths)) == (64, 5, 3, 3)
    assert played == [1, 2, 3]
    assert rl_training.evaluate_checkpoint(str(result.checkpoint_path), episodes=3, seed=5) == first
    # Episode i starts from seed + i, so the episodes of two evaluations overlap where their seeds do.
    assert rl_training.evaluate_checkpoint(path, checkpoint=last, episodes=2, seed=6).returns == first.returns[1:]


def test_evaluate_checkpoint_expands_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    rl_training.train_ppo(tiny_run_config("ppo"), run_dir=tmp_path / "run")
    assert rl_training.evaluate_checkpoint("~/run", checkpoint="last", episodes=1).global_step == 64


def test_resume_training_goes_on_with_a_larger_budget(tmp_path):
    rl_training.train_sac(tiny_run_config("sac"), run_dir=tmp_path / "run")
    result = rl_training.resume_training(tmp_path / "run", config=tiny_run_config("sac", total_timesteps=96))
    assert checkpoint_steps(result.run_dir)[-1] == 96
    assert [row["step"] for row in metric_rows(result.run_dir)] == [16, 32, 48, 64, 80, 96]


def test_the_train_functions_train_what_they_are_named_after(tmp_path):
    for algo, train in (("ppo", rl_training.train_ppo), ("dqn", rl_training.train_dqn), ("sac", rl_training.train_sac)):
        result = train(tiny_run_config(algo, total_timesteps=32), run_dir=tmp_path / algo)
        assert run_card(result.run_dir)["algo"] == algo
        assert result.checkpoint_path.name == "step_000000000032"
