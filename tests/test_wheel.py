"""The wheel works on its own: YAML groups and type marker inside, train, sweep, resume and evaluate from elsewhere."""

import os
import subprocess
import sys
import zipfile

import pytest
from cli_helpers import (
    REPO,
    TINY_PPO,
    checkpoint_steps,
    command_environment,
    metric_rows,
    only_run_dir,
    run_dirs,
    run_evaluate,
    run_train,
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel and return it."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(directory), str(REPO)]
    result = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = directory.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Install the wheel into a directory of its own and return that."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-warn-conflicts"]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    result = subprocess.run(
        [*command, "--target", str(target), str(wheel)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return target


@pytest.fixture
def environment(installed):
    """Return the environment of a process that sees the installed copy and not this checkout."""
    return command_environment(PYTHONPATH=str(installed))


def test_the_wheel_holds_the_groups_and_the_type_marker(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "rl_training/py.typed" in names
    shipped = {f"rl_training/{path.relative_to(REPO).as_posix()}" for path in (REPO / "conf").rglob("*.yaml")}
    assert len(shipped) >= 20
    assert shipped <= names
    modules = {path.relative_to(REPO).as_posix() for path in (REPO / "rl_training").rglob("*.py")}
    assert modules <= names


def test_the_wheel_holds_nothing_but_the_package(wheel):
    roots = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"rl_training"}


def test_the_wheel_declares_both_commands(wheel):
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    text = archive.read(entry_points).decode()
    assert "rl-train = rl_training.train:cli" in text
    assert "rl-evaluate = rl_training.evaluate:cli" in text


def test_the_installed_copy_is_the_one_that_runs(installed, environment, tmp_path):
    code = "import sys, rl_training, rl_training.config.conversion as c; print(rl_training.__file__, c.conf_dir())"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    package = installed / "rl_training"
    assert result.stdout.strip() == f"{package / '__init__.py'} {package / 'conf'}"


def test_the_installed_copy_trains_resumes_and_evaluates(installed, environment, tmp_path):
    script = installed / "bin" / "rl-train"
    result = subprocess.run(
        [sys.executable, str(script), *TINY_PPO],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    run_dir = only_run_dir(tmp_path)
    assert checkpoint_steps(run_dir) == [128]

    result = run_train(f"resume={run_dir}", "total_timesteps=160", cwd=tmp_path, environment=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert [row["step"] for row in metric_rows(run_dir)] == [32, 64, 96, 128, 160]

    result = run_evaluate(f"run={run_dir}", "checkpoint=last", "episodes=2", cwd=tmp_path, environment=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"{run_dir} at step 160: return " in result.stdout


def test_the_installed_copy_sweeps(environment, tmp_path):
    result = run_train("-m", *TINY_PPO, "seed=1,2", cwd=tmp_path, environment=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert [run_dir.name for run_dir in run_dirs(tmp_path)] == ["0-ppo-cartpole-s1", "1-ppo-cartpole-s2"]
