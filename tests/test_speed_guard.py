"""What training costs in counted operations, which no busy machine changes: a guard against slowing down unnoticed.

A count is no time: it cannot tell a cheap call from a dear one. But what this package does at a step are short calls,
and whatever makes it slower without a reason (a check at every step, a copy for each layer, one more wrapper) shows.
"""

import sys
from collections import Counter

import numpy as np
import pytest
import torch
from cli_helpers import tiny_env, tiny_run_config
from specs import CHOICE
from torch.utils._python_dispatch import TorchDispatchMode

from rl_training.algorithms.dqn import DQNAgent
from rl_training.algorithms.ppo import PPOAgent
from rl_training.algorithms.sac import SACAgent
from rl_training.data.replay_buffer import ReplayBuffer, Transitions
from rl_training.data.rollout_buffer import RolloutBatch
from rl_training.experiment import registry
from rl_training.runtime.callbacks import Callback
from rl_training.spaces import ContinuousActions, DiscreteActions, ObservationSpec

# Each limit is a tenth above the count of the day it was written. If a test fails, look at what the count consists of
# (every assertion prints it) and take the new operations out again. If they are worth their cost, measure it with
# scripts/benchmark_speed.py, say so in CHANGELOG.md, and raise the limit to a tenth above the new count. Lower it after
# a change that makes the count smaller.
MOST_TORCH_OPERATIONS_PER_UPDATE = {"ppo": 191, "dqn": 96, "sac": 376}
MOST_CALLS_PER_UPDATE = {"ppo": 254, "dqn": 270, "sac": 743}
MOST_CALLS_PER_ENV_STEP = {"ppo": 65, "dqn": 100, "sac": 203}

ALGOS = ["ppo", "dqn", "sac"]
AGENTS = {"ppo": PPOAgent, "dqn": DQNAgent, "sac": SACAgent}
DISCRETE = DiscreteActions(2)
CONTINUOUS = ContinuousActions(low=(-2.0,), high=(2.0,))


