"""Acting in numpy gives what the torch network gives, with its newest parameters, and is chosen from config alone."""

import numpy as np
import pytest
import torch
from torch import nn

from rl_training.config import Activation
from rl_training.networks.mlp import mlp
from rl_training.networks.numpy_mlp import acting_path, forward_function
from rl_training.runtime.loggers import read_evaluations
from rl_training.runtime.ppo_trainer import train_ppo

CPU = torch.device("cpu")


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("hidden", [[], [16], [64, 64], [256, 256]])
@pytest.mark.parametrize("batch", [1, 4, 33])
def test_outputs_equal_those_of_torch(activation, hidden, batch):
    torch.manual_seed(0)
    network = mlp(5, hidden, 3, activation)
    observations = np.random.default_rng(0).standard_normal((batch, 5), dtype=np.float32)
    before = observations.copy()
    forward = forward_function(network, 1, CPU)
    expected = network(torch.from_numpy(observations)).detach().numpy()
    np.testing.assert_allclose(forward(observations), expected, rtol=1e-5, atol=1e-6)
    assert np.array_equal(observations, before)


def test_changes_of_the_parameters_are_seen_at_once():
    network = mlp(2, [4], 1, Activation.tanh)
    forward = forward_function(network, 1, CPU)
    with torch.no_grad():
        network[-1].bias.fill_(100.0)
    assert forward(np.zeros((1, 2), np.float32))[0, 0] > 90.0


def test_the_path_depends_on_network_batch_and_device_alone():
    narrow, wide = mlp(4, [64, 64], 2, Activation.tanh), mlp(4, [256, 256], 2, Activation.relu)
    assert acting_path(narrow, 512, CPU) == "numpy"
    assert acting_path(wide, 1, CPU) == "numpy"
    assert acting_path(wide, 8, CPU) == "torch"
    assert acting_path(narrow, 1, torch.device("cuda")) == "torch"
    assert acting_path(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)), 1, CPU) == "torch"


def test_a_network_that_numpy_does_not_know_acts_in_torch():
    network = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    observations = np.ones((3, 4), np.float32)
    expected = network(torch.from_numpy(observations)).detach().numpy()
    assert np.array_equal(forward_function(network, 1, CPU)(observations), expected)


@pytest.mark.parametrize(("num_envs", "path"), [(1, "numpy"), (8, "torch")])
def test_an_evaluation_records_how_the_agent_acted(tiny_config, tmp_path, num_envs, path):
    algo = {"hidden_sizes": [128], "num_steps": 8, "minibatch_size": 8, "num_epochs": 1}
    config = tiny_config("ppo", "CartPole-v1", algo=algo, env={"num_envs": num_envs}, total_timesteps=8)
    train_ppo(config, run_dir=tmp_path)
    (row,) = read_evaluations(tmp_path)
    assert (row["acting_path"], row["num_envs"]) == (path, 1)
