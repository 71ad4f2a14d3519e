"""What the GPU benches share: fixed-length micro-batches, timing, our training step, ceilings."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from configs.model import ModelConfig, model_flops, resolve_model
from configs.schema import Recipe
from pretrain.data.batches import GlobalBatch, MicroBatch

VOCAB = 30522
MICRO_BATCHES = 8  # micro-batches a step


def commit() -> str:
    """Of the checkout, or BENCH_COMMIT where the copy that runs has no history."""
    if "BENCH_COMMIT" in os.environ:
        return os.environ["BENCH_COMMIT"]
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return run.stdout.strip() or "unknown"


def card() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def large() -> ModelConfig:
    return resolve_model(ModelConfig(preset="bert-large", vocab_size=VOCAB))


def fixed_rows(
    length: int, masked: int, tokens: int, seed: int = 0, device: str = "cuda"
) -> MicroBatch:
    """A micro-batch of random tokens: tokens / length rows, each full, `masked` predictions each."""
    g = torch.Generator().manual_seed(seed)
    rows = tokens // length
    ids = torch.randint(1000, VOCAB, (rows, length), generator=g)
    positions = torch.arange(length).repeat(rows, 1)
    places = torch.stack([torch.randperm(length, generator=g)[:masked] for _ in range(rows)])
    flat = (places + torch.arange(rows)[:, None] * length).sort().values.flatten()
    labels = torch.randint(1000, VOCAB, (rows * masked,), generator=g)
    micro = MicroBatch(
        input_ids=ids.flatten(),
        position_ids=positions.flatten(),
        token_type_ids=(positions >= length // 2).long().flatten(),
        token_keys=torch.randint(-(2**31), 2**31, (tokens,), generator=g).int(),
        cu_seqlens=torch.arange(rows + 1, dtype=torch.int32) * length,
        masked_positions=flat,
        masked_labels=labels,
        masked_weights=torch.ones(rows * masked),
        first_positions=torch.arange(rows) * length,
        next_sentence_labels=torch.randint(0, 2, (rows,), generator=g),
        row_weights=torch.ones(rows),
        max_length=length,
        tokens=tokens,
        rows=rows,
        masked=rows * masked,
        labelled=rows,
        sum_squared_lengths=rows * length * length,
    )
    return micro.map(lambda t: t.to(device))


def flops(config: ModelConfig, micros: list[MicroBatch]) -> float:
    return sum(
        model_flops(config, m.tokens, m.sum_squared_lengths, m.masked, m.rows) for m in micros
    )


def median_ms(step: Callable[[], Any], repeats: int, warmup: int = 2, each: int = 1) -> float:
    """Median time of `step` by CUDA events, `each` calls between two of them (short ones)."""
    for _ in range(warmup):
        step()
    pairs = []
    for _ in range(repeats):
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        for _ in range(each):
            step()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairs) / each


class Training:
    """Our trainer's model, engine and LAMB on a GPU, without its loop.

    Initial weights are drawn on the GPU (standard deviation 0.02), since the trainer's own, which
    do not depend on the layout, take seconds on the CPU. groups: pretrain.parallel.groups.Groups.
    tokens: most of them in a micro-batch.
    """

    def __init__(
        self,
        config: ModelConfig,
        precision: str,
        kernels: str = "auto",
        recorded: bool = True,
        groups: Any = None,
        zero_stage: int = 1,
        sequence_parallel: bool | None = None,
        tokens: int = 32768,
        seed: int = 1,
    ) -> None:
        from pretrain.engine import DTYPES, LeanEngine
        from pretrain.kernels import select
        from pretrain.micro import Micro, RecordedMicro
        from pretrain.model import build
        from pretrain.parallel.exchange import make_exchange
        from pretrain.parallel.groups import SINGLE

        device = torch.device("cuda", torch.cuda.current_device())
        self.groups = groups or SINGLE
        recipe = Recipe()
        recipe.train.precision = precision
        recipe.parallel.zero_stage = zero_stage
        chosen = select(kernels, device, precision)
        size = tokens * config.hidden_size * DTYPES[precision].itemsize
        group = self.groups.tp_group
        self.exchange = make_exchange(group, sequence_parallel, device, chosen, size)
        model, pieces = build(config, group, chosen, seed, self.exchange, init=False)
        model = model.to(device).train()
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "LayerNorm" not in name and not name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.02)
        self.engine = LeanEngine(recipe, model, pieces, self.groups, chosen, device)
        self.model = model
        self.micro = (RecordedMicro if recorded else Micro)(model, self.engine)

    def accumulate(self, micros: list[MicroBatch]) -> torch.Tensor:
        """Forward and backward over a global batch; loss sums, fp32 [4]."""
        masked = sum(m.masked for m in micros) * self.groups.dp
        rows = sum(m.rows for m in micros) * self.groups.dp
        whole = GlobalBatch(micros, masked, rows, 0, 0, 0.0, 0.0)
        last = len(micros) - 1
        sums = [self.micro(m, whole, i == last) for i, m in enumerate(micros)]
        return torch.stack(sums).sum(0)

    def step(self, micros: list[MicroBatch], lr: float = 1e-4) -> torch.Tensor:
        """One update; its loss (a device scalar)."""
        sums = self.accumulate(micros)
        self.engine.step(lr)
        return sums[0] / sum(m.masked for m in micros) + sums[1] / sum(m.rows for m in micros)


def matmul_rate(m: int, n: int, k: int, repeats: int = 20, warmup: int = 2) -> float:
    """TFLOP/s of torch's bf16 a [m, k] @ b [n, k]^T on random data.

    A card under load for a second clocks lower than in a burst of milliseconds: `warmup` decides
    which of the two is measured.
    """
    a = torch.randn(m, k, device="cuda").bfloat16()
    b = torch.randn(n, k, device="cuda").bfloat16()
    return 2e-9 * m * n * k / median_ms(lambda: a @ b.t(), repeats, warmup, each=4)


def fp8_rate(m: int, n: int, k: int, repeats: int = 20) -> float:
    """TFLOP/s of torch._scaled_mm, e4m3 with one scale a tensor and bf16 output."""
    a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")

    def product() -> Any:
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return 2e-9 * m * n * k / median_ms(product, repeats, each=4)


def copy_rate() -> float:
    """TB/s read plus written by a device-to-device copy of 4 GB."""
    a = torch.empty(1 << 31, dtype=torch.int16, device="cuda").random_()
    b = torch.empty_like(a)
    return 2e-9 * a.numel() * 2 / median_ms(lambda: b.copy_(a), 10)


# The first whose mark is in a kernel's name.
GROUPS = (
    (
        "GEMM",
        ("gemm", "nvjet", "cutlass", "xmma", "Kernel2", "cublas", "splitK", "_weight_gradient8"),
    ),
    ("norm, GELU, dropout", ("_norm_forward", "_norm_backward", "_gelu", "_dropout", "triton")),
    ("attention", ("attention_", "flash", "fmha", "cudnn")),
    ("loss", ("_row_stats", "_gradient")),
    ("optimiser", ("_moments", "_apply", "_reduce", "multi_tensor", "norm_kernel", "LpNorm")),
    ("8-bit rounding", ("_quantise", "_across")),
)


def group_of(kernel: str) -> str:
    for group, marks in GROUPS:
        if any(mark in kernel for mark in marks):
            return group
    return "other elementwise"


def budget(step: Callable[[], Any]) -> tuple[dict[str, float], list[tuple[str, float, int]]]:
    """Milliseconds a step of each kernel group, with gaps; and the single kernels, largest first."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        step()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    spans = []
    for event in prof.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        spans.append((event.time_range.start, event.time_range.end))
        entry = kernels.setdefault(event.name, [0.0, 0])
        entry[0] += event.time_range.elapsed_us() / 1e3
        entry[1] += 1
    groups: dict[str, float] = {}
    for name, (ms, _) in kernels.items():
        groups[group_of(name)] = groups.get(group_of(name), 0.0) + ms
    spans.sort()
    gaps, end = 0.0, spans[0][0]
    for begin, finish in spans:
        gaps += max(0.0, begin - end) / 1e3
        end = max(end, finish)
    groups["gaps"] = gaps
    ranked = sorted(((n, v[0], int(v[1])) for n, v in kernels.items()), key=lambda e: -e[1])
    return groups, ranked


def emit(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)


def stamp() -> dict[str, str]:
    return {
        "card": card(),
        "commit": commit(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
