"""python -m rl_training.evaluate run=outputs/… episodes=20: plays seeded episodes with a trained agent."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_training.runtime.trainer import EvalResult

USAGE = """Evaluate a trained agent on seeded, deterministic episodes.

usage: python -m rl_training.evaluate run=<run directory> [checkpoint=best] [episodes=20] [seed=…]
       python -m rl_training.evaluate run=<run directory> [checkpoint=best] episodes_from=recorded

  run            a run directory, or one of its checkpoints; may be given several times
  checkpoint     best (default), last, or a step number
  episodes       how many episodes to play
  seed           episode i starts from seed + i; default: eval.seed + 100000, episodes that training never looked at
  episodes_from  recorded plays the episodes again that training played at this checkpoint, and checks that every
                 return is the same"""


def cli() -> None:
    """Run the command."""
    from rl_training.arguments import fail, parse_key_values, whole_number, working_directory_importable
    from rl_training.errors import UserError

    converters: dict[str, Callable[[str], Any]] = {
        "run": Path,
        "checkpoint": str,
        "episodes": whole_number,
        "seed": whole_number,
        "episodes_from": str,
    }
    working_directory_importable()
    try:
        arguments = parse_key_values(sys.argv[1:], converters, USAGE)
        if "run" not in arguments:
            raise UserError("Name a run: python -m rl_training.evaluate run=outputs/ppo/cartpole/<run>")
        last = {key: values[-1] for key, values in arguments.items()}
        checkpoint = last.get("checkpoint", "best")
        if last.get("episodes", 1) < 1:
            raise UserError(f"episodes must be at least 1, got {last['episodes']}.")
        if last.get("seed", 0) < 0:
            raise UserError(f"seed must be at least 0, got {last['seed']}.")
        if "episodes_from" in last:
            if last["episodes_from"] != "recorded" or "episodes" in last or "seed" in last:
                raise UserError("episodes_from=recorded stands alone: it sets episodes and seed itself.")
            for run in arguments["run"]:
                _repeat(run, checkpoint)
        else:
            for run in arguments["run"]:
                _evaluate(run, checkpoint, last.get("episodes", 20), last.get("seed"))
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _evaluate(run: Path, checkpoint: str, episodes: int, seed: int | None) -> None:
    from rl_training.runtime.workflows import evaluate_checkpoint

    result = evaluate_checkpoint(
        run, checkpoint=checkpoint, episodes=episodes, seed=seed, on_episode=_progress(f"of {episodes} ")
    )
    _print(run, result)


def _repeat(run: Path, checkpoint: str) -> None:
    from rl_training.errors import UserError
    from rl_training.runtime.workflows import repeat_evaluation

    result, logged = repeat_evaluation(run, checkpoint=checkpoint, on_episode=_progress(""))
    _print(run, result)
    if list(result.returns) != logged:
        raise UserError(f"{run}: the returns are not those that training logged: {logged}")
    print("every return is the same as in training")


def _print(run: Path, result: "EvalResult") -> None:
    summary = result.summary
    spread = (
        f"standard deviation {summary.std:.2f}, 95 % interval [{summary.low:.2f}, {summary.high:.2f}], "
        if summary.count > 1
        else ""
    )
    episodes = f"{summary.count} episode{'s' if summary.count > 1 else ''} from seed {result.first_seed}"
    print(f"{run} at step {result.global_step:,}: return {summary.mean:.2f}, {spread}{episodes}")


def _progress(total: str) -> Callable[[int], None] | None:
    """Return a function that counts episodes on one line, if somebody is looking."""
    if not sys.stderr.isatty():
        return None
    return lambda played: print(f"\r\x1b[K{played} {total}episodes\r", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    cli()
