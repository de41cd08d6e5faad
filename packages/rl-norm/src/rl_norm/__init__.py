"""RMSNorm whose bits depend on the row alone."""

from rl_norm import ops_gpu as _ops_gpu  # noqa: F401  registers the GPU kernels
from rl_norm.layers import rms_norm

__all__ = ["rms_norm"]
