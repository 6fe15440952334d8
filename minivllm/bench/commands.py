"""The command lines of the benchmarks."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from minivllm.bench.kv_waste import Waste, measure
from minivllm.bench.scheduler_cost import pool_cost, queue_cost
from minivllm.bench.soak import soak
from minivllm.bench.workload import WORKLOADS, Workload

__all__ = ["add_parser"]


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add `bench` to an argparse subcommand table; each benchmark sets `run`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench", help="benchmarks of the KV cache's bookkeeping and the scheduler"
    )
    benches = parser.add_subparsers(required=True, metavar="BENCHMARK")

    waste = benches.add_parser("kv-waste", help="allocated and used KV slots, paged and contiguous")
    waste.add_argument("--workload", choices=sorted(WORKLOADS), action="append", help="default: all")
    waste.add_argument("--seed", type=int, default=0)
    waste.add_argument("--block-size", type=_positive, default=16)
    waste.add_argument("--num-kv-blocks", type=_positive, default=2049)
    waste.add_argument("--max-model-len", type=_positive, default=2048)
    waste.add_argument("--max-num-seqs", type=_positive, default=64)
    waste.set_defaults(run=_kv_waste)

    cost = benches.add_parser("scheduler-cost", help="time of plan, commit, allocate, free by pool and queue")
    cost.add_argument("--repetitions", type=_positive, default=200)
    cost.add_argument("--largest-pool", type=_positive, default=10**6)
    cost.add_argument("--longest-queue", type=_positive, default=10**5)
    cost.set_defaults(run=_scheduler_cost)

    soaking = benches.add_parser("soak", help="many requests with random aborts; nothing may be left over")
    soaking.add_argument("--requests", type=_positive, default=10_000)
    soaking.add_argument("--seed", type=int, default=0)
    soaking.set_defaults(run=_soak)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _kv_waste(arguments: argparse.Namespace) -> int:
    for name in arguments.workload or WORKLOADS:
        workload = WORKLOADS[name]
        waste = measure(
            workload,
            seed=arguments.seed,
            block_size=arguments.block_size,
            num_blocks=arguments.num_kv_blocks,
            max_model_len=arguments.max_model_len,
            max_num_seqs=arguments.max_num_seqs,
        )
        print(_waste_table(workload, waste, arguments))
    return 0


def _waste_table(workload: Workload, waste: Waste, arguments: argparse.Namespace) -> str:
    pool = (arguments.num_kv_blocks - 1) * arguments.block_size
    at_once = f"{waste.running / waste.steps:.1f}"
    rows = [
        ("", f"paged, blocks of {arguments.block_size}", f"contiguous, {arguments.max_model_len} each"),
        (
            "slots allocated per step",
            f"{waste.paged / waste.steps:.0f}",
            f"{waste.contiguous / waste.steps:.0f}",
        ),
        ("slots used per step", f"{waste.used / waste.steps:.0f}", f"{waste.used / waste.steps:.0f}"),
        ("wasted", f"{waste.paged_waste:.2%}", f"{waste.contiguous_waste:.2%}"),
        (f"requests at once in {pool} slots", at_once, f"at most {pool // arguments.max_model_len}"),
    ]
    lines = [
        f"workload {workload.name}: {workload.num_requests} requests, seed {arguments.seed}",
        f"  prompt: {workload.prompt}",
        f"  output: {workload.output}",
        f"  {waste.steps} steps, {waste.preemptions} preemptions",
        *(f"  {name:<32}{paged:>24}{contiguous:>28}" for name, paged, contiguous in rows),
        "",
    ]
    return "\n".join(lines)


def _scheduler_cost(arguments: argparse.Namespace) -> int:
    print(f"microseconds of CPU time, median of {arguments.repetitions}; 32 running requests")
    print(f"{'blocks':>10}{'cached':>10}{'plan':>10}{'commit':>10}{'allocate 64':>14}{'free 64':>12}")
    size = 1000
    while size <= arguments.largest_pool:
        cost = pool_cost(size, repetitions=arguments.repetitions)
        print(
            f"{cost.num_blocks:>10}{cost.num_cached:>10}{cost.plan:>10.1f}{cost.commit:>10.1f}"
            f"{cost.allocate:>14.1f}{cost.free:>12.1f}",
            flush=True,
        )
        size *= 10
    print(f"{'waiting':>10}{'plan':>10}{'plan, admitting':>18}{'abort waiting':>16}")
    size = 10
    while size <= arguments.longest_queue:
        queue = queue_cost(size, repetitions=arguments.repetitions)
        print(
            f"{queue.num_waiting:>10}{queue.plan:>10.1f}{queue.admit:>18.1f}{queue.abort:>16.1f}", flush=True
        )
        size *= 10
    return 0


def _soak(arguments: argparse.Namespace) -> int:
    def progress(done: int) -> None:
        if done % 1000 == 0:
            print(f"{done} of {arguments.requests} submitted", file=sys.stderr, flush=True)

    report = soak(arguments.requests, seed=arguments.seed, progress=progress)
    print(
        f"{arguments.requests} requests, seed {arguments.seed}: the engine is empty and every block is free"
    )
    print(", ".join(f"{count} {name}" for name, count in sorted(report.events.items())))
    print(f"{'wave':>6}{'requests':>10}{'steps':>8}{'memory, KiB':>14}")
    for number, wave in enumerate(report.waves, start=1):
        print(f"{number:>6}{wave.requests:>10}{wave.steps:>8}{wave.memory / 1024:>14.1f}")
    print(f"growth from wave 2 to wave {len(report.waves)}: {report.growth / 1024:.1f} KiB")
    return 0
