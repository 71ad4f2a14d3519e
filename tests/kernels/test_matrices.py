"""The passes over orthogonalised matrices (optimizer.orthogonal_lr) against their plain version."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from pretrain.kernels import plain
from pretrain.kernels.matrices import MatrixTable, orthogonalise

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None or not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs Triton and a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from pretrain.kernels import fused  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    difference = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert difference <= tolerance, float(difference)


@pytest.mark.parametrize("numels", [(64, 4096), (5000, 12288, 0, 9001)], ids=str)
def test_against_plain(numels):
    """Gaps between slices, sizes that no chunk divides, directions in another order, NaN."""
    n = len(numels)
    starts = [sum(numels[:i]) + 7 * i + 3 for i in range(n)]
    places = [sum(numels[i + 1 :]) for i in range(n)]
    total = sum(numels) + 7 * n + 3
    state = [torch.randn(total, device=DEVICE) for _ in range(3)]
    scale = torch.tensor(0.5, device=DEVICE)
    table = MatrixTable(starts, list(numels), places, [0.3, *[0.0] * (n - 1)], [2.0] * n)
    rates = torch.tensor([0.02] * (n - 1) + [float("nan")], device=DEVICE)
    results = []
    for kernels in (fused, plain):
        param, grad, exp_avg = (x.clone() for x in state)
        low = torch.zeros(total, dtype=torch.bfloat16, device=DEVICE)
        direction = torch.zeros(sum(numels), dtype=torch.bfloat16, device=DEVICE)
        kernels.matrix_momentum(grad, exp_avg, table, direction, beta1=0.9, grad_scale=scale)
        norms = kernels.matrix_norms(param, direction, table)
        kernels.matrix_apply(param, direction, table, rates, low)
        results.append((direction, norms, param, exp_avg, low))
    for ours, oracle, tolerance in zip(*results, (8e-3, 1e-3, 2e-4, 2e-6, 8e-3)):
        close(ours, oracle, tolerance)
    left = slice(starts[-1], starts[-1] + numels[-1])
    assert torch.equal(results[0][2][left], state[0][left])
    assert not results[0][4][left].any()
    nan = torch.tensor(float("nan"), device=DEVICE)
    exp_avg, direction = state[2].clone(), torch.ones(sum(numels), device=DEVICE)
    fused.matrix_momentum(state[1], exp_avg, table, direction, beta1=0.9, grad_scale=nan)
    assert torch.equal(exp_avg, state[2])


@pytest.mark.parametrize("shape", [(2, 128, 128), (2, 64, 256), (2, 256, 64)], ids=str)
def test_bf16_levels_the_singular_values_as_well(shape):
    torch.manual_seed(0)
    u, _, vt = torch.linalg.svd(torch.randn(shape, device=DEVICE), full_matrices=False)
    values = torch.logspace(-2, 0, u.shape[-1], device=DEVICE)
    out = orthogonalise(((u * values) @ vt).bfloat16())
    assert out.dtype == torch.bfloat16
    found = torch.linalg.svdvals(out.float())
    assert found.min() > 0.65
    assert found.max() < 1.3
