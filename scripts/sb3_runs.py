"""Stable-Baselines3 with the settings of one of our configs, for scripts/results.py."""

from typing import Any

import gymnasium as gym
import torch

from rl_training.config import Activation, AlgoConfig, DQNConfig, PPOConfig, QLoss, SACConfig, Schedule, TrainConfig
from rl_training.errors import UserError

ACTIVATIONS = {Activation.tanh: torch.nn.Tanh, Activation.relu: torch.nn.ReLU}


def train_sb3(config: TrainConfig, *, episodes: int, first_seed: int) -> list[float]:
    """Train, then play seeded deterministic episodes; returns their returns."""
    try:
        import stable_baselines3
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.vec_env import VecNormalize
    except ImportError:
        raise UserError("peers=sb3 needs an extra: pip install 'rl_training[bench]'") from None

    if config.env.env_kwargs or config.env.wrappers or config.env.frame_stack > 1:
        raise UserError("peers=sb3 takes neither env_kwargs nor wrappers nor stacked frames.")
    if config.env.num_envs > 1 and not isinstance(config.algo, PPOConfig):
        raise UserError("peers=sb3 counts updates of several environments in another way.")
    torch.set_num_threads(1)
    envs: Any = make_vec_env(config.env.id, config.env.num_envs, seed=config.seed)
    normalized = config.env.normalize_observation or config.env.normalize_reward
    if normalized:
        envs = VecNormalize(
            envs,
            norm_obs=config.env.normalize_observation,
            norm_reward=config.env.normalize_reward,
            clip_obs=config.env.clip_observation,
            clip_reward=config.env.clip_reward,
            gamma=config.algo.gamma,
        )
    algorithm = getattr(stable_baselines3, config.algo.name.upper())
    model = algorithm("MlpPolicy", envs, seed=config.seed, device="cpu", **sb3_settings(config.algo))
    model.learn(config.total_timesteps)

    env = gym.make(config.env.id)
    returns = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=first_seed + episode)
        total, ended = 0.0, False
        while not ended:
            seen = envs.normalize_obs(observation[None])[0] if normalized else observation
            action, _ = model.predict(seen, deterministic=True)
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            ended = terminated or truncated
        returns.append(total)
    env.close()
    return returns


def sb3_settings(algo: AlgoConfig) -> dict[str, Any]:
    """Translate our settings; one that SB3 does not have is refused, so that no row compares unequal things."""
    network: dict[str, Any] = {"net_arch": list(algo.hidden_sizes), "activation_fn": ACTIVATIONS[algo.activation]}
    if isinstance(algo, PPOConfig):
        _refuse(algo, recompute_advantages=False, target_kl=None, share_network=False, critic_activation=None)
        critic = algo.hidden_sizes if algo.critic_hidden_sizes is None else algo.critic_hidden_sizes
        network |= {
            "net_arch": {"pi": list(algo.hidden_sizes), "vf": list(critic)},
            "ortho_init": algo.orthogonal_init,
            "log_std_init": algo.initial_log_std,
        }
        return {
            "n_steps": algo.num_steps,
            "batch_size": algo.minibatch_size,
            "n_epochs": algo.num_epochs,
            "gamma": algo.gamma,
            "gae_lambda": algo.gae_lambda,
            "learning_rate": _schedule(algo.learning_rate, algo.learning_rate_schedule),
            "clip_range": _schedule(algo.clip_range, algo.clip_range_schedule),
            "clip_range_vf": algo.value_clip_range,
            "normalize_advantage": algo.normalize_advantage,
            "ent_coef": algo.entropy_coef,
            "vf_coef": algo.value_coef,
            "max_grad_norm": float("inf") if algo.max_grad_norm is None else algo.max_grad_norm,
            "use_sde": algo.state_dependent_noise,
            "sde_sample_freq": algo.noise_hold if algo.state_dependent_noise else -1,
            "policy_kwargs": network,
        }
    if isinstance(algo, DQNConfig):
        # Double Q is missing too, but it is our default: the report says so.
        _refuse(algo, dueling=False, prioritized=False, loss=QLoss.huber)
        return {
            **_off_policy(algo),
            "n_steps": algo.n_step,
            "tau": algo.target_update_rate,
            "target_update_interval": algo.target_update_every,
            "exploration_initial_eps": algo.initial_epsilon,
            "exploration_final_eps": algo.final_epsilon,
            "exploration_fraction": algo.exploration_fraction,
            "max_grad_norm": float("inf") if algo.max_grad_norm is None else algo.max_grad_norm,
            "policy_kwargs": network,
        }
    assert isinstance(algo, SACConfig)
    _refuse(algo, critic_layer_norm=False, max_grad_norm=None)
    entropy = f"auto_{algo.temperature}" if algo.learn_temperature else algo.temperature
    if algo.state_dependent_noise:
        network["log_std_init"] = algo.initial_log_std
    return {
        **_off_policy(algo),
        "tau": algo.target_update_rate,
        "ent_coef": entropy,
        "target_entropy": "auto" if algo.target_entropy is None else algo.target_entropy,
        "use_sde": algo.state_dependent_noise,
        "sde_sample_freq": algo.noise_hold if algo.state_dependent_noise else -1,
        "policy_kwargs": network,
    }


def _refuse(algo: AlgoConfig, **available: Any) -> None:
    for name, only in available.items():
        if getattr(algo, name) != only:
            raise UserError(
                f"SB3's {algo.name.upper()} has nothing like algo.{name}={getattr(algo, name)}; leave out peers=sb3."
            )


def _off_policy(algo: DQNConfig | SACConfig) -> dict[str, Any]:
    return {
        "learning_rate": algo.learning_rate,
        "gamma": algo.gamma,
        "buffer_size": algo.buffer_size,
        "learning_starts": algo.learning_starts,
        "batch_size": algo.batch_size,
        "train_freq": algo.train_every,
        "gradient_steps": algo.gradient_steps,
    }


def _schedule(value: float, schedule: Schedule) -> Any:
    if schedule is Schedule.linear:
        return lambda remaining: remaining * value
    return value
