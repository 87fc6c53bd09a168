"""Compares training speed with other libraries on the same hyperparameters.

Run it as `python scripts/benchmark_speed.py [peers=sb3,sbx] [workloads=W1,W2,W3,W4,W5] [rounds=3]`. The peers come
from the extra `bench`. Every library trains in a process of its own on one core and one thread, in interleaved order;
the table shows medians over the rounds. Speed is env steps per second inside the training loop, after a warm-up; ours
with default logging, through the training command. "outside" is the rest of the process's time: start-up and shut-down.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_training.arguments import fail, parse_key_values, whole_number
from rl_training.errors import UserError


@dataclass(frozen=True)
class Workload:
    """One comparison: our overrides, and the same hyperparameters as keyword arguments of a peer."""

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
        steps=200_000,
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
        steps=60_000,
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
    "W3": Workload("sac", "Pendulum-v1", steps=4_000, warm_up=1_000),
    "W4": Workload("ppo", "HalfCheetah-v5", steps=40_960, warm_up=4_096),
    "W5": Workload("sac", "HalfCheetah-v5", steps=4_000, warm_up=1_000),
}
MODULES = {"sb3": "stable_baselines3", "sbx": "sbx"}


@dataclass(frozen=True)
class Measurement:
    """What one process took."""

    steps_per_second: float
    seconds_outside: float
    megabytes: float


def main() -> None:
    """Measure and print the table."""
    if sys.argv[1:2] == ["--peer"]:
        train_peer(sys.argv[2], WORKLOADS[sys.argv[3]])
        return
    names = {"peers": str, "workloads": str, "rounds": whole_number}
    try:
        arguments = parse_key_values(sys.argv[1:], names, __doc__ or "")
        libraries = ["ours", *(name for name in arguments.get("peers", [""])[-1].split(",") if name)]
        chosen = arguments.get("workloads", [",".join(WORKLOADS)])[-1].split(",")
        for name in (*libraries[1:], *chosen):
            if name not in {*MODULES, *WORKLOADS}:
                raise UserError(f"{name} is neither a peer ({', '.join(MODULES)}) nor a workload.")
    except UserError as error:
        fail(str(error))
    rounds = arguments.get("rounds", [3])[-1]
    print("| workload | library | env steps/s | ratio to the first peer | outside (s) | peak memory (MB) |")
    print("|---|---|---|---|---|---|")
    for workload in chosen:
        measured: dict[str, list[Measurement]] = {library: [] for library in libraries}
        for _ in range(rounds):
            for library in libraries:
                measured[library].append(measure(library, workload))
        print_rows(workload, measured)


def print_rows(workload: str, measured: dict[str, list[Measurement]]) -> None:
    """Print the medians of one workload, a row for each library."""
    speeds = {name: statistics.median(m.steps_per_second for m in runs) for name, runs in measured.items()}
    reference = next((speed for name, speed in speeds.items() if name != "ours"), None)
    for name, runs in measured.items():
        ratio = f"{speeds[name] / reference:.2f}" if reference else "-"
        outside = statistics.median(m.seconds_outside for m in runs)
        memory = statistics.median(m.megabytes for m in runs)
        print(f"| {workload} | {name} | {speeds[name]:,.0f} | {ratio} | {outside:.1f} | {memory:.0f} |", flush=True)


def measure(library: str, name: str) -> Measurement:
    """Train one workload in a process of its own."""
    workload = WORKLOADS[name]
    with tempfile.TemporaryDirectory() as directory:
        if library == "ours":
            command = [
                sys.executable,
                "-m",
                "rl_training.train",
                *our_overrides(workload),
                f"hydra.run.dir={directory}/run",
            ]
        else:
            command = [sys.executable, __file__, "--peer", library, name]
        seconds, megabytes, output = run_on_one_core(command)
        marks = our_marks(Path(directory) / "run") if library == "ours" else json.loads(output.splitlines()[-1])
    (first_step, first_time), (last_step, last_time) = marks
    return Measurement((last_step - first_step) / (last_time - first_time), seconds - last_time, megabytes)


def our_overrides(workload: Workload) -> list[str]:
    """Return the arguments of the training command."""
    return [
        *(f"algo={workload.algo}", "env=gym", f"env.id={workload.env_id}", f"env.num_envs={workload.num_envs}"),
        *("tuned=none", "eval.episodes=0", f"total_timesteps={workload.steps}", "device=cpu", *workload.ours),
    ]


def our_marks(run_dir: Path) -> list[tuple[int, float]]:
    """Return (step, seconds since the run began) after the warm-up and at the end."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    warm_up = next(row for row in rows if row["step"] >= rows[-1]["step"] * 0.1)
    return [(row["step"], row["time/seconds"]) for row in (warm_up, rows[-1])]


def run_on_one_core(command: list[str]) -> tuple[float, float, str]:
    """Run a command on one core and one thread; return its seconds, its peak memory in MB, and its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    pin = (lambda: os.sched_setaffinity(0, {0})) if hasattr(os, "sched_setaffinity") else None
    start = time.monotonic()
    process = subprocess.Popen(
        command, env=environment, preexec_fn=pin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"error: {' '.join(command)} failed; run it by hand to see why.")
    return time.monotonic() - start, usage.ru_maxrss / 1024, output


def train_peer(library: str, workload: Workload) -> None:
    """Train with a peer in this process and print the marks that `our_marks` gives for us."""
    import importlib

    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    marks: list[tuple[int, float]] = []
    start = time.monotonic()

    class Mark(BaseCallback):  # type: ignore[misc]
        def _on_step(self) -> bool:
            if not marks and self.num_timesteps >= workload.warm_up:
                marks.append((self.num_timesteps, time.monotonic() - start))
            return True

    algorithm = getattr(importlib.import_module(MODULES[library]), workload.algo.upper())
    settings = dict(workload.peer)
    if library == "sb3":
        settings["device"] = "cpu"
    model = algorithm("MlpPolicy", make_vec_env(workload.env_id, workload.num_envs), seed=1, **settings)
    start = time.monotonic()
    model.learn(workload.steps, callback=Mark())
    marks.append((model.num_timesteps, time.monotonic() - start))
    print(json.dumps(marks))


if __name__ == "__main__":
    main()
