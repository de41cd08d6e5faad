"""The contracts name what decides the bits, and refuse what no kernel here serves."""

import json
import pathlib
import subprocess
import sys

import pytest

from rl_attn.contract import attention, rotary
from rl_contract import ContractError, Settings


def settings(**change):
    base = {"hidden_size": 64, "vocab_size": 100, "norm_eps": 1e-6, "rope": {"theta": 1e4, "rotary_dim": 32}}
    return Settings(**{**base, **change})


def test_contracts_serialise_and_have_stable_fingerprints():
    for make in (attention, rotary):
        contract = make(settings())
        json.dumps(contract.to_dict())
        assert contract.fingerprint == make(settings()).fingerprint


@pytest.mark.parametrize("change", [{"key_tile": 32}, {"segment": 512}, {"dtype": "float32"}])
def test_what_changes_the_bits_changes_the_attention_contract(change):
    assert attention(settings(**change)).fingerprint != attention(settings()).fingerprint


@pytest.mark.parametrize(
    "rope",
    [
        {"theta": 1e6, "rotary_dim": 32},
        {"theta": 1e4, "rotary_dim": 16},
        {"theta": 1e4, "rotary_dim": 32, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    ],
)
def test_what_changes_the_bits_changes_the_rotary_contract(rope):
    assert rotary(settings(rope=rope)).fingerprint != rotary(settings()).fingerprint


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"attention": "nosplit"}, {"key_tile": 8}])
def test_attention_refuses_what_no_kernel_serves(change):
    with pytest.raises(ContractError, match=next(iter(change))[:4]):
        attention(settings(**change))


@pytest.mark.parametrize("arch", ["sm90", "gfx942", "gfx950"])
def test_gpu_contracts_differ_from_each_other_and_refuse_fp32(arch):
    assert attention(settings(arch=arch)).fingerprint != attention(settings()).fingerprint
    assert attention(settings(arch=arch, key_tile=64)).fingerprint != attention(settings(arch=arch)).fingerprint
    with pytest.raises(ContractError, match="dtype"):
        attention(settings(arch=arch, dtype="float32"))
    with pytest.raises(ContractError, match="power of two"):
        attention(settings(arch=arch, key_tile=48, segment=480))


def test_nosplit_contract_names_library_version_and_digest():
    contract = attention(settings(arch="sm90", attention="nosplit"))
    assert "vllm" in contract.primitives["library"]
    assert len(contract.primitives["sha256"]) == 64
    assert contract.fingerprint != attention(settings(arch="sm90")).fingerprint
    with pytest.raises(ContractError, match="gfx942"):
        attention(settings(arch="gfx942", attention="nosplit"))


def test_rotary_refuses_an_unknown_rule():
    with pytest.raises(ContractError, match="longrope"):
        rotary(settings(rope={"theta": 1e4, "rotary_dim": 32, "rope_type": "longrope"}))


def test_import_needs_no_engine():
    program = "import sys, rl_attn; print([m for m in ('vllm', 'megatron', 'ray', 'triton') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_kernel_files_say_order_and_rounding_first():
    import rl_attn

    folder = pathlib.Path(rl_attn.__file__).parent
    for name in (
        "cpu.py",
        "cpu_backward.py",
        "cpu_rotary.py",
        "cpu_tiles.py",
        *(p.name for p in folder.glob("triton_*.py")),
    ):
        head = (folder / name).read_text().split('"""')[1]
        assert "ontract ``" in head
        assert "round" in head.lower()


def test_library_family_has_a_certificate_for_some_page_sizes_alone():
    from rl_attn.nosplit import check_page, library_for

    library = library_for("sm90")
    check_page(library, 16)
    with pytest.raises(ContractError, match=r"pages of 128 tokens; certified: \(16, 64\)"):
        check_page(library, 128)
