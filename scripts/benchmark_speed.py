"""Compares training speed with other libraries on the same hyperparameters.

Run it as `python scripts/benchmark_speed.py [peers=sb3,sbx] [workloads=W1,W2,W3,W4,W5] [rounds=3] [core=0]
[peers_python=<interpreter>]`. The peers come from the extra `bench`, or from another interpreter that has them. Every
library trains in a process of its own on one core and one thread, round by round, library by library. We are there
twice: "ours" is what a short run does (device.compile=false), "ours, compiled" what a long one does
(device.compile=true); both through the training command with default logging, evaluation off.

The table shows medians over the rounds:

env steps/s       between the end of the warm-up, which is well after the first update and so after all compiling, and
                  the end of training: from our metric rows, from a callback in the peers.
x <peer>          env steps/s over those of this peer.
start-up (s)      from the start of the process to its first env step: interpreter, imports, config, networks, reset.
                  For sbx that includes compiling the policy, which has to act first.
compile, cold (s) in the first round. Ours: the whole first gradient step, which imports the compiler, traces and
                  compiles, with empty directories for everything that torch keeps (its precompiled headers too, which
                  are not in TORCHINDUCTOR_CACHE_DIR but in TMPDIR). sbx: all the time that JAX reports as tracing,
                  lowering and compiling, over the whole run.
compile, warm (s) in the rounds after it: ours then finds the compiled code of the first; JAX keeps none by default.
peak memory (MB)  the largest resident size of the training process; the C++ compiler's own processes are not in it.

The hyperparameters differ in one thing: sbx's DQN takes one width for all layers (120-120 in W2, not 120-84) and does
not clip gradients.
"""

import dataclasses
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Nothing of rl_training up here: the peers' interpreter, which runs this file too, need not have it.


@dataclass(frozen=True)
class Workload:
    """One comparison: our overrides, and the same hyperparameters as keyword arguments of a peer.

    The warm-up ends after the first update, and what follows takes the fastest library some seconds.
    """

    algo: str
    env_id: str
    steps: int
    warm_up: int
    ours: tuple[str, ...] = ()
    peer: dict[str, Any] = field(default_factory=dict)
    num_envs: int = 1


WORKLOADS = {
    "W1": Workload(
        "ppo",
        "CartPole-v1",
        steps=400_000,
        warm_up=20_000,
        num_envs=4,
        ours=(
            *("algo.num_steps=128", "algo.minibatch_size=128", "algo.num_epochs=4", "algo.learning_rate=2.5e-4"),
            "algo.entropy_coef=0.01",
        ),
        peer={"n_steps": 128, "batch_size": 128, "n_epochs": 4, "learning_rate": 2.5e-4, "ent_coef": 0.01},
    ),
    "W2": Workload(
        "dqn",
        "CartPole-v1",
        steps=120_000,
        warm_up=5_000,
        ours=(
            *("algo.hidden_sizes=[120,84]", "algo.batch_size=128", "algo.train_every=10", "algo.buffer_size=10_000"),
            *("algo.learning_starts=1000", "algo.target_update_every=500", "algo.double_q=false"),
        ),
        peer={
            "policy_kwargs": {"net_arch": [120, 84]},
            "batch_size": 128,
            "train_freq": 10,
            "buffer_size": 10_000,
            "learning_starts": 1000,
            "target_update_interval": 500,
        },
    ),
    "W3": Workload("sac", "Pendulum-v1", steps=5_000, warm_up=1_000),
    "W4": Workload("ppo", "HalfCheetah-v5", steps=81_920, warm_up=4_096),
    "W5": Workload("sac", "HalfCheetah-v5", steps=5_000, warm_up=1_000),
}
OURS = {"ours": False, "ours, compiled": True}
BUSY = 0.9
"""A process that gets less of its core than this shares it with something else."""
PEERS = {"sb3": "stable_baselines3", "sbx": "sbx"}


class BenchmarkError(Exception):
    """Something that keeps the benchmark from running; shown as one line."""


@dataclass(frozen=True)
class Report:
    """What a process tells of its own training."""

    first_step_at: float
    """On the monotonic clock, which all processes of a machine share."""
    marks: list[tuple[int, float]]
    """(env steps, seconds) at the end of the warm-up and at the end."""
    compile_seconds: float | None
    megabytes: float


@dataclass(frozen=True)
class Measurement:
    """What one process took."""

    steps_per_second: float
    startup_seconds: float
    compile_seconds: float | None
    megabytes: float


