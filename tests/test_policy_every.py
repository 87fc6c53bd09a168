"""SAC with several gradient steps on the critics for one on the policy."""

import copy

import pytest
import torch
from cli_helpers import differences
from compilation_helpers import CONTINUOUS, distance, needs_compiler, tensors_of
from compilation_helpers import make_agent as make_compiled
from compilation_helpers import make_batch as make_large_batch
from test_sac_update import make_agent, make_batch

from rl_training.algorithms.sac import SACAgent
from rl_training.config import SACConfig
from rl_training.errors import ConfigError
from rl_training.runtime.sac_trainer import train_sac

# The first import of torch's own compiler uses what torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

POLICY = {"actor", "actor_optimizer", "temperature", "temperature_optimizer"}
CRITICS = {"critics", "critic_optimizer", "target_critics"}


def changed_parts(agent: SACAgent, before: dict) -> set[str]:
    return {path.split("/")[1] for path in differences(agent.state_dict(), before)}


def test_a_step_on_the_critics_leaves_all_of_the_policy_to_the_bit():
    agent = make_agent()
    agent.update(make_batch())  # so that every optimizer has moments
    before = copy.deepcopy(agent.state_dict())
    metrics = agent.update(make_batch(seed=1), improve_policy=False)
    assert changed_parts(agent, before) == CRITICS | {"update_noise"}
    assert set(metrics) == {"loss/value", "policy/q_value", "policy/temperature", "loss/gradient_norm"}


def test_a_step_on_both_changes_all():
    agent = make_agent()
    before = copy.deepcopy(agent.state_dict())
    metrics = agent.update(make_batch())
    assert changed_parts(agent, before) == CRITICS | POLICY | {"update_noise"}
    assert {"loss/policy", "policy/entropy"} <= set(metrics)


def test_the_critics_learn_the_same_whether_the_policy_learns_after_them_or_not():
    with_policy, without = make_agent(), make_agent()
    first = with_policy.update(make_batch())
    second = without.update(make_batch(), improve_policy=False)
    assert first["loss/value"] == second["loss/value"]
    assert {path.split("/")[1] for path in differences(with_policy.state_dict(), without.state_dict())} == POLICY


def test_both_kinds_of_steps_take_the_same_random_numbers():
    # So that the critics' noise does not depend on how often the policy learns.
    often, seldom = make_agent(), make_agent()
    often.update(make_batch())
    seldom.update(make_batch(), improve_policy=False)
    assert torch.equal(often.state_dict()["update_noise"], seldom.state_dict()["update_noise"])


def recorded_run(tiny_config, run_dir, monkeypatch, **algo) -> list[bool]:
    """Train 64 steps, and return of each gradient step whether the policy took part."""
    taken = []
    plain = SACAgent.update

    def update(agent, batch, *, improve_policy=True):
        taken.append(improve_policy)
        return plain(agent, batch, improve_policy=improve_policy)

    with monkeypatch.context() as patch:
        patch.setattr(SACAgent, "update", update)
        settings = {"learning_starts": 32, "train_every": 8, **algo}
        train_sac(tiny_config("sac", "Pendulum-v1", algo=settings, total_timesteps=64), run_dir=run_dir)
    return taken


@pytest.mark.parametrize(
    ("gradient_steps", "policy_every", "of_each_update"),
    [(1, 1, [True]), (3, 1, [True] * 3), (4, 2, [False, True, False, True]), (3, 3, [False, False, True])],
)
def test_the_trainer_improves_the_policy_in_every_so_many_gradient_steps(
    tiny_config, tmp_path, monkeypatch, gradient_steps, policy_every, of_each_update
):
    # Updates at 40, 48, 56 and 64 steps
    settings = {"gradient_steps": gradient_steps, "policy_every": policy_every}
    assert recorded_run(tiny_config, tmp_path / "run", monkeypatch, **settings) == of_each_update * 4


def test_several_environments_make_several_updates_due_at_once(tiny_config, tmp_path, monkeypatch):
    # 16 environments and an update of two gradient steps every 8 steps: two of them in each vector step after 32.
    taken = []
    monkeypatch.setattr(
        SACAgent,
        "update",
        lambda agent, batch, *, improve_policy: taken.append(improve_policy) or {"x": torch.zeros(())},
    )
    algo = {"learning_starts": 32, "train_every": 8, "gradient_steps": 2, "policy_every": 2}
    config = tiny_config("sac", "Pendulum-v1", algo=algo, env={"num_envs": 16}, total_timesteps=64)
    train_sac(config, run_dir=tmp_path / "run")
    assert taken == [False, True, False, True] * 2


def test_every_row_of_metrics_has_the_policy(tiny_config, tmp_path, finite_rows):
    algo = {"learning_starts": 32, "gradient_steps": 2, "policy_every": 2}
    config = tiny_config("sac", "Pendulum-v1", algo=algo, total_timesteps=64, logging={"every": 8})
    rows = finite_rows(train_sac(config, run_dir=tmp_path / "run").run_dir)
    assert len(rows) == 8
    for row in rows[4:]:
        assert {"loss/policy", "loss/value", "policy/entropy", "policy/temperature"} <= set(row)


def test_one_step_of_the_policy_for_each_of_the_critics_is_the_default(tiny_config, tmp_path, parameters):
    assert SACConfig().policy_every == 1
    runs = [
        parameters(train_sac(tiny_config("sac", "Pendulum-v1", algo=algo, total_timesteps=64), run_dir=tmp_path / name))
        for name, algo in {
            "default": {"gradient_steps": 2},
            "one": {"gradient_steps": 2, "policy_every": 1},
            "two": {"gradient_steps": 2, "policy_every": 2},
        }.items()
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize(("gradient_steps", "policy_every"), [(1, 2), (4, 3), (2, 4)])
def test_a_policy_that_would_not_learn_in_every_update_is_refused(tiny_config, gradient_steps, policy_every):
    with pytest.raises(ConfigError) as refusal:
        tiny_config("sac", "Pendulum-v1", algo={"gradient_steps": gradient_steps, "policy_every": policy_every})
    assert str(refusal.value) == (
        f"algo.policy_every={policy_every} must divide algo.gradient_steps={gradient_steps}. "
        f"Try algo.gradient_steps={policy_every}."
    )


@needs_compiler
def test_compiled_steps_of_both_kinds_give_what_eager_ones_give():
    config = SACConfig(hidden_sizes=[16], learning_rate=1e-3, activation="tanh", gradient_steps=2, policy_every=2)
    compiled, eager = (make_compiled(config, CONTINUOUS, compiled=value) for value in (True, False))
    start = tensors_of(eager)
    for agent in (compiled, eager):
        history = [
            agent.update(make_large_batch(config, CONTINUOUS, seed=step), improve_policy=step % 2 == 1)
            for step in range(10)
        ]
        assert [len(metrics) for metrics in history] == [4, 6] * 5
    assert compiled.compiled_update.path == "compiled"
    assert compiled.compiled_update.compilations == 2
    ours, theirs = tensors_of(compiled), tensors_of(eager)
    moved = {name: distance(theirs[name], start[name]) for name in theirs}
    assert [name for name in moved if not moved[name]] == []
    # Rounding gives about 2e-5; one step of the ten left out is 0.1.
    far = {name: distance(ours[name], theirs[name]) / moved[name] for name in moved}
    assert {name: value for name, value in far.items() if not value < 1e-4} == {}
