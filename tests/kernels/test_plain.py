"""The plain kernels, which are the specification: against naive arithmetic, and their dropout."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import UserError
from pretrain.kernels import hashing, plain, select
from pretrain.kernels.plain import LambTable

INTS = st.integers(-(2**31), 2**31 - 1)


@settings(max_examples=50, deadline=None)
@given(key=INTS, seed=st.integers(0, 2**40), site=st.integers(0, 400), channel=st.integers(0, 4095))
def test_the_mask_is_the_formula_of_the_docstring(key, seed, site, channel):
    row = hashing.mix((key & hashing.MASK) ^ hashing.stream(seed, site))
    multiplier = hashing.mix(channel) | 1
    bits = row * multiplier + hashing.mix(channel + hashing.GOLDEN) & hashing.MASK
    keys = torch.tensor([key], dtype=torch.int32)
    for p in (0.1, 0.5):
        kept = hashing.hidden_keep(keys, channel + 1, p, seed, site)[0, channel]
        assert bool(kept) == (bits >> 16 >= hashing.threshold(p))


def test_dropout_keeps_its_share_and_the_expectation():
    p, tokens, channels = 0.1, 4096, 512
    keys = torch.arange(tokens, dtype=torch.int32) * 7
    kept = hashing.hidden_keep(keys, channels, p, seed=3, site=5).double()
    share = 1 - hashing.threshold(p) / 65536
    sigma = math.sqrt(share * (1 - share))
    assert abs(kept.mean() - share) < 5 * sigma / math.sqrt(kept.numel())
    # Row and column sums scatter as those of independent draws: chi-square, five deviations.
    for dim, count in ((0, tokens), (1, channels)):
        z = (kept.mean(dim) - share) * math.sqrt(count) / sigma
        assert abs(z.square().mean() - 1) < 5 * math.sqrt(2 / len(z))
    assert hashing.keep_scale(p) * share == pytest.approx(1, abs=1e-12)
    ones = plain.dropout(torch.ones(tokens, channels), p, keys, 5, 3)
    assert torch.equal(ones > 0, kept > 0) and abs(ones.mean() - 1) < 1e-3


def test_dropout_values_are_not_related_to_each_other():
    """Pairs of channels, of tokens, four corners of rectangles and neighbours; and the spectrum."""
    tokens, channels = 2000, 256
    keys = torch.arange(tokens, dtype=torch.int32)
    kept = hashing.hidden_keep(keys, channels, 0.1, seed=1, site=2).double().numpy()
    z = (kept - kept.mean()) / kept.std()
    for a, count in ((z.T @ z / tokens, tokens), (z[:500] @ z[:500].T / channels, channels)):
        pairs = a[np.triu_indices(len(a), 1)] * math.sqrt(count)
        assert abs(pairs.var() - 1) < 0.05 and abs(pairs.mean()) < 0.05
    four = z[:-1, :-1] * z[1:, 1:] * z[:-1, 1:] * z[1:, :-1]
    three = z[:, :-2] * z[:, 1:-1] * z[:, 2:]
    for product in (four, three):
        assert abs(product.mean() / product.std() * math.sqrt(product.size)) < 5
    largest = np.linalg.svd(z, compute_uv=False)[0]
    assert largest < 1.03 * (math.sqrt(tokens) + math.sqrt(channels))  # Marchenko-Pastur edge


def test_masks_differ_by_site_seed_and_head_and_agree_over_ranks():
    keys = torch.arange(500, dtype=torch.int32)
    whole = hashing.attention_keep(keys, 8, 0, 32, 0.3, seed=1, site=4)
    halves = [hashing.attention_keep(keys, 4, first, 32, 0.3, 1, 4) for first in (0, 4)]
    assert torch.equal(torch.cat(halves, 1), whole)
    others = [
        hashing.attention_keep(keys, 8, 0, 32, 0.3, seed=2, site=4),
        hashing.attention_keep(keys, 8, 0, 32, 0.3, seed=1, site=8),
        whole.roll(1, 1),
    ]
    for other in others:
        agreement = (other == whole).double().mean()
        assert abs(agreement - (0.7**2 + 0.3**2)) < 0.02


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5])
def test_probabilities_that_cannot_be(p):
    with pytest.raises(ValueError, match="not in"):
        hashing.threshold(p)


def naive_attention(qkv, rows, token_keys, p, site, seed, first_head):
    """One row at a time, one head at a time."""
    out = []
    for start, end in zip(rows[:-1].tolist(), rows[1:].tolist()):
        q, k, v = qkv[start:end].permute(1, 2, 0, 3)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        if p:
            keys = token_keys[start:end]
            kept = hashing.attention_keep(keys, q.shape[0], first_head, end - start, p, seed, site)
            weights = weights * kept.transpose(0, 1) * hashing.keep_scale(p)
        out.append((weights @ v).transpose(0, 1).flatten(1))
    return torch.cat([o for o in out if len(o)])


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_attention_stays_inside_rows(p):
    torch.manual_seed(0)
    rows = torch.tensor([0, 5, 5, 6, 23, 40], dtype=torch.int32)
    qkv = torch.randn(40, 3, 3, 8, dtype=torch.double, requires_grad=True)
    keys = torch.randint(-(2**31), 2**31, (40,), dtype=torch.int32)
    rest = (p, 4, 9, 5)
    out = plain.attention(qkv, rows, 17, keys, *rest)
    oracle = naive_attention(qkv, rows, keys, *rest)
    assert torch.allclose(out, oracle, atol=1e-12)
    upstream = torch.randn_like(out)
    ours, expected = (torch.autograd.grad(x, qkv, upstream)[0] for x in (out, oracle))
    assert torch.allclose(ours, expected, atol=1e-12)


def test_attention_does_not_depend_on_how_rows_are_packed():
    torch.manual_seed(0)
    lengths = [3, 9, 1, 6]
    qkv = torch.randn(sum(lengths), 3, 2, 8)
    keys = torch.randint(-(2**31), 2**31, (len(qkv),), dtype=torch.int32)
    starts = np.cumsum([0, *lengths])
    rest = (0.1, 0, 1, 0)

    def packed(order):
        index = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order])
        rows = torch.tensor(np.cumsum([0] + [lengths[i] for i in order]), dtype=torch.int32)
        out = torch.empty(len(qkv), 16)
        out[index] = plain.attention(qkv[index], rows, 12, keys[index], *rest)
        return out

    assert torch.allclose(packed([0, 1, 2, 3]), packed([3, 1, 0, 2]), atol=1e-6)


def test_the_bias_of_qkv_gets_the_summed_gradient():
    qkv = torch.randn(6, 3, 2, 4, dtype=torch.double, requires_grad=True)
    bias = torch.randn(24, dtype=torch.double, requires_grad=True)
    rows, keys = torch.tensor([0, 2, 6], dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    out = plain.attention(qkv, rows, 4, keys, 0.0, 0, 0, bias=bias)
    assert torch.equal(out, plain.attention(qkv, rows, 4, keys, 0.0, 0, 0))
    out.square().sum().backward()
    assert torch.allclose(bias.grad, qkv.grad.sum(0).flatten())


def test_vocabulary_loss_is_cross_entropy_without_the_padding():
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*s, dtype=torch.double, requires_grad=True) for s in ((7, 8), (16, 8), (16,))
    )
    labels, weights = torch.randint(0, 13, (7,)), torch.tensor([1.0, 0, 2, 1, 1, 0, 1])
    loss, correct = plain.linear_cross_entropy(hidden, weight, bias, labels, weights, 0, 13)
    logits = (hidden @ weight.T + bias)[:, :13]
    oracle = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    assert torch.allclose(loss, oracle)
    assert correct == ((logits.argmax(1) == labels) & (weights > 0)).sum()
    inputs = (hidden, weight, bias)
    for ours, expected in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(oracle, inputs)
    ):
        assert torch.allclose(ours, expected)


def test_a_vocabulary_shard_of_padding_alone():
    hidden, weight = torch.randn(3, 4), torch.randn(8, 4)
    loss, _ = plain.linear_cross_entropy(
        hidden, weight, torch.zeros(8), torch.tensor([1, 2, 3]), torch.ones(3), 0, 8
    )
    padded = torch.cat([weight, torch.randn(8, 4)])
    more, _ = plain.linear_cross_entropy(
        hidden, padded, torch.zeros(16), torch.tensor([1, 2, 3]), torch.ones(3), 0, 8
    )
    assert torch.allclose(loss, more)


def test_lamb_in_blocks_is_the_formula(monkeypatch):
    monkeypatch.setattr(plain, "LAMB_BLOCK", 7)
    torch.manual_seed(0)
    starts, numels, decays = [2, 12, 12], [10, 0, 15], [0.1, 0.0, 0.0]
    param, grad, m, v = (torch.rand(30, dtype=torch.double) for _ in range(4))
    before = [x.clone() for x in (param, m, v)]
    table = LambTable(starts, numels, decays)
    options = {"eps": 1e-6, "correction1": 0.3, "correction2": 0.2}
    scale = torch.tensor(0.5, dtype=torch.double)
    norms = plain.lamb_moments(
        param, grad, m, v, table, beta1=0.9, beta2=0.99, grad_scale=scale, **options
    )
    low = torch.zeros(30, dtype=torch.bfloat16)
    ratios = torch.tensor([2.0, 1.0, 3.0], dtype=torch.double)
    plain.lamb_apply(param, m, v, table, ratios, lr=0.01, low=low, **options)
    p0, m0, v0 = before
    m1, v1 = 0.9 * m0 + 0.1 * grad / 2, 0.99 * v0 + 0.01 * (grad / 2) ** 2
    for i, (start, numel, decay) in enumerate(zip(starts, numels, decays)):
        at = slice(start, start + numel)
        update = (m1[at] / 0.3) / ((v1[at] / 0.2).sqrt() + 1e-6) + decay * p0[at]
        assert torch.allclose(norms[0, i], p0[at].square().sum())
        assert torch.allclose(norms[1, i], update.square().sum())
        assert torch.allclose(param[at], p0[at] - 0.01 * ratios[i] * update)
        assert torch.equal(low[at], param[at].bfloat16())
    for now, then in zip((param, m, v), before):  # what belongs to no tensor stays
        assert torch.equal(now[:2], then[:2]) and torch.equal(now[27:], then[27:])


def test_a_table_of_columns_that_differ_in_length():
    with pytest.raises(ValueError, match="length"):
        LambTable([0], [1, 2], [0.0])


def test_selection():
    assert select("plain", "cpu") is plain and select("auto", "cpu") is plain
    with pytest.raises(UserError, match="train.kernels=fast"):
        select("fast", "cpu")
    with pytest.raises(UserError, match="fp8"):
        select("auto", "cpu", "fp8")
