"""Checkpoints: what they hold, what they survive, what they refuse; evaluating and resuming from them, exactly."""

import dataclasses
import hashlib
import json
import math
import os
import pickle
import random
import shutil
import signal

import numpy as np
import pytest
import torch
from cli_helpers import (
    checkpoint_steps,
    comparable_rows,
    differences,
    directory_content,
    metric_rows,
    names_in,
    run_card,
    tiny_algo,
    tiny_env,
    tiny_run_config,
    train_until_interrupted,
)

from rl_training.errors import UserError
from rl_training.experiment import registry
from rl_training.runtime import exactness, run_utils
from rl_training.runtime.checkpointing import (
    CheckpointError,
    check_checkpoint,
    checkpoint_paths,
    clear_the_way,
    find_checkpoint,
    prune,
    read_checkpoint,
    write_checkpoint,
)
from rl_training.runtime.comparison import first_difference
from rl_training.runtime.loggers import cut_back
from rl_training.runtime.session import TrainingSession
from rl_training.runtime.state_tree import join, split
from rl_training.runtime.workflows import evaluate_checkpoint, load_run_config, resume_training

FILES = ["arrays.npz", "manifest.json", "state.json", "tensors.pt"]


def train(config, run_dir):
    return registry.get(config.algo.name).load_train()(config, run_dir=run_dir)


# The state tree


def round_trip(tree):
    encoded, tensors, arrays = split(tree)
    return join(json.loads(json.dumps(encoded)), tensors, arrays)


@pytest.mark.parametrize(
    "tree",
    [
        {"a": 1, "b": [1.5, "x", None, True], "c": {}},
        {0: "zero", 7: {"x": 1}},
        {"state": {0: {"step": 3}}, "mixed": {"a": 1, 2: "b", (1, "t"): "tuple key"}},
        {"tuple": (1, (2, 3), [4]), "empty": ()},
        {"$tensor": "not a tensor", "plain": {"$items": [1, 2]}, "t": {"$tuple": []}},
        {"big": 2**128 + 1, "negative": -(2**70)},
        {"state": random.Random(3).getstate()},
        {"inf": math.inf, "tiny": 5e-324, "third": 1 / 3},
    ],
)
def test_a_tree_of_plain_values_comes_back_the_same(tree):
    assert differences(round_trip(tree), tree) == []


def test_tensors_and_arrays_come_back_with_their_bits_and_types():
    tree = {
        "float": torch.tensor([1.0, -0.0, 1e-45]),
        "half": torch.tensor([1.5], dtype=torch.float64),
        "scalar": torch.tensor(3),
        "bytes": torch.tensor([1, 255], dtype=torch.uint8),
        "nested": [{"array": np.array([[1, 2], [3, 4]], np.int64)}, (np.zeros((0, 3), np.float32), np.array(True))],
        "nan": np.array([np.nan, np.inf]),
    }
    assert differences(round_trip(tree), tree) == []


def test_a_numpy_scalar_becomes_a_plain_number():
    assert differences(round_trip({"a": np.float32(0.5), "b": np.int64(3)}), {"a": 0.5, "b": 3}) == []


