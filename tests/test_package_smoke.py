"""The package as a whole: what importing it loads, and that every name and module is there."""

import importlib
import pkgutil
import re
import subprocess
import sys

import pytest
from cli_helpers import command_environment

import rl_training

PUBLIC_NAMES = [
    "DQN",
    "PPO",
    "SAC",
    "Callback",
    "EnvConfig",
    "EvalResult",
    "TrainConfig",
    "TrainResult",
    "TrainerState",
    "evaluate_checkpoint",
    "fit",
    "make_config",
    "resume_training",
    "train_dqn",
    "train_ppo",
    "train_sac",
]
MODULES = sorted(info.name for info in pkgutil.walk_packages(rl_training.__path__, "rl_training."))


def loaded_after(statement, cwd):
    names = ("torch", "gymnasium", "hydra", "omegaconf", "tensorboard", "numpy")
    code = f"{statement}\nimport sys\nprint(*(name for name in {names} if name in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=command_environment(), capture_output=True, text=True, check=True
    )
    return result.stdout.split()


def test_importing_the_package_loads_nothing_large(tmp_path):
    assert loaded_after("import rl_training", tmp_path) == []


def test_importing_the_config_loads_neither_hydra_nor_torch(tmp_path):
    assert not set(loaded_after("import rl_training.config", tmp_path)) & {"torch", "gymnasium", "hydra", "tensorboard"}


def test_the_python_api_needs_no_hydra(tmp_path):
    loaded = loaded_after("import rl_training\nrl_training.make_config('sac', 'Pendulum-v1')", tmp_path)
    assert "hydra" not in loaded
    assert "torch" in loaded  # the check can see what is loaded


def test_the_public_names_are_those_that_are_documented():
    assert sorted(rl_training.__all__) == sorted(PUBLIC_NAMES)


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_a_public_name_resolves(name):
    assert callable(getattr(rl_training, name))


def test_dir_lists_the_public_names():
    assert set(dir(rl_training)) >= {*PUBLIC_NAMES, "__version__"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'rl_training' has no attribute 'trian'"):
        rl_training.trian  # noqa: B018


def test_no_public_function_has_the_name_of_a_command():
    commands = {name.removeprefix("rl_training.") for name in MODULES if name.count(".") == 1}
    assert {"train", "evaluate", "cli"} <= commands
    assert not commands & set(PUBLIC_NAMES)


def test_the_version_is_a_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", rl_training.__version__)


@pytest.mark.parametrize("module", MODULES)
def test_every_module_imports_and_says_what_it_is_for(module):
    assert importlib.import_module(module).__doc__


def test_there_are_modules_to_import():
    assert len(MODULES) > 40
