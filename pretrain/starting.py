"""Brings a training up: processes, device, model, engine, and the last good checkpoint."""

from __future__ import annotations

import os
import secrets
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from configs.console import say
from configs.cpus import own_cpus, usable_cpus
from configs.errors import UserError
from configs.loading import to_dict
from data_prep.shards import HELD_OUT, held_out
from pretrain.checkpoint.folder import Damaged, checkpoints, resolve, set_aside
from pretrain.checkpoint.reader import Reader, load_shard
from pretrain.checkpoint.writer import Writer
from pretrain.checks import Plan
from pretrain.engine import DTYPES, Engine, LeanEngine
from pretrain.evaluation import Evaluator, unigram
from pretrain.exhausted import told
from pretrain.micro import Micro, RecordedMicro
from pretrain.model import BertForPreTraining, build
from pretrain.model.init import start_at_sinusoids, start_at_unigram
from pretrain.optim.budget import TimeBudget
from pretrain.parallel.exchange import Exchange, make_exchange
from pretrain.parallel.groups import Groups, make_groups
from pretrain.parallel.pieces import Piece
from pretrain.telemetry import Telemetry
from pretrain.watchdog import Watchdog, connect

START_S = 1800  # of the process group: slow nodes, big checkpoints


@dataclass
class Run:
    """A training that stands ready. step: updates done."""

    plan: Plan
    groups: Groups
    device: torch.device
    engine: Engine
    micro: Micro  # forward and backward of a micro-batch
    writer: Writer
    watchdog: Watchdog
    telemetry: Telemetry
    budget: TimeBudget
    identity: dict[str, Any]  # of the model and its data, for checkpoints
    step: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    evaluator: Evaluator | None = None
    probe: Callable[[], dict[str, float]] | None = None

    def say(self, text: str) -> None:
        if self.plan.rank == 0:
            say(text)

    def evaluate(self) -> dict[str, float]:
        values = self.evaluator.run(self.engine.model) if self.evaluator else {}
        return {**values, **(self.probe() if self.probe else {})}

    def close(self) -> None:
        """The orderly end, on all ranks together."""
        self.telemetry.close()
        self.micro.close()
        if dist.is_initialized():
            dist.barrier()
        self.watchdog.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def begin(plan: Plan) -> Run:
    """Everything up to the first update; collective over all processes of the job.

    Raises:
        UserError: on every rank, what only the machine at hand can tell: its memory, its devices, a
            checkpoint that cannot be read.
    """
    recipe = plan.recipe
    device = _device(plan)
    if plan.world > 1 or _engine_name(plan) == "deepspeed":  # which wants a group, be it of one
        _connect(plan, device)
    watchdog = Watchdog(
        plan.train_dir,
        recipe.guard.hang_timeout_s,
        plan.rank,
        plan.world,
        connect(plan.rank, plan.world, device) if plan.world > 1 else None,
    )
    try:
        with told(plan, setting_up=True):
            return _assemble(plan, device, watchdog)
    except BaseException as error:
        watchdog.fail(error)
        raise


def _assemble(plan: Plan, device: torch.device, watchdog: Watchdog) -> Run:
    from pretrain.kernels import is_fused, select

    recipe = plan.recipe
    torch.set_num_threads(recipe.train.threads or _threads())
    # The largest that fits is another on a machine of other cards; all pack alike.
    plan.micro_batch_tokens = min(_of_all(plan.micro_batch_tokens))
    groups = make_groups(plan.tp, plan.world, plan.rank)
    kernels = select(recipe.train.kernels, device, recipe.train.precision)
    activation = plan.micro_batch_tokens * plan.model.hidden_size
    exchange = make_exchange(
        groups.tp_group,
        recipe.parallel.sequence_parallel,
        device,
        kernels,
        activation * DTYPES[recipe.train.precision].itemsize,
    )
    model, pieces = _model(plan, groups, kernels, exchange)
    engine = _engine_class(plan)(recipe, model, pieces, groups, kernels, device)
    engine.model.train()
    # DeepSpeed's hooks count and launch in Python: they cannot be recorded.
    recorded = recipe.train.compile and is_fused(kernels) and isinstance(engine, LeanEngine)
    identity = {
        "model": to_dict(plan.model),
        "recipe": to_dict(recipe),
        "origin": plan.origin,
        "tensors": {p.name: list(p.logical_shape) for p in pieces},
        "tokenizer_fingerprint": next(iter(plan.shards.values())).tokenizer_fingerprint,
        "shards": {name: s.fingerprint for name, s in plan.shards.items()},
        "layout": {"tp": groups.tp, "dp": groups.dp, "engine": type(engine).__name__},
    }
    # Whatever may be refused comes before a new start sets the earlier checkpoints aside.
    evaluator, probe = _evaluator(plan, groups, device), _probe(plan, groups, engine)
    step, state = _resume(plan, engine)
    plan.goes_on_from(state)
    budget = TimeBudget(recipe.train.max_minutes, state.get("spent_s", 0.0), plan.spent_s)
    token = _of_all(secrets.token_hex(4))[0]
    telemetry = Telemetry(
        plan.train_dir,
        recipe,
        plan.model,
        total=plan.end,
        resumed=step,
        budget=budget,
        rank=plan.rank,
        world=plan.world,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
    )
    run = Run(
        plan,
        groups,
        device,
        engine,
        (RecordedMicro if recorded else Micro)(model, engine, recipe.train.nsp_weight),
        Writer(plan.train_dir, groups, recipe.checkpoint.keep, token, telemetry.saved),
        watchdog,
        telemetry,
        budget,
        identity,
        step,
        state,
        evaluator,
        probe,
    )
    _announce(run, f"{exchange or 'all tokens on every rank'}, " if groups.tp > 1 else "")
    return run


