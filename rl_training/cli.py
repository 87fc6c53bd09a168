"""Hydra plumbing of the training command.

Hydra composes the config and makes the run directory. Around it: `resume=<dir>` is resolved before composition, the
`Preflight` callback checks everything before the directory is made, and what the user can mend ends in one line.
"""

import os
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from rl_training.arguments import fail, leave, working_directory_importable
from rl_training.config import TrainConfig
from rl_training.config.conversion import conf_dir, describe_omegaconf_error, load_yaml, to_train_config
from rl_training.config.store import register_schemas
from rl_training.errors import UserError, did_you_mean
from rl_training.experiment import registry
from rl_training.experiment.default_manager import DefaultExperimentManager, check_experiment
from rl_training.help import training_help
from rl_training.runtime.automatic import thread_count
from rl_training.runtime.system import launcher, pin_threads


def train_main() -> None:
    """Run the training command with the arguments of this process."""
    # Hydra would print its own summary of an exception; with this it raises, and we print.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    _register()
    working_directory_importable()
    try:
        if {"-h", "--help"} & set(sys.argv[1:]):
            overrides = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
            print(training_help(to_train_config(_composed(overrides)), launcher()))
            return
        sys.argv[1:] = prepare_resume([whole_number_override(argument) for argument in sys.argv[1:]])
        _hydra_main()
    except UserError as error:
        fail(str(error))
    except HydraException as error:
        fail(describe_hydra_error(error))
    except KeyboardInterrupt as error:
        leave(str(error) or "interrupted", getattr(error, "exit_code", 130))


def compose_config(overrides: Sequence[str]) -> TrainConfig:
    """Compose and check the config of a training command without running it."""
    _register()
    return checked_config(_composed(overrides))


def _composed(overrides: Sequence[str]) -> DictConfig:
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        try:
            return hydra.compose("config", [whole_number_override(override) for override in overrides])
        except HydraException as error:
            raise UserError(describe_hydra_error(error)) from None


def _register() -> None:
    OmegaConf.register_new_resolver(
        "uid", lambda digits: secrets.token_hex(int(digits) // 2), use_cache=True, replace=True
    )
    register_schemas({name: registry.get(name).config_class for name in registry.names()})


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
def _hydra_main(composed: DictConfig) -> float | None:
    """Train one run; the returned evaluation return is what a sweeper optimises."""
    try:
        _check_preset(HydraConfig.get().overrides.task, composed)
        config = checked_config(composed)
        manager = DefaultExperimentManager()
        if config.resume is not None:
            trainer = manager.resume(config.resume, config=config)
        else:
            trainer = manager.setup(config, run_dir=Path(HydraConfig.get().runtime.output_dir))
        return trainer.train().metrics.get("eval/return_mean")
    except UserError as error:
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            raise  # Hydra names the job and goes on with the others
        fail(str(error))


def checked_config(composed: DictConfig) -> TrainConfig:
    """Convert Hydra's config to dataclasses and check it against the environment and the machine."""
    config = to_train_config(composed)
    pin_threads(thread_count(config))
    check_experiment(config)
    return config


class Preflight(Callback):
    """Checks a single run before Hydra makes its directory; the jobs of a sweep check themselves."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Leave at once if the config cannot train, or if the run to resume has nothing left to do."""
        composed = config.copy()
        with open_dict(composed):
            del composed["hydra"]
        try:
            _check_preset(config.hydra.overrides.task, config)
            checked = checked_config(composed)
            if checked.resume is None:
                _check_new_directory(Path(config.hydra.run.dir))
            else:
                _check_resume(Path(checked.resume), checked)
        except UserError as error:
            # Hydra turns other exceptions of a callback into warnings.
            fail(str(error))


def _check_new_directory(run_dir: Path) -> None:
    from rl_training.runtime.run_utils import require_no_run

    require_no_run(run_dir)
    existing = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"Cannot make the run directory {run_dir}: {existing} is not a directory that can be written.")


def _check_resume(path: Path, config: TrainConfig) -> None:
    """Refuse a run that cannot go on with this config; leave if it has nothing left to do."""
    from rl_training.runtime.workflows import (
        check_resumable,
        checkpoint_to_continue,
        finished_step,
        load_run_config,
        locate_run,
    )

    check_resumable(load_run_config(locate_run(path)), config)
    checkpoint = checkpoint_to_continue(path, config, warn=False)
    if (step := finished_step(path, checkpoint, config)) is not None:
        leave(f"{path} is finished at step {step:,}; total_timesteps=<more> goes further.", 0)


