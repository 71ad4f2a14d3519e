"""Sequence-parallel products in pieces: whatever carries the tokens, results are those of one process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from pretrain.kernels import plain
from pretrain.parallel.exchange import Exchange, make_exchange
from tests.trainer.launch import world

KINDS = ["collectives", "peers", "peers too small"]


@pytest.mark.parametrize("size", [2, 4])
def test_products_and_gradients_are_those_of_one_process(size, tmp_path):
    for rank in world(size, "tests.trainer.exchanges:both", KINDS, tmp_path, 6):
        assert list(rank) == KINDS
        for kind, steps in rank.items():
            for wanted, got in steps:
                for a, b in zip(wanted, got, strict=True):
                    torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12, msg=kind)


@dataclass
class Ranks:
    n: int = 2

    def size(self) -> int:
        return self.n

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("wanted", "kind"), [(None, type(None)), (True, Exchange), (False, type(None))]
)
def test_without_gpus_tokens_are_shared_out_where_that_is_asked_for(wanted, kind):
    made = make_exchange(Ranks(), wanted, torch.device("cpu"), plain, 1024)
    assert type(made) is kind
    for uneven in (None, Ranks(1), Ranks(3)):
        assert make_exchange(uneven, wanted, torch.device("cpu"), plain, 1024) is None


@pytest.mark.parametrize("step", ["empty", "rendezvous"])
def test_a_rank_that_cannot_join_keeps_all_from_it(step):
    assert world(2, "tests.trainer.exchanges:refused", step) == [True, True]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_that_reach_each_other_do_the_same():
    size = 4 if torch.cuda.device_count() >= 4 else 2
    for rank in world(size, "tests.trainer.exchanges:on_gpus", 20):
        for wanted, got in rank:
            for a, b in zip(wanted, got, strict=True):
                torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