def test_a_tensor_with_a_gradient_is_stored_without_it():
    _, tensors, _ = split({"w": torch.ones(2, requires_grad=True)})
    assert not tensors["/w"].requires_grad


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"agent": {"hook": len}}, "state at /agent/hook has type builtin_function_or_method"),
        ({"a": [1, {2, 3}]}, "state at /a/1 has type set"),
        ({"a": (1, object())}, "state at /a/1 has type object"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused_by_its_path(tree, message):
    with pytest.raises(TypeError, match=message):
        split(tree)


def test_the_comparison_of_these_tests_sees_one_bit():
    one, other = {"a": [torch.zeros(2)], "b": 1.0}, {"a": [torch.tensor([0.0, -0.0])], "b": 1.0}
    assert differences(one, other) == ["/a/0"]
    assert differences({"a": 1}, {"a": 1.0}) == ["/a"]
    assert differences({"a": 1}, {"a": 1, "b": 2}) == ["/b"]


# Writing and reading


STATE = {"session": {"global_step": 10}, "weights": torch.arange(3.0), "buffer": np.arange(4), 5: ("x", 2**100)}


def test_a_checkpoint_comes_back_the_same(tmp_path):
    path = write_checkpoint(tmp_path, 10, STATE, labels=["best"])
    assert path == tmp_path / "checkpoints" / "step_000000000010"
    assert names_in(path) == FILES
    assert differences(read_checkpoint(path), STATE) == []
    info = check_checkpoint(path)
    assert (info.path, info.global_step, info.labels) == (path, 10, ("best",))
    assert json.loads((path / "manifest.json").read_text())["format_version"] == 1


def test_a_write_that_fails_leaves_nothing_behind(tmp_path):
    with pytest.raises(TypeError, match="state at /a has type set"):
        write_checkpoint(tmp_path, 10, {"a": {1}})
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_newer_state_of_the_same_step_stands_beside_the_older_one_and_wins(tmp_path):
    older = write_checkpoint(tmp_path, 10, STATE)
    changed = {**STATE, "session": {**STATE["session"], "global_step": 10, "newer": True}}
    newer = write_checkpoint(tmp_path, 10, changed, labels=["best"])
    assert (older.name, newer.name) == ("step_000000000010", "step_000000000010.01")
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path, "10") == find_checkpoint(tmp_path, "best") == newer
    assert read_checkpoint(newer)["session"]["newer"] is True
    assert checkpoint_paths(tmp_path) == [older, newer]