class TorchOperations(TorchDispatchMode):
    """Counts the operations that torch runs, those of the backward pass and the optimizer included."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, arguments=(), settings=None):
        self.counts[str(operation)] += 1
        return operation(*arguments, **(settings or {}))


class Calls:
    """Counts the calls of Python and C functions while it is entered."""

    def __init__(self):
        self.counts = Counter()

    def __enter__(self):
        self._before = sys.getprofile()
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_):
        sys.setprofile(self._before)

    def _count(self, frame, event, argument):
        if event == "call":
            self.counts[frame.f_code.co_name] += 1
        elif event == "c_call":
            self.counts[argument.__name__] += 1


def make_agent_and_batch(algo: str, rows: int = 64, **settings):
    discrete = algo != "sac"
    observations, values = torch.randn(rows, 4), torch.randn(rows)
    actions = torch.zeros(rows, dtype=torch.int64) if discrete else torch.rand(rows, 1)
    batch = (
        RolloutBatch(observations, actions, values, values, values, values)
        if algo == "ppo"
        else Transitions(observations, actions, values, observations, torch.zeros(rows))
    )
    config = registry.get(algo).config_class(**{"hidden_sizes": [64, 64], **settings})
    agent = AGENTS[algo](config, ObservationSpec(4), DISCRETE if discrete else CONTINUOUS, compile_update=False)
    return agent, batch


def update(agent, batch):
    if isinstance(agent, PPOAgent):
        return agent.update(batch, clip_range=0.2, learning_rate=1e-3)
    return agent.update(batch)


def counts_of_an_update(algo: str, counter) -> Counter:
    """Count what an update does, and not what only the first one has to set up."""
    agent, batch = make_agent_and_batch(algo)
    update(agent, batch)
    with counter:
        update(agent, batch)
    return counter.counts


# The update


@pytest.mark.parametrize("algo", ALGOS)
def test_an_update_runs_no_more_torch_operations_than_it_did(algo):
    counts = counts_of_an_update(algo, TorchOperations())
    assert counts["aten._fused_adam_.default"] == (3 if algo == "sac" else 1)
    assert counts.total() <= MOST_TORCH_OPERATIONS_PER_UPDATE[algo], counts.most_common()


@pytest.mark.parametrize("algo", ALGOS)
def test_more_layers_cost_the_optimizer_nothing(algo):
    # Adam, clipping and target updates work on one vector; only the passes through the network know layers.
    counts = []
    for hidden_sizes in ([8], [8, 8, 8, 8]):
        agent, batch = make_agent_and_batch(algo, hidden_sizes=hidden_sizes, max_grad_norm=0.5)
        with TorchOperations() as operations:
            update(agent, batch)
            if algo == "dqn":
                agent.update_target()
        by_name = Counter()
        for operation, number in operations.counts.items():
            by_name[operation.split(".")[1]] += number
        of_one_vector = ("_fused_adam_", "lerp_", "linalg_vector_norm", "mul_", "add_", "cat")
        counts.append(Counter({name: number for name, number in by_name.items() if name in of_one_vector}))
    assert counts[0] == counts[1]
    assert counts[0]["_fused_adam_"] == (3 if algo == "sac" else 1)


@pytest.mark.parametrize("algo", ALGOS)
def test_an_update_makes_no_more_calls_than_it_did(algo):
    counts = counts_of_an_update(algo, Calls())
    assert counts.total() <= MOST_CALLS_PER_UPDATE[algo], counts.most_common()


# The loop around it


class NoteCalls(Callback):
    """Notes the calls so far at some steps."""

    def __init__(self, calls: Calls, *steps: int):
        self.calls, self.steps = calls, steps
        self.counts: dict[int, Counter] = {}

    def on_collect_end(self, state, result):
        if state.global_step in self.steps:
            self.counts[state.global_step] = self.calls.counts.copy()


@pytest.fixture
def calls_of_training(tmp_path, monkeypatch):
    """Return a function that trains with updates that do nothing, and counts the calls of steps 201 to 400 and of
    steps 401 to 2,400.
    """

    def count(algo):
        monkeypatch.setattr(AGENTS[algo], "update", lambda *_, **__: {})
        settings = {
            "ppo": {"num_steps": 200, "minibatch_size": 200, "num_epochs": 1},
            "dqn": {"learning_starts": 0, "buffer_size": 5_000, "initial_epsilon": 0.1, "final_epsilon": 0.1},
            "sac": {"learning_starts": 0, "buffer_size": 5_000},
        }[algo]
        config = tiny_run_config(
            algo,
            algo_config=registry.get(algo).config_class(hidden_sizes=[64, 64], **settings),
            env=tiny_env(algo),
            total_timesteps=2_600,
            logging={"every": 10_000},
            eval={"every": None, "episodes": 0},
        )
        with Calls() as calls:
            noted = NoteCalls(calls, 200, 400, 2_400)
            registry.get(algo).load_train()(config, run_dir=tmp_path / algo, callbacks=[noted])
        at = noted.counts
        return at[400] - at[200], at[2_400] - at[400]

    return count


@pytest.mark.parametrize("algo", ALGOS)
def test_an_env_step_makes_no_more_calls_than_it_did(algo, calls_of_training):
    _, counts = calls_of_training(algo)
    assert counts.total() / 2_000 <= MOST_CALLS_PER_ENV_STEP[algo], counts.most_common()


@pytest.mark.parametrize("algo", ALGOS)
def test_ten_times_the_steps_make_at_most_eleven_times_the_calls(algo, calls_of_training):
    of_200_steps, of_2000_steps = calls_of_training(algo)
    assert of_200_steps["explore"] == 200
    assert of_2000_steps.total() <= 11 * of_200_steps.total(), (of_2000_steps - of_200_steps).most_common()


def filled_buffer(transitions: int, capacity: int) -> ReplayBuffer:
    buffer = ReplayBuffer(capacity, 1, ObservationSpec(4), CHOICE, seed=0)
    observations, flags = np.zeros((1, 4), np.float32), np.zeros(1, np.bool_)
    for _ in range(transitions):
        buffer.add(observations, np.zeros(1, np.int64), np.zeros(1, np.float32), observations, flags)
    return buffer


def test_sampling_from_a_buffer_ten_times_larger_makes_the_same_calls():
    counts = []
    for transitions, capacity in ((300, 300), (3_000, 3_000), (3_000, 1_000_000), (3_000, 300)):
        buffer = filled_buffer(transitions, capacity)
        buffer.sample(64)
        with Calls() as calls:
            buffer.sample(64)
        counts.append(calls.counts)
    assert counts[0].total() > 10
    assert all(count == counts[0] for count in counts)


def test_adding_to_a_buffer_costs_the_same_whether_it_is_empty_or_full():
    counts = []
    for transitions, capacity in ((1, 3_000), (2_999, 3_000), (3_000, 300)):
        buffer = filled_buffer(transitions, capacity)
        row = np.zeros((1, 4), np.float32), np.zeros(1, np.int64), np.zeros(1, np.float32)
        with Calls() as calls:
            buffer.add(row[0], row[1], row[2], row[0], row[2])
        counts.append(calls.counts)
    assert counts[0]["add"] == 1
    assert all(count == counts[0] for count in counts)
