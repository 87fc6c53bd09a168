"""The YAML groups against the dataclasses: everything composes, presets and command line win in the right order."""

import math
from pathlib import Path

import pytest
from cli_helpers import REPO
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_training.api.algorithms import make_config
from rl_training.config import (
    Activation,
    CheckpointConfig,
    DeviceConfig,
    DeviceKind,
    DQNConfig,
    EnvConfig,
    EvalConfig,
    LoggingConfig,
    PPOConfig,
    QLoss,
    SACConfig,
    TrainConfig,
)
from rl_training.config.conversion import conf_dir, load_yaml, plain, shipped_env, to_train_config, tuned_preset
from rl_training.config.store import register_schemas
from rl_training.errors import ConfigError
from rl_training.experiment import registry
from rl_training.help import training_help

CONF = REPO / "conf"
ALGOS = ["dqn", "ppo", "sac"]
VARIANTS = ["sac_efficient"]
ENVS = sorted(path.stem for path in (CONF / "env").glob("*.yaml"))
PRESETS = sorted(path.stem for path in (CONF / "tuned").glob("*.yaml") if path.stem != "none")


@pytest.fixture(scope="module")
def composed():
    """Return a function from overrides to the typed config that the command line would train."""
    GlobalHydra.instance().clear()
    register_schemas({name: registry.get(name).config_class for name in registry.names()})
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        yield lambda *overrides: to_train_config(compose("config", overrides=list(overrides)))
    GlobalHydra.instance().clear()


def leaves(node, prefix=""):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def value_at(config, key):
    node = plain(config)
    for name in key.split("."):
        node = node[name]
    return node


# Groups


def test_the_checkout_uses_its_own_conf_directory():
    assert conf_dir() == CONF


def test_there_is_a_group_file_for_every_registered_algorithm_and_no_other():
    assert registry.names() == ALGOS
    assert sorted(path.stem for path in (CONF / "algo").glob("*.yaml")) == sorted([*ALGOS, *VARIANTS])


@pytest.mark.parametrize("choice", VARIANTS)
def test_a_variant_is_an_algorithm_with_other_settings_in_yaml_and_in_python(composed, choice):
    algo = choice.partition("_")[0]
    plain_config, config = composed(f"algo={algo}", "env=gym"), composed(f"algo={choice}", "env=gym")
    assert config.algo.name == algo
    assert config.algo != plain_config.algo
    assert config == make_config(choice, "gym")
    with pytest.raises(ConfigError, match=rf"Unknown algorithm '{choice}x'\. Did you mean '{choice}'\?"):
        make_config(f"{choice}x", "gym")


def test_algorithm_names_have_no_underscore_because_presets_split_there():
    assert [name for name in registry.names() if "_" in name] == []


def test_the_shipped_environments_are_all_there():
    assert ENVS == [
        "acrobot",
        "ant",
        "bipedalwalker",
        "breakout",
        "cartpole",
        "gym",
        "halfcheetah",
        "hopper",
        "humanoid",
        "inverted_double_pendulum",
        "inverted_pendulum",
        "lunarlander",
        "lunarlander_continuous",
        "mountaincar",
        "mountaincar_continuous",
        "pendulum",
        "pong",
        "reacher",
        "swimmer",
        "walker2d",
    ]


@pytest.mark.parametrize("env", ENVS)
def test_an_env_group_is_named_after_its_file(env):
    assert load_yaml(CONF / "env" / f"{env}.yaml")["name"] == env


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("algo", ALGOS)
def test_every_algorithm_composes_with_every_environment(composed, algo, env):
    config = composed(f"algo={algo}", f"env={env}")
    assert (config.algo.name, config.env.name) == (algo, env)
    assert type(config.algo) is registry.get(algo).config_class
    assert config.preset == (f"{algo}_{env}" if f"{algo}_{env}" in PRESETS else None)


@pytest.mark.parametrize("kind", ["auto", "cpu", "cuda", "mps"])
def test_every_device_group_composes(composed, kind):
    assert composed(f"device={kind}").device == DeviceConfig(kind=DeviceKind[kind])


@pytest.mark.parametrize(
    ("group", "progress", "metrics_file", "tensorboard"),
    [("default", True, True, True), ("minimal", True, True, False), ("none", False, False, False)],
)
def test_every_logging_group_says_what_it_writes(composed, group, progress, metrics_file, tensorboard):
    expected = LoggingConfig(progress=progress, metrics_file=metrics_file, tensorboard=tensorboard)
    assert composed(f"logging={group}").logging == expected