def rewrite_manifest(path, **changes):
    """Make the manifest fit the files as they are now, as a forger would, and change entries of it."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name in ("arrays.npz", "state.json", "tensors.pt"):
        content = (path / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "truncated state": (lambda path: os.truncate(path / "state.json", 5), "state.json is not what was written"),
    "truncated tensors": (lambda path: os.truncate(path / "tensors.pt", 100), "tensors.pt is not what was written"),
    "flipped bit in tensors": (lambda path: flip_a_bit(path / "tensors.pt"), "tensors.pt is not what was written"),
    "flipped bit in arrays": (lambda path: flip_a_bit(path / "arrays.npz"), "arrays.npz is not what was written"),
    "deleted tensors": (lambda path: (path / "tensors.pt").unlink(), "tensors.pt is missing"),
    "deleted manifest": (lambda path: (path / "manifest.json").unlink(), "cannot read manifest.json"),
    "manifest that is no JSON": (lambda path: (path / "manifest.json").write_text("{"), "cannot read manifest.json"),
    "manifest that is a list": (lambda path: (path / "manifest.json").write_text("[]"), "cannot read manifest.json"),
    "newer format": (lambda path: rewrite_manifest(path, format_version=2), "has format 2"),
    "symlinked file": (lambda path: replace_by_symlink(path / "state.json"), "state.json is missing"),
}


def replace_by_symlink(file):
    elsewhere = file.parent.parent.parent / "elsewhere.json"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_is_named_and_the_older_one_is_taken(damage, reason, tmp_path, caplog):
    older = write_checkpoint(tmp_path, 10, STATE)
    newer = write_checkpoint(tmp_path, 20, STATE)
    damage(newer)
    with pytest.raises(CheckpointError, match=reason):
        read_checkpoint(newer)
    assert find_checkpoint(tmp_path) == older
    (record,) = caplog.records
    assert str(newer) in record.getMessage()
    assert reason in record.getMessage()


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE.keys())
def test_if_all_checkpoints_are_damaged_none_is_taken(damage, reason, tmp_path):
    damage(write_checkpoint(tmp_path, 10, STATE))
    with pytest.raises(CheckpointError, match="has no intact checkpoint, so it cannot go on"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"state.json": 3, "tensors.pt": 3, "arrays.npz": 3}},
        {"files": {"state.json": {}, "tensors.pt": {}, "arrays.npz": {}}},
        {"files": {}},
        {"labels": 3},
        {"global_step": "twenty"},
        {"journal": {"../../secret.bin": {"bytes": 1, "crc32": 0}}},
        {"format_version": None},
    ],
    ids=str,
)
def test_a_manifest_of_the_wrong_shape_is_a_torn_checkpoint_and_no_crash(change, tmp_path):
    older = write_checkpoint(tmp_path, 10, STATE)
    rewrite_manifest(write_checkpoint(tmp_path, 20, STATE), **change)
    assert find_checkpoint(tmp_path) == older
    prune(tmp_path, keep_last=1)
    assert find_checkpoint(tmp_path) == older


def test_to_train_on_a_torn_checkpoint_is_put_aside_with_its_files(tmp_path):
    older, newer = (write_checkpoint(tmp_path, step, STATE) for step in (10, 20))
    os.truncate(newer / "state.json", 5)
    content = directory_content(newer)
    assert find_checkpoint(tmp_path, to_train=True) == older
    clear_the_way(older)
    assert checkpoint_paths(tmp_path) == [older]
    (aside,) = (tmp_path / "checkpoints" / "torn").iterdir()
    assert aside.name.startswith("step_000000000020")
    assert directory_content(aside) == content


def test_to_evaluate_nothing_is_moved(tmp_path):
    older, newer = (write_checkpoint(tmp_path, step, STATE) for step in (10, 20))
    os.truncate(newer / "state.json", 5)
    assert find_checkpoint(tmp_path) == older
    assert checkpoint_paths(tmp_path) == [older, newer]


def test_a_checkpoint_of_a_newer_format_is_left_for_the_version_that_wrote_it(tmp_path):
    path = write_checkpoint(tmp_path, 10, STATE)
    rewrite_manifest(path, format_version=2)
    with pytest.raises(CheckpointError):
        find_checkpoint(tmp_path, to_train=True)
    assert checkpoint_paths(tmp_path) == [path]


def test_the_newest_checkpoint_is_the_one_of_the_largest_step_whatever_the_clock_says(tmp_path):
    late = write_checkpoint(tmp_path, 1_000, STATE)
    early = write_checkpoint(tmp_path, 20, STATE)
    os.utime(late, (0, 0))
    assert find_checkpoint(tmp_path) == late
    assert checkpoint_paths(tmp_path) == [early, late]


def test_a_checkpoint_is_found_by_best_last_step_and_path(tmp_path):
    first = write_checkpoint(tmp_path, 10, STATE, labels=["best"])
    second = write_checkpoint(tmp_path, 20, STATE)
    assert find_checkpoint(tmp_path, "best") == first
    assert find_checkpoint(tmp_path, "last") == find_checkpoint(tmp_path) == second
    assert find_checkpoint(tmp_path, "10") == find_checkpoint(tmp_path, "step_000000000010") == first
    assert find_checkpoint(first, "last") == first
    with pytest.raises(UserError, match=r"has no checkpoint '15'\. Choose best, last or one of the steps 10, 20\."):
        find_checkpoint(tmp_path, "15")


def test_without_a_best_checkpoint_best_is_the_last_one(tmp_path):
    write_checkpoint(tmp_path, 10, STATE)
    last = write_checkpoint(tmp_path, 20, STATE)
    assert find_checkpoint(tmp_path, "best") == last


class Malice:
    """Unpickling it makes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def plant_in_tensors_as_torch_does(path, malice):
    torch.save({"/weights": malice}, path / "tensors.pt")


def plant_in_tensors_as_a_bare_pickle(path, malice):
    (path / "tensors.pt").write_bytes(pickle.dumps({"/weights": malice}))


def plant_in_arrays(path, malice):
    np.savez(path / "arrays.npz", array_0=np.array([malice], dtype=object))


@pytest.mark.parametrize("plant", [plant_in_tensors_as_torch_does, plant_in_tensors_as_a_bare_pickle, plant_in_arrays])
def test_a_strangers_checkpoint_runs_no_code(plant, tmp_path):
    path, marker = write_checkpoint(tmp_path, 10, STATE), tmp_path / "code was run"
    plant(path, Malice(marker))
    rewrite_manifest(path)
    assert check_checkpoint(path).global_step == 10
    with pytest.raises(CheckpointError, match="step_000000000010 cannot be read"):
        read_checkpoint(path)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Malice(marker)))  # noqa: S301 - the charge is live
    assert marker.exists()


