"""Megatron-core's own optimizer (fp32 masters, Adam, its distributed form) behind the calls of ``StrictOptimizer``.

Strict operators add to the ``main_grad`` of Megatron's gradient buffer; its order of addition over ranks, its gradient
norm and its Adam are Megatron's, so weights after a step are equal run to run, not over layouts. Adam is torch's, norm
and clip are Megatron's functions, except in the native arm on TransformerEngine, which takes that package's.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronConfig
from megatron.core.optimizer import get_megatron_optimizer

from rl_megatron import own_optimizer, te, topology
from rl_megatron.cpu_device import device
from rl_megatron.optimizer import OptimizerConfig, check_optimizer, is_head_norm


class MegatronOptimizer:
    """``get_megatron_optimizer`` over the model in Megatron's DistributedDataParallel; GPUs only.

    Raises:
        MissingSupport: on a CPU, where Megatron's optimizer asks for CUDA tensors; a megatron-core whose optimizer
            can't be kept from TransformerEngine or Apex.
    """

    def __init__(self, model: GPTModel, config: OptimizerConfig) -> None:
        check_optimizer(config, device().type)
        self.config = config
        self.steps = 0
        # over context parallel ranks Megatron's own operators leave shares of the gradient, to be summed; strict ones
        # leave all of it on every rank, and the mean of equal values is exact
        model.config.calculate_per_token_loss = model.rl.mode == "native"
        buffers = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=config.distributed,
        )
        # which has no step of its own at which rows of peers could be taken over
        model.rl_later = None
        self._wrapped = DistributedDataParallel(config=model.config, ddp_config=buffers, module=model)
        if model.rl.native_operators == "te":
            te.add_to_main_grads(model)
        bf16 = next(model.parameters()).dtype == torch.bfloat16
        settings = MegatronConfig(
            optimizer="adam",
            lr=config.lr,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            weight_decay=config.weight_decay,
            clip_grad=config.clip_grad,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=config.distributed,
        )
        with self._own():
            self._optimizer = get_megatron_optimizer(settings, [self._wrapped], use_gloo_process_groups=False)
            self._ran = own_optimizer.what_runs(self._optimizer)

    def _own(self) -> AbstractContextManager[None]:
        with_te = self._wrapped.module.rl.native_operators == "te"
        return nullcontext() if with_te else own_optimizer.pinned()

    def ran(self) -> dict[str, str]:
        """As ``Optimizer.ran``, and the class of the update, the functions of norm and clip."""
        return {"class": own_optimizer.qualified(type(self)), **self._ran}

    def zero_grad(self) -> None:
        self._wrapped.zero_grad_buffer()
        self._optimizer.zero_grad()

    def collect(self) -> None:
        """Nothing: Megatron's hooks have added what autograd left to ``main_grad``."""

    def step(self) -> dict[str, Any]:
        """As ``StrictOptimizer.step``; Megatron sums, clips and updates."""
        self._wrapped.finish_grad_sync()
        if self._wrapped.module.rl.mode == "native":
            tp = parallel_state.get_tensor_model_parallel_group()
            for name, parameter in self._wrapped.module.named_parameters():
                if is_head_norm(name):
                    topology.native_sum_(parameter.main_grad, tp)
        with self._own():
            updated, norm, _ = self._optimizer.step()
        norm = float(norm)
        self.steps += int(updated)
        clip = self.config.clip_grad
        coef = min(1.0, clip / (norm + 1e-6)) if clip > 0 and math.isfinite(norm) else 1.0
        return {"grad_norm": norm, "clip_coef": coef, "skipped": not updated}

    def state_dict(self) -> dict[str, Any]:
        with self._own():
            return {"steps": self.steps, "megatron": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])
        with self._own():
            self._optimizer.load_state_dict(state["megatron"])
