"""The registry and the manager as contracts: what an algorithm of one's own needs, and what is refused."""

import inspect
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import checkpoint_steps, metric_rows, run_card, tiny_env, tiny_run_config

from rl_training.config import AlgoConfig, DQNConfig, PPOConfig, SACConfig
from rl_training.config.fields import option
from rl_training.envs.normalization import Normalizer
from rl_training.envs.training_envs import TrainingEnvs
from rl_training.errors import ConfigError, UserError
from rl_training.experiment import registry
from rl_training.experiment.default_manager import DefaultExperimentManager
from rl_training.experiment.manager import ExperimentManager
from rl_training.experiment.registry import AlgorithmSpec, Capabilities
from rl_training.runtime.run_utils import create_training_run
from rl_training.runtime.session import TrainingSession
from rl_training.runtime.trainer import Trainer, TrainResult
from rl_training.runtime.workflows import evaluate_checkpoint, resume_training
from rl_training.spaces import ContinuousActions, DiscreteActions

# An algorithm of one's own, as a user would write it in a file of their own: it takes random actions.


@dataclass
class RandomConfig(AlgoConfig):
    name: str = "random"
    favourite: int = option(0, "The action that evaluation takes.", at_least=0)


class RandomAgent:
    def __init__(self, config, actions, seed):
        self.config, self.actions = config, actions
        self.generator = np.random.Generator(np.random.PCG64(seed))

    def act(self, observations):
        return np.full(len(observations), self.config.favourite)

    def explore(self, observations):
        return self.generator.integers(self.actions.count, size=len(observations))

    def state_dict(self):
        return {"generator": self.generator.bit_generator.state}

    def load_state_dict(self, state):
        self.generator.bit_generator.state = state["generator"]


class Nothing:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


def build_random_agent(config, observation, actions, device=None):
    return RandomAgent(config.algo, actions, config.seed)


def train_random(config, *, run_dir=None, callbacks=(), checkpoint=None):
    run = create_training_run(config, run_dir, checkpoint)
    envs = TrainingEnvs(config)
    normalizer = Normalizer(config.env, envs.observation_spec.size, config.algo.gamma)
    agent = build_random_agent(config, envs.observation_spec, envs.action_spec)
    with TrainingSession(
        run, agent=agent, envs=envs, normalizer=normalizer, data=Nothing(), callbacks=callbacks
    ) as session:
        if not session.resumed:
            envs.reset()
        while session.running:
            session.record_step(envs.step(agent.explore(envs.observations)))
            session.end_collect()
            session.end_iteration()
        return session.finish()


RANDOM = AlgorithmSpec(
    name="random",
    config_class=RandomConfig,
    train=f"{__name__}:train_random",
    build_agent=f"{__name__}:build_random_agent",
    capabilities=Capabilities(discrete_actions=True),
)


@pytest.fixture
def registered(monkeypatch):
    """Register the algorithm above for one test."""
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    registry.register(RANDOM)


# The manager


def test_the_default_manager_is_an_experiment_manager():
    assert isinstance(DefaultExperimentManager(), ExperimentManager)


def test_something_without_resume_is_no_experiment_manager():
    class OnlySetup:
        def setup(self, config, callbacks=(), run_dir=None):
            raise NotImplementedError

    assert not isinstance(OnlySetup(), ExperimentManager)


@pytest.mark.parametrize("algo", ["ppo", "dqn", "sac"])
def test_setup_returns_a_trainer_and_makes_no_directory_yet(algo, tmp_path):
    trainer = DefaultExperimentManager().setup(tiny_run_config(algo), run_dir=tmp_path / "run")
    assert isinstance(trainer, Trainer)
    assert list(tmp_path.iterdir()) == []


def test_all_train_functions_have_one_signature():
    signatures = {str(inspect.signature(registry.get(name).load_train())) for name in ("ppo", "dqn", "sac")}
    assert len(signatures) == 1


def test_all_build_functions_have_the_same_parameters():
    parameters = {
        tuple(inspect.signature(registry.get(name).load_build_agent()).parameters) for name in ("ppo", "dqn", "sac")
    }
    assert parameters == {("config", "observation", "actions", "device")}


# The registry


def test_the_registry_knows_the_three_algorithms_and_their_configs():
    assert registry.names() == ["dqn", "ppo", "sac"]
    assert [registry.get(name).config_class for name in ("ppo", "dqn", "sac")] == [PPOConfig, DQNConfig, SACConfig]
    assert [registry.get(name).config_class().name for name in registry.names()] == registry.names()


def test_an_unknown_algorithm_is_answered_with_the_closest_one():
    with pytest.raises(ConfigError) as error:
        registry.get("pp0")
    assert str(error.value) == "Unknown algorithm 'pp0'. Did you mean 'ppo'? Choose from dqn, ppo, sac."


def test_a_name_that_is_close_to_nothing_gets_no_suggestion():
    with pytest.raises(ConfigError, match=r"^Unknown algorithm 'zzz'\. Choose from dqn, ppo, sac\.$"):
        registry.get("zzz")


