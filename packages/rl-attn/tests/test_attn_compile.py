"""The GPU kernels on a machine without a GPU: their logic in Triton's interpreter, and code for each architecture."""

import os
import re
import subprocess
import sys
import textwrap

import pytest

triton = pytest.importorskip("triton")

from rl_attn import plans  # noqa: E402

ARCHS = {"sm90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64), "gfx950": ("hip", "gfx950", 64)}
BF16 = ("q", "k", "v", "out", "grad", "dq", "dk", "dv")
FP32 = ("lse", "delta", "part_m", "part_w", "part_o")
INDEX = ("cu_q", "cu_k", "seq_lens", "table", "positions", "key_positions")


def _compile(function, constants, row, arch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict.fromkeys(BF16, "*bf16") | dict.fromkeys(FP32, "*fp32") | dict.fromkeys(INDEX, "*i64")
    types |= {"c": "fp32", "scale": "fp32"}
    signature, aligned = {}, {}
    for i, name in enumerate(function.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if types.get(name, "").startswith("*") or re.fullmatch(r"s[qkvog]_[bht]", name):
            aligned[(i,)] = [["tt.divisibility", 16]]
    options = {"num_warps": row.warps, "num_stages": row.stages, "enable_fp_fusion": False}
    if arch != "sm90":
        options |= {"kpack": 1, "matrix_instr_nonkdim": 16}
    source = ASTSource(function, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget(*ARCHS[arch]), options=options)


def _cases():
    from rl_attn import triton_backward, triton_decode, triton_forward

    shape = {"GROUP": 4, "D": 128, "BLOCK_D": 128}
    tile = {"KEY_TILE": 64, "SEGMENT": 512}
    return {
        "paged": (triton_forward.attn_fwd_kernel, shape | tile | {"PAGE": 16, "SHORT": 0}, ("block_m",)),
        "segments": (
            triton_decode.attn_segments_kernel, shape | tile | {"PAGE": 16, "SHORT": 1, "B": 16}, ("block_m", "stages"),
        ),
        "fold": (
            triton_decode.attn_fold_kernel, {"D": 128, "BLOCK_D": 128, "SEGMENT": 512, "SHORT": 1, "B": 16},
            ("unroll", "stages"),
        ),
        "grad_queries": (triton_backward.attn_grad_queries_kernel, shape, ("block_m", "block_n")),
        "grad_keys": (triton_backward.attn_grad_keys_kernel, shape, ("block_m", "block_n")),
    }  # fmt: skip


# spilled registers that a frozen plan allows, by kernel; none elsewhere
ALLOWED_SPILLS: dict[tuple[str, str], int] = {}


@pytest.mark.parametrize("kernel", ["paged", "segments", "fold", "grad_queries", "grad_keys"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_shipped_plan_compiles_without_spills(arch, kernel):
    function, constants, fields = _cases()[kernel]
    row = plans.shipped(arch).choose(kernel, 128, 4096)
    names = {"block_m": "BLOCK_M", "block_n": "BLOCK_N", "unroll": "UNROLL", "stages": "STAGES"}
    constants = constants | {names[f]: getattr(row, f) for f in fields}
    assembly = _compile(function, constants, row, arch).asm["amdgcn"]
    spills = sum(int(x) for x in re.findall(r"\.[vs]gpr_spill_count:\s+(\d+)", assembly))
    assert spills <= ALLOWED_SPILLS.get((arch, kernel), 0)
    if kernel != "fold":
        assert "v_mfma_f32_16x16x" in assembly


def test_sm90_uses_its_matrix_unit_and_one_exp2():
    function, constants, _ = _cases()["paged"]
    row = plans.shipped("sm90").choose("paged", 128, 4096)
    ptx = _compile(function, constants | {"BLOCK_M": row.block_m}, row, "sm90").asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "ex2.approx.ftz.f32" in ptx
    # contraction is off: every fused multiply-add is one that the contract names, and rounds to nearest
    assert not re.search(r"fma\.r[zmp]", ptx)


def test_kernels_in_the_interpreter_agree_with_the_oracle():
    program = textwrap.dedent(
        """
        import torch
        from rl_attn import gpu
        from rl_attn.reference import attention_reference
        torch.manual_seed(0)
        heads, kv_heads, dim, page, lengths = 4, 2, 32, 16, [70, 1, 37]
        cu = torch.tensor([0, 70, 71, 108])
        q, k, v = (torch.randn(108, h, dim).half() for h in (heads, kv_heads, kv_heads))
        at = torch.cat([torch.arange(n) for n in lengths])
        scale = dim ** -0.5
        wanted = [
            attention_reference(q[a:b].float(), k[a:b].float(), v[a:b].float(), at[a:b], scale, key_tile=16, segment=32)
            for a, b in zip(cu[:-1], cu[1:])
        ]
        out, lse = (torch.cat([w[i] for w in wanted]) for i in range(2))
        def close(found, rows=slice(None)):
            assert float((found[0] - out[rows]).abs().max()) < 2e-3, "O"
            assert float((found[1] - lse[rows]).abs().max()) < 2e-3, "LSE"
        close(gpu.packed(q, k, v, cu, cu, at, scale, 16, 32, torch.float32))
        cache = torch.full((2, 12, kv_heads, page, dim), torch.nan).half()
        ids, taken, slots = torch.randperm(12), 0, []
        table = torch.full((3, 6), 99, dtype=torch.int32)
        for n, length in enumerate(lengths):
            count = -(-length // page)
            table[n, :count] = ids[taken : taken + count].int()
            rows = torch.arange(length)
            slots.append(table[n, rows // page].long() * page + rows % page)
            taken += count
        gpu.write(cache[0], cache[1], k, v, torch.cat(slots))
        lens = torch.tensor(lengths, dtype=torch.int32)
        close(gpu.paged(q, cache[0], cache[1], cu, lens, table, scale, 16, 32, out_dtype=torch.float32))
        last = cu[1:] - 1
        starts = torch.arange(4, dtype=torch.int32)
        close(gpu.paged(q[last], cache[0], cache[1], starts, lens, table, scale, 16, 32, out_dtype=torch.float32), last)
        """
    )
    result = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]


def test_a_plan_that_moves_bits_is_refused_by_name():
    from rl_contract import ContractError

    for name in ("key_tile", "kpack", "num_splits"):
        with pytest.raises(ContractError, match=name):
            plans.Plans.from_dict(
                {"arch": "sm90", "rows": [{"kernel": "forward", "head_dim": 64, "warps": 4, name: 1}]}
            )
    with pytest.raises(ContractError, match="powers of two"):
        plans.Row(kernel="forward", head_dim=64, warps=3)
    with pytest.raises(ContractError, match="head_dim=512"):
        plans.shipped("sm90").choose("forward", 512)
