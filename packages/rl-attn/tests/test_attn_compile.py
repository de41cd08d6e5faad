"""Code for every GPU from a machine without one: each row of each plan file, at the widest head that it serves."""

import json
import os
import re
import subprocess
import sys
import textwrap
from importlib.resources import files

import pytest

triton = pytest.importorskip("triton")

from rl_attn import gpu, plans  # noqa: E402
from rl_contract.profile import KEY_TILE, SEGMENT  # noqa: E402

ARCHS = {"sm90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64), "gfx950": ("hip", "gfx950", 64)}
# bytes of shared memory that one program may ask for
ROOM = {"sm90": 232448, "gfx942": 65536, "gfx950": 163840}
BF16 = ("q", "k", "v", "out", "grad", "dq", "dk", "dv", "q_weight", "k_weight", "k_cache", "v_cache")
FP32 = ("lse", "delta", "part_m", "part_w", "part_o", "cos", "sin")
INDEX = ("cu_q", "cu_k", "seq_lens", "table", "positions", "key_positions", "slots")
COUNTS = ("begun", "folded")
# registers that a frozen plan may spill, by (architecture, kernel, head_dim); none elsewhere
ALLOWED_SPILLS: dict[tuple[str, str, int], int] = {}


def _signature(function, constants, box):
    types = dict.fromkeys(BF16, "*bf16") | dict.fromkeys(FP32, "*fp32") | dict.fromkeys(INDEX, "*i64")
    types |= dict.fromkeys(COUNTS, "*i32") | {"c": "fp32", "scale": "fp32", "eps": "fp32"}
    signature, aligned = {}, {}
    for i, name in enumerate(function.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if name.endswith("_desc"):
            from triton.experimental.gluon import language as gl

            shape = [box, constants["D"]]
            layout = gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)
            signature[name] = f"tensordesc<bf16{shape},{layout!r}>"
        if types.get(name, "").startswith("*") or re.fullmatch(r"(s[qkvog]|c[kv])_[bht]|._head_columns", name):
            aligned[(i,)] = [["tt.divisibility", 16]]
    return signature, aligned


# a kernel of the language with layouts, without copies
GLUON = -1


def _compile(function, constants, options, arch, box=0, counting=False):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource
    if box:
        from triton.experimental.gluon._runtime import GluonASTSource as source
    if arch != "sm90":
        options = options | {"kpack": 1, "matrix_instr_nonkdim": 16}
    if not counting:
        constants = constants | {name: None for name in COUNTS if name in function.arg_names}
    signature, aligned = _signature(function, constants, box)
    built = source(function, signature, constants, aligned)
    return triton.compile(built, target=GPUTarget(*ARCHS[arch]), options=options | {"enable_fp_fusion": False})


def _launch(row, head_dim, page, key_tile=KEY_TILE):
    """The kernel that ``gpu`` launches for a plan row: function, constants, options, rows of a copy (0: no copies)."""
    from rl_attn import triton_backward, triton_decode, triton_forward

    shape = {"GROUP": 4, "D": head_dim}
    wide = shape | {"BLOCK_D": gpu.padded(head_dim)}
    tile = {"KEY_TILE": key_tile, "SEGMENT": SEGMENT, "PAGE": page}
    stages = gpu.stages_for(row, key_tile)
    options = {"num_warps": row.warps, "num_stages": stages}
    if row.specialised:
        from rl_attn import triton_hopper, triton_hopper_decode, triton_hopper_fold

        if row.kernel == "fold":
            constants = {"D": head_dim, "SEGMENT": SEGMENT, "SHORT": 1}
            return triton_hopper_fold.attn_fold_sm90_kernel, constants, {"num_warps": 4}, GLUON

        decode = row.kernel == "segments"
        constants = shape | tile | {"STAGES": gpu.ring_for(row, key_tile) if decode else stages}
        constants["SHORT"] = 1 if page else 0
        options = {"num_warps": 4, "maxnreg": row.max_registers or gpu.WIDE_REGISTERS}
        function = triton_hopper_decode.attn_segments_sm90_kernel if decode else triton_hopper.attn_fwd_sm90_kernel
        return function, constants, options, min(page or key_tile, key_tile)
    if row.kernel in ("forward", "paged"):
        constants = wide | tile | {"BLOCK_M": row.block_m, "SHORT": 0}
        return triton_forward.attn_fwd_kernel, constants, options, 0
    if row.kernel == "segments":
        constants = wide | tile | {"BLOCK_M": row.block_m, "SHORT": 1, "B": 16, "STAGES": stages}
        return triton_decode.attn_segments_kernel, constants, options, 0
    if row.kernel == "fold":
        constants = {k: v for k, v in wide.items() if k != "GROUP"}
        constants |= {"SEGMENT": SEGMENT, "SHORT": 1, "B": 16, "UNROLL": row.unroll, "OVERLAPPED": False}
        return triton_decode.attn_fold_kernel, constants, options, 0
    kernel = getattr(triton_backward, f"attn_{row.kernel}_kernel")
    options["num_stages"] = row.stages
    return kernel, wide | {"BLOCK_M": row.block_m, "BLOCK_N": row.block_n}, options, 0


def _rows(arch):
    name = "sm90" if arch == "sm90" else "generic"
    return json.loads((files("rl_attn") / "plans" / f"{name}.json").read_text())["rows"]


CASES = [(arch, n) for arch in ARCHS for n in range(len(_rows(arch)))]


@pytest.mark.parametrize(("arch", "n"), CASES, ids=[f"{a}-{_rows(a)[n]['kernel']}{n}" for a, n in CASES])
def test_plan_row_fits_its_architecture(arch, n):
    row = plans.Row(**_rows(arch)[n])
    page = 0 if row.kernel == "forward" else 16
    function, constants, options, box = _launch(row, row.head_dim, page)
    built = _compile(function, constants, options, arch, box)
    assert built.metadata.shared <= ROOM[arch]
    if arch == "sm90":
        text = built.asm["ptx"]
        assert row.kernel == "fold" or "wgmma.mma_async" in text or "mma.sync" in text
    else:
        text = built.asm["amdgcn"]
        spills = sum(int(x) for x in re.findall(r"\.[vs]gpr_spill_count:\s+(\d+)", text))
        assert spills <= ALLOWED_SPILLS.get((arch, row.kernel, row.head_dim), 0)
        assert row.kernel == "fold" or "v_mfma_f32_16x16x" in text


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("head_dim", "half", "heads"), [(128, 64, 16), (96, 24, 4)])
def test_norm_rotation_and_write_of_rows_fit_in_registers(arch, head_dim, half, heads):
    """A head's sum of squares joins registers and lanes where they are; heads of 128 need no shared memory for it."""
    from rl_attn.triton_rotary import norm_rotary_write_kernel

    sizes = {"D": head_dim, "BLOCK_D": gpu.padded(head_dim), "HALF": half, "BLOCK_HALF": gpu.padded(half)}
    rest = {"BLOCK_REST": gpu.padded(head_dim - 2 * half), "HEADS": heads, "KV_HEADS": heads // 2, "NORM": True}
    built = _compile(norm_rotary_write_kernel, sizes | rest | {"PAGE": 16}, {"num_warps": 4}, arch)
    assert built.metadata.shared <= (0 if head_dim == 128 else 4096)
    if arch != "sm90":
        assert re.findall(r"\.[vs]gpr_spill_count:\s+(\d+)", built.asm["amdgcn"]) == ["0", "0"]


def test_sm90_uses_its_matrix_unit_and_one_exp2():
    row = plans.shipped("sm90").choose("paged", 128, 4096)
    function, constants, options, box = _launch(row, 128, 16)
    ptx = _compile(function, constants, options, "sm90", box).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "ex2.approx.ftz.f32" in ptx
    # contraction is off: every fused multiply-add is one that the contract names, and rounds to nearest
    assert not re.search(r"fma\.r[zmp]", ptx)


@pytest.mark.parametrize(("head_dim", "rows"), [(64, 8), (128, 8), (128, 16)])
def test_decode_of_few_rows_lays_them_along_the_narrow_side(head_dim, rows):
    from rl_attn.triton_hopper_few import attn_few_sm90_kernel

    row = plans.shipped("sm90").choose("segments", head_dim, specialised=True)
    _, constants, options, box = _launch(row, head_dim, 16)
    constants |= {"ROWS": rows, "SHORT": rows // 4}
    built = _compile(attn_few_sm90_kernel, constants, options, "sm90", box)
    assert built.metadata.shared <= ROOM["sm90"]
    assert set(re.findall(r"wgmma\.mma_async\S*\.(m\d+n\d+)k16", built.asm["ptx"])) == {f"m64n{rows}"}


@pytest.mark.parametrize("head_dim", [64, 128])
def test_decode_of_tables_of_one_segment_stores_no_partial_state(head_dim):
    row = plans.shipped("sm90").choose("segments", head_dim, specialised=True)
    function, constants, options, box = _launch(row, head_dim, 16)
    none = dict.fromkeys(("part_m", "part_w", "part_o"))
    built, whole = (_compile(function, constants | more, options, "sm90", box) for more in (none, {}))
    assert built.metadata.shared <= ROOM["sm90"]
    stores = [x.asm["ptx"].count("st.global") for x in (built, whole)]
    assert 0 < stores[0] < stores[1]


def test_decode_of_a_segment_of_any_number_of_pages_compiles():
    row = plans.shipped("sm90").choose("segments", 128, specialised=True)
    function, constants, options, box = _launch(row, 128, 16)
    built = _compile(function, constants | {"SEGMENT": 2112}, options, "sm90", box)
    assert built.metadata.shared <= ROOM["sm90"]


@pytest.mark.parametrize("kernel", ["forward", "segments", "fold"])
def test_kernels_that_count_segments_compile_and_others_know_nothing_of_it(kernel):
    row = plans.shipped("sm90").choose(kernel, 128, 4096 if kernel == "forward" else 64, specialised=True)
    assert row.specialised
    function, constants, options, box = _launch(row, 128, 0 if kernel == "forward" else 16)
    counting, plain = (_compile(function, constants, options, "sm90", box, on) for on in (True, False))
    assert counting.metadata.shared <= ROOM["sm90"]
    parameters = [x.asm["ptx"].count(".param .u64 .ptr") for x in (counting, plain)]
    assert parameters[0] - parameters[1] == sum(name in function.arg_names for name in COUNTS) > 0


def test_kernels_in_the_interpreter_agree_with_the_oracle():
    program = textwrap.dedent(
        """
        import torch
        from rl_attn import gpu, gpu_rotary
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
        gpu_rotary.write(cache[0], cache[1], k, v, torch.cat(slots))
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
    row = {"kernel": "forward", "head_dim": 64, "warps": 4}
    for bad, words in (
        ({}, "lacks 'arch'; lacks 'rows'"),
        ({"arch": "sm9O", "rows": []}, "arch='sm9O', supported"),
        ({"arch": "sm90", "rows": [row | {"head_dim": 64.5}]}, "head_dim=64.5, supported: a whole number"),
        ({"arch": "sm90", "rows": [row | {"specialised": "zzz"}]}, "specialised='zzz', supported: true"),
        ({"arch": "sm90", "rows": []}, "forward needs a row for every call: head_dim=256"),
        ({"arch": "sm90", "rows": [row | {"block_m": 16, "stages": 10**20}]}, "stages=1.*, supported: a whole number"),
        ({"arch": "sm90", "rows": [row | {"block_m": 16, "stages": 100}]}, "stages=100, supported: at most 64"),
        (
            {"arch": "sm90", "rows": [row | {"block_m": 16, "head_dim": 3}]},
            "head_dim=3, supported: multiples of 8 up to",
        ),
        ({"arch": "sm90", "rows": [row | {"block_m": 16, "head_dim": 264}]}, "head_dim=264, supported: multiples of 8"),
        ({"arch": "sm90", "rows": [row]}, "block_m=0, supported for kernel=forward: from 1"),
        ({"arch": "sm90", "rows": [{"kernel": "forward"}]}, "lacks 'head_dim'; lacks 'warps'"),
    ):
        with pytest.raises(ContractError, match=words):
            plans.Plans.from_dict(bad)
    with pytest.raises(ContractError, match="powers of two"):
        plans.Row(kernel="forward", head_dim=64, warps=3)
    with pytest.raises(ContractError, match="head_dim=512"):
        plans.shipped("sm90").choose("forward", 512)
