"""Imports point down only, checked on the source of every module, inside functions too."""

import ast
from pathlib import Path

import pytest
from cli_helpers import REPO

PACKAGE = REPO / "rl_training"

# From top to bottom. Each inner tuple is one layer; its members do not import each other. A name stands for a module,
# or for all modules of a package, which may import each other.
LAYERS = (
    ("train", "evaluate", "verify"),
    ("cli",),
    ("arguments", "help"),
    ("api",),
    ("experiment.default_manager",),
    ("experiment.manager",),
    ("runtime.workflows",),
    ("experiment.registry",),
    ("runtime.ppo_trainer", "runtime.dqn_trainer", "runtime.sac_trainer"),
    ("runtime.session",),
    ("runtime.reporting",),
    ("runtime.callbacks",),
    ("runtime.run_utils", "runtime.replay_journal", "runtime.comparison"),
    ("runtime.automatic",),
    (
        "runtime.checkpointing",
        "runtime.loggers",
        "runtime.evaluation",
        "runtime.run_card",
        "runtime.exactness",
        "runtime.metrics",
    ),
    ("runtime.trainer",),
    ("envs", "algorithms"),
    ("data",),
    ("networks",),
    ("config",),
    ("numerics",),
    ("errors", "seeding", "spaces", "transfer", "runtime.system", "runtime.statistics", "runtime.state_tree"),
)
# Packages whose __init__ holds nothing but a docstring.
EMPTY_PACKAGES = ("algorithms", "api", "data", "envs", "experiment", "networks", "runtime")
BATCH_TYPES = {"RolloutBatch", "Transitions"}


