"""Linear layers and SwiGLU with a fixed order of addition."""

from rl_gemm import ops_gpu as _ops_gpu  # noqa: F401  registers the GPU kernels
from rl_gemm.layers import column_parallel_linear, gate_up_swiglu, linear, row_parallel_linear, swiglu

__all__ = ["column_parallel_linear", "gate_up_swiglu", "linear", "row_parallel_linear", "swiglu"]
