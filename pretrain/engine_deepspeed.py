"""The engine made of DeepSpeed's ZeRO-1 and ZeRO-2 optimisers, with exact LAMB inside them.

DeepSpeed hands an optimiser one flat fp32 partition, which hides the tensors. After
`deepspeed.initialize` each parameter knows which slice of the partition it is (`_hp_mapping`), and
our LAMB is bound to those slices. That attribute is private: DeepSpeed is pinned, and the layout
tests compare this engine with the reference.
"""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any

import torch
from torch import Tensor, nn

from configs.schema import Recipe
from pretrain.engine import DTYPES, Engine
from pretrain.optim.lamb import Finite, Lamb, Update, Verdict
from pretrain.parallel.groups import Groups
from pretrain.parallel.pieces import Piece
from pretrain.parallel.slices import Shard, make_slices


class _Bridge(torch.optim.Optimizer):
    """What DeepSpeed sees as the optimiser: it passes the flat partition and its gradient on."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.0})
        self.lamb: Lamb | None = None
        self.lr, self.grad_scale = 0.0, 1.0
        self.verdict: Verdict = Finite()
        self.update: Update | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.lamb is None:
            return  # DeepSpeed's own trial step inside initialize()
        grad = self.param_groups[0]["params"][0].grad
        self.update = self.lamb.step(grad, self.lr, self.grad_scale, None, self.verdict)


class _Mpu:
    """The view of our groups that DeepSpeed asks its `mpu` for."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups

    def get_model_parallel_rank(self) -> int:
        return self.groups.tp_rank

    def get_model_parallel_world_size(self) -> int:
        return self.groups.tp

    def get_model_parallel_group(self) -> Any:
        return self.groups.tp_group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return self.groups.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self.groups.dp

    def get_data_parallel_group(self) -> Any:
        return self.groups.dp_group


class DeepSpeedEngine(Engine):
    """ZeRO-1 and ZeRO-2 in fp32, bf16 and fp16."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        pieces: list[Piece],
        groups: Groups,
        kernels: Any,
        device: torch.device,
    ) -> None:
        super().__init__(recipe, pieces, groups)
        deepspeed = _import_deepspeed()
        self.stage = recipe.parallel.zero_stage
        exact = {p: p.data.clone().view(-1) for p in model.parameters()}
        self.bridge = _Bridge(model.parameters())
        self.engine, *_ = deepspeed.initialize(
            model=model.to(device),
            optimizer=self.bridge,
            config=_config(recipe, groups, device),
            mpu=_Mpu(groups) if groups.tp_group is not None else None,
            dist_init_required=False,
        )
        self.model = self.engine.module
        self.shard = self._bind()
        for s in self.shard.slices:  # DeepSpeed made the masters of rounded weights
            begin = s.piece.start + s.begin
            s.of(self.shard.master).copy_(exact[s.piece.param][begin : begin + s.numel])
        self.lamb = Lamb(pieces, self.shard, recipe.optimizer, groups, kernels)
        self.bridge.lamb = self.lamb
        self._open: contextlib.ExitStack | None = None

    def _bind(self) -> Shard:
        flat = self.bridge.param_groups[0]["params"][0]
        held = []
        for name, p in self.model.named_parameters():
            mapping: Any = getattr(p, "_hp_mapping", None)
            if mapping is None:
                continue
            high, low = mapping.get_hp_fragment_address(), mapping.lp_fragment_address
            if mapping.get_hp_fragment().data_ptr() != flat[high.start :].data_ptr():
                raise RuntimeError(f"{name}: this DeepSpeed lays its partitions out in another way")
            held.append((p, low.start, low.start + low.numel, high.start))
        master = flat.data
        slices = make_slices(self.pieces, held)
        return Shard(master, torch.zeros_like(master), torch.zeros_like(master), slices, False)

    def backward(self, loss: Tensor, last: bool) -> None:
        # DeepSpeed averages over the data-parallel ranks; our loss is a share of a sum.
        loss = loss * (self.loss_scale * self.groups.dp)
        if self.stage == 2:
            # ZeRO-2 would reduce every micro-batch; this leaves gradients local until the last.
            if self._open is None:
                self._open = contextlib.ExitStack()
                self._open.enter_context(self.engine.coalesce_grad_reduction())
            self.engine.backward(loss, scale_wrt_gas=False)
            if last:
                self._open.close()
                self._open = None
            return
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss, scale_wrt_gas=False)

    def step(self, lr: float, verdict: Verdict | None = None) -> Update:
        bridge, verdict = self.bridge, verdict or Finite()
        bridge.lr, bridge.grad_scale, bridge.verdict = lr, 1.0 / self.loss_scale, verdict
        bridge.update = None
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        update = bridge.update
        if update is None:  # DeepSpeed found an overflow and did not call the optimiser
            norm = torch.full((), math.inf, device=self.shard.master.device)
            verdict.asked(norm)
            verdict.heard()
            update = Update(norm, None, True)
        if self.scaler:
            self.scaler.update(update.skipped)
        return update

    def refresh(self) -> None:
        self.engine.optimizer.update_lp_params()


def _import_deepspeed() -> Any:
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # On CPU DeepSpeed would compile a shared-memory operator for half a minute, unused here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _config(recipe: Recipe, groups: Groups, device: torch.device) -> dict[str, Any]:
    dtype = DTYPES[recipe.train.precision]
    return {
        "train_batch_size": groups.dp,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # LAMB limits the global norm itself
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": recipe.parallel.zero_stage,
            "overlap_comm": device.type == "cuda",
            "contiguous_gradients": True,
            "reduce_scatter": True,
        },
        # Without immediate updates BF16_Optimizer adds a bf16 gradient that itself accumulates.
        "bf16": {"enabled": dtype == torch.bfloat16, "immediate_grad_update": True},
        # Our own scaler multiplies the loss: the same in both engines.
        "fp16": {"enabled": dtype == torch.float16, "loss_scale": 1.0},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