def test_a_checkpoint_that_holds_something_else_is_refused(tmp_path):
    path = write_checkpoint(tmp_path, 10, STATE)
    (path / "state.json").write_text("[1, 2]")
    rewrite_manifest(path)
    with pytest.raises(CheckpointError, match="does not hold the state of a run"):
        read_checkpoint(path)


# Retention


def test_the_last_k_and_the_newest_best_are_kept(tmp_path):
    for step in range(1, 7):
        write_checkpoint(tmp_path, step, STATE, labels=["best"] if step in (1, 3) else [])
    prune(tmp_path, keep_last=2)
    assert checkpoint_steps(tmp_path) == [3, 5, 6]


def test_a_best_checkpoint_among_the_last_does_not_count_twice(tmp_path):
    for step in range(1, 5):
        write_checkpoint(tmp_path, step, STATE, labels=["best"] if step == 4 else [])
    prune(tmp_path, keep_last=2)
    assert checkpoint_steps(tmp_path) == [3, 4]


@pytest.mark.parametrize("damage", ["truncated tensors", "deleted manifest", "deleted tensors"])
def test_a_torn_checkpoint_is_never_counted_as_kept(damage, tmp_path):
    for step in range(1, 5):
        write_checkpoint(tmp_path, step, STATE)
    for step in (3, 4):
        DAMAGE[damage][0](tmp_path / "checkpoints" / f"step_{step:012d}")
    prune(tmp_path, keep_last=2)
    intact = [find_checkpoint(tmp_path, which).name for which in ("1", "2")]
    assert intact == ["step_000000000001", "step_000000000002"]


def test_abandoned_staging_is_removed(tmp_path):
    write_checkpoint(tmp_path, 1, STATE)
    (tmp_path / "checkpoints" / ".staging-step_000000000002-abc").mkdir()
    prune(tmp_path, keep_last=1)
    assert names_in(tmp_path / "checkpoints") == ["step_000000000001"]


def test_a_run_keeps_what_its_config_says(tmp_path):
    config = tiny_run_config(
        "ppo", total_timesteps=96, checkpoint={"every": 16, "keep_last": 3, "keep_best": False}, eval={"episodes": 0}
    )
    train(config, tmp_path / "run")
    assert checkpoint_steps(tmp_path / "run") == [64, 80, 96]


# Metric files


def test_metric_files_are_cut_back_and_those_of_later_are_removed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("first\nsecond\n")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events.out.tfevents.0000").write_text("old")
    (tmp_path / "tensorboard" / "events.out.tfevents.0001").write_text("new")
    cut_back(tmp_path, {"metrics.jsonl": 6, "tensorboard/events.out.tfevents.0000": 3})
    assert (tmp_path / "metrics.jsonl").read_text() == "first\n"
    assert names_in(tmp_path / "tensorboard") == ["events.out.tfevents.0000"]


