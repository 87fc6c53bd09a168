"""What the tests of compiled updates share: agents, batches, and the comparison of compiled with eager training."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cli_helpers import differences

from rl_training.algorithms.dqn import DQNAgent
from rl_training.algorithms.ppo import PPOAgent
from rl_training.algorithms.sac import SACAgent
from rl_training.config import DQNConfig, PPOConfig, SACConfig
from rl_training.data.replay_buffer import Transitions
from rl_training.data.rollout_buffer import RolloutBatch
from rl_training.runtime.automatic import cpp_compiler
from rl_training.spaces import ContinuousActions, DiscreteActions, ObservationSpec

needs_compiler = pytest.mark.skipif(cpp_compiler() is None, reason="there is no C++ compiler here")

DISCRETE = DiscreteActions(3)
CONTINUOUS = ContinuousActions(low=(-9.0, -9.0), high=(9.0, 9.0))
AGENTS = {PPOConfig: PPOAgent, DQNConfig: DQNAgent, SACConfig: SACAgent}
SMALL = {"hidden_sizes": [16, 16], "learning_rate": 1e-3, "activation": "tanh"}
ROWS = 64


def make_agent(config, actions, *, compiled: bool, seed: int = 5):
    agent_class = AGENTS[type(config)]
    return agent_class(config, ObservationSpec(3), actions, num_envs=2, seed=seed, compile_update=compiled)


def make_batch(config, actions, *, seed: int = 0, rows: int = ROWS):
    """Random transitions, for PPO as if an older policy had collected them."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=source)

    if isinstance(actions, DiscreteActions):
        taken = torch.randint(0, actions.count, (rows,), generator=source)
    else:
        taken = torch.rand(rows, actions.size, generator=source) * 2 - 1
    observations = normal(rows, 3)
    if isinstance(config, PPOConfig):
        return RolloutBatch(observations, taken, 0.3 * normal(rows) - 1.5, normal(rows), normal(rows), normal(rows))
    terminated = (torch.rand(rows, generator=source) < 0.2).float()
    return Transitions(observations, taken, normal(rows), normal(rows, 3), terminated)


def update(agent, batch, step: int = 0):
    """One gradient step, for PPO with other scheduled values at every step, for DQN with a target now and then."""
    if isinstance(agent, PPOAgent):
        return agent.update(batch, clip_range=0.2 - 0.005 * step, learning_rate=1e-3 * (1 + step / 10))
    metrics = agent.update(batch)
    if isinstance(agent, DQNAgent) and step % 5 == 4:
        agent.update_target()
    return metrics


def tensors_of(agent) -> dict[str, torch.Tensor]:
    """Every tensor that the agent would save: networks, targets, moments."""
    return {
        f"{part}/{name}": tensor.clone()
        for part, state in agent.state_dict().items()
        for name, tensor in (state.items() if isinstance(state, dict) else [("state", state)])
    }


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    return torch.linalg.vector_norm(first.double() - second.double()).item()


def train_alike(
    config: Any,
    actions: Any,
    train: Callable[[Any], list[Any]],
    tolerance: float,
    *,
    fixed: Callable[[str], bool] = lambda name: False,
) -> tuple[list[Any], list[Any]]:
    """Train a compiled and an eager agent, and check that every tensor has gone the same way.

    `tolerance` is a share of the way that training has moved a tensor; those that are `fixed` must not move at all.
    Returns what `train` gave for each.
    """
    compiled, eager = (make_agent(config, actions, compiled=value) for value in (True, False))
    start = tensors_of(eager)
    assert differences(start, tensors_of(compiled)) == []
    history, expected_history = train(compiled), train(eager)
    assert compiled.compiled_update.path == "compiled"
    assert compiled.compiled_update.compilations == 1

    ours, theirs = tensors_of(compiled), tensors_of(eager)
    moved = {name: distance(theirs[name], start[name]) for name in theirs}
    still = {name for name in moved if fixed(name)}
    # Everything else has moved, so a tensor that the compiled update forgets lies outside of the tolerance.
    assert {name for name in moved if not moved[name]} == still
    relative = {name: distance(ours[name], theirs[name]) / moved[name] for name in moved if name not in still}
    assert {name: value for name, value in relative.items() if not value < tolerance} == {}
    assert [name for name in still if not torch.equal(ours[name], start[name])] == []
    return history, expected_history


def require_same_metrics(history: Sequence[Any], expected_history: Sequence[Any], tolerance: float) -> None:
    """Check that each step gave the same metrics, in the same order."""
    for step, (got, expected) in enumerate(zip(history, expected_history, strict=True)):
        assert list(got) == list(expected)
        for name, value in expected.items():
            assert got[name].item() == pytest.approx(value.item(), rel=tolerance, abs=tolerance), (step, name)
            assert not got[name].requires_grad