@pytest.mark.parametrize("name", ["my_algo", "", "_"])
def test_a_name_with_an_underscore_or_without_letters_is_refused(registered, name):
    with pytest.raises(ValueError, match="must not be empty or contain an underscore"):
        registry.register(replace(RANDOM, name=name))
    assert registry.names() == ["dqn", "ppo", "random", "sac"]


def test_another_algorithm_of_the_same_name_is_refused(registered):
    with pytest.raises(ValueError, match=r"'ppo' is already registered as rl_training\.runtime\.ppo_trainer:train_ppo"):
        registry.register(replace(RANDOM, name="ppo"))
    assert registry.get("ppo").config_class is PPOConfig


def test_registering_the_same_thing_twice_is_harmless(registered):
    registry.register(RANDOM)
    assert registry.names() == ["dqn", "ppo", "random", "sac"]


DISCRETE = DiscreteActions(count=2)
BOUNDED = ContinuousActions(low=(-1.0,), high=(1.0,))
UNBOUNDED = ContinuousActions(low=(-np.inf,), high=(np.inf,))


@pytest.mark.parametrize(
    ("algo", "actions"),
    [("ppo", DISCRETE), ("ppo", BOUNDED), ("ppo", UNBOUNDED), ("dqn", DISCRETE), ("sac", BOUNDED)],
)
def test_an_algorithm_accepts_the_actions_that_it_can_learn(algo, actions):
    assert registry.check_actions(registry.get(algo), actions, "Env-v0") is None


@pytest.mark.parametrize(
    ("algo", "actions", "message"),
    [
        ("dqn", BOUNDED, "algo=dqn cannot train on Env-v0, which has continuous actions. Use algo=ppo or algo=sac."),
        ("sac", DISCRETE, "algo=sac cannot train on Env-v0, which has 2 discrete actions. Use algo=dqn or algo=ppo."),
        (
            "sac",
            UNBOUNDED,
            "algo=sac cannot train on Env-v0, which has continuous actions without bounds. Use algo=ppo.",
        ),
        (
            "dqn",
            UNBOUNDED,
            "algo=dqn cannot train on Env-v0, which has continuous actions without bounds. Use algo=ppo.",
        ),
    ],
)
def test_an_algorithm_refuses_other_actions_and_names_those_that_can(algo, actions, message):
    with pytest.raises(UserError) as error:
        registry.check_actions(registry.get(algo), actions, "Env-v0")
    assert str(error.value) == message


# An algorithm of one's own


def random_config(**settings):
    return tiny_run_config("dqn", algo_config=RandomConfig(favourite=1), **settings)


def test_an_algorithm_of_ones_own_trains_through_the_manager(registered, tmp_path):
    result = DefaultExperimentManager().setup(random_config(), run_dir=tmp_path / "run").train()
    assert isinstance(result, TrainResult)
    assert result.run_dir == tmp_path / "run"
    assert run_card(result.run_dir)["algo"] == "random"
    assert [row["step"] for row in metric_rows(result.run_dir)] == [16, 32, 48, 64]
    assert checkpoint_steps(result.run_dir)[-1] == 64
    # Always pushing right, CartPole falls within a dozen steps.
    assert 8 <= result.metrics["eval/return_mean"] <= 12


def test_an_algorithm_of_ones_own_is_evaluated_and_resumed_like_any_other(registered, tmp_path):
    result = DefaultExperimentManager().setup(random_config(), run_dir=tmp_path / "run").train()
    evaluation = evaluate_checkpoint(result.run_dir, checkpoint="last", episodes=1, seed=100_000)
    assert evaluation.summary.mean == result.metrics["eval/return_mean"]
    longer = resume_training(result.run_dir, config=random_config(total_timesteps=96))
    assert longer.checkpoint_path.name == "step_000000000096"


def test_an_algorithm_of_ones_own_goes_by_its_name_in_the_python_api(registered, tmp_path):
    import rl_training

    result = rl_training.fit(
        "random",
        "CartPole-v1",
        run_dir=tmp_path / "run",
        total_timesteps=20,
        logging={"progress": False, "tensorboard": False},
        eval={"episodes": 0},
    )
    assert Path(result.checkpoint_path).name == "step_000000000020"


def test_an_algorithm_of_ones_own_is_refused_where_it_does_not_fit(registered, tmp_path):
    config = tiny_run_config("sac", algo_config=RandomConfig(), env=tiny_env("sac"))
    with pytest.raises(UserError, match="algo=random cannot train on Pendulum-v1"):
        DefaultExperimentManager().setup(config, run_dir=tmp_path / "run")


def test_a_name_that_does_not_belong_to_the_settings_is_refused():
    config = tiny_run_config("dqn")
    config.algo.name = "ppo"
    with pytest.raises(ConfigError, match=r"algo\.name=ppo does not match"):
        DefaultExperimentManager().setup(config)
