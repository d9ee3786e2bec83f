"""megatron-core, which wants an environment of its own: every rank starts a process of it and passes steps on."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from shutil import rmtree
from typing import Any

import psutil
import torch.distributed as dist

from benchmarks.rounds import Work
from hpctrain.config.schema import RunConfig

SCRIPT = Path(__file__).with_name("megatron_rank.py")


def work(config: RunConfig, axis: str, python: str | None) -> Work:
    """megatron-core over two ranks.

    Args:
        config: of the run.
        axis: `tp`, `pp` or `ep`.
        python: an interpreter with torch and megatron-core.

    Raises:
        RuntimeError: there is none, or it ended; with the last line it wrote.
    """
    if python is None:
        raise RuntimeError("no interpreter that has it was named (--megatron PYTHON)")
    folder: list[str | None] = [tempfile.mkdtemp(prefix="hpctrain-bench-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    try:
        process = _Process(python, _settings(config, axis) | {"store": f"{folder[0]}/store"})
        parameters = process.answer()["parameters"]
        dist.barrier()
    finally:
        rmtree(str(folder[0]), ignore_errors=True)
    return Work(process.step, parameters, process.cpu)


class _Process:
    """The other interpreter, and what it says."""

    def __init__(self, python: str, settings: dict[str, Any]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [python, "-I", str(SCRIPT), json.dumps(settings)]
        self._process = subprocess.Popen(
            command, text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        self._usage = psutil.Process(self._process.pid)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._process.wait()
        self._errors.seek(0)
        raise RuntimeError(([line for line in self._errors.read().splitlines() if line.strip()] or ["no word"])[-1])

    def step(self) -> float | None:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        loss: float | None = self.answer()["loss"]
        return loss

    def cpu(self) -> float:
        times = self._usage.cpu_times()
        return float(times.user + times.system)


def _settings(config: RunConfig, axis: str) -> dict[str, Any]:
    m, train, o = config.model, config.train, config.optimizer
    return {
        "axis": axis,
        "layers": m.layers,
        "hidden": m.hidden,
        "heads": m.heads,
        "kv": m.kv,
        "ffn": m.ffn_width,
        "vocab": m.vocab,
        "seq": config.data.seq,
        "eps": m.norm_eps,
        "theta": int(m.rope_theta),
        "std": m.init_std,
        "micro_batch": train.micro_batch,
        "micro_batches": train.global_batch // train.micro_batch,
        "lr": o.lr,
        "betas": [o.beta1, o.beta2],
        "adam_eps": o.eps,
        "decay": o.weight_decay,
        "clip": o.clip,
        "experts": {"number": m.moe.experts, "top_k": m.moe.top_k, "ffn": m.expert_width} if m.moe else None,
    }
