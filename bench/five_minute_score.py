"""Held-out loss and BLiMP of runs and model folders, one after the other in one process.

The same rows, masks (15%, drawn from the rows alone), tokenizer and code for every folder. The
result file is written again after each, so that what is done is kept.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from configs import say
from configs.cli import run_cli
from data_prep.shards import held_out
from pretrain.evaluate import evaluate


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.five_minute_score", description=__doc__)
    parser.add_argument("models", nargs="+", help="NAME=run or HF folder")
    parser.add_argument("--held-out", required=True, help="shard set whose held-out part is scored")
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--pseudo-rows", type=int, default=128, help="for the pseudo-perplexity")
    parser.add_argument("--sample", type=float, default=1.0, help="share of BLiMP, 0 = none")
    parser.add_argument("--blimp", default="", help="BLiMP's parquet")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    rows = held_out(Path(options.held_out))
    results: dict[str, Any] = {}
    for name, _, folder in (text.partition("=") for text in options.models):
        start = time.monotonic()
        scores = evaluate(
            Path(folder),
            rows,
            rows=options.rows,
            pseudo_rows=options.pseudo_rows,
            blimp=options.blimp if options.sample else "",
            sample=options.sample or 1.0,
        )
        results[name] = {**scores, "device": device}
        Path(options.out).write_text(json.dumps(results, indent=1), encoding="utf-8")
        say(f"{name}: {scores['mlm_loss']:.4f} ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    run_cli(main)
