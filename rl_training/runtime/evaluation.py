"""Runs a policy on seeded episodes, without touching anything that training depends on."""

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch

from rl_training.config import TrainConfig
from rl_training.envs.factory import make_env
from rl_training.envs.normalization import Normalizer
from rl_training.runtime.trainer import Agent, EvalResult


def evaluate_agent(
    agent: Agent,
    config: TrainConfig,
    normalizer: Normalizer,
    *,
    episodes: int,
    seed: int,
    global_step: int = 0,
    on_episode: Callable[[int], None] | None = None,
) -> EvalResult:
    """Play `episodes` deterministic episodes in one environment of their own; episode i starts from seed + i.

    The normaliser's statistics are used and not moved; returns are in raw rewards.
    """
    returns, lengths = [], []
    with _global_generators_preserved():
        env = make_env(config, env_index=0, evaluation=True)
        dtype = np.uint8 if env.observation_space.dtype == np.uint8 else np.float32
        try:
            for episode in range(episodes):
                observation, _ = env.reset(seed=seed + episode)
                ended = False
                while not ended:
                    actions = agent.act(normalizer.observations(np.asarray(observation, dtype)[None]))
                    action = actions.item() if actions.ndim == 1 else actions[0]
                    observation, _, terminated, truncated, info = env.step(action)
                    ended = terminated or truncated
                returns.append(float(info["episode"]["r"]))
                lengths.append(int(info["episode"]["l"]))
                if on_episode is not None:
                    on_episode(episode + 1)
        finally:
            env.close()
    path = getattr(agent, "acting_path", "custom")
    return EvalResult(global_step, tuple(returns), tuple(lengths), first_seed=seed, acting_path=path)


@contextlib.contextmanager
def _global_generators_preserved() -> Iterator[None]:
    """Restore Python's, numpy's and torch's global generators after the block: environments may draw from them."""
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state = np.random.get_state()  # noqa: NPY002 - third-party code draws from it
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_rng_state(torch_state)
