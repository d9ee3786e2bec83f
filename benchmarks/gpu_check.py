"""`make test-gpu`: what only a CUDA machine can tell, in at most eight minutes and without internet.

Runs the tests marked `gpu`, then trains a Llama of one billion parameters on one GPU with the driver itself,
briefly also under ZeRO stage 1, and prints what came out as JSON: tokens/s, MFU in both definitions, peak memory,
losses.

    python -m benchmarks.gpu_check [--out FILE] [--steps 30] [--seq 4096] [--micro-batch 2]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.gpu.zero import absence

ROOT = Path(__file__).parent.parent
TEST_LIMIT_S, CORPUS_LIMIT_S, TRAIN_LIMIT_S, ZERO_LIMIT_S = 150, 60, 180, 90
ZERO_STEPS = 10


def run(command: list[str], limit_s: float) -> tuple[int, str]:
    """Exit code and output of a command; 124 when it took too long."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, timeout=limit_s, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return 124, (late.stdout or b"").decode(errors="replace") if isinstance(late.stdout, bytes) else ""
    return done.returncode, done.stdout


def tests() -> dict[str, Any]:
    """Outcome of the tests marked `gpu`."""
    command = [sys.executable, "-m", "pytest", "tests", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short"]
    code, out = run(command, TEST_LIMIT_S)
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", out)}
    return {"exit_code": code, **counts, "output": "" if code == 0 else out[-4000:]}


def corpus(folder: Path) -> dict[str, Any]:
    """Build the corpus to train on."""
    code, out = run([sys.executable, "-m", "hpctrain", "data", "stdlib", str(folder / "stdlib.h5")], CORPUS_LIMIT_S)
    return {"exit_code": code, "output": "" if code == 0 else out[-4000:]}


def training(stage: int, steps: int, seq: int, micro_batch: int, folder: Path, limit_s: float) -> dict[str, Any]:
    """A bf16 run of llama-1b, with the byte vocabulary of the corpus, on one GPU."""
    if stage and (reason := absence()):
        return {"exit_code": 0, "skipped": reason}
    name = f"stage{stage}"
    overrides = {
        "model.vocab": 257, "data.corpus": folder / "stdlib.h5", "data.seq": seq, "folder": folder, "name": name,
        "cluster.gpus_per_node": 1, "cluster.device": "cuda", "sharding.stage": stage, "parallel.tp": 1,
        "train.precision": "bf16", "train.steps": steps, "train.micro_batch": micro_batch,
        "train.global_batch": 4 * micro_batch, "train.log_every": 5, "train.eval_every": 0, "train.eval_batches": 2,
        "optimizer.warmup_steps": 5, "checkpoint.every": 0, "checkpoint.at_end": "false",
    }  # fmt: skip
    command = [sys.executable, "-m", "hpctrain", "train", "llama-1b", *(f"{k}={v}" for k, v in overrides.items())]
    code, out = run(command, limit_s)
    records = []
    metrics = folder / name / "metrics.jsonl"
    if metrics.exists():
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    train = [r for r in records if r["kind"] == "train"]
    kept = ("step", "loss", "grad_norm", "tps", "mfu_palm", "mfu_causal", "memory_gib", "time/step")
    return {
        "exit_code": code,
        "steps": [{key: r[key] for key in kept} for r in train],
        "validation": [r["loss"] for r in records if r["kind"] == "eval"],
        "output": "" if code == 0 else out[-4000:],
    }


def main() -> None:
    """Write the results; exit 1 if anything failed, 3 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=2)
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("error: no CUDA device here; this check needs one.", file=sys.stderr)
        sys.exit(3)
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="hpctrain-gpu-") as made:
        folder, size = Path(made), (args.seq, args.micro_batch)
        results = {
            "gpu": torch.cuda.get_device_name(),
            "gpus": torch.cuda.device_count(),
            "torch": torch.__version__,
            "tests": tests(),
            "corpus": corpus(folder),
            "training": training(0, args.steps, *size, folder, TRAIN_LIMIT_S),
            "zero": training(1, ZERO_STEPS, *size, folder, ZERO_LIMIT_S),
        }
    results["seconds"] = round(time.time() - began, 1)
    text = json.dumps(results, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    sys.exit(int(any(results[part]["exit_code"] for part in ("tests", "corpus", "training", "zero"))))


if __name__ == "__main__":
    main()
