"""Time of an optimiser update: ours, and with orthogonal matrices, against the reference, torch's
AdamW and DeepSpeed's FusedLamb.

    python -m bench.optimizer [--preset bert-large] [--repeats N] [--json]

Weights, gradients and moments are fp32; ours also writes a bf16 copy of the weights on a GPU. On a
GPU BERT-large and wall time by events; on a CPU a small model and CPU seconds. All in one run on
one device, as ms an update and as a ratio to ours. FusedLamb is built on first use (a minute) and
left out where it cannot be.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench import harness as h
from configs.model import ModelConfig, parameter_count, resolve_model
from configs.schema import OptimizerConfig
from pretrain.kernels import is_fused, select
from pretrain.kernels.plain import LambTable
from pretrain.model import build
from pretrain.optim.lamb import Lamb
from pretrain.optim.reference import ReferenceLamb
from pretrain.parallel.groups import SINGLE
from pretrain.parallel.pieces import Piece
from pretrain.parallel.slices import Shard, make_slices

Step = Callable[[], Any]


def tensors(preset: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's tensors by name."""
    config = resolve_model(ModelConfig(preset=preset, vocab_size=h.VOCAB))
    _, pieces = build(config, init=False)
    return {piece.name: piece.shape for piece in pieces}


def flat(shapes: dict[str, tuple[int, ...]], device: torch.device) -> tuple[torch.Tensor, dict]:
    """A flat buffer of small random values, and its views by name."""
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    buffer = torch.randn(sum(sizes.values()), device=device) * 0.02
    parts = buffer.split(list(sizes.values()))
    return buffer, {name: part.view(shapes[name]) for name, part in zip(shapes, parts)}


def ours(shapes: dict[str, tuple[int, ...]], device: torch.device) -> Step:
    """Both passes and the gradient norm, as pretrain.optim.lamb makes them."""
    kernels = select("auto", device)
    param, views = flat(shapes, device)
    grad, grads = flat(shapes, device)
    exp_avg, exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param)
    numels = [v.numel() for v in views.values()]
    starts = [sum(numels[:i]) for i in range(len(numels))]
    decays = [0.0 if "LayerNorm" in n or n.endswith("bias") else 0.01 for n in views]
    table = LambTable(starts, numels, decays)
    low = param.bfloat16() if is_fused(kernels) else None
    options = {"eps": 1e-6, "correction1": 0.1, "correction2": 0.001}
    pieces = list(grads.values())

    def step() -> None:
        norm = torch.stack(torch._foreach_norm(pieces)).norm()
        scale = 1.0 / norm.clamp(min=1.0)
        squares = kernels.lamb_moments(
            param, grad, exp_avg, exp_avg_sq, table,
            beta1=0.9, beta2=0.999, grad_scale=scale, **options,
        )  # fmt: skip
        weight, update = squares.sqrt()
        ratios = torch.where((weight > 0) & (update > 0), weight / update, torch.ones_like(weight))
        kernels.lamb_apply(param, exp_avg, exp_avg_sq, table, ratios, lr=1e-4, low=low, **options)

    return step


def orthogonal(shapes: dict[str, tuple[int, ...]], device: torch.device) -> Step:
    """The whole optimiser of one rank, with the encoder's matrices orthogonalised."""
    master, weights = flat(shapes, device)
    grad, _ = flat(shapes, device)
    pieces, held, at = [], [], 0
    for name, weight in weights.items():
        shape, param = shapes[name], torch.nn.Parameter(weight)
        zero = tuple(0 for _ in shape)
        decayed = not ("LayerNorm" in name or name.endswith("bias"))
        pieces.append(Piece(name, param, 0, shape, zero, shape, False, decayed))
        held.append((param, 0, weight.numel(), at))
        at += weight.numel()
    moments = torch.zeros_like(master), torch.zeros_like(master)
    shard = Shard(master, *moments, make_slices(pieces, held), whole=True)
    kernels = select("auto", device)
    lamb = Lamb(pieces, shard, OptimizerConfig(orthogonal_lr=2.0), SINGLE, kernels)
    low = master.bfloat16() if is_fused(kernels) else None
    return lambda: lamb.step(grad, 1e-4, low=low)


def reference(shapes: dict[str, tuple[int, ...]], device: torch.device) -> Step:
    _, weights = flat(shapes, device)
    _, grads = flat(shapes, device)
    decayed = {n for n in weights if not ("LayerNorm" in n or n.endswith("bias"))}
    lamb = ReferenceLamb(weights, OptimizerConfig(), decayed)
    return lambda: lamb.step(grads, 1e-4)


def _parameters(shapes: dict[str, tuple[int, ...]], device: torch.device) -> list:
    _, weights = flat(shapes, device)
    _, grads = flat(shapes, device)
    parameters = [torch.nn.Parameter(w.clone()) for w in weights.values()]
    for parameter, grad in zip(parameters, grads.values()):
        parameter.grad = grad.clone()
    return parameters


def adamw(shapes: dict[str, tuple[int, ...]], device: torch.device) -> Step:
    return torch.optim.AdamW(_parameters(shapes, device), lr=1e-4, fused=True).step


def deepspeed_lamb(shapes: dict[str, tuple[int, ...]], device: torch.device) -> Step | None:
    if device.type != "cuda":
        return None
    # "9.0a" in that list breaks DeepSpeed's build.
    major, minor = torch.cuda.get_device_capability(device)
    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    try:
        from deepspeed.ops.lamb import FusedLamb

        return FusedLamb(_parameters(shapes, device), lr=1e-4).step
    except Exception as error:  # whatever a compiler that is missing raises
        print(f"DeepSpeed FusedLamb left out: {str(error).splitlines()[0][:200]}")
        return None


def timed(step: Step, device: torch.device, repeats: int) -> float:
    """Median ms of an update: wall time by events on a GPU, CPU time of the process on a CPU."""
    if device.type == "cuda":
        return h.median_ms(step, repeats, 3)
    step()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        step()
        times.append((time.process_time() - start) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--preset", default="", help="bert-large on a GPU, bert-mini on a CPU")
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON line last")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    preset = options.preset or ("bert-large" if device.type == "cuda" else "bert-mini")
    repeats = options.repeats or (20 if device.type == "cuda" else 5)
    shapes = tensors(preset)
    entrants = {
        "Lambert LAMB": ours,
        "the same, orthogonal_lr": orthogonal,
        "reference LAMB": reference,
        "torch AdamW (fused)": adamw,
        "DeepSpeed FusedLamb": deepspeed_lamb,
    }
    rows: dict[str, float] = {}
    for name, make in entrants.items():
        step = make(shapes, device)
        if step is None:
            continue
        rows[name] = timed(step, device, repeats if make is not reference else max(2, repeats // 4))
        del step
        if device.type == "cuda":
            torch.cuda.empty_cache()
    config = resolve_model(ModelConfig(preset=preset, vocab_size=h.VOCAB))
    count = parameter_count(config)
    print(f"{preset}, {count / 1e6:.0f}M parameters, {h.card()}, commit {h.commit()}")
    for name, ms in rows.items():
        rate = f"{42 * count / ms * 1e-9:6.2f} TB/s" if name == "Lambert LAMB" else " " * 11
        print(f"{name:24s} {ms:9.2f} ms {rate}  {ms / rows['Lambert LAMB']:6.2f} x ours")
    if options.json:
        h.emit({**h.stamp(), "preset": preset, "parameters": count, "ms": rows})


if __name__ == "__main__":
    main()
