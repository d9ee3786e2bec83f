"""Building a corpus from JSON lines with a BPE tokenizer, beside the `tokenizers` library fed in batches.

The peer reads the same lines, encodes lots of 1000 texts with `encode_batch` on all cores (its own threads), or with
`encode_batch_fast`, which leaves offsets out, and appends the ids to a .bin file: the loop of most scripts. Ours reads,
encodes in as many processes as there are cores, writes, merges, checksums and reads all of it once more. Contenders
take turns in one run; ratios are medians over rounds.

    python -m benchmarks.data_build [--mb 24]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.bpe import save, train_bpe
from hpctrain.data.sources import list_sources

PEER = """
import json, sys
import numpy as np
from tokenizers import Tokenizer
source, tokenizer, output, call = sys.argv[1:]
tokenizer = Tokenizer.from_file(tokenizer)
encode = getattr(tokenizer, call)
end = np.array([tokenizer.token_to_id("<|endoftext|>")], "<u2")
def flush(texts, out):
    for encoding in encode(texts, add_special_tokens=False):
        out.write(np.array(encoding.ids, "<u2").data)
        out.write(end.data)
with open(source, "rb") as lines, open(output, "wb") as out:
    texts = []
    for line in lines:
        texts.append(json.loads(line)["text"])
        if len(texts) == 1000:
            flush(texts, out)
            texts = []
    flush(texts, out)
"""
OURS, BATCH, FAST = "hpctrain data build", "tokenizers, encode_batch", "tokenizers, encode_batch_fast"


def documents(size: int) -> Iterator[str]:
    """Texts of the standard library, cut to a few thousand characters, until there are `size` bytes."""
    listing = list_sources([Path(sysconfig.get_path("stdlib"))], [".py"], "hash", ("site-packages", "__pycache__"))
    while size > 0:
        for source in listing.sources:
            text = source.path.read_text(errors="replace")
            for at in range(0, len(text), 4000):
                yield text[at : at + 4000]
                size -= len(text[at : at + 4000])
                if size <= 0:
                    return


def measure(mb: float, rounds: int) -> dict[str, Any]:
    """Rates, ratios and rows for a table.

    Args:
        mb: of text, MB.
        rounds: that count.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, cores = Path(name), len(os.sched_getaffinity(0))
        source, tokenizer = folder / "a.jsonl", folder / "t.json"
        texts = list(documents(int(mb * 1e6)))
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        save(train_bpe((text.encode() for text in texts[:1000]), 16384), tokenizer)
        ours = ["-m", "hpctrain", "data", "build", str(folder / "o.h5"), str(source), "--tokenizer", str(tokenizer)]
        peer = ["-c", PEER, str(source), str(tokenizer), str(folder / "p.bin")]
        commands = {OURS: [*ours, "--force"], BATCH: [*peer, "encode_batch"], FAST: [*peer, "encode_batch_fast"]}
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        rng = np.random.default_rng(0)
        for turn in range(-1, rounds):  # round -1 warms up
            for name in rng.permutation(list(commands)):
                began = time.perf_counter()
                subprocess.run([sys.executable, *commands[name]], check=True, capture_output=True)
                if turn >= 0:
                    seconds[name].append(time.perf_counter() - began)
        same = _same(folder)
    rate = {name: mb / statistics.median(s) for name, s in seconds.items()}
    over = {p: statistics.median(b / a for a, b in zip(seconds[OURS], seconds[p])) for p in (BATCH, FAST)}
    what = f"corpus of {mb:g} MB of JSON lines, BPE, {cores} cores"
    return {
        "what": "whole commands, start of the interpreter included",
        "mb": mb,
        "rounds": rounds,
        "same_tokens": same,
        "mb_per_s": {name: round(r, 3) for name, r in rate.items()},
        "speed_over": {name: round(r, 3) for name, r in over.items()},
        "rows": [
            [what, f"{rate[OURS]:.2f} MB/s", f"{peer}: {rate[peer]:.2f} MB/s", f"{over[peer]:.2f}"]
            for peer in (BATCH, FAST)
        ],
    }


def _same(folder: Path) -> bool:
    """Both wrote the same tokens, in an order of stretches of their own."""
    from hpctrain.data.corpus import Corpus

    ours, theirs = Corpus.open(folder / "o.h5").tokens, np.fromfile(folder / "p.bin", "<u2")
    return bool((np.bincount(ours, minlength=65536) == np.bincount(theirs, minlength=65536)).all())


def main() -> None:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=24.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of 3 MB")
    args = parser.parse_args()
    mb, rounds = (3.0, 1) if args.quick else (args.mb, args.rounds)
    print(json.dumps(measure(mb, rounds), indent=1))


if __name__ == "__main__":
    main()