def main() -> None:
    """Measure and print the table."""
    if sys.argv[1:2] == ["--run"]:
        library, workload, directory = sys.argv[2:]
        run(library, WORKLOADS[workload], Path(directory))
        return
    from rl_training.arguments import fail, parse_key_values, whole_number
    from rl_training.errors import UserError

    names = {"peers": str, "workloads": str, "rounds": whole_number, "core": whole_number, "peers_python": str}
    try:
        arguments = parse_key_values(sys.argv[1:], names, __doc__ or "")
        peers = [name for name in arguments.get("peers", [""])[-1].split(",") if name]
        workloads = arguments.get("workloads", [",".join(WORKLOADS)])[-1].split(",")
        check_names("peers", peers, PEERS)
        check_names("workloads", workloads, WORKLOADS)
        core = checked_core(arguments.get("core", [0])[-1])
        python = arguments.get("peers_python", [sys.executable])[-1]
        check_installed(peers, python)
        compare(workloads, peers, max(1, arguments.get("rounds", [3])[-1]), core, python)
    except (UserError, BenchmarkError) as error:
        fail(str(error))


def check_names(key: str, names: Sequence[str], known: Collection[str]) -> None:
    """Refuse names that nothing has."""
    for name in names:
        if name not in known:
            raise BenchmarkError(f"{key}={name} does not exist. Choose from {', '.join(known)}.")


def checked_core(core: int) -> int:
    """Return the core if this process may use it."""
    if hasattr(os, "sched_getaffinity") and core not in os.sched_getaffinity(0):
        raise BenchmarkError(f"core={core} is not among the cores here: {sorted(os.sched_getaffinity(0))}.")
    return core


def check_installed(peers: Sequence[str], python: str) -> None:
    """Refuse peers that their interpreter does not have."""
    for peer in peers:
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({PEERS[peer]!r}) is None)"
        try:
            missing = subprocess.run([python, "-c", code], check=False).returncode != 0
        except OSError as error:
            raise BenchmarkError(f"Cannot run peers_python={python}: {error.strerror}.") from None
        if missing:
            raise BenchmarkError(
                f"{python} has no {PEERS[peer]}: pip install 'rl_training[bench]', "
                "or name an interpreter that has it with peers_python=<path>."
            )


def compare(workloads: Sequence[str], peers: Sequence[str], rounds: int, core: int, python: str) -> None:
    """Train every workload with every library, and print a row for each."""
    columns = [
        *("workload", "library", "env steps/s", *(f"x {peer}" for peer in peers)),
        *("start-up (s)", "compile, cold (s)", "compile, warm (s)", "peak memory (MB)"),
    ]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for workload in workloads:
        measured: dict[str, list[Measurement]] = {library: [] for library in (*OURS, *peers)}
        with tempfile.TemporaryDirectory() as cache:
            for _ in range(rounds):
                for library, runs in measured.items():
                    interpreter = sys.executable if library in OURS else python
                    runs.append(measure(interpreter, library, workload, core, Path(cache)))
        print_rows(workload, measured, peers)