def _model(
    plan: Plan, groups: Groups, kernels: Any, exchange: Exchange | None
) -> tuple[BertForPreTraining, list[Piece]]:
    """With the weights that a training starts from, unless a checkpoint's take their place."""
    recipe, new = plan.recipe, plan.newest == 0
    model, pieces = build(
        plan.model,
        groups.tp_group,
        kernels,
        seed=recipe.seed,
        exchange=exchange,
        recompute=recipe.parallel.activation_checkpointing,
        init=new,
    )
    if recipe.train.unigram_bias and new:
        start_at_unigram(pieces, unigram(plan.shards[recipe.phases[0].shards]))
    if recipe.train.sinusoidal_positions and new:
        start_at_sinusoids(pieces, plan.model.initializer_range)
    return model, pieces


def _announce(run: Run, shared: str) -> None:
    """Says what was assembled. shared: how tokens are shared out, where they could be."""
    plan, recipe = run.plan, run.plan.recipe
    for warning in plan.warnings:
        run.say(f"note: {warning}")
    what = (
        f"{type(run.engine).__name__}, tp {plan.tp} x dp {plan.dp}, "
        f"{shared}zero_stage {recipe.parallel.zero_stage}, "
        f"{recipe.train.precision}, micro-batches of up to {plan.micro_batch_tokens} tokens"
    )
    run.say(f"LAMB: {', '.join(f'{k} {v}' for k, v in to_dict(recipe.optimizer).items())}")
    run.say(f"{f'goes on from update {run.step}' if run.step else 'starts'}: {what}")
    run.telemetry.event(run.step, f"start: {what}")


def _device(plan: Plan) -> torch.device:
    """Raises UserError if there is a GPU that torch cannot use, and a CPU may not take its place."""
    recipe = plan.recipe
    warnings.filterwarnings("ignore", message=".*Transformer Engine and Apex are not installed.*")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if recipe.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if plan.device == "cuda" and not torch.cuda.is_available():
        what, precision = "a GPU is there, but this torch cannot use it", recipe.train.precision
        # Ranks whose torch can use theirs would wait for this one with another backend.
        if plan.world > 1 or precision in ("fp16", "fp8"):
            raise UserError(
                f"{what}, as {plan.world} processes in {precision} have to",
                "install a torch for this GPU and its driver, or train on CPUs in fp32 or bf16, "
                "with CUDA_VISIBLE_DEVICES= in the environment",
            )
        plan.warnings.append(f"{what}: training on the CPU")
    if not torch.cuda.is_available() or plan.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        return torch.device("cpu")
    torch.cuda.set_device(plan.local_rank)
    torch.set_float32_matmul_precision("highest" if recipe.train.precision == "fp32" else "high")
    return torch.device("cuda", plan.local_rank)


def _connect(plan: Plan, device: torch.device) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            store=dist.HashStore() if plan.world == 1 else None,
            rank=plan.rank,
            world_size=plan.world,
            timeout=timedelta(seconds=START_S),
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"no rendezvous at {address}: {str(error).splitlines()[0]}",
            "check that all processes were started and that MASTER_ADDR:MASTER_PORT is free and reachable",
        ) from None


def _engine_name(plan: Plan) -> str:
    """auto: the lean engine, whose passes a GPU records, but DeepSpeed for ZeRO-2."""
    parallel = plan.recipe.parallel
    if parallel.engine != "auto":
        return parallel.engine
    return "deepspeed" if parallel.zero_stage == 2 and plan.dp > 1 else "lean"


def _engine_class(plan: Plan) -> type[LeanEngine] | Any:
    if _engine_name(plan) == "lean":
        return LeanEngine
    from pretrain.engine_deepspeed import DeepSpeedEngine

    return DeepSpeedEngine


