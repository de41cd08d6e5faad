"""vLLM's own worker on a CPU, without our plugin, in a process that may use AMX: see ``rl_vllm.plugin``."""

import torch
from vllm.v1.worker.cpu_worker import CPUWorker


class StockCPUWorker(CPUWorker):
    def __init__(self, *args, **kwargs):
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
        super().__init__(*args, **kwargs)
