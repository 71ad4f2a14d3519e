"""Ten updates of a small model in any layout, run by the processes that tests start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from configs.loading import to_dict
from configs.schema import OptimizerConfig, Recipe
from pretrain.checkpoint import latest
from pretrain.checkpoint.reader import Reader, load_shard
from pretrain.checkpoint.writer import Writer
from pretrain.model import build
from pretrain.optim.reference import ReferenceLamb
from pretrain.parallel.exchange import Exchange
from pretrain.parallel.groups import Groups
from tests.trainer.batches import pack, random_rows, tiny_config

ROWS = 12
UPDATES = 10
LR = 0.01
OPTIMIZER = OptimizerConfig(max_grad_norm=1.0)


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    dp: int = 1
    zero: int = 0
    accumulate: int = 1
    engine: str = "lean"
    precision: str = "fp32"
    sequence: bool = False
    recompute: bool = False
    recorded: bool = False  # the backward pass without hooks, as a CUDA graph records it

    def __str__(self) -> str:
        extra = ("-sp" if self.sequence else "") + ("-recompute" if self.recompute else "")
        extra += "-recorded" if self.recorded else ""
        shape = f"tp{self.tp}-dp{self.dp}-z{self.zero}-x{self.accumulate}"
        return f"{self.engine}-{shape}-{self.precision}{extra}"


def config():
    return tiny_config(hidden_dropout=0.1, attention_dropout=0.1)


def micros(rows: list[dict], dp_rank: int, dp: int, accumulate: int) -> list:
    bins = [rows[i :: dp * accumulate] for i in range(dp * accumulate)]
    mine = bins[dp_rank * accumulate : (dp_rank + 1) * accumulate]
    return [pack(b) for b in mine]


def update_rows(update: int) -> list[dict]:
    return random_rows(ROWS, config(), seed=1000 + update)


def loss_of(sums, masked: int, rows: int) -> torch.Tensor:
    return sums.mlm_sum / masked + sums.nsp_sum / rows


def reference(
    updates: int = UPDATES, optimizer: OptimizerConfig = OPTIMIZER
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """(losses, gradient norms, final tensors) of the plain model and the reference LAMB."""
    model, pieces = build(config(), seed=3)
    perturb(pieces)
    tensors = {p.name: logical_view(p, p.param.data) for p in pieces}
    lamb = ReferenceLamb(tensors, optimizer, {p.name for p in pieces if p.decayed})
    losses, norms = [], []
    for update in range(updates):
        micro = pack(update_rows(update))
        model.zero_grad()
        loss = loss_of(model(micro), micro.masked, micro.rows)
        loss.backward()
        norms.append(lamb.step({p.name: logical_view(p, p.param.grad) for p in pieces}, LR))
        losses.append(loss.item())
    return losses, norms, {k: v.clone() for k, v in tensors.items()}


def perturb(pieces) -> None:
    """Moves every tensor (biases too) away from its initial value, alike in every layout: a tensor
    that starts at zero is all update, and Adam-type updates amplify rounding noise."""
    for piece in pieces:
        generator = torch.Generator().manual_seed(crc32(piece.name.encode()))
        noise = torch.randn(piece.logical_shape, generator=generator) * 0.05
        block = piece.view(piece.param.data.view(-1))
        theirs, ours = piece.clip(block)
        block[ours] += noise[theirs]


def logical_view(piece, tensor: torch.Tensor) -> torch.Tensor:
    """The part of a parameter-shaped tensor that is real (no vocabulary padding)."""
    block = piece.view(tensor.view(-1))
    return block[piece.clip(block)[1]]


def make_groups(tp: int, dp: int) -> Groups:
    """Groups of a layout, for every part of the world in which it fits."""
    rank, world = dist.get_rank(), dist.get_world_size()
    size = tp * dp
    mine: dict[str, object] = {}
    for base in range(0, world, size):
        for d in range(dp):
            ranks = [base + d * tp + t for t in range(tp)]
            group = dist.new_group(ranks)
            if rank in ranks:
                mine["tp"] = group
        for t in range(tp):
            ranks = [base + d * tp + t for d in range(dp)]
            group = dist.new_group(ranks)
            if rank in ranks:
                mine["dp"] = group
    local = rank % size
    return Groups(tp, dp, local % tp, local // tp, mine["tp"], mine["dp"])


def recipe_of(layout: Layout, optimizer: OptimizerConfig = OPTIMIZER) -> Recipe:
    recipe = Recipe(optimizer=replace(optimizer))
    recipe.train.precision = layout.precision
    recipe.parallel.zero_stage = layout.zero
    recipe.parallel.tp = layout.tp
    recipe.parallel.engine = layout.engine
    return recipe


def make_engine(layout: Layout, groups: Groups, optimizer: OptimizerConfig = OPTIMIZER):
    from pretrain.kernels import plain

    cpu = torch.device("cpu")
    model, pieces = build(
        config(),
        groups.tp_group,
        plain,
        seed=3,
        exchange=Exchange(groups.tp_group) if layout.sequence else None,
        recompute=layout.recompute,
    )
    perturb(pieces)
    recipe = recipe_of(layout, optimizer)
    if layout.engine == "deepspeed":
        from pretrain.engine_deepspeed import DeepSpeedEngine as Kind
    else:
        from pretrain.engine import LeanEngine as Kind
    return Kind(recipe, model, pieces, groups, plain, cpu)


def everyone(value: object, groups: Groups) -> list:
    """What each rank of this copy of the layout gives."""
    column: list = [None] * groups.tp
    dist.all_gather_object(column, value, group=groups.tp_group)
    columns: list = [None] * groups.dp
    dist.all_gather_object(columns, column, group=groups.dp_group)
    return [value for column in columns for value in column]


def gather(engine, kind: str = "master") -> dict[str, torch.Tensor]:
    """Logical tensors put together from all slices of all ranks of this copy of the layout."""
    shard, groups = engine.shard, engine.groups
    parts = []
    for s in shard.slices:
        if s.piece.sharded or groups.tp_rank == 0:
            parts.append(
                (
                    s.piece.name,
                    s.piece.shape,
                    s.piece.offset,
                    s.piece.logical_shape,
                    s.begin,
                    s.of(shard.tensor(kind)).clone(),
                )
            )
    out: dict[str, torch.Tensor] = {}
    blocks: dict[tuple, torch.Tensor] = {}
    for theirs in everyone(parts, groups):
        for name, shape, offset, logical, begin, values in theirs:
            block = blocks.setdefault((name, shape, offset, logical), torch.zeros(shape))
            block.view(-1)[begin : begin + values.numel()] = values
    for (name, shape, offset, logical), block in blocks.items():
        full = out.setdefault(name, torch.zeros(logical))
        place = tuple(slice(o, min(o + n, w)) for o, n, w in zip(offset, shape, logical))
        full[place] = block[tuple(slice(0, p.stop - p.start) for p in place)]
    return out


def train(
    layout: Layout,
    groups: Groups,
    updates: int = UPDATES,
    start: int = 0,
    engine=None,
    optimizer: OptimizerConfig = OPTIMIZER,
):
    engine = engine or make_engine(layout, groups, optimizer)
    if layout.recorded:
        engine.warm_up()
    losses, norms = [], []
    for update in range(start, start + updates):
        rows = update_rows(update)
        masked = sum(len(r["positions"]) for r in rows)
        total = torch.zeros(())
        parts = micros(rows, groups.dp_rank, groups.dp, layout.accumulate)
        for number, micro in enumerate(parts):
            loss = loss_of(engine.model(micro), masked, len(rows))
            last = number == len(parts) - 1
            if layout.recorded:
                engine.accumulate(loss * engine.loss_scale, last)
            else:
                engine.backward(loss, last)
            total += loss.detach()
        if groups.dp > 1:
            dist.all_reduce(total, group=groups.dp_group)
        result = engine.step(LR)
        losses.append(total.item())
        norms.append(float(result.grad_norm))
    return losses, norms, engine


def refused(layout: Layout, groups: Groups) -> bool:
    """Whether two first updates that are NaN on one rank alone leave all as it was on every rank."""
    engine = make_engine(layout, groups)

    def everything() -> list[torch.Tensor]:
        held = [*engine.model.parameters(), *map(engine.shard.tensor, engine.shard.kinds)]
        return [t.detach().clone() for t in held]

    before, skipped = everything(), True
    for update in range(2):
        (micro,) = micros(update_rows(update), groups.dp_rank, groups.dp, 1)
        odd = float("nan") if groups.rank == groups.world - 1 else 1.0
        engine.backward(odd * loss_of(engine.model(micro), micro.masked, micro.rows), True)
        skipped &= engine.step(LR).skipped
    alike = all(a.equal(b) for a, b in zip(before, everything(), strict=True))
    return all(everyone(skipped and alike and engine.lamb.steps == 0, groups))


def whole(
    layout: Layout, groups: Groups, optimizer: OptimizerConfig = OPTIMIZER
) -> tuple[list[float], list[float], dict]:
    """(losses, gradient norms, final tensors)."""
    losses, norms, engine = train(layout, groups, optimizer=optimizer)
    return losses, norms, gather(engine)


def resume(layout: Layout, groups: Groups, folder: Path) -> tuple[list[float], list[float]]:
    """(losses of ten updates, losses of the last five after a stop and a load in between)."""
    losses, _, engine = train(layout, groups, 5)
    writer = Writer(folder / str(layout), groups, 1, "test")
    meta = {
        "model": to_dict(config()),
        "tensors": {p.name: list(p.logical_shape) for p in engine.pieces},
        "state": engine.state(),
    }
    writer.save(5, engine.shard, meta)
    writer.close()
    losses += train(layout, groups, 5, start=5, engine=engine)[0]
    everyone(None, groups)  # published on the ranks that only read it
    other = make_engine(layout, groups)
    with Reader(latest(writer.train_dir)) as reader:
        load_shard(reader, other.shard)
        other.load(reader.meta["state"])
    return losses, train(layout, groups, 5, start=5, engine=other)[0]


def run_world(jobs: list[tuple[str, list[Layout], tuple]]) -> list[dict[str, object]]:
    """For each job (function, layouts, its other arguments) what the function gave, by layout.

    A layout smaller than the world runs in a part of it, beside others of its size.
    """
    # DeepSpeed takes fp16 only on CPUs that multiply in it (AVX512-FP16); torch does on all, slowly.
    get_accelerator().is_fp16_supported = lambda: True
    shapes = sorted({(x.tp, x.dp) for _, layouts, _ in jobs for x in layouts})
    made = {shape: make_groups(*shape) for shape in shapes}
    rank, world = dist.get_rank(), dist.get_world_size()
    results: list[dict[str, object]] = []
    for function, layouts, arguments in jobs:
        mine = []
        for size in sorted({tp * dp for tp, dp in shapes}):
            mine += [x for x in layouts if x.tp * x.dp == size][rank // size :: world // size]
        run = globals()[function]
        results.append({str(x): run(x, made[x.tp, x.dp], *arguments) for x in mine})
    return results