def _resume(plan: Plan, engine: Engine) -> tuple[int, dict[str, Any]]:
    """Loads the newest checkpoint that is whole; (updates done, state), (0, {}) for a new run.

    Raises:
        UserError: there are checkpoints, and none can be read.
    """
    recipe = plan.recipe
    found = checkpoints(plan.train_dir) if recipe.checkpoint.resume else []
    found = _of_all(found)[0]
    for step, folder in reversed(found):
        # Update 0 is an imported model: weights alone, so the moments start at zero.
        meta, error = _load(engine, folder, moments=step > 0)
        if meta is not None:
            return step, meta["state"] if step > 0 else {}
        if plan.rank == 0:
            say(f"{folder} is damaged and skipped: {error}")
    if found:
        raise UserError(
            f"{plan.train_dir}: none of {len(found)} checkpoints can be read",
            "restore one, or start anew with checkpoint.resume=false",
        )
    if recipe.checkpoint.init_from:
        folder = resolve(recipe.checkpoint.init_from)
        meta, error = _load(engine, folder, moments=False)
        if meta is None:
            raise UserError(f"checkpoint.init_from: {error}", "name another checkpoint")
        if plan.rank == 0:
            say(f"weights from {folder}")
    # Only now: the weights may have come from there, and every rank has them.
    aside = set_aside(plan.train_dir) if plan.rank == 0 and not recipe.checkpoint.resume else None
    if aside:
        say(f"starts anew: the earlier checkpoints and log are in {aside}")
    return 0, {}


def _load(engine: Engine, folder: Any, moments: bool) -> tuple[dict[str, Any] | None, str]:
    """(meta, "") when every rank could load it, else (None, what was wrong)."""
    problem = ""
    meta: dict[str, Any] = {}
    try:
        with Reader(folder) as reader:
            meta = reader.meta
            load_shard(reader, engine.shard, moments)
    except Damaged as error:
        problem = str(error)
    if problem := next((p for p in _of_all(problem) if p), ""):
        return None, problem
    fresh = {"optimizer_steps": 0, "scaler": None}
    engine.load(meta["state"] if moments else fresh)
    return meta, ""


def _of_all(value: Any) -> list[Any]:
    """What each rank gives here, by rank (small objects of our own processes); collective."""
    if not dist.is_initialized():
        return [value]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def _threads() -> int:
    """This rank's share of the CPUs that it may use; collective."""
    host = socket.gethostname()
    return usable_cpus([mask for name, mask in _of_all((host, own_cpus())) if name == host])


def _evaluator(plan: Plan, groups: Groups, device: torch.device) -> Evaluator | None:
    """Held-out rows of the first phase's shards, if there are any; at masking.probability in all
    phases, whatever their own rate, so that their losses compare."""
    recipe = plan.recipe
    shards = plan.shards[recipe.phases[0].shards]
    if not (shards.folder / HELD_OUT).is_dir():
        return None
    rows = held_out(shards.folder)
    if not rows.num_rows:
        return None
    return Evaluator(
        rows,
        recipe.masking,
        recipe.train.eval_rows,
        micro_batch_tokens=plan.micro_batch_tokens,
        dp_rank=groups.dp_rank,
        dp=groups.dp,
        device=device,
        group=groups.dp_group,
        unigram=unigram(shards),
        nsp=plan.model.nsp_head,
    )


def _probe(plan: Plan, groups: Groups, engine: Engine) -> Callable[[], dict[str, float]] | None:
    """BLiMP's share of right answers in percent, over all ranks; the same pairs each time."""
    path = plan.recipe.train.probe
    if not path:
        return None
    from transformers import AutoTokenizer

    from pretrain.downstream.blimp import open_pairs, probe

    tokenizer: Any = AutoTokenizer.from_pretrained(f"{plan.recipe.work_dir}/vocab")
    positions, about = plan.model.max_position_embeddings, plan.recipe.train.probe_pairs
    try:
        pairs = open_pairs(path, tokenizer, positions, about=about)
    except UserError as error:
        raise UserError(f"train.probe={error.what}", f"{error.remedy}, or leave it out") from None

    model: Any = engine.model

    def score() -> dict[str, float]:
        was_training = model.training
        share = (groups.dp_rank, groups.dp)
        right, scored = probe(model, tokenizer, pairs, share=share)
        model.train(was_training)
        counts = torch.tensor([float(right), float(scored)])
        if groups.dp > 1:
            counts = counts.to(next(model.parameters()).device)
            dist.all_reduce(counts, group=groups.dp_group)
        return {"blimp": 100 * float(counts[0]) / max(float(counts[1]), 1.0)}

    return score
