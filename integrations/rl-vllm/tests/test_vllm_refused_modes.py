"""What changes an engine's order of addition behind its operators is refused when the engine is configured."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_checkpoint import tiny_config, tiny_weights, write_checkpoint

import rl_vllm
from rl_contract import ContractError, build_profile

pytest.importorskip("vllm")

CONFIG = tiny_config()
# some of this vLLM's, some of others
FUSIONS = (
    "fuse_allreduce_rms",
    "fuse_gemm_comms",
    "fuse_attn_quant",
    "enable_qk_norm_rope_fusion",
    "fuse_rope_kvcache",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), CONFIG, tiny_weights(CONFIG))


@pytest.fixture(scope="module")
def profile(checkpoint):
    return build_profile("tiny", rl_vllm.settings_from_hf(checkpoint, leaves=4))


def configured(profile, checkpoint, **overrides):
    """vLLM's configuration of a strict engine, as every entrance makes it; nothing is started."""
    from vllm.engine.arg_utils import EngineArgs

    with rl_vllm.cpu_environment(1):
        args = rl_vllm.engine_args(
            profile, model=str(checkpoint), skip_tokenizer_init=True, max_model_len=256, **overrides
        )
        return EngineArgs(**args).create_engine_config()


def passes(**flags: bool) -> dict[str, Any]:
    return {"compilation_config": {"pass_config": flags}}


@pytest.mark.field_report("R36", "R54")
def test_graph_strict_engine_has_no_compiled_graph_whatever_was_asked(checkpoint, profile):
    from vllm.config.compilation import CompilationMode, CUDAGraphMode

    for asked in ({}, {"optimization_level": 3}):
        compilation = configured(profile, checkpoint, **asked).compilation_config
        assert compilation.mode == CompilationMode.NONE
        assert compilation.cudagraph_mode == CUDAGraphMode.NONE
        assert not any(getattr(compilation.pass_config, name, False) for name in FUSIONS)


@pytest.mark.field_report("R36")
def test_fused_reduction_and_norm_is_refused(checkpoint, profile):
    with pytest.raises(ContractError, match="the fusion pass fuse_allreduce_rms is not supported: switch it off"):
        configured(profile, checkpoint, **passes(fuse_allreduce_rms=True))


@pytest.mark.field_report("R36", "R37")
def test_passes_that_reorder_are_all_listed_at_once(checkpoint, profile):
    """Names that this vLLM no longer has or clears itself included: what is looked at is the configuration's state."""
    config = configured(profile, checkpoint)
    flags = SimpleNamespace(**dict.fromkeys(FUSIONS, True), enable_sp=True)
    config.compilation_config.pass_config = flags
    found = rl_vllm.engine_violations(profile, CONFIG, 1, vllm_config=config)
    for name in (*FUSIONS, "sequence parallel"):
        assert any(name in violation and "switch it off" in violation for violation in found), name
    assert len(found) == len(FUSIONS) + 1


@pytest.mark.field_report("R37")
def test_sequence_parallel_has_no_way_in(checkpoint, profile):
    # this vLLM has dropped the flag, others refuse in our preflight: an engine never starts with it
    with pytest.raises(Exception, match=r"enable_sp|sequence parallel"):
        configured(profile, checkpoint, **passes(enable_sp=True))


@pytest.mark.field_report("R56")
def test_an_engine_that_could_drop_its_weights_in_sleep_does_not_start(checkpoint, profile):
    with pytest.raises(Exception, match=r"[Ss]leep mode"):
        configured(profile, checkpoint, enable_sleep_mode=True)


@pytest.mark.field_report("R17")
def test_a_layer_without_a_strict_operator_stops_the_build(profile):
    from rl_contract import MissingSupport
    from rl_vllm.config import StrictConfig

    class FusedExperts(torch.nn.Module):
        pass

    with pytest.raises(MissingSupport, match=r"model\.layers\.0\.mlp: no strict operator for FusedExperts"):
        StrictConfig(profile).get_quant_method(FusedExperts(), "model.layers.0.mlp")
