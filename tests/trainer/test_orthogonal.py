"""optimizer.orthogonal_lr: LAMB whose encoder matrices take an orthogonalised momentum (Muon)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from configs import UserError
from configs.layout import check_layout
from configs.schema import OptimizerConfig, Recipe
from pretrain.engine import LeanEngine
from pretrain.kernels import plain
from pretrain.kernels.matrices import orthogonalise
from pretrain.model import build
from pretrain.optim.lamb import Lamb
from pretrain.optim.reference import ReferenceLamb
from pretrain.parallel.groups import SINGLE
from pretrain.parallel.pieces import Piece
from pretrain.parallel.slices import Shard, make_slices
from tests.trainer.batches import pack, random_rows, tiny_config

SHAPES = {
    "bert.encoder.layer.0.wide.weight": (8, 20),
    "bert.encoder.layer.0.tall.weight": (20, 8),
    "bert.encoder.layer.0.square.weight": (8, 8),
    "bert.encoder.layer.0.square.bias": (8,),
    "bert.encoder.layer.1.square.weight": (8, 8),
    "bert.pooler.dense.weight": (9, 4),
}
DECAYED = {name for name in SHAPES if name.endswith("weight")}
ORTHOGONAL = {name for name in DECAYED if "encoder" in name}


def whole(tensors: dict[str, torch.Tensor]) -> tuple[Shard, list[Piece]]:
    pieces, held, at = [], [], 0
    for name, value in tensors.items():
        shape = tuple(value.shape)
        zero = tuple(0 for _ in shape)
        param = nn.Parameter(value.clone())
        pieces.append(Piece(name, param, 0, shape, zero, shape, False, name in DECAYED))
        held.append((param, 0, value.numel(), at))
        at += value.numel() + 5
    flat = [torch.zeros(at) for _ in range(3)]
    shard = Shard(*flat, make_slices(pieces, held), whole=True)
    for s in shard.slices:
        s.of(shard.master).copy_(s.piece.param.data.view(-1))
    return shard, pieces


def random_tensors(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def flat(shard: Shard, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    out = torch.zeros_like(shard.master)
    for s in shard.slices:
        s.of(out).copy_(tensors[s.piece.name].view(-1))
    return out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.3, "beta1": 0.8},
        {"max_grad_norm": 0.0, "trust_ratio_max": 2.0},
        {"adapt_bias_and_norm": False},
    ],
    ids=str,
)
def test_it_equals_the_reference(options):
    config = OptimizerConfig(orthogonal_lr=2.0, **options)
    g = torch.Generator().manual_seed(0)
    theirs = random_tensors(g)
    shard, pieces = whole(theirs)
    lamb = Lamb(pieces, shard, config, SINGLE, plain)
    reference = ReferenceLamb(theirs, config, DECAYED)
    for _ in range(8):
        grads = random_tensors(g)
        reference.step(grads, 0.02)
        low = torch.zeros_like(shard.master, dtype=torch.bfloat16)
        scaled = flat(shard, {name: grad * 64 for name, grad in grads.items()})
        update = lamb.step(scaled, 0.02, grad_scale=1 / 64, low=low)
        ratios = dict(zip((p.name for p in pieces), update.ratios.tolist()))
        assert ratios == pytest.approx(reference.ratios, rel=1e-4)
    for s in shard.slices:
        wanted = theirs[s.piece.name].view(-1)
        assert torch.allclose(s.of(shard.master), wanted, rtol=1e-5, atol=1e-6), s.piece.name
        assert torch.equal(s.of(low), s.of(shard.master).bfloat16())
        # Adam's second moment is for those that Adam moves.
        assert bool(s.of(shard.exp_avg_sq).any()) == (s.piece.name not in ORTHOGONAL)


def test_the_step_is_so_many_times_lr_of_the_weights_norm_in_all_directions_alike():
    config = OptimizerConfig(orthogonal_lr=3.0, weight_decay=0.0)
    g = torch.Generator().manual_seed(1)
    before, grads = random_tensors(g), random_tensors(g)
    shard, pieces = whole(before)
    Lamb(pieces, shard, config, SINGLE, plain).step(flat(shard, grads), 0.01)
    for s in shard.slices:
        weight = before[s.piece.name]
        step = weight - s.of(shard.master).view(weight.shape)
        times = 3 if s.piece.name in ORTHOGONAL else 1
        assert float(step.norm() / weight.norm()) == pytest.approx(0.01 * times, rel=1e-4)
        if s.piece.name in ORTHOGONAL:
            singular = torch.linalg.svdvals(step)
            assert singular.max() / singular.min() < 1.6


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 32), (2, 32, 8)], ids=str)
def test_orthogonalised_keeps_the_singular_vectors_and_levels_the_values(shape):
    g = torch.Generator().manual_seed(0)
    u, _, vt = torch.linalg.svd(torch.randn(shape, generator=g), full_matrices=False)
    values = torch.logspace(-2, 0, u.shape[-1])  # a hundredth of the largest
    out = orthogonalise(17 * (u * values) @ vt)
    found = (u.mT @ out @ vt.mT).diagonal(dim1=1, dim2=2)
    assert found.min() > 0.77
    assert found.max() < 1.23
    assert torch.allclose(u * found[:, None] @ vt, out, atol=1e-4)
    assert not orthogonalise(torch.zeros(shape)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-41, 1e-36, 1e-30, 1e-24, 1e-18, 1e18, 1e34])
def test_vanishing_and_huge_gradients_do_not_diverge(size, dtype):
    """Squares of them are zero or infinite in fp32; what is nearly nothing may stay it."""
    x = (torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).double() * size).to(
        dtype
    )
    values = torch.linalg.svdvals(orthogonalise(x).double())
    assert values.max() < 1.3
    if size > 1e-35:
        assert values.median() > 0.7


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    g = torch.Generator().manual_seed(0)
    tensors, grads = random_tensors(g), random_tensors(g)
    grads["bert.encoder.layer.0.wide.weight"][1, 2] = bad
    shard, pieces = whole(tensors)
    before = shard.master.clone()
    low = torch.zeros_like(before)
    update = Lamb(pieces, shard, OptimizerConfig(orthogonal_lr=2.0), SINGLE, plain).step(
        flat(shard, grads), 0.1, low=low
    )
    assert update.skipped
    assert torch.equal(shard.master, before)
    assert not shard.exp_avg.any()
    assert not low.any()


def test_a_model_learns_with_it_as_the_reference_does():
    """On the lean engine; every matrix of the encoder is among the orthogonalised."""
    config, weights = tiny_config(), []
    for name in ("lambert", "reference"):
        model, pieces = build(config, seed=1)
        optimizer = OptimizerConfig(implementation=name, orthogonal_lr=2.0)
        recipe = Recipe(optimizer=optimizer)
        recipe.train.precision = "fp32"
        engine = LeanEngine(recipe, model, pieces, SINGLE, plain, torch.device("cpu"))
        for step in range(4):
            micro = pack(random_rows(6, config, seed=step))
            engine.backward(engine.model(micro).mlm_sum / micro.masked, last=True)
            engine.step(0.01)
        weights.append(engine.weights.clone())
        held = {pieces[engine.shard.slices[i].index].name for i in engine.lamb.matrices.held}
        assert held == {
            p.name for p in pieces if p.decayed and ".encoder." in p.name and len(p.shape) == 2
        }
        assert len(held) == 6 * config.num_layers
    assert (weights[0] - weights[1]).norm() / weights[0].norm() < 1e-5


@pytest.mark.parametrize("name", ["deepspeed", "apex"])
def test_another_lamb_does_not_know_it(name):
    recipe = Recipe(optimizer=OptimizerConfig(implementation=name, orthogonal_lr=2.0))
    recipe.parallel.zero_stage = 0
    with pytest.raises(UserError, match="knows no optimizer.orthogonal_lr"):
        check_layout(recipe, 1)