def _check_preset(overrides: Sequence[str], config: DictConfig) -> None:
    """Refuse tuned=<name> if nothing has that name, which Hydra would pass over, and a preset of another algorithm."""
    if any(override.startswith("preset=") for override in overrides):
        raise UserError("preset is set by the preset itself. Use tuned=<name> to choose one, tuned=none for none.")
    asked = [override for override in overrides if override.startswith("tuned=")]
    presets = sorted(path.stem for path in (conf_dir() / "tuned").glob("*.yaml"))
    if asked and asked[-1] != "tuned=none" and config.preset is None:
        name = asked[-1].partition("=")[2]
        raise UserError(f"{asked[-1]} does not exist.{did_you_mean(name, presets)} Choose from {', '.join(presets)}.")
    if asked and config.preset is not None and not config.preset.startswith(f"{config.algo.name}_"):
        raise UserError(f"tuned={config.preset} is a preset of another algorithm than algo={config.algo.name}.")


def whole_number_override(argument: str) -> str:
    """Write 1e5 as 100000, so that whole-number settings accept it; texts below env.env_kwargs stay as they are."""
    key, separator, value = argument.partition("=")
    if separator and not key:
        raise UserError(f"{argument} has no key before the equals sign. Write key=value.")
    if not separator or key == "resume" or key.lstrip("+").startswith("env.env_kwargs"):
        return argument
    return f"{key}={','.join(_whole_number(part) for part in value.split(','))}"


def _whole_number(text: str) -> str:
    if re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d+", text) and float(text).is_integer():
        return str(int(float(text)))
    return text


def prepare_resume(arguments: list[str]) -> list[str]:
    """Replace resume=<dir> by a config that holds the run's saved settings and points Hydra at its directory.

    The path never meets Hydra's grammar, so any directory name works. Hydra's record of the new start goes beside the
    original one.
    """
    paths = [argument.partition("=")[2] for argument in arguments if argument.startswith("resume=")]
    paths = [path.strip("'\"") for path in paths if path != "null"]
    if "" in paths:
        raise UserError("resume= needs a run directory, such as resume=outputs/sac/pendulum/<run>.")
    if not paths:
        return arguments
    if len(paths) > 1 or {"-m", "--multirun"} & set(arguments):
        raise UserError("resume= takes one directory, and no sweep.")

    from rl_training.runtime.run_utils import saved_config_file
    from rl_training.runtime.workflows import locate_run

    run_dir = locate_run(Path(paths[0]))
    saved = load_yaml(saved_config_file(run_dir))
    saved["stop_at_step"] = None  # it belongs to one launch
    saved["resume"] = _literal(Path(paths[0]).expanduser().resolve())
    spec = registry.get(saved.get("algo", {}).get("name", ""))
    record = next(f"resume_{k}" for k in range(1, 10**6) if not (run_dir / ".hydra" / f"resume_{k}").exists())
    node = {
        "defaults": [
            "schema/train",
            "runtime",
            {"/schema/algo@algo": spec.name},
            "/schema/env@env",
            "/schema/device@device",
            "/schema/logging@logging",
            "_self_",
        ],
        **saved,
        "hydra": {"run": {"dir": _literal(run_dir)}, "output_subdir": f".hydra/{record}"},
    }
    ConfigStore.instance().store(name="_resume", node=OmegaConf.create(node))
    others = [
        setting for argument in arguments if not argument.startswith("resume=") for setting in _group_settings(argument)
    ]
    return [*others, "--config-name=_resume"]


def _literal(path: Path) -> str:
    """Return a path that OmegaConf takes as it is, even with "${" in it."""
    return str(path).replace("${", "\\${")


def _group_settings(argument: str) -> list[str]:
    """Replace device=cpu and logging=none, which may change on resume, by the settings of the group."""
    group, _, choice = argument.partition("=")
    if group in ("algo", "env", "tuned"):
        raise UserError(f"{argument} cannot be combined with resume=: a resumed run keeps its {group}.")
    if group not in ("device", "logging"):
        return [argument]
    file = conf_dir() / group / f"{choice}.yaml"
    if not file.is_file():
        choices = sorted(path.stem for path in file.parent.glob("*.yaml"))
        raise UserError(f"{argument} does not exist.{did_you_mean(choice, choices)} Choose from {', '.join(choices)}.")
    return [f"{group}.{key}={value}" for key, value in load_yaml(file).items() if key != "defaults"]


def describe_hydra_error(error: HydraException) -> str:
    """Say in one line what Hydra could not compose."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        options = [option for option in error.options or () if "/" not in option]
        return f"{group}={choice} does not exist.{did_you_mean(choice, options)} Choose from {', '.join(options)}."
    if isinstance(error.__cause__, OmegaConfBaseException):
        typed = re.match(r"Could not override '(.+)'", str(error))
        return describe_omegaconf_error(error.__cause__, typed and typed[1])
    problem = " ".join(str(error).split()).partition(" See https")[0]
    if problem.startswith("Ambiguous value"):
        return "An argument has several values, separated by commas: add -m to sweep over them."
    if "Lexer" in problem or "parsing override" in problem:
        problem += """. Write key=value; a value with special characters needs quotes, as in 'key="a~b"'."""
    return problem
