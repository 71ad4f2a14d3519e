"""LAMB: published values, the production optimiser against the readable one, its options."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from configs.schema import OptimizerConfig, Recipe
from pretrain.engine import LeanEngine
from pretrain.kernels import plain
from pretrain.model import build
from pretrain.optim import lamb as lamb_module
from pretrain.optim.lamb import Lamb
from pretrain.optim.reference import ReferenceLamb
from pretrain.parallel.groups import SINGLE, Groups
from pretrain.parallel.pieces import Piece
from pretrain.parallel.slices import Shard, make_slices
from tests.trainer.batches import pack, random_rows, tiny_config

B29 = {
    "a.weight": ([3.0, 4.0], [0.5, 0.5], 3.53554, [2.646447, 3.646447]),
    "b.weight": ([0.03, 0.04], [0.2, -0.2], 0.035356, [0.026464, 0.043536]),
    "c.weight": ([0.0, 0.0], [0.5, 0.5], 1.0, [-0.1, -0.1]),
}


def production(tensors: dict[str, torch.Tensor], config: OptimizerConfig, decayed: set[str]):
    """(Lamb, shard, pieces) over the tensors, each cut in two slices with a gap between tensors."""
    pieces, held, at = [], [], 0
    for name, value in tensors.items():
        shape = tuple(value.shape)
        zero = tuple(0 for _ in shape)
        pieces.append(
            Piece(name, nn.Parameter(value.clone()), 0, shape, zero, shape, False, name in decayed)
        )
        middle = value.numel() // 3
        held += [
            (pieces[-1].param, 0, middle, at),
            (pieces[-1].param, middle, value.numel(), at + middle),
        ]
        at += value.numel() + 5
    master = torch.zeros(at)
    shard = Shard(master, torch.zeros(at), torch.zeros(at), make_slices(pieces, held), whole=True)
    for s in shard.slices:
        s.of(master).copy_(s.piece.param.data.view(-1)[s.begin : s.begin + s.numel])
    return Lamb(pieces, shard, config, SINGLE, plain), shard, pieces


def flatten(shard: Shard, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    flat = torch.zeros_like(shard.master)
    for s in shard.slices:
        s.of(flat).copy_(tensors[s.piece.name].reshape(-1)[s.begin : s.begin + s.numel])
    return flat


def logical(shard: Shard, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {name: torch.zeros(t.numel()) for name, t in tensors.items()}
    for s in shard.slices:
        out[s.piece.name][s.begin : s.begin + s.numel] = s.of(shard.master)
    return {name: v.view(tensors[name].shape) for name, v in out.items()}


@pytest.mark.parametrize("which", ["reference", "production"])
def test_b29_one_step_has_the_published_values(which):
    config = OptimizerConfig(weight_decay=0.0, max_grad_norm=0.0)
    tensors = {k: torch.tensor(v[0]) for k, v in B29.items()}
    grads = {k: torch.tensor(v[1]) for k, v in B29.items()}
    if which == "reference":
        lamb = ReferenceLamb(tensors, config, set(tensors))
        lamb.step(grads, 0.1)
        ratios, after = lamb.ratios, tensors
    else:
        lamb, shard, pieces = production(tensors, config, set(tensors))
        update = lamb.step(flatten(shard, grads), 0.1)
        ratios = dict(zip((p.name for p in pieces), update.ratios.tolist()))
        after = logical(shard, tensors)
    for name, (_, _, ratio, wanted) in B29.items():
        assert ratios[name] == pytest.approx(ratio, abs=1e-5)
        assert after[name].tolist() == pytest.approx(wanted, abs=1e-5)


OPTIONS = [
    {},
    {"bias_correction": False},
    {"max_grad_norm": 0.0},
    {"trust_ratio_min": 0.5, "trust_ratio_max": 2.0},
    {"adapt_bias_and_norm": False},
    {"weight_decay": 0.3, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_production_equals_the_reference(options):
    config = replace(OptimizerConfig(), **options)
    g = torch.Generator().manual_seed(0)
    tensors = {
        "x.weight": torch.randn(7, 5, generator=g),
        "x.bias": torch.randn(7, generator=g) * 0.01,
        "LayerNorm.weight": torch.ones(5),
        "y.weight": torch.randn(11, 3, generator=g) * 3,
    }
    decayed = {"x.weight", "y.weight"}
    lamb, shard, pieces = production(tensors, config, decayed)
    theirs = {k: v.clone() for k, v in tensors.items()}
    reference = ReferenceLamb(theirs, config, decayed)
    for step in range(8):
        grads = {
            k: torch.randn(v.shape, generator=g) * 10 ** (step % 3 - 1) for k, v in tensors.items()
        }
        norm = reference.step(grads, 0.02)
        scaled = {k: v * 64 for k, v in grads.items()}
        update = lamb.step(flatten(shard, scaled), 0.02, grad_scale=1 / 64)
        assert float(update.grad_norm) == pytest.approx(norm, rel=1e-5)
        ratios = dict(zip((p.name for p in pieces), update.ratios.tolist()))
        assert ratios == pytest.approx(reference.ratios, rel=1e-4)
    for name, value in logical(shard, tensors).items():
        assert torch.allclose(value, theirs[name], rtol=1e-5, atol=1e-6), name


def test_the_low_precision_copy_is_the_rounded_master():
    tensors = {"x.weight": torch.randn(64, 3)}
    lamb, shard, _ = production(tensors, OptimizerConfig(), {"x.weight"})
    low = torch.zeros_like(shard.master, dtype=torch.bfloat16)
    lamb.step(flatten(shard, {"x.weight": torch.randn(64, 3)}), 0.1, low=low)
    assert torch.equal(low, shard.master.bfloat16())


@pytest.mark.parametrize("tp", [2, 4])
def test_copies_of_a_tensor_get_one_gradient_in_few_operations(tp, monkeypatch):
    def counted(count: int) -> int:
        tensors = {f"t{i}.weight": torch.randn(3 + i, 5) for i in range(count)}
        _, shard, pieces = production(tensors, OptimizerConfig(), set())
        pieces[1] = replace(pieces[1], sharded=True)
        shard.slices = [replace(s, piece=pieces[s.index]) for s in shard.slices]
        for piece in pieces[count // 2 :]:
            piece.param.sequence_partial = True
        # A sum over ranks that all hold the same.
        monkeypatch.setattr(lamb_module.dist, "all_reduce", lambda x, group: x.mul_(tp))
        lamb = Lamb(pieces, shard, OptimizerConfig(), Groups(tp, 1, 0, 0), plain)
        grad = flatten(shard, {name: torch.randn(t.shape) for name, t in tensors.items()})
        wanted = grad.clone()
        for s in shard.slices:
            if not s.piece.sharded:
                view = s.of(wanted)
                view.copy_((view if s.index >= count // 2 else view / tp) * tp)
        with Operations() as operations:
            lamb._agree_on_replicas(lamb._views(grad))
        assert torch.equal(grad, wanted)
        return operations.count

    assert counted(5) == counted(40)


class Operations(TorchDispatchMode):
    """Counts what reaches the device's kernels: on a GPU each is a launch or a few."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    tensors = {"x.weight": torch.randn(8, 3)}
    lamb, shard, _ = production(tensors, OptimizerConfig(), {"x.weight"})
    before = shard.master.clone()
    grad = torch.randn(8, 3)
    grad[2, 1] = bad
    update = lamb.step(flatten(shard, {"x.weight": grad}), 0.1)
    assert update.skipped
    assert update.ratios is None
    assert lamb.steps == 0
    assert torch.equal(shard.master, before)
    assert not shard.exp_avg.any()
    assert not lamb.step(flatten(shard, {"x.weight": grad.nan_to_num(1.0, 1.0)}), 0.1).skipped


