"""The 8-bit path (fused_fp8) against float64: a layer's MLP with its norms and the product after it."""

from __future__ import annotations

import gc
import importlib.util
import os
import weakref
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pretrain.kernels import plain

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
if not (ABLE or INTERPRETED):
    pytest.skip("needs a GPU with 8-bit products or TRITON_INTERPRET=1", allow_module_level=True)
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

from pretrain.kernels import fused_fp8, triton_fp8, triton_fp8_gelu, triton_fp8_rounding  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
T, H, WIDE = (160, 64, 256) if INTERPRETED else (2048, 512, 2048)
SHAPES = {
    "bias1": (H,), "norm1": (H,), "norm_bias1": (H,), "up": (WIDE, H), "up_bias": (WIDE,),
    "down": (H, WIDE), "bias2": (H,), "norm2": (H,), "norm_bias2": (H,), "qkv": (3 * H, H),
}  # fmt: skip
# The interpreter cuts e4m3 off where a GPU rounds to nearest: 2.5 times the error.
TOLERANCE = 0.2 if INTERPRETED else 0.1


@pytest.fixture(autouse=True)
def products(monkeypatch):
    """A CPU has no 8-bit products."""

    def product(a, b, dtype, bias=None):
        wide = [m.values.float() * m.stats[0][:, None] for m in (a, b)]
        return (wide[0] @ wide[1].t()).to(dtype)

    if INTERPRETED:
        monkeypatch.setattr(triton_fp8, "_product", product)
    torch.manual_seed(0)


def draw():
    tensors = {}
    for name, shape in SHAPES.items():
        drawn = torch.randn(shape, device=DEVICE)
        if name.startswith("norm") and "bias" not in name:
            drawn = 1 + 0.2 * drawn
        tensors[name] = drawn * (shape[1] ** -0.5 if len(shape) == 2 else 1)
    for name in ("x", "residual", "end"):
        tensors[name] = torch.randn(T, H, device=DEVICE)
    # Most tokens have a far smaller gradient than the masked ones.
    fall = torch.where(torch.arange(T, device=DEVICE) % 7 == 0, 1e-4, 1e-7)[:, None]
    tensors["end"] = tensors["end"] * fall
    tensors["out"] = torch.randn(T, 3 * H, device=DEVICE) * fall
    return {name: t.bfloat16() for name, t in tensors.items()}


def layer(k, t, p, keys, run=lambda function, *arguments: function(*arguments)):
    """run: calls what comes behind the first norm."""
    y = k.bias_dropout_add_norm(
        t["x"], t["bias1"], t["residual"], t["norm1"], t["norm_bias1"], 1e-12, p, keys, 1, 5
    )
    return run(behind, k, t, p, keys, y)


def behind(k, t, p, keys, y):
    z, y = k.forked_linear(y, t["up"])
    z = k.linear(k.bias_gelu(z, t["up_bias"]), t["down"])
    y = k.bias_dropout_add_norm(z, t["bias2"], y, t["norm2"], t["norm_bias2"], 1e-12, p, keys, 2, 5)
    qkv, y = k.forked_linear(y, t["qkv"])
    return qkv, y


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_values_and_gradients(p):
    drawn, keys = draw(), torch.randint(-(2**31), 2**31, (T,), device=DEVICE).int()
    results = []
    for k, dtype in ((fused_fp8, torch.bfloat16), (plain, torch.float64)):
        t = {name: v.to(dtype).detach().requires_grad_() for name, v in drawn.items()}
        qkv, y = layer(k, t, p, keys)
        ((qkv * t["out"].detach()).sum() + (y * t["end"].detach()).sum()).backward()
        got = {"qkv output": qkv, "output": y}
        results.append(got | {n: t[n].grad for n in (*SHAPES, "x", "residual")})
    for name, exact in results[1].items():
        error = (results[0][name].double() - exact).norm() / exact.norm()
        assert error < TOLERANCE, (name, float(error))


