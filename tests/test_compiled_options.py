"""Compiled updates with the optional parts of the algorithms: the same numbers as the plain ones."""

import pytest
import torch
from compilation_helpers import (
    CONTINUOUS,
    DISCRETE,
    SMALL,
    distance,
    make_agent,
    make_batch,
    needs_compiler,
    require_same_metrics,
    tensors_of,
    train_alike,
    update,
)

from rl_training.config import DQNConfig, PPOConfig, SACConfig

pytestmark = [needs_compiler, pytest.mark.usefixtures("one_thread")]

STEPS = 10
PRIORITIZED = DQNConfig(**SMALL, gamma=0.5, dueling=True, n_step=3, prioritized=True)
CASES = {
    "dqn, dueling, three steps, priorities": (PRIORITIZED, DISCRETE),
    "dqn, three steps, single Q, mse": (DQNConfig(**SMALL, gamma=0.5, n_step=3, double_q=False, loss="mse"), DISCRETE),
    "dqn, priorities": (DQNConfig(**SMALL, prioritized=True), DISCRETE),
    "ppo, state-dependent noise, own critic": (
        PPOConfig(
            **SMALL,
            state_dependent_noise=True,
            critic_hidden_sizes=[24],
            critic_activation="tanh",
            entropy_coef=0.01,
        ),
        CONTINUOUS,
    ),
    "sac, layer norm": (SACConfig(**SMALL, critic_layer_norm=True, target_update_rate=0.1), CONTINUOUS),
    "sac, state-dependent noise": (
        SACConfig(**SMALL, state_dependent_noise=True, initial_log_std=-1.0, target_update_rate=0.1),
        CONTINUOUS,
    ),
}
# How far compiled numbers may lie from eager ones, as a share of the way that training has moved them. Rounding gives
# 2e-5; one step of the ten left out is 0.1.
TOLERANCE = 1e-4


def option_batch(config, actions, seed: int):
    """Random transitions, with the discounts and weights that the config's replay buffer would give."""
    batch = make_batch(config, actions, seed=seed)
    if not isinstance(config, DQNConfig):
        return batch
    source = torch.Generator().manual_seed(1_000 + seed)
    rows = len(batch.rewards)
    if config.n_step > 1:
        powers = torch.randint(1, config.n_step + 1, (rows,), generator=source)
        batch = batch._replace(discounts=config.gamma**powers)
    if config.prioritized:
        batch = batch._replace(weights=torch.rand(rows, generator=source) * 0.9 + 0.1)
    return batch


def train(agent, config, actions, *, without: str | None = None):
    """Return the metrics and errors of each step; `without` leaves out a field of the batches."""
    history = []
    for step in range(STEPS):
        batch = option_batch(config, actions, step)
        metrics = update(agent, batch._replace(**{without: None}) if without else batch, step)
        history.append((metrics, getattr(agent, "td_errors", None)))
    return history


@pytest.mark.parametrize("case", CASES)
def test_compiled_steps_give_what_eager_ones_give(case):
    config, actions = CASES[case]
    history, expected_history = train_alike(config, actions, lambda agent: train(agent, config, actions), TOLERANCE)
    (metrics, errors), (expected_metrics, expected_errors) = (
        zip(*steps, strict=True) for steps in (history, expected_history)
    )
    require_same_metrics(metrics, expected_metrics, TOLERANCE)
    if not getattr(config, "prioritized", False):
        assert {*errors, *expected_errors} == {None}
        return
    for got, expected in zip(errors, expected_errors, strict=True):
        assert not got.requires_grad
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    # The errors of a step are kept while later steps compute theirs.
    assert not torch.equal(errors[-1], errors[-2])


@pytest.mark.parametrize("field", ["discounts", "weights"])
def test_a_compiled_update_sees_discounts_and_weights(field):
    # The negative control: training without them leads far away.
    compiled, without = (make_agent(PRIORITIZED, DISCRETE, compiled=True) for _ in range(2))
    start = tensors_of(compiled)["q_network/value_head.weight"]
    train(compiled, PRIORITIZED, DISCRETE)
    train(without, PRIORITIZED, DISCRETE, without=field)
    with_it, without_it = (tensors_of(agent)["q_network/value_head.weight"] for agent in (compiled, without))
    assert distance(with_it, without_it) > 0.05 * distance(with_it, start)


def test_batches_with_and_without_a_field_are_compiled_apart():
    agent = make_agent(PRIORITIZED, DISCRETE, compiled=True)
    batch = option_batch(PRIORITIZED, DISCRETE, 0)
    counts = []
    for changed in (batch, batch._replace(weights=None), batch, batch._replace(discounts=None), batch):
        agent.update(changed)
        counts.append(agent.compiled_update.compilations)
    assert counts == [1, 2, 2, 3, 3]
    assert agent.compiled_update.path == "compiled"


def test_an_agent_explores_with_the_deviation_that_a_compiled_update_has_learned():
    config, actions = CASES["sac, state-dependent noise"]
    compiled, eager = (make_agent(config, actions, compiled=value) for value in (True, False))
    observations = make_batch(config, actions).observations[:2].numpy()
    first = compiled.explore(observations, 3)
    for agent in (compiled, eager):
        train(agent, config, actions)
    explored, expected = compiled.explore(observations, 3), eager.explore(observations, 3)
    assert abs(explored - first).max() > 1e-2
    assert abs(explored - expected).max() < 1e-4