def print_rows(workload: str, measured: dict[str, list[Measurement]], peers: Sequence[str]) -> None:
    """Print the medians of one workload, a row for each library."""
    speeds = {library: statistics.median(m.steps_per_second for m in runs) for library, runs in measured.items()}
    for library, runs in measured.items():
        compiling = [m.compile_seconds for m in runs if m.compile_seconds is not None]
        cells = [
            *(workload, library, f"{speeds[library]:,.0f}"),
            *(f"{speeds[library] / speeds[peer]:.2f}" for peer in peers),
            f"{statistics.median(m.startup_seconds for m in runs):.1f}",
            f"{compiling[0]:.1f}" if compiling else "-",
            f"{statistics.median(compiling[1:]):.1f}" if compiling[1:] else "-",
            f"{statistics.median(m.megabytes for m in runs):.0f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def measure(python: str, library: str, workload: str, core: int, cache: Path) -> Measurement:
    """Train one workload in a process of its own, which finds and leaves compiled code in `cache`."""
    with tempfile.TemporaryDirectory() as directory:
        start = time.monotonic()
        run_on_one_core([python, __file__, "--run", library, workload, directory], core, cache)
        report = Report(**json.loads((Path(directory) / "report.json").read_text()))
    (first_step, first_time), (last_step, last_time) = report.marks
    return Measurement(
        steps_per_second=(last_step - first_step) / (last_time - first_time),
        startup_seconds=report.first_step_at - start,
        compile_seconds=report.compile_seconds,
        megabytes=report.megabytes,
    )


def run_on_one_core(command: list[str], core: int, cache: Path) -> None:
    """Run a command to its end on one core and one thread."""
    environment = {
        **os.environ,
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TMPDIR": str(cache),
    }
    pin = (lambda: os.sched_setaffinity(0, {core})) if hasattr(os, "sched_setaffinity") else None
    start, cpu_before = time.monotonic(), cpu_seconds_of_children()
    done = subprocess.run(
        command, env=environment, preexec_fn=pin, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise BenchmarkError(f"{' '.join(command)} failed: {reason}")
    share = (cpu_seconds_of_children() - cpu_before) / (time.monotonic() - start)
    if share < BUSY:
        label = " ".join(command[3:-1])
        print(f"warning: {label}: other work took {1 - share:.0%} of core {core}", file=sys.stderr, flush=True)


def cpu_seconds_of_children() -> float:
    """Return the processor time of all processes that were started here and have ended."""
    times = os.times()
    return times.children_user + times.children_system


def run(library: str, workload: Workload, directory: Path) -> None:
    """Train in this process and leave a report."""
    report = train_ours(workload, OURS[library], directory) if library in OURS else train_peer(library, workload)
    (directory / "report.json").write_text(json.dumps(dataclasses.asdict(report)))


def train_ours(workload: Workload, compiled: bool, directory: Path) -> Report:
    """Train by our training command."""
    first_step: list[float] = []
    first_update: list[float] = []

    def watch() -> None:
        from rl_training.envs.training_envs import TrainingEnvs

        time_first_call(TrainingEnvs, "step", first_step)
        time_first_call(agent_class(workload.algo), "update", first_update)

    run_training_command(our_overrides(workload, compiled, directory / "run"), watch)
    check_update_path(directory / "run", compiled)
    rows = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    warm_up = next(row for row in rows if row["step"] >= workload.warm_up)
    return Report(
        first_step_at=first_step[0],
        marks=[(row["step"], row["time/seconds"]) for row in (warm_up, rows[-1])],
        compile_seconds=first_update[1] - first_update[0] if compiled else None,
        megabytes=peak_megabytes(),
    )


def our_overrides(workload: Workload, compiled: bool, run_dir: Path) -> list[str]:
    """Return the arguments of the training command."""
    return [
        *(f"algo={workload.algo}", "env=gym", f"env.id={workload.env_id}", f"env.num_envs={workload.num_envs}"),
        *("tuned=none", "eval.episodes=0", f"total_timesteps={workload.steps}", "device=cpu", *workload.ours),
        *(f"device.compile={str(compiled).lower()}", f"hydra.run.dir={run_dir}"),
    ]


def run_training_command(overrides: list[str], watch: Callable[[], None]) -> None:
    """Run the training command in this process; `watch` is called when it has imported all it needs, not before."""
    from rl_training.experiment.registry import AlgorithmSpec
    from rl_training.train import cli

    load_train = AlgorithmSpec.load_train

    def load_and_watch(spec: AlgorithmSpec) -> Any:
        train = load_train(spec)
        watch()
        return train

    AlgorithmSpec.load_train = load_and_watch  # type: ignore[method-assign]
    sys.argv[1:] = overrides
    cli()


def agent_class(algo: str) -> type:
    """Return the class of our agent."""
    return getattr(importlib.import_module(f"rl_training.algorithms.{algo}"), f"{algo.upper()}Agent")


def check_update_path(run_dir: Path, compiled: bool) -> None:
    """Refuse the numbers of a run that went on without compiling, as it does where that fails."""
    path = json.loads((run_dir / "metadata.json").read_text())["updates"]
    if compiled != (path == "compiled"):
        raise SystemExit(f"the updates of this run were {path}; is there a C++ compiler?")


def time_first_call(owner: Any, name: str, times: list[float]) -> None:
    """Note when the first call of a function starts and ends; later calls are the function's own."""
    function = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, function)
        start = time.monotonic()
        result = function(*args, **kwargs)
        times.extend((start, time.monotonic()))
        return result

    setattr(owner, name, timed)


def peak_megabytes() -> float:
    """Return the largest resident size of this process so far."""
    import resource

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / 2**20 if sys.platform == "darwin" else size / 2**10


def train_peer(library: str, workload: Workload) -> Report:
    """Train with a peer."""
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    marks: list[tuple[int, float]] = []
    compiling = jax_compilations() if library == "sbx" else None

    class Mark(BaseCallback):  # type: ignore[misc]
        def _on_step(self) -> bool:
            if not marks and self.num_timesteps >= workload.warm_up:
                marks.append((self.num_timesteps, time.monotonic()))
            return True

    algorithm = getattr(importlib.import_module(PEERS[library]), workload.algo.upper())
    settings = {**workload.peer, **({"device": "cpu"} if library == "sb3" else {})}
    envs = make_vec_env(workload.env_id, workload.num_envs)
    first_step: list[float] = []
    time_first_call(envs, "step_async", first_step)
    model = algorithm("MlpPolicy", envs, seed=1, **settings)
    model.learn(workload.steps, callback=Mark())
    marks.append((model.num_timesteps, time.monotonic()))
    seconds = None if compiling is None else covered_seconds(compiling)
    return Report(first_step[0], marks, seconds, peak_megabytes())


def jax_compilations() -> list[tuple[float, float]]:
    """Return a list that JAX fills with the start and end of all its tracing, lowering and compiling."""
    import jax

    intervals: list[tuple[float, float]] = []

    def note(event: str, duration: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            now = time.monotonic()
            intervals.append((now - duration, now))

    jax.monitoring.register_event_duration_secs_listener(note)
    return intervals


def covered_seconds(intervals: list[tuple[float, float]]) -> float:
    """Return the length of a union of intervals: a function is traced inside the trace of another."""
    total, covered_to = 0.0, 0.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered_to))
        covered_to = max(covered_to, end)
    return total


if __name__ == "__main__":
    main()