def test_recomputed_activations_change_nothing():
    """Gradients reach `main_grad` once and in fp32, though autograd brings other tensors back."""
    drawn, keys = draw(), torch.randint(-(2**31), 2**31, (T,), device=DEVICE).int()
    # A CPU's bf16 products cannot add to fp32.
    mains = [name for name in SHAPES if not (INTERPRETED and name == "qkv")]
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    results = []
    for options in ({}, {"run": again}):
        t = {name: v.detach().requires_grad_() for name, v in drawn.items()}
        arrived = []
        for name in mains:
            t[name].main_grad = torch.zeros_like(t[name], dtype=torch.float32)
            t[name].main_grad_arrived = partial(arrived.append, name)
        qkv, y = layer(fused_fp8, t, 0.1, keys, **options)
        ((qkv * t["out"].detach()).sum() + (y * t["end"].detach()).sum()).backward()
        assert sorted(arrived) == sorted(mains)
        results.append([*(t[name].main_grad for name in mains), t["x"].grad, t["residual"].grad])
    for ours, again in zip(*results):
        assert torch.equal(ours, again) and ours.norm() > 0


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: the interpreter makes e4m3 numbers of NaN")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["end", "out", "x", "up", "up_bias", "down"])
def test_what_is_not_finite_is_never_rounded_away(name, bad):
    """The update must be skipped, so some gradient of a weight has to tell."""
    t = draw()
    t[name].view(-1)[3] = bad
    t = {n: v.detach().requires_grad_() for n, v in t.items()}
    qkv, y = layer(fused_fp8, t, 0.0, torch.zeros(T, dtype=torch.int32, device=DEVICE))
    ((qkv * t["out"].detach()).sum() + (y * t["end"].detach()).sum()).backward()
    for weight in ("up", "down", "norm1"):
        assert not t[weight].grad.isfinite().all(), weight


def test_everything_is_freed():
    """y knows its fork, the fork not y: no cycle that the collector cannot see."""
    t = {name: v.detach().requires_grad_() for name, v in draw().items()}
    qkv, y = layer(fused_fp8, t, 0.0, torch.zeros(T, dtype=torch.int32, device=DEVICE))
    (qkv.sum() + y.sum()).backward()
    kept = weakref.ref(t["up"]), weakref.ref(qkv)
    del t, qkv, y
    gc.collect()
    assert [r() for r in kept] == [None, None]


@pytest.mark.parametrize("factor", [1e-9, 1.0, 3e4])
def test_both_ways_round_agree(factor):
    """Scales are powers of two: x^T is made from x without rounding again; zero rows stay zero."""
    x = (torch.randn(96, 64, device=DEVICE) * factor).bfloat16()
    x[5] = 0
    eight = triton_fp8_rounding.quantise(x)
    rows = eight.values.float() * eight.stats[0][:, None]
    assert (rows[5] == 0).all() and (rows - x.float()).norm() < 0.08 * x.float().norm()
    values, scale = triton_fp8_rounding.turned(eight)
    assert torch.equal(values.float().t() * scale, rows)
    assert torch.equal(torch.log2(eight.stats[0]), torch.log2(eight.stats[0]).round())


@pytest.mark.parametrize("back", [False, True])
def test_both_ways_round_of_gelu_are_the_same_values(back):
    """Every byte of the turned copy is the one of the other (ptxas once moved some unmade)."""
    x, grad = (torch.randn(T, WIDE, device=DEVICE).bfloat16() for _ in range(2))
    bias = torch.randn(WIDE, device=DEVICE).bfloat16()
    norms = torch.full((T,), 8.0, device=DEVICE)  # alike, so that all scales are
    bounds = (norms, norms.amax(), norms.amax() / 8)
    eight, _ = triton_fp8_gelu._run(grad if back else None, x, bias, bounds)
    values, scale = eight.across
    assert torch.equal(values.t().float(), eight.values.float())
    assert (eight.stats[0] == scale).all()
