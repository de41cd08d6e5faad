"""vLLM plugin: the strict operators inside stock vLLM."""

from rl_vllm.arguments import cpu_environment, engine_args, serve_flags
from rl_vllm.client import VllmEngineClient, assert_strict, report, reset_launches, version_spans
from rl_vllm.preflight import check_engine, engine_violations
from rl_vllm.settings import settings_from_hf
from rl_vllm.trace import trace_step

__all__ = [
    "VllmEngineClient",
    "assert_strict",
    "check_engine",
    "cpu_environment",
    "engine_args",
    "engine_violations",
    "report",
    "reset_launches",
    "serve_flags",
    "settings_from_hf",
    "trace_step",
    "version_spans",
]