def test_without_arguments_ppo_trains_on_cartpole(composed):
    config = composed()
    assert (config.algo.name, config.env.id, config.device.kind) == ("ppo", "CartPole-v1", DeviceKind.auto)


def test_help_lists_every_choice_and_every_setting_with_value_range_and_meaning():
    text = training_help(make_config("sac", "pendulum"), "train")
    words = set(text.replace(",", " ").split())
    assert words >= {*ALGOS, *ENVS, "auto", "cpu", "cuda", "mps", "default", "minimal", "none"}
    assert "  algo.gamma=0.99                        Discount factor. [>= 0, <= 1]\n" in text
    assert "  algo.activation=relu                   Nonlinearity between layers. [tanh, relu]\n" in text
    assert "  total_timesteps=20000 " in text
    assert max(map(len, text.splitlines())) <= 120


def test_help_lists_the_values_of_settings_that_take_a_word_or_null():
    text = training_help(make_config("ppo", "cartpole"), "train")
    assert "=null            Nonlinearity of the critic; null is as in the actor. [tanh, relu, null]\n" in text
    assert "=auto                    CPU threads of torch; auto is 1, or 2 for layers of 512 and more." in text
    # The brackets stay together, where need be on a line of their own.
    assert "layers of 512 and more.\n                                         [auto or >= 1]\n" in text
    assert "win back the seconds.\n                                         [auto, true, false]\n" in text
    assert "=false               Actor and critic share their hidden layers.\n" in text


# Presets


def pair_of(preset: str) -> tuple[str, str]:
    """Split a preset's name; the name of a variant and that of an environment may both hold an underscore."""
    env = max((env for env in ENVS if preset.endswith(f"_{env}")), key=len)
    return preset.removesuffix(f"_{env}"), env


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_named_after_an_algorithm_and_an_environment_and_says_its_name(preset):
    algo, env = pair_of(preset)
    assert algo in [*ALGOS, *VARIANTS]
    assert env in ENVS
    assert load_yaml(CONF / "tuned" / f"{preset}.yaml")["preset"] == preset


