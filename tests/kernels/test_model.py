"""What the kernels promise the whole model, on CPU and (marked) on a GPU."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from bench.harness import fixed_rows
from configs.model import ModelConfig, resolve_model
from configs.schema import Recipe
from pretrain.data.batches import GlobalBatch
from pretrain.engine import LeanEngine
from pretrain.kernels import plain, select
from pretrain.micro import Micro, RecordedMicro
from pretrain.model import build
from pretrain.parallel.groups import SINGLE

TINY = resolve_model(ModelConfig(preset="bert-tiny", vocab_size=30522))


def test_only_scored_tokens_pass_the_last_layer_and_nothing_changes():
    """The loss through the gathered tokens equals that of all hidden states; so do gradients."""
    micro = fixed_rows(16, 3, 64, device="cpu")
    model, _ = build(TINY, kernels=plain, seed=1)
    model.train()
    sums = model(micro)
    hidden = model.encode(micro)
    scored = model.cls.predictions.transform(hidden[micro.masked_positions])
    weight = model.bert.embeddings.word_embeddings.weight
    loss, _ = plain.linear_cross_entropy(
        scored,
        weight,
        model.cls.predictions.bias,
        micro.masked_labels,
        micro.masked_weights,
        0,
        30522,
    )
    assert torch.allclose(sums.mlm_sum, loss, rtol=1e-6)
    layer = list(model.bert.encoder.layer[-1].parameters())
    for ours, whole in zip(
        torch.autograd.grad(sums.mlm_sum, layer), torch.autograd.grad(loss, layer)
    ):
        assert torch.allclose(ours, whole, rtol=1e-3, atol=1e-6)


def train(
    kernels_name: str, recorded: bool, precision: str, device: str, length: int
) -> list[float]:
    """Losses of six updates of three micro-batches each."""
    kernels = select(kernels_name, device, precision)
    model, pieces = build(TINY, kernels=kernels, seed=1)
    recipe = Recipe()
    recipe.train.precision = precision
    model.to(device).train()
    engine = LeanEngine(recipe, model, pieces, SINGLE, kernels, torch.device(device))
    run = (RecordedMicro if recorded else Micro)(model, engine)
    micros = [fixed_rows(length, 3, 4 * length, seed=i, device=device) for i in range(3)]
    masked, rows = sum(m.masked for m in micros), sum(m.rows for m in micros)
    batch = GlobalBatch(micros, masked, rows, 0, 0, 0.0, 0.0)
    losses = []
    for _ in range(6):
        sums = torch.stack([run(m, batch, i == 2) for i, m in enumerate(micros)]).sum(0)
        losses.append(float(sums[0] / masked + sums[1] / rows))
        engine.step(5e-3)
    run.close()
    return losses


def test_accumulated_gradients_are_those_of_the_hooks():
    micro = fixed_rows(16, 3, 64, device="cpu")
    model, pieces = build(TINY, kernels=plain, seed=1)
    recipe = Recipe()
    recipe.train.precision = "bf16"
    engine = LeanEngine(recipe, model.train(), pieces, SINGLE, plain, torch.device("cpu"))
    engine.backward(model(micro).mlm_sum, last=False)
    hooked = engine.grads.clone()
    engine.grads.zero_()
    engine.accumulate(model(micro).mlm_sum, last=False)
    assert hooked.norm() > 0 and torch.equal(engine.grads, hooked)


class _Adds(torch.autograd.Function):
    """A product that adds its weight's gradient itself, as the fused ones do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.weight.main_grad.add_(grad.t() @ x)
        ctx.weight.main_grad_arrived()
        return grad @ weight, None


def test_every_gradient_is_counted_once_whoever_adds_it(monkeypatch):
    """Or a bucket would be sent to the other ranks before all of it is there."""
    kernels = SimpleNamespace(**vars(plain))
    kernels.linear = lambda x, weight, bias=None, group=None: _Adds.apply(x, weight)
    model, pieces = build(TINY, kernels=kernels, seed=1)
    recipe = Recipe()
    recipe.train.precision = "bf16"
    engine = LeanEngine(recipe, model.train(), pieces, SINGLE, plain, torch.device("cpu"))
    counted = []
    monkeypatch.setattr(engine, "_count", lambda bucket: counted.append(id(bucket)))
    sums = model(fixed_rows(16, 3, 64, device="cpu"))
    engine.backward(sums.mlm_sum + sums.nsp_sum, last=True)
    assert [counted.count(id(b)) for b in engine.buckets] == [len(b.params) for b in engine.buckets]


def test_an_engine_that_is_let_go_frees_its_memory():
    """Parameters, hooks and engine hold each other: the garbage collector must see all of it."""
    model, pieces = build(TINY, kernels=plain, seed=1)
    recipe = Recipe()
    recipe.train.precision = "bf16"
    engine = LeanEngine(recipe, model.train(), pieces, SINGLE, plain, torch.device("cpu"))
    engine.backward(model(fixed_rows(16, 3, 64, device="cpu")).mlm_sum, last=True)
    held = [weakref.ref(x) for x in (model, engine.weights, engine.grads, engine.shard.master)]
    del model, pieces, engine
    gc.collect()
    assert [x() for x in held] == [None] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("length", [64, 160])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_is_the_same_with_fused_kernels_and_from_graphs(length, precision):
    oracle = train("plain", False, "fp32", "cuda", length)
    eager = train("auto", False, precision, "cuda", length)
    assert train("auto", True, precision, "cuda", length) == eager
    assert oracle[-1] < oracle[0] - 0.1
    for ours, exact in zip(eager, oracle):
        assert ours == pytest.approx(exact, abs=0.05)


@pytest.mark.gpu
def test_fp8_training_follows_bf16():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with 8-bit matrix units")
    for ours, other in zip(*(train("auto", True, p, "cuda", 64) for p in ("fp8", "bf16"))):
        assert ours == pytest.approx(other, abs=0.1)
