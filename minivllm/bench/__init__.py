"""Benchmarks of the control plane: `minivllm bench kv-waste`, `scheduler-cost` and `soak`.

They drive the real scheduler and block manager with a runner that computes nothing, so they load
no torch and say nothing about a model's speed.
"""

from __future__ import annotations

from minivllm.bench.commands import add_parser

__all__ = ["add_parser"]