def test_every_pair_that_can_be_trained_has_a_preset():
    discrete = {"acrobot", "breakout", "cartpole", "lunarlander", "mountaincar", "pong"}
    continuous = {
        "ant",
        "bipedalwalker",
        "halfcheetah",
        "hopper",
        "humanoid",
        "inverted_double_pendulum",
        "inverted_pendulum",
        "lunarlander_continuous",
        "mountaincar_continuous",
        "pendulum",
        "reacher",
        "swimmer",
        "walker2d",
    }
    assert discrete | continuous | {"gym"} == set(ENVS)
    assert set(PRESETS) == {
        *(f"ppo_{env}" for env in discrete | continuous),
        *(f"dqn_{env}" for env in discrete),
        *(f"sac_{env}" for env in continuous),
        *(f"sac_efficient_{env}" for env in ("halfcheetah", "hopper", "pendulum")),
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_says_where_its_values_come_from(preset):
    _, comment = (CONF / "tuned" / f"{preset}.yaml").read_text().splitlines()[:2]
    assert comment.startswith("# ")
    assert len(comment) > 30


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_beats_the_defaults(composed, preset):
    algo, env = pair_of(preset)
    config, defaults = composed(f"algo={algo}", f"env={env}"), composed(f"algo={algo}", f"env={env}", "tuned=none")
    settings = dict(leaves(load_yaml(CONF / "tuned" / f"{preset}.yaml")))
    assert {key: value_at(config, key) for key in settings} == settings
    assert any(value_at(defaults, key) != value for key, value in settings.items() if key != "preset")


def test_the_command_line_beats_the_preset(composed):
    config = composed("algo=ppo", "env=cartpole", "algo.gamma=0.5", "total_timesteps=123", "env.num_envs=16")
    assert config.preset == "ppo_cartpole"
    assert (config.algo.gamma, config.total_timesteps, config.env.num_envs) == (0.5, 123, 16)


def test_tuned_none_turns_the_preset_off(composed):
    config = composed("algo=ppo", "env=cartpole", "tuned=none")
    assert config.preset is None
    assert config == TrainConfig(algo=PPOConfig(), env=EnvConfig(name="cartpole", id="CartPole-v1"))


def test_a_pair_without_a_preset_gets_the_defaults(composed):
    expected = TrainConfig(algo=PPOConfig(), env=EnvConfig(name="gym", id="Taxi-v3"))
    assert composed("algo=ppo", "env=gym", "env.id=Taxi-v3") == expected


# One default, written once


@pytest.mark.parametrize(("algo", "config_class"), [("ppo", PPOConfig), ("dqn", DQNConfig), ("sac", SACConfig)])
def test_yaml_without_preset_is_the_dataclass_defaults(composed, algo, config_class):
    config = composed(f"algo={algo}", "env=pendulum", "tuned=none")
    assert config == TrainConfig(algo=config_class(), env=EnvConfig(name="pendulum", id="Pendulum-v1"))
    assert config == make_config(algo, "pendulum", preset=False)


@pytest.mark.parametrize(
    ("algo", "env", "env_id"),
    [("sac", "pendulum", "Pendulum-v1"), ("ppo", "cartpole", "CartPole-v1"), ("dqn", "acrobot", "Acrobot-v1")],
)
def test_python_and_the_command_line_build_the_same_config(composed, algo, env, env_id):
    config = composed(f"algo={algo}", f"env={env}")
    assert make_config(algo, env_id) == config
    assert make_config(algo, env) == config


def test_a_config_that_has_become_plain_data_comes_back_the_same(composed):
    config = composed("algo=sac", "env=pendulum", "tags=[a,b]", "+env.env_kwargs.g=9.8")
    data = plain(config)
    assert data["algo"]["activation"] == "relu"
    assert data["env"]["env_kwargs"] == {"g": 9.8}
    assert to_train_config(OmegaConf.merge(OmegaConf.structured(TrainConfig(algo=SACConfig())), data)) == config


def test_an_unshipped_environment_has_no_settings_and_an_unknown_pair_no_preset():
    assert shipped_env("Taxi-v3") is None
    assert shipped_env("hopper") == {"name": "hopper", "id": "Hopper-v5", "extra": "mujoco"}
    assert tuned_preset("sac", "hopper-that-nobody-tuned") == {}


def test_a_key_that_plus_slipped_past_the_schema_is_refused(composed):
    with pytest.raises(ConfigError, match=r"Unknown key eval\.episods\. Did you mean 'eval\.episodes'\?"):
        composed("+eval.episods=3")


def test_env_kwargs_is_the_one_place_for_keys_of_ones_own(composed):
    assert composed("+env.env_kwargs.anything=1").env.env_kwargs == {"anything": 1}


def test_a_missing_interpolation_is_refused_by_key():
    node = OmegaConf.merge(OmegaConf.structured(TrainConfig(algo=PPOConfig())), {"seed": "${nowhere}"})
    with pytest.raises((ConfigError, OmegaConfBaseException), match="nowhere"):
        to_train_config(node)


# Values from Python: converted where that is harmless, refused in the user's words where it is not


def test_values_that_mean_the_same_are_converted():
    config = PPOConfig(num_steps=1e3, activation="relu", hidden_sizes=(32, 16.0), gamma=1)
    assert config.num_steps == 1000
    assert type(config.num_steps) is int
    assert config.activation is Activation.relu
    assert config.hidden_sizes == [32, 16]
    assert [type(size) for size in config.hidden_sizes] == [int, int]
    assert type(config.gamma) is float


def test_an_optional_value_may_be_none_or_a_number():
    assert PPOConfig(max_grad_norm=None).max_grad_norm is None
    assert type(PPOConfig(max_grad_norm=1).max_grad_norm) is float
    assert EvalConfig(every=1e4).every == 10_000
    assert DQNConfig(loss="mse").loss is QLoss.mse


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PPOConfig(gamma=2), "algo.gamma must be at least 0 and at most 1, got 2.0."),
        (lambda: PPOConfig(gamma=-0.1), "algo.gamma must be at least 0 and at most 1, got -0.1."),
        (lambda: PPOConfig(gamma=math.nan), "algo.gamma must be at least 0 and at most 1, got nan."),
        (lambda: PPOConfig(gamma="0.9"), "algo.gamma must be a number, got '0.9'."),
        (lambda: PPOConfig(gamma=True), "algo.gamma must be a number, got True."),
        (lambda: PPOConfig(gamma=None), "algo.gamma must be a number, got None."),
        (lambda: PPOConfig(learning_rate=0), "algo.learning_rate must be above 0, got 0.0."),
        (
            lambda: PPOConfig(activation="tahn"),
            "algo.activation must be one of tanh, relu, got 'tahn'. Did you mean 'tanh'?",
        ),
        (lambda: PPOConfig(activation=3), "algo.activation must be one of tanh, relu, got 3."),
        (lambda: PPOConfig(num_steps=1.5), "algo.num_steps must be a whole number, got 1.5."),
        (lambda: PPOConfig(num_steps=True), "algo.num_steps must be a whole number, got True."),
        (lambda: PPOConfig(num_steps=0), "algo.num_steps must be at least 1, got 0."),
        (lambda: PPOConfig(hidden_sizes="x"), "algo.hidden_sizes must be a list, got 'x'."),
        (lambda: PPOConfig(hidden_sizes=[64, "x"]), "algo.hidden_sizes must be a whole number, got 'x'."),
        (lambda: PPOConfig(hidden_sizes=[64, 0]), "algo.hidden_sizes must be at least 1, got 0."),
        (lambda: PPOConfig(normalize_advantage=1), "algo.normalize_advantage must be true or false, got 1."),
        (lambda: PPOConfig(max_grad_norm=0), "algo.max_grad_norm must be above 0, got 0.0."),
        (lambda: DQNConfig(final_epsilon=1.5), "algo.final_epsilon must be at least 0 and at most 1, got 1.5."),
        (lambda: SACConfig(temperature=-1), "algo.temperature must be above 0, got -1.0."),
        (lambda: EnvConfig(env_kwargs=5), "env.env_kwargs must be a mapping, got 5."),
        (lambda: EnvConfig(id=5), "env.id must be a text, got 5."),
        (lambda: EnvConfig(num_envs=0), "env.num_envs must be at least 1, got 0."),
        (lambda: EvalConfig(every=0), "eval.every must be at least 1, got 0."),
        (lambda: CheckpointConfig(keep_last=0), "checkpoint.keep_last must be at least 1, got 0."),
        (lambda: LoggingConfig(every=0), "logging.every must be at least 1, got 0."),
        (
            lambda: DeviceConfig(kind="gpu"),
            "device.kind must be one of auto, cpu, cuda, mps, got 'gpu'. Did you mean 'cpu'?",
        ),
        (lambda: TrainConfig(seed=-1), "seed must be at least 0, got -1."),
        (lambda: TrainConfig(tags="a"), "tags must be a list, got 'a'."),
        (lambda: TrainConfig(total_timesteps=-1), "total_timesteps must be at least 0, got -1."),
    ],
)
def test_a_bad_value_is_refused_with_its_key_and_its_range(make, message):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value) == message