def modules() -> dict[str, Path]:
    """Return every module of the package by its name without the leading "rl_training."; the package itself is ""."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def layer_of(module: str) -> tuple[int, str] | None:
    """Return the rank of a module (0 is the top) and the entry of LAYERS that covers it."""
    for rank, layer in enumerate(LAYERS):
        for entry in layer:
            if module == entry or module.startswith(f"{entry}."):
                return rank, entry
    return None


def imports(source: str, module: str) -> list[tuple[str, str]]:
    """Return (full module name, imported name or "") of every import that runs, wherever it stands."""
    found = []
    package = ["rl_training", *module.split(".")[:-1]]

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            found.extend((base, alias.name) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


def own_imports(source: str, module: str) -> list[tuple[str, str]]:
    """Return the imports from the package itself: the module without "rl_training.", and the name taken from it."""
    found = []
    for name, attribute in imports(source, module):
        if name != "rl_training" and not name.startswith("rl_training."):
            continue
        inner = name.removeprefix("rl_training").removeprefix(".")
        submodule = f"{inner}.{attribute}".removeprefix(".")
        found.append((submodule, "") if attribute and submodule in MODULES else (inner, attribute))
    return found


def violations(source: str, module: str) -> list[str]:
    """Return what a module imports against the rule."""
    found = []
    position = layer_of(module)
    for target, attribute in own_imports(source, module):
        if target == "" and attribute == "__version__":
            continue
        reached = layer_of(target)
        if position is None or reached is None:
            found.append(f"{module} imports {target or 'rl_training'}")
        elif reached[0] <= position[0] and reached[1] != position[1]:
            found.append(f"{module} imports {target}")
        elif position[1] == "algorithms" and reached[1] == "data" and attribute not in BATCH_TYPES:
            found.append(f"{module} imports {attribute} of {target}")
    return found


def foreign(source: str, module: str) -> set[str]:
    """Return the top-level packages that a module imports from elsewhere."""
    return {name.partition(".")[0] for name, _ in imports(source, module)} - {"rl_training"}


def sources(*entries: str) -> dict[str, str]:
    """Return the source of every module, or of those that entries of LAYERS cover."""
    return {
        module: path.read_text()
        for module, path in MODULES.items()
        if not entries or ((position := layer_of(module)) is not None and position[1] in entries)
    }


def test_every_module_has_its_layer():
    assert sorted(module for module in MODULES if layer_of(module) is None) == ["", "experiment", "runtime"]


@pytest.mark.parametrize("module", sorted(set(MODULES) - {""}))
def test_imports_point_down(module):
    if module in EMPTY_PACKAGES:
        assert own_imports(MODULES[module].read_text(), module) == []
    else:
        assert violations(MODULES[module].read_text(), module) == []


def test_the_package_itself_imports_only_the_public_names_and_only_when_asked():
    source = MODULES[""].read_text()
    assert own_imports(source, "") == [("api.algorithms", "")]
    top_level = [node for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [ast.unparse(node) for node in top_level] == ["from typing import TYPE_CHECKING, Any"]


def test_packages_export_nothing_by_themselves():
    for package in EMPTY_PACKAGES:
        body = ast.parse(MODULES[package].read_text()).body
        assert [type(node) for node in body] == [ast.Expr], package
    assert not {target for target, _ in own_imports(MODULES["config"].read_text(), "config")} & {
        "config.store",
        "config.conversion",
    }


def test_only_the_command_line_and_the_registration_know_hydra():
    users = {module for module, source in sources().items() if "hydra" in foreign(source, module)}
    assert users == {"cli", "config.store"}


def test_algorithms_networks_and_data_know_neither_gymnasium_nor_config_files():
    for module, source in sources("algorithms", "networks", "data").items():
        assert not foreign(source, module) & {"gymnasium", "hydra", "omegaconf", "tensorboard"}, module


def test_what_a_look_at_the_help_imports_names_torch_and_gymnasium_nowhere():
    early = sources(
        "train", "evaluate", "verify", "cli", "experiment.default_manager", "experiment.registry", "config", "errors"
    )
    assert len(early) >= 12
    for module, source in early.items():
        assert not foreign(source, module) & {"torch", "gymnasium", "tensorboard"}, module


# Negative controls: the checker sees what it is there to see


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("networks.mlp", "from rl_training.data.replay_buffer import Transitions", "imports data.replay_buffer"),
        ("config.fields", "import rl_training.runtime.session", "imports runtime.session"),
        ("runtime.ppo_trainer", "from rl_training.runtime.dqn_trainer import x", "imports runtime.dqn_trainer"),
        ("runtime.loggers", "from rl_training.runtime.checkpointing import x", "imports runtime.checkpointing"),
        ("envs.factory", "def f():\n    from rl_training.algorithms import ppo", "imports algorithms.ppo"),
        ("algorithms.sac", "from rl_training.envs.factory import make_env", "imports envs.factory"),
        ("algorithms.sac", "from rl_training.data.replay_buffer import ReplayBuffer", "imports ReplayBuffer of"),
        ("errors", "from rl_training import seeding", "imports seeding"),
        ("data.replay_buffer", "from rl_training import fit", "imports rl_training"),
        ("runtime.callbacks", "from . import session", "imports runtime.session"),
        ("runtime.callbacks", "class A:\n    def f(self):\n        from .session import x", "imports runtime.session"),
        ("envs.factory", "if TYPE_CHECKING:\n    pass\nelse:\n    import rl_training.cli", "imports cli"),
        ("a_module_without_a_layer", "import rl_training.errors", "imports errors"),
    ],
)
def test_a_violation_is_found(module, source, expected):
    (found,) = violations(source, module)
    assert found.startswith(f"{module} {expected}")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cli", "from rl_training.config.store import register_schemas"),
        ("algorithms.sac", "from rl_training.data.replay_buffer import Transitions"),
        ("algorithms.sac", "from rl_training.algorithms.noise import normal"),
        ("runtime.run_utils", "from rl_training import __version__"),
        ("config.fields", "if TYPE_CHECKING:\n    from rl_training.cli import fail"),
        ("errors", "import json"),
    ],
)
def test_what_the_rule_allows_is_not_flagged(module, source):
    assert violations(source, module) == []


def test_an_import_of_hydra_inside_a_function_is_seen():
    assert foreign("def f():\n    from hydra.core.config_store import ConfigStore", "api.algorithms") == {"hydra"}
