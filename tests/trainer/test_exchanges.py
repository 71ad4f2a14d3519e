"""Sequence-parallel products in pieces: whatever carries the tokens, results are those of one process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cluster.plan import shared_out
from cluster.planner.cards import find_card
from cluster.planner.layouts import share_tokens
from cluster.planner.step_time import Layout, exchanges_s
from configs.schema import ParallelConfig, Recipe, TrainConfig
from pretrain.kernels import plain
from pretrain.parallel import peers
from pretrain.parallel.exchange import Exchange, Gather, Sums, make_exchange
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


@pytest.mark.parametrize(
    ("tp", "per_node", "train", "card", "wanted", "how"),
    [
        (1, 8, {}, "H100", None, "no"),
        (2, 8, {}, "H100", None, "by copy engines"),
        (2, 8, {}, "H100", True, "by copy engines"),
        (2, 8, {}, "H100", False, "no"),
        (3, 8, {}, "H100", None, "no"),
        (16, 16, {}, "H100", None, "by copy engines"),
        (16, 8, {}, "H100", True, "by collectives"),
        (32, 32, {}, "H100", None, "no"),
        (2, 8, {"precision": "fp8"}, "H100", None, "no"),
        (2, 8, {"precision": "fp8"}, "H100", True, "by collectives"),
        (2, 8, {"kernels": "plain"}, "H100", None, "no"),
        (2, 8, {"kernels": "plain"}, "H100", True, "by collectives"),
        (8, 4, {}, "H100", None, "no"),
        (8, 4, {}, "H100", True, "by collectives"),
        (2, 8, {}, "RTX4090", None, "no"),
        (2, 8, {}, "RTX4090", True, "by collectives"),
    ],
)
def test_planner_and_trainer_share_out_tokens_alike(
    tp, per_node, train, card, wanted, how, monkeypatch
):
    recipe = Recipe(
        parallel=ParallelConfig(tp, sequence_parallel=wanted), train=TrainConfig(**train)
    )
    layout = Layout(tp, 1, 0, 8192, gpus_per_node=per_node, precision=recipe.train.precision)
    assert shared_out(share_tokens(layout, recipe, find_card(card))) == how

    name = "fused_fp8" if recipe.train.precision == "fp8" else "fused"
    file = Path(plain.__file__).with_name(
        f"{name if recipe.train.kernels == 'auto' else 'plain'}.py"
    )
    kernels = SimpleNamespace(
        **dict.fromkeys(re.findall(r'^    "(\w+)",$', file.read_text(), re.M))
    )
    near = tp <= per_node and find_card(card).copy_engines is not None
    monkeypatch.setattr(peers, "connect", lambda *_: "by copy engines" if near else None)
    made = make_exchange(Ranks(tp), wanted, torch.device("cuda"), kernels, 1024)
    assert ("by collectives" if isinstance(made, Exchange) else made or "no") == how


class Counted(Exchange):
    """Counts what is begun; nobody is there to answer."""

    def __init__(self) -> None:
        super().__init__(Ranks())
        self.made = 0

    def gather(self, x):
        self.made += 1
        return Gather(self, x.repeat(self.n, 1), lambda rank: None, lambda: None)

    def sums(self, like, t, width):
        self.made += 1
        return OwnSums(self, like.new_zeros(self.n, t, width))


class OwnSums(Sums):
    def collected(self):
        return self.place()


def test_planner_counts_the_exchanges_that_a_layer_makes():
    exchange = Counted()
    x = torch.randn(4, 4, requires_grad=True)
    w = torch.randn(4, 4, requires_grad=True)
    for _ in range(2):  # the halves of a layer
        middle, _ = plain.gathered_linear(x, w, None, exchange)
        x = plain.scattered_linear(middle, w, exchange)
    forward, exchange.made = exchange.made, 0
    x.sum().backward()
    assert exchanges_s([(1.0, 1.0, 1.0)] * 4, link=0.0, wait=1.0) == (forward, exchange.made)


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