def test_a_section_of_the_wrong_kind_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"^env must be a EnvConfig, got 'CartPole-v1'"):
        TrainConfig(env="CartPole-v1")


def test_a_minibatch_larger_than_the_rollout_is_refused_with_the_arithmetic():
    with pytest.raises(ConfigError) as error:
        TrainConfig(algo=PPOConfig(num_steps=8, minibatch_size=17), env=EnvConfig(num_envs=2))
    assert "8 x 2 = 16 transitions. Try algo.minibatch_size=16." in str(error.value)
    assert TrainConfig(algo=PPOConfig(num_steps=8, minibatch_size=16), env=EnvConfig(num_envs=2)).env.num_envs == 2


def test_a_replay_buffer_smaller_than_one_vector_step_is_refused():
    with pytest.raises(ConfigError, match=r"algo\.buffer_size=3 cannot hold one step of env\.num_envs=4"):
        TrainConfig(algo=DQNConfig(buffer_size=3), env=EnvConfig(num_envs=4))


def test_configs_share_no_mutable_default_and_do_not_keep_the_callers_dict():
    PPOConfig().hidden_sizes.append(1)
    assert PPOConfig().hidden_sizes == [64, 64]
    kwargs = {"gravity": 9.8}
    config = EnvConfig(env_kwargs=kwargs)
    kwargs["gravity"] = 0.0
    assert config.env_kwargs == {"gravity": 9.8}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Path("a/b"), "a/b"),
        ((1, 2), [1, 2]),
        ({"b", "a"}, ["a", "b"]),
        (Activation.tanh, "tanh"),
        ({1: (Path("x"),)}, {"1": ["x"]}),
        (None, None),
    ],
)
def test_plain_data_is_what_yaml_can_hold(value, expected):
    assert plain(value) == expected
