"""The results command: honest statistics by hand, runs that are not repeated, and a report that shows every seed."""

import importlib.util
import json
import sys

import numpy as np
import pytest
from cli_helpers import REPO

from rl_training.errors import UserError


@pytest.fixture
def results(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(REPO / "scripts"))
    spec = importlib.util.spec_from_file_location("results_script", REPO / "scripts" / "results.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "results_script", module)  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(module, "RUNS", tmp_path / "runs")
    return module


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([7.0], 7.0),
        ([1.0, 3.0], 2.0),
        # Of three values the middle one counts by 1/3 and each outer one by 1/12: 2 x (0/12 + 6/3 + 30/12).
        ([30.0, 0.0, 6.0], 9.0),
        ([100.0, 2.0, 4.0, -50.0], 3.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 1000.0], 4.5),
    ],
)
def test_the_interquartile_mean_is_that_of_the_middle_half(results, values, expected):
    assert results.interquartile_mean(np.array(values)) == pytest.approx(expected)


def test_the_bootstrap_interval_holds_the_interquartile_mean_and_shrinks_with_more_runs(results):
    few, many = np.array([0.0, 10.0, 20.0, 30.0]), np.tile([0.0, 10.0, 20.0, 30.0], 8)
    for values in (few, many):
        low, high = results.bootstrap_interval(values)
        assert low < results.interquartile_mean(values) < high
    assert np.diff(results.bootstrap_interval(many)) < 0.5 * np.diff(results.bootstrap_interval(few))
    assert results.bootstrap_interval(np.array([5.0, 5.0, 5.0])) == (5.0, 5.0)


def test_an_unknown_pair_is_answered_with_the_one_that_was_meant(results):
    with pytest.raises(UserError, match=r"There is no preset ppo_cartpol\. Did you mean 'ppo_cartpole'\?"):
        results.check_pair("ppo_cartpol")


def test_a_measured_run_is_not_measured_again_and_one_without_its_file_goes_on(results, monkeypatch):
    results.measure("ppo_cartpole", "ours", 1, 600, "1/1")
    (path,) = (results.DOCS / "results").glob("*.json")
    assert path.name == "ppo_cartpole-600-ours-1.json"
    first = json.loads(path.read_text())
    assert len(first["returns"]) == results.EPISODES
    assert first["curve"]
    content = path.read_bytes()
    monkeypatch.setattr(results, "train_ours", lambda *_: pytest.fail("measured twice"))
    results.measure("ppo_cartpole", "ours", 1, 600, "1/1")
    assert path.read_bytes() == content
    # An option that came after the measurement is at its default and changes nothing; a changed setting does.
    del first["settings"]["algo"]["recompute_advantages"]
    path.write_text(json.dumps(first))
    results.measure("ppo_cartpole", "ours", 1, 600, "1/1")
    first["settings"]["algo"]["gamma"] = 0.5
    path.write_text(json.dumps(first))
    monkeypatch.setattr(results, "train_ours", lambda *_: (1.0, [2.0], []))
    results.measure("ppo_cartpole", "ours", 1, 600, "1/1")
    assert json.loads(path.read_text())["returns"] == [2.0]


def test_an_interrupted_run_goes_on_where_it_stopped(results):
    from rl_training.experiment.default_manager import DefaultExperimentManager

    config = results.preset_config("ppo_cartpole", 1, 600)
    straight = results.train_ours(config, results.RUNS / "straight")
    config.stop_at_step = 256
    DefaultExperimentManager().setup(config, run_dir=results.RUNS / "stopped").train()
    config.stop_at_step = None
    resumed = results.train_ours(config, results.RUNS / "stopped")
    assert resumed[1:] == straight[1:]


def test_the_report_shows_every_seed_next_to_the_peer_and_the_published_value(results):
    runs = [
        results.Run("dqn_cartpole", library, seed, 50_000, 12.0, [figure] * 4, [[1.0, 2.0], [3.0, figure]], {})
        for library, figures in (("ours", [500.0, 480.0, 490.0]), ("sb3", [500.0, 193.0]))
        for seed, figure in enumerate(figures, start=1)
    ]
    (results.DOCS).mkdir()
    results.write_report(runs)
    text = (results.DOCS / "results.md").read_text()
    assert "| **ours** | 3 | 490.0 | 490.0 [480.0, 500.0] | 500.0, 480.0, 490.0 | 12 s | 500 (50k) |" in text
    assert "| dqn cartpole | 50,000 | SB3 | 2 | 346.5 | 346.5 | 500.0, 193.0 |" in text
    assert "](images/curves_dqn.png)" in text
    assert (results.DOCS / "images" / "curves_dqn.png").stat().st_size > 5_000


def test_settings_that_sb3_lacks_are_refused(results):
    import sb3_runs

    from rl_training.config import DQNConfig, PPOConfig, SACConfig

    for config in (DQNConfig(dueling=True), DQNConfig(prioritized=True), SACConfig(critic_layer_norm=True)):
        with pytest.raises(UserError, match="SB3's"):
            sb3_runs.sb3_settings(config)
    settings = sb3_runs.sb3_settings(PPOConfig(learning_rate=0.5, learning_rate_schedule="linear", num_steps=7))
    assert settings["n_steps"] == 7
    assert settings["learning_rate"](0.5) == 0.25
    assert sb3_runs.sb3_settings(SACConfig(learn_temperature=False, temperature=0.1))["ent_coef"] == 0.1
