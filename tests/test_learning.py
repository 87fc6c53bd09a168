"""Each preset reaches the return it promises. Minutes of work: run by scripts/test, deselected by -m 'not learning'."""

from pathlib import Path

import pytest

import rl_training

pytestmark = pytest.mark.learning


def fit(algo: str, env: str, run_dir: Path, *, compiled: bool = False, **settings) -> rl_training.TrainResult:
    """Train with the preset and seed 1, and evaluate once, at the end."""
    return rl_training.fit(
        *(algo, env),
        run_dir=run_dir,
        seed=1,
        logging={"progress": False},
        eval={"every": None, "episodes": 20},
        device={"compile": compiled},
        **settings,
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_ppo_solves_cartpole_with_its_preset(tmp_path, compiled):
    # CartPole-v1 counts as solved at 475; the most is 500.
    result = fit("ppo", "CartPole-v1", tmp_path, compiled=compiled)
    assert result.metrics["eval/return_mean"] >= 475


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_dqn_solves_cartpole_with_its_preset_and_holds_it_to_the_end(tmp_path, compiled):
    result = fit("dqn", "CartPole-v1", tmp_path, compiled=compiled)
    assert result.metrics["eval/return_mean"] >= 475


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_sac_swings_the_pendulum_up_with_its_preset(tmp_path, compiled):
    # In half of the preset's 20,000 steps. A policy that holds the pendulum up scores about -150, one that does
    # nothing below -1,000.
    result = fit("sac", "Pendulum-v1", tmp_path, compiled=compiled, total_timesteps=10_000)
    assert result.metrics["eval/return_mean"] > -200


def test_ppo_with_state_dependent_noise_climbs_the_continuous_mountain_with_its_preset(tmp_path):
    # 100 at the top, less what the actions cost; a car that stays in the valley scores at most 0.
    result = fit("ppo", "MountainCarContinuous-v0", tmp_path)
    assert result.metrics["eval/return_mean"] > 85
