"""Makes environments from the config, and says in one line what is wrong with one that cannot be made or used."""

import functools
import importlib
import json
from typing import Any

import gymnasium as gym

from rl_training.config import EnvConfig, TrainConfig, Vectorization
from rl_training.config.conversion import plain
from rl_training.envs.flattening import describe_spaces, flat_env
from rl_training.envs.snapshots import EpisodeRecorder
from rl_training.envs.sync_vector_env import SameStepVectorEnv
from rl_training.envs.vector_env import VectorEnvs
from rl_training.envs.wrappers import named_wrappers, wrapped_env
from rl_training.errors import UserError, did_you_mean
from rl_training.seeding import derive_seed
from rl_training.spaces import ActionSpec, ObservationSpec

GymEnv = gym.Env[Any, Any]


def make_env(config: TrainConfig, env_index: int, *, evaluation: bool = False) -> EpisodeRecorder[Any, Any]:
    """Make one environment that keeps episode statistics and can be snapshotted; its index seeds its action space."""
    flat = flat_env(_make_wrapped(config.env, evaluation=evaluation), config.env.id, config.env.frame_stack)
    env: EpisodeRecorder[Any, Any] = EpisodeRecorder(flat, f"{config.env.id} (environment {env_index})")
    env.action_space.seed(env_seed(config, env_index))
    return env


def make_vector_env(config: TrainConfig) -> VectorEnvs:
    """Make `num_envs` environments that step together, in the way that `env.vectorization` names."""
    how = config.env.vectorization
    if how is Vectorization["async"]:
        from rl_training.envs.async_vector_env import AsyncVectorEnv

        return AsyncVectorEnv(config, *probe_spaces(config.env))
    if how is Vectorization.vector:
        from rl_training.envs.late_reset_envs import GymnasiumVectorEnvs

        return GymnasiumVectorEnvs(config.env, *probe_spaces(config.env))
    if how is Vectorization.envpool:
        from rl_training.envs.envpool_envs import EnvPoolEnvs

        return EnvPoolEnvs(config.env)
    makers = [functools.partial(make_env, config, index) for index in range(config.env.num_envs)]
    return SameStepVectorEnv(makers)


def check_vectorization(config: EnvConfig) -> None:
    """Refuse a way to step that this environment does not have."""
    if config.vectorization is Vectorization.vector:
        from rl_training.envs.late_reset_envs import check_vectorised

        check_vectorised(config)


def env_seed(config: TrainConfig, env_index: int) -> int:
    """Return the seed with which a training environment is first reset."""
    return derive_seed(config.seed, "env", env_index)


def probe_spaces(config: EnvConfig) -> tuple[ObservationSpec, ActionSpec]:
    """Make one environment, describe its spaces, and close it; remembered, since a launch asks more than once."""
    key = json.dumps(plain(config), sort_keys=True, default=repr)
    if key not in _PROBED:
        env = _make_wrapped(config)
        try:
            _PROBED[key] = describe_spaces(env.observation_space, env.action_space, config.id, config.frame_stack)
        finally:
            env.close()
    return _PROBED[key]


_PROBED: dict[str, tuple[ObservationSpec, ActionSpec]] = {}


def _make_wrapped(config: EnvConfig, *, evaluation: bool = False) -> GymEnv:
    if not config.id:
        raise UserError("env.id is empty: name a Gymnasium environment, such as env=gym env.id=CartPole-v1.")
    if config.wrappers and config.vectorization in (Vectorization.vector, Vectorization.envpool):
        raise UserError(
            f"env.wrappers do not go with env.vectorization={config.vectorization.name}, which steps all environments "
            "as one. Use env.vectorization=sync or async."
        )
    if config.vectorization is Vectorization.envpool:
        from rl_training.envs.envpool_envs import SingleEnvPool

        return SingleEnvPool(config)
    if config.import_module is not None:
        _import_registering_module(config)
    wrappers = named_wrappers(config.wrappers)
    try:
        # Gymnasium's checker costs a quarter of a CartPole step; `describe_spaces` has looked at the spaces already.
        bare: GymEnv = gym.make(config.id, disable_env_checker=True, **config.env_kwargs)
        return wrapped_env(bare, wrappers, config.id, evaluation=evaluation)
    except UserError:
        raise
    except (gym.error.UnregisteredEnv, gym.error.VersionNotFound) as error:
        raise UserError(_unknown_id(config, error)) from None
    except (gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise UserError(_missing_dependency(config, error)) from None
    except Exception as error:
        reason = _one_line(error)
        raise UserError(f"Cannot make env.id={config.id}: {type(error).__name__}: {reason}") from error


def _one_line(value: object) -> str:
    return " ".join(str(value).split())


def _import_registering_module(config: EnvConfig) -> None:
    assert config.import_module is not None
    try:
        importlib.import_module(config.import_module)
    except ImportError as error:
        if config.extra is not None:
            raise UserError(_missing_dependency(config, error)) from None
        raise UserError(f"Cannot import env.import_module={config.import_module}: {error}. Is it installed?") from None


def _unknown_id(config: EnvConfig, error: Exception) -> str:
    suggestion = did_you_mean(config.id, list(gym.registry))
    if suggestion:
        return f"Unknown environment env.id={config.id}.{suggestion}"
    advice = (
        "If a package registers it, add env.import_module=<package>."
        if config.import_module is None
        else f"Importing {config.import_module} did not register it."
    )
    return f"Unknown environment env.id={config.id} ({_one_line(error).rstrip('.')}). {advice}"


def _missing_dependency(config: EnvConfig, error: Exception) -> str:
    if config.extra is not None:
        return f"{config.id} needs an extra: pip install 'rl_training[{config.extra}]'"
    reason = _one_line(error)
    return f"{config.id} needs a package that is not installed: {reason}"
