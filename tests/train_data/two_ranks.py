"""Started by test_evaluation: two gloo ranks score the held-out rows."""

from __future__ import annotations

import json
import multiprocessing
import socket
import sys

import torch.distributed as dist

from configs.schema import MaskingConfig
from data_prep.shards import held_out
from pretrain.evaluation import Evaluator
from tests.train_data.hashed_model import HashedModel


def rank_main(rank: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    evaluator = Evaluator(
        held_out(folder), MaskingConfig(), micro_batch_tokens=1024, dp_rank=rank, dp=2
    )
    result = evaluator.run(HashedModel())
    sys.stdout.write(json.dumps(result) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # fork: torch is loaded once
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(r, port, sys.argv[1])) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(process.exitcode or 0 for process in ranks))