def test_the_reference_as_the_trainers_optimiser_is_the_same():
    """optimizer.implementation=reference on the lean engine, fp32 and with scaled gradients."""

    config = tiny_config()
    weights = []
    for name in ("lambert", "reference"):
        model, pieces = build(config, seed=1)
        recipe = Recipe(optimizer=OptimizerConfig(implementation=name))
        recipe.train.precision = "fp32"
        engine = LeanEngine(recipe, model, pieces, SINGLE, plain, torch.device("cpu"))
        for step in range(4):
            micro = pack(random_rows(6, config, seed=step))
            engine.backward(engine.model(micro).mlm_sum / micro.masked, last=True)
            update = engine.step(0.01)
            assert update.ratios is not None
            assert len(update.ratios) == len(pieces)
        weights.append(engine.weights.clone())
    assert (weights[0] - weights[1]).norm() / weights[0].norm() < 1e-5


def test_masters_keep_what_rounding_takes_away():
    """Masters that start on bf16's grid would swallow the first small updates."""
    exact, pieces = build(tiny_config(), seed=1)
    model, parts = build(tiny_config(), seed=1)
    engine = LeanEngine(Recipe(), model, parts, SINGLE, plain, torch.device("cpu"))
    by_name = {p.name: p.view(p.param.data.view(-1)) for p in pieces}
    for s in engine.shard.slices:
        value = by_name[s.piece.name].view(-1)
        assert torch.equal(s.of(engine.shard.master), value)
        assert torch.equal(s.piece.view(s.piece.param.data.view(-1)).view(-1), value.bfloat16())
    assert not engine.grads.any()


def test_the_norm_of_millions_of_elements_is_exact():
    """A CPU's own norm in fp32 is wrong by 2e-4 at the size of a word embedding."""
    torch.manual_seed(0)
    tensors = {"a.weight": torch.randn(4000, 1000)}
    gradient = {"a.weight": torch.randn(4000, 1000) * 1e-3}
    lamb, shard, _ = production(tensors, OptimizerConfig(), {"a.weight"})
    found = lamb.step(flatten(shard, gradient), 0.01).grad_norm
    assert float(found) == pytest.approx(float(gradient["a.weight"].double().norm()), rel=1e-6)
