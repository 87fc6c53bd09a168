"""The names and signatures that other documents and users rely on."""

import dataclasses
import inspect
from inspect import Parameter

import pytest

import rl_training
from rl_training.config import TrainConfig
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.envs.factory import make_env, make_vector_env, probe_spaces
from rl_training.experiment import registry
from rl_training.experiment.default_manager import DefaultExperimentManager
from rl_training.experiment.manager import ExperimentManager
from rl_training.experiment.registry import AlgorithmSpec, Capabilities
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.checkpointing import find_checkpoint, read_checkpoint, write_checkpoint
from rl_training.runtime.dqn_trainer import build_dqn_agent, train_dqn
from rl_training.runtime.ppo_trainer import build_ppo_agent, train_ppo
from rl_training.runtime.run_utils import (
    create_training_run,
    resolve_device,
    save_training_checkpoint,
    serialize_train_config,
)
from rl_training.runtime.sac_trainer import build_sac_agent, train_sac
from rl_training.runtime.trainer import (
    CollectResult,
    EvalResult,
    TrainerState,
    TrainResult,
    UpdateResult,
)
from rl_training.runtime.workflows import evaluate_checkpoint, resume_training

MARKS = {
    Parameter.POSITIONAL_OR_KEYWORD: "",
    Parameter.KEYWORD_ONLY: "*",
    Parameter.VAR_KEYWORD: "**",
    Parameter.VAR_POSITIONAL: "*args ",
}


def signature(function):
    """Return the parameters: "name" if required, "name=" with a default, "*name" if keyword-only."""
    return " ".join(
        f"{MARKS[parameter.kind]}{name}{'' if parameter.default is Parameter.empty else '='}"
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self"
    )


TRAIN = "config *run_dir= *callbacks= *checkpoint="
BUILD = "config observation actions device="


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (train_ppo, TRAIN),
        (train_dqn, TRAIN),
        (train_sac, TRAIN),
        (build_ppo_agent, BUILD),
        (build_dqn_agent, BUILD),
        (build_sac_agent, BUILD),
        (DefaultExperimentManager.setup, "config callbacks= run_dir="),
        (DefaultExperimentManager.resume, "checkpoint callbacks= config="),
        (ExperimentManager.setup, "config callbacks= run_dir="),
        (ExperimentManager.resume, "checkpoint callbacks= config="),
        (registry.register, "spec"),
        (registry.get, "name"),
        (registry.names, ""),
        (AlgorithmSpec, "name config_class train build_agent capabilities"),
        (Capabilities, "discrete_actions= continuous_actions= unbounded_actions= several_choices="),
        (Callback.on_train_start, "state"),
        (Callback.on_collect_end, "state result"),
        (Callback.on_update_end, "state result"),
        (Callback.on_eval_end, "state result"),
        (Callback.on_train_end, "state result"),
        (Callback.state_dict, ""),
        (Callback.load_state_dict, "state"),
        (TrainerState.request_stop, "reason"),
        (TrainerState.request_checkpoint, "label="),
        (resolve_device, "kind"),
        (serialize_train_config, "config"),
        (create_training_run, "config run_dir= checkpoint="),
        (save_training_checkpoint, "run global_step parts labels="),
        (write_checkpoint, "run_dir global_step state labels= journal="),
        (read_checkpoint, "path"),
        (find_checkpoint, "path which= *to_train= *warn="),
        (evaluate_checkpoint, "path *checkpoint= *episodes= *seed= *on_episode="),
        (resume_training, "path *config= *callbacks="),
        (rl_training.fit, "algo env *callbacks= *run_dir= **settings"),
        (rl_training.make_config, "algo env *preset= *hyperparameters= *env_settings= **settings"),
        (make_env, "config env_index *evaluation="),
        (make_vector_env, "config"),
        (probe_spaces, "config"),
        (RolloutBuffer, "num_steps num_envs observation actions *seed *device= *masked="),
        (RolloutBuffer.reset, ""),
        (RolloutBuffer.add, "observations actions rewards terminated truncated next_observations valid="),
        (RolloutBuffer.compute_returns_and_advantages, "last_values gamma gae_lambda truncated_values="),
        (RolloutBuffer.iter_minibatches, "minibatch_size"),
        (
            ReplayBuffer,
            "capacity num_envs observation actions *seed *device= *n_step= *gamma= *priority_exponent= *masked=",
        ),
        (ReplayBuffer.add, "observations actions rewards next_observations terminated truncated= valid="),
        (ReplayBuffer.sample, "batch_size scale_observations= scale_rewards= *weight_exponent="),
    ],
)
def test_a_documented_function_has_its_documented_signature(function, expected):
    assert signature(function) == expected


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        (TrainResult, ["run_dir", "checkpoint_path", "metrics"]),
        (EvalResult, ["global_step", "returns", "lengths", "first_seed", "acting_path"]),
        (CollectResult, ["env_steps", "episodes"]),
        (UpdateResult, ["gradient_steps", "metrics"]),
    ],
)
def test_results_have_their_documented_fields_and_do_not_change(record, fields):
    assert [field.name for field in dataclasses.fields(record)] == fields
    values = dict.fromkeys(fields)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record(**values), fields[0], 1)


def test_the_state_shows_callbacks_where_the_run_stands():
    names = [field.name for field in dataclasses.fields(TrainerState)]
    assert names[:7] == ["config", "run_dir", "agent", "global_step", "gradient_steps", "episodes", "metrics"]
    assert isinstance(TrainerState.progress, property)


def test_the_config_has_its_documented_sections():
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    assert names >= {
        "algo",
        "env",
        "device",
        "logging",
        "eval",
        "checkpoint",
        "seed",
        "total_timesteps",
        "tags",
        "resume",
    }


def test_short_names_are_the_config_classes():
    assert [cls.__name__ for cls in (rl_training.PPO, rl_training.DQN, rl_training.SAC)] == [
        "PPOConfig",
        "DQNConfig",
        "SACConfig",
    ]


def test_the_public_functions_are_the_documented_ones():
    assert rl_training.train_ppo is train_ppo
    assert rl_training.train_dqn is train_dqn
    assert rl_training.train_sac is train_sac
    assert rl_training.evaluate_checkpoint is evaluate_checkpoint
    assert rl_training.resume_training is resume_training
    assert rl_training.Callback is Callback


def test_defaults_that_users_see_in_the_help():
    parameters = inspect.signature(evaluate_checkpoint).parameters
    assert (parameters["checkpoint"].default, parameters["episodes"].default, parameters["seed"].default) == (
        "best",
        20,
        None,
    )
    assert inspect.signature(find_checkpoint).parameters["which"].default == "last"