def test_a_metric_file_that_lost_its_end_is_not_filled_with_zeros(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("first\n")
    cut_back(tmp_path, {"metrics.jsonl": 13})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"first\n"


@pytest.mark.parametrize("switched_off", ["metrics_file", "tensorboard"])
def test_switching_a_log_off_for_a_while_loses_none_of_its_rows(switched_off, tmp_path):
    def steps(run_dir):
        events = sorted((run_dir / "tensorboard").iterdir())
        return [row["step"] for row in metric_rows(run_dir)], [path.stat().st_size for path in events]

    logs = {"tensorboard": True}
    train(tiny_run_config("ppo", total_timesteps=32, logging=logs), tmp_path / "run")
    before = steps(tmp_path / "run")
    resume_training(
        tmp_path / "run", config=tiny_run_config("ppo", total_timesteps=64, logging={**logs, switched_off: False})
    )
    resume_training(tmp_path / "run", config=tiny_run_config("ppo", total_timesteps=96, logging=logs))
    after = steps(tmp_path / "run")
    assert after[0][:2] == before[0] == [16, 32]
    assert after[1][:1] == before[1]


# Evaluating


@pytest.mark.parametrize("algo", ["ppo", "dqn", "sac"])
def test_evaluation_repeats_itself_and_the_one_of_training(algo, tmp_path):
    config = tiny_run_config(
        algo,
        env=tiny_env(algo, normalize_observation=True),
        eval={"episodes": 2, "every": 32},
        checkpoint={"every": 32, "keep_last": 5},
    )
    result = train(config, tmp_path / "run")
    for step in (32, 64):
        evaluation = evaluate_checkpoint(result.run_dir, checkpoint=str(step), episodes=2, seed=100_000)
        assert evaluation == evaluate_checkpoint(result.run_dir, checkpoint=str(step), episodes=2, seed=100_000)
        (logged,) = (row for row in metric_rows(result.run_dir) if row["step"] == step)
        assert evaluation.summary.mean == logged["eval/return_mean"]
        assert evaluation.summary.std == logged["eval/return_std"]
        assert evaluation.global_step == step
        assert evaluation.first_seed == 100_000
        # By default other episodes are played than those that have chosen the best checkpoint.
        assert evaluate_checkpoint(result.run_dir, episodes=1).first_seed == 200_000


def test_evaluation_depends_on_the_checkpoint_and_on_the_seed(tmp_path):
    config = tiny_run_config("sac", checkpoint={"every": 32, "keep_last": 5})
    run_dir = train(config, tmp_path / "run").run_dir
    early, late = (evaluate_checkpoint(run_dir, checkpoint=which, episodes=2).returns for which in ("32", "64"))
    assert early != late
    assert evaluate_checkpoint(run_dir, checkpoint="64", episodes=2, seed=1).returns != late


# Resuming


def test_resume_goes_on_with_counters_and_metrics(tmp_path):
    train(tiny_run_config("dqn"), tmp_path / "run")
    before = metric_rows(tmp_path / "run")
    result = resume_training(tmp_path / "run", config=tiny_run_config("dqn", total_timesteps=128))
    rows = metric_rows(tmp_path / "run")
    assert rows[: len(before)] == before
    assert [row["step"] for row in rows] == [16, 32, 48, 64, 80, 96, 112, 128]
    assert [row["train/gradient_steps"] for row in rows] == [0, 3, 7, 11, 15, 19, 23, 27]
    assert rows[-1]["train/episodes"] >= rows[3]["train/episodes"]
    assert rows[-1]["time/seconds"] > rows[3]["time/seconds"]
    assert result.metrics["train/gradient_steps"] == 27
    assert run_card(tmp_path / "run")["global_step"] == 128


def test_the_config_of_a_resumed_run_is_the_last_one_used(tmp_path):
    train(tiny_run_config("ppo"), tmp_path / "run")
    resume_training(tmp_path / "run", config=tiny_run_config("ppo", total_timesteps=96))
    assert load_run_config(tmp_path / "run").total_timesteps == 96


def test_a_torn_newest_checkpoint_makes_resume_start_at_the_one_before(tmp_path):
    config = tiny_run_config("ppo", checkpoint={"every": 32, "keep_last": 5}, eval={"every": None})
    train(config, tmp_path / "run")
    rows = comparable_rows(tmp_path / "run")
    flip_a_bit(tmp_path / "run" / "checkpoints" / "step_000000000064" / "tensors.pt")
    result = resume_training(tmp_path / "run")
    assert [entry["from_step"] for entry in run_card(tmp_path / "run")["resumes"]] == [32]
    assert read_checkpoint(result.checkpoint_path)["session"]["global_step"] == 64
    assert comparable_rows(tmp_path / "run") == rows


BRANCHED = {"checkpoint": {"every": 16, "keep_last": 50}, "eval": {"every": None}}


def branched_config(total_timesteps):
    """Return a run whose learning rate depends on the budget, so that another budget is another future."""
    algo = tiny_algo("ppo", learning_rate=0.01, learning_rate_schedule="linear")
    return tiny_run_config("ppo", algo_config=algo, total_timesteps=total_timesteps, **BRANCHED)


def test_resume_from_an_older_checkpoint_keeps_none_of_the_abandoned_future(tmp_path):
    run_dir = train(branched_config(64), tmp_path / "run").run_dir
    assert checkpoint_steps(run_dir) == [16, 32, 48, 64]
    only_early = shutil.copytree(run_dir, tmp_path / "only early")
    for step in (48, 64):
        shutil.rmtree(only_early / "checkpoints" / f"step_{step:012d}")
    resume_training(run_dir / "checkpoints" / "step_000000000032", config=branched_config(96))
    resume_training(only_early, config=branched_config(96))
    for step in (48, 64, 80, 96):
        agents = [
            read_checkpoint(directory / "checkpoints" / f"step_{step:012d}")["agent"]
            for directory in (run_dir, only_early)
        ]
        assert differences(*agents) == [], step


def test_a_run_that_went_back_and_was_interrupted_resumes_where_it_was_interrupted(tmp_path, monkeypatch):
    run_dir = train(branched_config(64), tmp_path / "run").run_dir
    older = run_dir / "checkpoints" / "step_000000000016"
    train_until_interrupted(monkeypatch, lambda: resume_training(older, config=branched_config(96)), 40)
    resume_training(run_dir)
    assert [entry["from_step"] for entry in run_card(run_dir)["resumes"]] == [16, 40]
    assert [row["step"] for row in metric_rows(run_dir)] == [16, 32, 48, 64, 80, 96]


def test_a_replay_buffer_that_lost_a_bit_is_passed_over_for_training_and_not_for_evaluation(tmp_path):
    config = tiny_run_config("dqn", checkpoint={"every": 32, "keep_last": 5}, eval={"every": None})
    run_dir = train(config, tmp_path / "run").run_dir
    rows = comparable_rows(run_dir)
    (journal,) = (run_dir / "replay").iterdir()
    flip_a_bit(journal)  # in the transition after the 32nd, which the older checkpoint does not have
    assert evaluate_checkpoint(run_dir, checkpoint="last", episodes=1).global_step == 64
    resume_training(run_dir)
    assert [entry["from_step"] for entry in run_card(run_dir)["resumes"]] == [32]
    assert comparable_rows(run_dir) == rows


def test_the_checkpoints_of_a_run_in_use_are_not_touched(tmp_path):
    run_dir = train(tiny_run_config("ppo"), tmp_path / "run").run_dir
    flip_a_bit(run_dir / "checkpoints" / "step_000000000064" / "tensors.pt")
    before = checkpoint_steps(run_dir)
    owner = run_utils.create_training_run(
        tiny_run_config("ppo"), run_dir, run_dir / "checkpoints" / "step_000000000032"
    )
    with pytest.raises(UserError, match="is in use by process"):
        resume_training(run_dir)
    owner.close()
    assert checkpoint_steps(run_dir) == before == [32, 64]


def test_strict_resume_on_another_machine_is_refused_and_changes_nothing(tmp_path, monkeypatch):
    run_dir = train(tiny_run_config("ppo"), tmp_path / "run").run_dir
    before = directory_content(run_dir)
    monkeypatch.setattr(exactness, "cpu_name", lambda: "another cpu")
    strict = tiny_run_config("ppo", total_timesteps=96, resume_strict=True)
    with pytest.raises(
        UserError,
        match=r"resume_strict=true: cpu changed from .* to another cpu \(another machine\)\. Nothing was changed\.",
    ):
        resume_training(run_dir, config=strict)
    assert directory_content(run_dir) == before
    resume_training(run_dir, config=tiny_run_config("ppo", total_timesteps=96))
    card = run_card(run_dir)
    assert (card["global_step"], card["exact"], len(card["inexact_reasons"])) == (96, False, 1)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no SIGUSR1")
@pytest.mark.parametrize(("algo", "step"), [("ppo", 40), ("dqn", 41), ("sac", 41)])
def test_sigusr1_saves_and_goes_on(algo, step, tmp_path, monkeypatch):
    original = TrainingSession.record_step

    def record_step(session, *arguments):
        original(session, *arguments)
        if session.state.global_step == step:
            signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(TrainingSession, "record_step", record_step)
    train(tiny_run_config(algo, eval={"episodes": 0}), tmp_path / "run")
    assert checkpoint_steps(tmp_path / "run") == [step, 64]
    assert run_card(tmp_path / "run")["status"] == "finished"


def test_another_environment_or_algorithm_is_refused_with_the_differing_keys(tmp_path):
    train(tiny_run_config("ppo"), tmp_path / "run")
    other = tiny_run_config("ppo", algo_config=tiny_algo("ppo", gamma=0.5), env=tiny_env("ppo", num_envs=2))
    with pytest.raises(UserError, match=r"cannot change algo\.gamma: 0\.99 -> 0\.5; env\.num_envs: 1 -> 2\."):
        resume_training(tmp_path / "run", config=other)
    with pytest.raises(UserError, match="algo"):
        resume_training(tmp_path / "run", config=tiny_run_config("dqn"))


# Exactness: interrupted anywhere and resumed, a run ends with the same bits as one that was never interrupted

SHORT_EPISODES = {"max_episode_steps": 20}
REPLAY_CAPACITY = 100  # less than the steps of a run: the ring comes round
EXACT = {
    "ppo on cartpole": ("ppo", {"name": "cartpole", "id": "CartPole-v1"}),
    "ppo on pendulum": ("ppo", {"name": "pendulum", "id": "Pendulum-v1", "env_kwargs": SHORT_EPISODES}),
    "dqn on cartpole": ("dqn", {"name": "cartpole", "id": "CartPole-v1"}),
    "sac on pendulum": ("sac", {"name": "pendulum", "id": "Pendulum-v1", "env_kwargs": SHORT_EPISODES}),
}


def exact_config(kind, **settings):
    """Return a run of 192 steps of two environments with normalisation, schedules, evaluations and rows."""
    algo, env = EXACT[kind]
    schedules = {"learning_rate_schedule": "linear", "clip_range_schedule": "linear"}
    special = schedules if algo == "ppo" else {"buffer_size": REPLAY_CAPACITY}
    env_config = tiny_env(algo, **env, num_envs=2, normalize_observation=True, normalize_reward=True)
    return tiny_run_config(
        algo,
        env=env_config,
        algo_config=tiny_algo(algo, **special),
        **{"total_timesteps": 192, "eval": {"every": 64}, **settings},
    )


def final_state(run_dir):
    """Return the state at the end of a run without what depends on the clock or on the number of starts."""
    path = find_checkpoint(run_dir)
    state = read_checkpoint(path)
    session = {**state["session"], "seconds": None}
    session["metrics"] = {key: value for key, value in session["metrics"].items() if not key.startswith("time/")}
    assert set(state.pop("metric_files")) == {"evaluations.jsonl", "metrics.jsonl"}
    rows = replay_rows(path, state["data"].pop("segments", []))
    return {**state, "session": session, "data": {**state["data"], "rows": rows}}


def replay_rows(checkpoint, segments):
    """Return the transitions of a replay buffer that can still be sampled, as bytes, by their number in the run."""
    journal = json.loads((checkpoint / "manifest.json").read_text())["journal"]
    rows = {}
    for first, count, _ in segments:
        name = f"replay/rows_{first:015d}.bin"
        content = (checkpoint.parent.parent / name).read_bytes()
        width = journal[name]["bytes"] // count
        rows.update({first + row: content[row * width : (row + 1) * width] for row in range(count)})
    return {number: rows[number] for number in sorted(rows)[-REPLAY_CAPACITY:]}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Return a function to the directory of an uninterrupted run of each kind, trained once."""
    root, done = tmp_path_factory.mktemp("straight"), {}

    def run_dir(kind):
        if kind not in done:
            done[kind] = train(exact_config(kind), root / kind.replace(" ", "-")).run_dir
        return done[kind]

    return run_dir


# 96 is the end of a rollout, 104 its fourth vector step; 20 is before and 22 just after learning starts.
@pytest.mark.parametrize("stops", [(96,), (104,), (20, 22, 130)], ids=str)
@pytest.mark.parametrize("kind", EXACT)
def test_an_interrupted_run_ends_with_the_bits_of_an_uninterrupted_one(kind, stops, straight, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    starts = [lambda: train(exact_config(kind), run_dir), *[lambda: resume_training(run_dir)] * (len(stops) - 1)]
    for start, stop in zip(starts, stops, strict=True):
        assert train_until_interrupted(monkeypatch, start, stop) == 130
        assert checkpoint_steps(run_dir)[-1] == stop
        assert run_card(run_dir)["status"] == "interrupted"
    resume_training(run_dir)

    assert [entry["from_step"] for entry in run_card(run_dir)["resumes"]] == list(stops)
    assert differences(final_state(run_dir), final_state(straight(kind))) == []
    assert (run_dir / "evaluations.jsonl").read_bytes() == (straight(kind) / "evaluations.jsonl").read_bytes()
    assert first_difference(run_dir, straight(kind)) is None
    assert comparable_rows(run_dir) == comparable_rows(straight(kind))
    assert len(comparable_rows(run_dir)) == {"ppo": 6, "dqn": 12, "sac": 12}[EXACT[kind][0]]


def test_what_exactness_compares_is_there(straight):
    """The replay buffer is full, the normaliser has seen every step, and PPO ends between two rollouts."""
    dqn, ppo = final_state(straight("dqn on cartpole")), final_state(straight("ppo on cartpole"))
    assert sorted(dqn["data"]["rows"]) == list(range(92, 192))
    assert dqn["normalizer"]["observations"]["count"] == 194  # the first observations count as well
    assert (ppo["data"]["position"], ppo["session"]["global_step"]) == (0, 192)
    assert len({*dqn["data"]["rows"].values()}) == 100


def test_a_resumed_run_with_one_changed_number_is_not_the_same(straight, tmp_path, monkeypatch):
    """The negative control: the comparisons above see a single weight that a checkpoint got wrong."""
    run_dir, kind = tmp_path / "run", "dqn on cartpole"
    train_until_interrupted(monkeypatch, lambda: train(exact_config(kind), run_dir), 104)
    path = find_checkpoint(run_dir)
    journal = json.loads((path / "manifest.json").read_text())["journal"]
    state = read_checkpoint(path)
    state["agent"]["q_network"]["0.weight"][0, 0] += 1e-3
    shutil.rmtree(path)
    write_checkpoint(run_dir, 104, state, journal=journal)
    resume_training(run_dir)
    assert "/agent/q_network/0.weight" in differences(final_state(run_dir), final_state(straight(kind)))
    assert comparable_rows(run_dir) != comparable_rows(straight(kind))
    assert first_difference(run_dir, straight(kind)).startswith("metrics.jsonl at step 112: ")


@pytest.mark.parametrize("kind", EXACT)
def test_a_run_that_paused_goes_on_when_it_is_resumed_and_ends_with_the_same_bits(kind, straight, tmp_path):
    paused = train(exact_config(kind, stop_at_step=104), tmp_path / "run")
    assert paused.checkpoint_path.name == "step_000000000104"
    assert run_card(tmp_path / "run")["status"] == "paused"
    resume_training(tmp_path / "run")
    assert run_card(tmp_path / "run")["status"] == "finished"
    assert differences(final_state(tmp_path / "run"), final_state(straight(kind))) == []
    assert comparable_rows(tmp_path / "run") == comparable_rows(straight(kind))


@pytest.mark.parametrize("kind", EXACT)
def test_saving_evaluating_and_logging_do_not_change_what_is_learned(kind, straight, tmp_path):
    config = exact_config(
        kind,
        eval={"every": 10, "episodes": 2},
        logging={"every": 7},
        checkpoint={"every": 6},
    )
    busy, quiet = final_state_of_learning(train(config, tmp_path / "busy").run_dir), straight(kind)
    assert differences(busy, final_state_of_learning(quiet)) == []


def final_state_of_learning(run_dir):
    state = final_state(run_dir)
    return {name: state[name] for name in ("agent", "data", "normalizer", "envs", "global_generators")}


@pytest.mark.parametrize("kind", EXACT)
def test_another_seed_learns_other_parameters(kind, straight, tmp_path):
    other = train(exact_config(kind, seed=2), tmp_path / "other").run_dir
    assert differences(final_state(other)["agent"], final_state(straight(kind))["agent"]) != []


def test_a_run_of_zero_steps_is_a_valid_run(tmp_path):
    config = dataclasses.replace(tiny_run_config("ppo"), total_timesteps=0)
    result = train(config, tmp_path / "run")
    assert result.checkpoint_path.name == "step_000000000000"
    assert [row["step"] for row in metric_rows(result.run_dir)] == [0]
    assert evaluate_checkpoint(result.run_dir, episodes=1).global_step == 0
