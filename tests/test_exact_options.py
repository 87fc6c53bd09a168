"""Runs with the optional parts of the algorithms are exact too: paused and resumed, they end with the same bits."""

import json
import shutil

import pytest
from cli_helpers import comparable_rows, differences, run_card, tiny_algo, tiny_env, tiny_run_config
from test_checkpoint_workflows import REPLAY_CAPACITY, final_state, train

from rl_training.runtime.checkpointing import find_checkpoint, read_checkpoint, write_checkpoint
from rl_training.runtime.comparison import first_difference
from rl_training.runtime.workflows import resume_training

PENDULUM = {"name": "pendulum", "id": "Pendulum-v1", "env_kwargs": {"max_episode_steps": 20}}
CARTPOLE = {"name": "cartpole", "id": "CartPole-v1"}
SMALL_BUFFER = {"buffer_size": REPLAY_CAPACITY}  # the ring comes round
OPTIONS = {
    "dqn, dueling, three steps, priorities": (
        *("dqn", CARTPOLE, SMALL_BUFFER),
        {"dueling": True, "n_step": 3, "prioritized": True},
    ),
    "dqn, three steps": ("dqn", CARTPOLE, SMALL_BUFFER, {"n_step": 3}),
    "dqn, priorities": ("dqn", CARTPOLE, SMALL_BUFFER, {"prioritized": True}),
    "ppo, state-dependent noise": ("ppo", PENDULUM, {}, {"state_dependent_noise": True}),
    "ppo, advantages anew, own critic": (
        *("ppo", CARTPOLE, {}),
        {"recompute_advantages": True, "critic_hidden_sizes": [6, 6], "critic_activation": "relu"},
    ),
    "ppo, advantages anew": ("ppo", PENDULUM, {}, {"recompute_advantages": True}),
    "sac, state-dependent noise": ("sac", PENDULUM, SMALL_BUFFER, {"state_dependent_noise": True}),
    "sac, layer norm": ("sac", PENDULUM, SMALL_BUFFER, {"critic_layer_norm": True}),
}


def option_config(kind, *, options: bool = True, **settings):
    """Return a run of 192 steps of two environments with normalisation, evaluations and rows."""
    algo, env, special, chosen = OPTIONS[kind]
    return tiny_run_config(
        algo,
        env=tiny_env(algo, **env, num_envs=2, normalize_observation=True, normalize_reward=True),
        algo_config=tiny_algo(algo, **special, **(chosen if options else {})),
        **{"total_timesteps": 192, "eval": {"every": 64}, **settings},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function to the directory of an uninterrupted run of each kind, trained once."""
    root, done = tmp_path_factory.mktemp("whole"), {}

    def run_dir(kind):
        if kind not in done:
            done[kind] = train(option_config(kind), root / str(len(done))).run_dir
        return done[kind]

    return run_dir


# 22 is just after learning starts and 104 the middle of a rollout, of the eight vector steps for which a noise function
# is kept, and of an n-step return; the replay buffer has come round by then.
@pytest.mark.parametrize("stop", [22, 104])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_paused_run_ends_with_the_bits_of_one_that_was_not(kind, stop, whole, tmp_path):
    paused = train(option_config(kind, stop_at_step=stop), tmp_path / "run")
    assert paused.checkpoint_path.name == f"step_{stop:012d}"
    assert run_card(tmp_path / "run")["status"] == "paused"
    resume_training(tmp_path / "run")
    assert run_card(tmp_path / "run")["status"] == "finished"
    assert differences(final_state(tmp_path / "run"), final_state(whole(kind))) == []
    assert first_difference(tmp_path / "run", whole(kind)) is None
    assert comparable_rows(tmp_path / "run") == comparable_rows(whole(kind))
    assert len(comparable_rows(tmp_path / "run")) >= 6


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_options_change_what_is_learned(kind, whole, tmp_path):
    plain = train(option_config(kind, options=False), tmp_path / "plain").run_dir
    assert differences(final_state(plain)["agent"], final_state(whole(kind))["agent"]) != []
    assert comparable_rows(plain) != comparable_rows(whole(kind))


def test_what_exactness_compares_is_there(whole):
    """Priorities of a full buffer that updates have changed, and where episodes ended."""
    state = final_state(whole("dqn, dueling, three steps, priorities"))
    priorities = state["data"]["priorities"]["leaves"]
    assert priorities.shape == (REPLAY_CAPACITY,)
    assert len(set(priorities.tolist())) > 50
    assert {"value_head.weight", "advantage_head.weight"} <= set(state["agent"]["q_network"])
    rows = state["data"]["rows"]
    plain = final_state(whole("dqn, priorities"))["data"]["rows"]
    assert {len(row) for row in rows.values()} == {len(row) + 1 for row in plain.values()} == {len(rows[191])}
    assert {row[-1] for row in rows.values()} == {0, 1}  # the flag of the end is the last byte of a row


def test_a_resumed_run_with_one_changed_priority_is_not_the_same(whole, tmp_path):
    """The negative control: the comparison above sees a single priority that a checkpoint got wrong."""
    run_dir, kind = tmp_path / "run", "dqn, dueling, three steps, priorities"
    train(option_config(kind, stop_at_step=104), run_dir)
    path = find_checkpoint(run_dir)
    journal = json.loads((path / "manifest.json").read_text())["journal"]
    state = read_checkpoint(path)
    state["data"]["priorities"]["leaves"][40] += 5.0
    shutil.rmtree(path)
    write_checkpoint(run_dir, 104, state, journal=journal)
    resume_training(run_dir)
    assert first_difference(run_dir, whole(kind)).startswith("metrics.jsonl at step 112: ")
