"""Each fused kernel against its plain version in fp64, forward and backward.

Run on a GPU, or interpreted on a CPU where Triton is installed (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from pretrain.kernels import plain

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None or not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs Triton and a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from pretrain.kernels import fused  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
TYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]
# Norm-relative: rounding of results and of the operands of matrix products, for each type.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    difference = (actual.double() - expected.double()).norm()
    assert actual.shape == expected.shape
    assert difference <= tolerance * expected.double().norm() + 1e-30, float(
        difference / expected.double().norm()
    )


def compare(function: str, dtype: torch.dtype, inputs: list, rest: dict) -> None:
    """Runs both versions with the same upstream gradient; `inputs` are tensors that get gradients."""
    inputs = [x.to(dtype) for x in inputs]
    fast = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    ours = getattr(fused, function)(**rest(fast))
    oracle = getattr(plain, function)(**rest(exact))
    ours, oracle = (x[0] if isinstance(x, tuple) else x for x in (ours, oracle))
    close(ours, oracle, TOLERANCE[dtype])
    upstream = torch.randn_like(oracle).to(ours.dtype)
    gradients = torch.autograd.grad(ours, fast, upstream)
    expected = torch.autograd.grad(oracle, exact, upstream.double())
    for i, (a, b) in enumerate(zip(gradients, expected)):
        assert a.isfinite().all(), i
        if function == "attention" and i == 1:
            # The key bias has no true gradient (softmax does not see it): zero, or rounding noise.
            thirds = a.view(3, -1), b.view(3, -1)
            assert thirds[0][1].norm() == 0 and thirds[1][1].norm() <= 1e-9 * b.norm()
            # Sums over tokens of what is rounded before: looser in low precision.
            close(a, b, 3 * TOLERANCE[dtype])
        else:
            close(a, b, TOLERANCE[dtype])


def keys(tokens: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (tokens,), dtype=torch.int32, device=DEVICE)


def lengths_to_rows(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(
        0, dtype=torch.int32
    )


SHORT = [7, 1, 0, 32, 20]
LONG = [150, 33, 0, 128, 129]
CASES = (
    [(SHORT, 32)]
    if INTERPRETED
    else [(SHORT, 32), ([128, 77, 0, 128, 3, 100], 128), (LONG, 160), ([512, 300, 1, 257], 512)]
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("lengths, longest", CASES)
@pytest.mark.parametrize("first_head, with_bias", [(0, False), (3, True)])
def test_attention(lengths, longest, p, dtype, first_head, with_bias):
    if dtype == torch.float32 and longest > 32:
        pytest.skip(
            "needs a GPU in half precision: fp32 products of large tiles take minutes to compile"
        )
    tokens, heads, width = sum(lengths), 2, 16 if INTERPRETED else 64
    inputs = [torch.randn(tokens, 3, heads, width, device=DEVICE)]
    if with_bias:
        inputs.append(torch.zeros(3 * heads * width, device=DEVICE))
    rows, token_keys = lengths_to_rows(lengths), keys(tokens)

    def rest(x):
        return {
            "qkv": x[0], "cu_seqlens": rows, "max_length": longest, "token_keys": token_keys, "p": p,
            "site": 4, "seed": 99, "first_head": first_head, "bias": x[1] if with_bias else None,
        }  # fmt: skip

    compare("attention", dtype, inputs, rest)


@pytest.mark.skipif(
    not INTERPRETED, reason="needs TRITON_INTERPRET=1; a GPU has its long rows above"
)
def test_attention_of_rows_longer_than_a_tile():
    from pretrain.kernels import attention

    lengths = [40, 3, 0, 32]
    rows, token_keys = lengths_to_rows(lengths), keys(75)
    qkv, bias = torch.randn(75, 3, 2, 16), torch.zeros(96)
    rest = (0.1, 4, 99, 0)
    tiles = {"BLOCK_M": 16, "BLOCK_N": 16}
    drawn = attention.hashes(token_keys, 0.1, 4, 99, 2, 0, 48)
    out, log_sums = attention.forward(qkv, rows, 48, *drawn, 0.1, short=16, **tiles)
    exact, exact_bias = qkv.double().requires_grad_(), bias.double().requires_grad_()
    oracle = plain.attention(exact, rows, 48, token_keys, *rest, bias=exact_bias)
    close(out, oracle, 2e-5)
    upstream = torch.randn_like(out)
    grad_qkv, grad_bias = attention.backward(
        upstream,
        qkv,
        True,
        rows,
        48,
        *drawn,
        out,
        log_sums,
        0.1,
        short=16,
        queries=tiles,
        keys=tiles,
    )
    expected, expected_bias = torch.autograd.grad(oracle, (exact, exact_bias), upstream.double())
    close(grad_qkv, expected, 2e-5)
    close(grad_bias.sum(0).flatten(), expected_bias, 2e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("hidden", [48] if INTERPRETED else [768, 1024, 2560])
@pytest.mark.parametrize("parts", [(), (2,), (4,)])
def test_bias_dropout_add_norm(parts, hidden, p, dtype):
    tokens = 13 if INTERPRETED else 1111
    x = torch.randn(*parts, tokens, hidden, device=DEVICE)
    residual = torch.randn(tokens, hidden, device=DEVICE)
    bias, weight, norm_bias = (torch.randn(hidden, device=DEVICE) for _ in range(3))
    token_keys = keys(tokens)

    def rest(t):
        return {
            "x": t[0], "bias": t[1], "residual": t[2], "weight": t[3], "norm_bias": t[4],
            "eps": 1e-12, "p": p, "token_keys": token_keys, "site": 1, "seed": 5,
        }  # fmt: skip

    compare("bias_dropout_add_norm", dtype, [x, bias, residual, weight, norm_bias], rest)


@pytest.mark.parametrize("dtype", TYPES)
def test_layer_norm(dtype):
    hidden = 48 if INTERPRETED else 1024
    x = torch.randn(17, hidden + 16, device=DEVICE) * 3 + 1  # of which a part is taken
    weight, bias = (torch.randn(hidden, device=DEVICE) for _ in range(2))
    compare(
        "layer_norm",
        dtype,
        [x, weight, bias],
        lambda t: {"x": t[0][:, :hidden], "weight": t[1], "bias": t[2], "eps": 1e-12},
    )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [0, 9 if INTERPRETED else 1003])
def test_bias_gelu(tokens, dtype):
    channels = 40 if INTERPRETED else 4096
    x, bias = torch.randn(tokens, channels, device=DEVICE) * 2, torch.randn(channels, device=DEVICE)
    compare("bias_gelu", dtype, [x, bias], lambda t: {"x": t[0], "bias": t[1]})


@pytest.mark.parametrize("dtype", TYPES)
def test_dropout(dtype):
    x, token_keys = torch.randn(33, 48, device=DEVICE), keys(33)
    compare(
        "dropout",
        dtype,
        [x],
        lambda t: {"x": t[0], "p": 0.3, "token_keys": token_keys, "site": 9, "seed": 1},
    )


# Few rows; many; runs over many parts; more than 16 bits of ids.
@pytest.mark.parametrize("rows, used", [(2, 2), (500, 500), (40, 2), (40000, 60)])
@pytest.mark.parametrize("dtype", TYPES)
def test_embedding(rows, used, dtype):
    tokens, hidden = (300, 48) if INTERPRETED else (5000, 1024)
    ids = torch.randint(rows - used, rows, (tokens,), device=DEVICE)
    weight = torch.randn(rows, hidden, device=DEVICE)
    compare("embedding", dtype, [weight], lambda t: {"ids": ids, "weight": t[0]})


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: interpreted it takes minutes")
def test_tied_weight_is_summed_in_its_main_gradient():
    """Both gradients of the word embeddings arrive as one."""
    rows, tokens = 100, 70
    parameter = torch.nn.Parameter(torch.randn(rows, 32, device=DEVICE).bfloat16())
    parameter.main_grad = torch.ones(rows, 32, device=DEVICE)
    arrived = []
    parameter.main_grad_arrived = lambda: arrived.append(1)
    exact = parameter.detach().double().requires_grad_()
    ids, labels = torch.randint(0, rows, (2, tokens), device=DEVICE)
    weights, bias = torch.ones(tokens, device=DEVICE), torch.zeros(rows, device=DEVICE)
    for k, weight in ((fused, parameter), (plain, exact)):
        hidden = k.embedding(ids, weight)
        rest = (bias.to(weight.dtype), labels, weights.to(weight.dtype), 0, rows)
        k.linear_cross_entropy(hidden, weight, *rest)[0].backward()
    assert arrived == [1] and parameter.grad is None
    close(parameter.main_grad - 1, exact.grad, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("start", [0, 50])
def test_linear_cross_entropy(dtype, start):
    positions, hidden, vocab = (35, 16, 64) if INTERPRETED else (300, 256, 5120)
    true_vocab = start + vocab - 7
    x = torch.randn(positions, hidden, device=DEVICE)
    weight, bias = torch.randn(vocab, hidden, device=DEVICE) / 4, torch.randn(vocab, device=DEVICE)
    labels = torch.randint(start, true_vocab, (positions,), device=DEVICE)
    weights = torch.rand(positions, device=DEVICE)
    weights[1] = 0

    def rest(t):
        return {
            "hidden": t[0], "weight": t[1], "bias": t[2], "labels": labels, "weights": weights,
            "vocab_start": start, "true_vocab": true_vocab,
        }  # fmt: skip

    compare("linear_cross_entropy", dtype, [x, weight, bias], rest)
    arguments = rest([x.to(dtype), weight.to(dtype), bias.to(dtype)])
    assert fused.linear_cross_entropy(**arguments)[1] == plain.linear_cross_entropy(**arguments)[1]


def test_the_loss_of_a_weight_that_is_not_a_number_is_none():
    hidden, weight = torch.randn(5, 16, device=DEVICE), torch.randn(64, 16, device=DEVICE)
    weight[3] = float("nan")
    rest = (torch.zeros(64, device=DEVICE), torch.full((5,), 9, device=DEVICE))
    rest += (torch.ones(5, device=DEVICE), 0, 60)
    for k in (fused, plain):
        assert k.linear_cross_entropy(hidden, weight, *rest)[0].isnan()


def test_lamb():
    numels = [40, 1, 0, 300] if INTERPRETED else [70001, 1, 0, 16384, 123, 1 << 20]
    starts = [sum(numels[:i]) for i in range(len(numels))]
    decays = [0.01 * (i % 2) for i in range(len(numels))]
    total = sum(numels) + 5  # a tail that belongs to no tensor
    state = [torch.randn(total, device=DEVICE) for _ in range(3)] + [
        torch.rand(total, device=DEVICE)
    ]
    options = {"eps": 1e-6, "correction1": 0.1, "correction2": 0.001}
    results = []
    for kernels, dtype in ((fused, torch.float32), (plain, torch.float64)):
        param, grad, exp_avg, exp_avg_sq = (x.to(dtype).clone() for x in state)
        low = torch.zeros(total, dtype=torch.bfloat16, device=DEVICE)
        table = kernels.LambTable(starts, numels, decays)
        scale = torch.tensor(0.5, device=DEVICE, dtype=dtype)
        norms = kernels.lamb_moments(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            table,
            beta1=0.9,
            beta2=0.999,
            grad_scale=scale,
            **options,
        )
        ratios = torch.where(norms[1] > 0, (norms[0] / norms[1]).sqrt(), torch.ones_like(norms[0]))
        kernels.lamb_apply(param, exp_avg, exp_avg_sq, table, ratios, lr=0.01, low=low, **options)
        results.append((norms, param, exp_avg, exp_avg_sq, low))
    for ours, oracle in zip(*results):
        close(ours, oracle, 8e-3 if ours.dtype == torch.bfloat16 else 2e-6)
    assert torch.equal(results[0][1][-5:], state[0][-5:])


@pytest.mark.parametrize("kernels", [fused, plain])
def test_lamb_leaves_alone_what_it_is_told_to_by_nan(kernels):
    numels = [40, 300]
    options = {"eps": 1e-6, "correction1": 0.1, "correction2": 0.001}
    state = [torch.rand(340, device=DEVICE) for _ in range(4)]
    before = [x.clone() for x in state]
    param, grad, exp_avg, exp_avg_sq = state
    table, betas = kernels.LambTable([0, 40], numels, [0.0, 0.1]), {"beta1": 0.9, "beta2": 0.999}
    nan = torch.tensor(float("nan"), device=DEVICE)
    kernels.lamb_moments(*state, table, grad_scale=nan, **betas, **options)
    assert all(torch.equal(now, then) for now, then in zip(state, before))
    ratios, low = torch.tensor([float("nan"), 1.0], device=DEVICE), torch.zeros_like(param)
    kernels.lamb_apply(
        param, exp_avg, exp_avg_sq, table, ratios, lr=0.01, low=low.bfloat16(), **options
    )
    assert torch.equal(param[:40], before[0][:40])
    assert (param[40:] != before[0][40:]).all()


@pytest.mark.parametrize("heads, first_head", [(4, 0), (3, 5)])
def test_masks_are_those_of_the_specification(heads, first_head):
    """Values one and v = identity show the attention mask itself; x = 1 the hidden one."""
    tokens, width = 16, 16
    token_keys = keys(tokens)
    x = torch.ones(tokens, 64, device=DEVICE)
    arguments = {"p": 0.5, "token_keys": token_keys, "site": 2, "seed": 3}
    assert torch.equal(fused.dropout(x, **arguments), plain.dropout(x, **arguments))
    qkv = torch.zeros(tokens, 3, heads, width, device=DEVICE)
    qkv[:, 2] = torch.eye(tokens, width, device=DEVICE)[:, None]
    rows = lengths_to_rows([tokens])
    ours, oracle = (
        k.attention(qkv, rows, tokens, first_head=first_head, **arguments) for k in (fused, plain)
    )
    assert torch.equal(ours > 0, oracle > 0)
    assert 0.3 < (oracle > 0).float().mean() < 0.7


@pytest.mark.parametrize("dtype", [t for t in TYPES if t != torch.float32] or TYPES)
@pytest.mark.parametrize("fork, out", [(False, 16), (False, 48), (True, 16)])
def test_linear_adds_to_the_main_gradient(dtype, fork, out):
    """Weight gradients go into `main_grad`, the residual's into the input's, else as torch's."""
    function = fused.forked_linear if fork else fused.linear
    x, weight, bias = (torch.randn(*s, device=DEVICE) for s in ((24, 32), (out, 32), (out,)))
    parameter = torch.nn.Parameter(weight.to(dtype))
    arrived = []
    if not INTERPRETED:
        parameter.main_grad = torch.ones(out, 32, device=DEVICE)
        parameter.main_grad_arrived = lambda: arrived.append(1)
    fast, fast_bias = (t.to(dtype).clone().requires_grad_() for t in (x, bias))
    exact, exact_weight, exact_bias = (
        t.to(dtype).double().requires_grad_() for t in (x, weight, bias)
    )
    up, beside = torch.randn(24, out, device=DEVICE), torch.randn(24, 32, device=DEVICE)
    oracle = exact @ exact_weight.t() + exact_bias
    outputs = [(oracle, up), (exact, beside)] if fork else [(oracle, up)]
    sum((a * b.to(dtype).double()).sum() for a, b in outputs).backward()
    y = function(fast, parameter, fast_bias)
    y, rest = y if fork else (y, None)
    close(y, oracle, TOLERANCE[dtype])
    loss = (y * up.to(dtype)).sum() + ((rest * beside.to(dtype)).sum() if fork else 0)
    loss.backward()
    close(fast.grad, exact.grad, TOLERANCE[dtype])
    close(fast_bias.grad, exact_bias.grad, TOLERANCE[dtype])
    if INTERPRETED:
        close(parameter.grad, exact_weight.grad, TOLERANCE[dtype])
    else:
        assert arrived == [1] and parameter.grad is None
        close(parameter.main_grad - 1, exact_weight.grad, TOLERANCE[dtype])


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: interpreted it takes minutes")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_collect_adds_to_main_gradients(count):
    from pretrain.kernels.triton_gradients import collect

    parameters, arrived = [], []
    for i in range(count):
        parameter = torch.nn.Parameter(torch.zeros(1000, device=DEVICE, dtype=torch.bfloat16))
        parameter.main_grad = torch.full((1000,), float(i), device=DEVICE)
        parameter.main_grad_arrived = lambda i=i: arrived.append(i)
        parameters.append(parameter)
    partial = torch.randn(333, count, 1000, device=DEVICE)
    assert collect(partial, *parameters) == [None] * count and arrived == list(range(count))
    for i, parameter in enumerate(parameters):
        close(parameter.main_grad - i, partial[:, i].double().sum(0), 1e-5)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
def test_contributions_of_other_ranks_are_added(ranks, dtype):
    own = torch.randn(100, 77, device=DEVICE, dtype=dtype)
    parts = torch.randn(ranks, 100, 77, device=DEVICE, dtype=dtype)
    exact = own.double() + parts.double().sum(0)
    got = fused.add_parts(own, parts)
    assert got.data_ptr() == own.data_ptr()
    close(got, exact, torch.finfo(dtype).eps)
