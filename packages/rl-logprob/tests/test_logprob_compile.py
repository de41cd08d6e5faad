"""Without a GPU the Triton kernels compile for every architecture, onto its matrix unit and without contraction."""

import os

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize(("backend", "arch", "width"), [("cuda", 90, 32), ("hip", "gfx942", 64), ("hip", "gfx950", 64)])
def test_kernels_compile_without_a_gpu(backend, arch, width):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from rl_logprob import (
        triton_draw,
        triton_draw_ranks,
        triton_few,
        triton_head,
        triton_sample,
        triton_scores,
        triton_support,
    )

    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter is on")
    f, i, n, d = "*fp32", "i32", "*i64", "*fp64"
    given = {
        "temperature": f,
        "threshold": f,
        "last_id": n,
        "state": d,
        "targets": n,
        "dlogp": f,
        "dentropy": f,
        "m": f,
        "s": n,
        "u": n,
        "out": "*bf16",
    }
    shape = {"M": i, "N": i, "K": i, "first": i, "stride": i, "stride_block": i, "stride_am": i, "stride_bn": i}
    block = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "EVEN_K": True, "UNIT": False}
    limits = {"temperature": f, "threshold": f, "last_id": n}
    stats = {"logits": f} | limits | {"goal": n, "m": f, "s": n, "u": n, "T": i, "C": i, "stride": i, "first_tile": i}
    merge = {"m": f, "s": n, "u": n, "state": d, "T": i, "tiles": i, "stride_row": i, "stride_tile": i}
    sample = {"logits": f, "seeds": n, "positions": n} | limits | {"values": d, "ids_out": n, "V": i}
    few = dict.fromkeys(("T", "N", "H", "stride_d"), i)
    jobs = [
        (
            triton_head.head_pointer_kernel,
            {"a": "*bf16", "b": "*bf16"} | given | shape,
            block | {"ENTROPY": True, "GRADIENT": g, "SUPPORT": kept, "GROUP_N": 4096 if kept else 0},
        )
        for g in (False, True)
        for kept in (False, True)
    ]
    jobs += [
        (
            triton_scores.tile_stats_kernel,
            stats | {"stride_tile": i},
            {"ROWS": 16, "UNIT": False, "ENTROPY": True, "SUPPORT": True},
        ),
        (triton_scores.merge_kernel, merge, {"ENTROPY": True, "ROWS": 16, "TILES": 128}),
        (
            triton_scores.score_kernel,
            {"m": f, "s": n, "u": n, "logits": f, "targets": n, "temperature": f, "x": f, "state": d, "logp": f}
            | dict.fromkeys(("T", "V", "stride", "tiles", "stride_row", "stride_tile"), i),
            {"GATHER": True, "UNIT": False, "ENTROPY": True, "ROWS": 16, "TILES": 128},
        ),
        (
            triton_sample.sample_kernel,
            sample | {"per_program": i, "stride": i},
            {"GREEDY": False, "UNIT": False, "SUPPORT": True, "BLOCK": 1024},
        ),
        *(
            (
                triton_draw.draw_kernel,
                {"logits": f, "edge": f, "seeds": n, "positions": n, "temperature": f, "kinds": n, "values": d}
                | {"ids_out": "*i32", "m": f, "s": n, "V": i, "first_id": i, "C": i, "first_tile": i, "tiles": i}
                | {"per_program": i, "stride": i},
                {"TILES": 8, "SHARED": shared},
            )
            for shared in (False, True)
        ),
        (
            triton_draw_ranks.best_kernel,
            {"logits": f, "edge": f, "values": d, "ids": "*i32", "m": f, "out": n, "first_id": i, "C": i, "tiles": i}
            | {"parts": i, "stride": i},
            {"PARTS": 128, "TILES": 512},
        ),
        (
            triton_draw_ranks.pick_kernel,
            {"found": n, "kinds": n, "m": f, "s": n, "chosen": f, "mine": n, "out": n, "bad": n, "tiles": i},
            {"WORLD": 8, "TILES": 512},
        ),
        (
            triton_draw_ranks.count_kernel,
            {"logits": f, "kinds": n, "chosen": f, "mine": n, "columns": i, "per_program": i, "stride": i},
            {"BLOCK": 1024},
        ),
        (
            triton_draw_ranks.finish_kernel,
            {"sums": n, "temperature": f, "kinds": n, "chosen": f, "out": n, "T": i},
            {"WORLD": 8, "ROWS": 128},
        ),
        (
            triton_draw.score_kernel,
            {"logits": f, "temperature": f, "kinds": n, "values": d, "ids": "*i32", "m": f, "s": n, "out": n, "bad": n}
            | {"V": i, "parts": i, "stride": i},
            {"PARTS": 256, "TILES": 512},
        ),
        (
            triton_draw.rank_kernel,
            {"logits": f, "kinds": n, "out": n, "V": i, "per_program": i, "stride": i},
            {"BLOCK": 1024},
        ),
        (
            triton_support.support_kernel,
            {"logits": f, "temperature": f, "top_k": n, "top_p": d, "min_p": d, "threshold": f, "last_id": n, "V": i}
            | {"stride": i},
            {"UNIT": False, "BLOCK": 1024},
        ),
        (
            triton_few.hidden_kernel,
            {"d": "*bf16", "weight": "*bf16", "out": f} | few | {"stride_w": i},
            {"GROUP_N": 4096, "BLOCK_T": 64, "BLOCK_H": 64, "BLOCK_K": 64},
        ),
        (
            triton_few.fold_kernel,
            {"parts": f, "root": f, "size": i, "blocks": i},
            {"FIRST": False, "BLOCK": 1024},
        ),
        (
            triton_few.weight_kernel,
            {"d": "*bf16", "hidden": "*bf16", "out": f} | few | {"stride_h": i},
            {"BLOCK_N": 128, "BLOCK_H": 64, "BLOCK_K": 32, "ADD": True},
        ),
    ]
    options = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
    if backend == "hip":
        options |= {"kpack": 1, "matrix_instr_nonkdim": 16}
    for kernel, signature, constants in jobs:
        source = ASTSource(fn=kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
        binary = compile(source, target=GPUTarget(backend, arch, width), options=options)
        text = binary.asm["ptx" if backend == "cuda" else "amdgcn"]
        # what the contract calls separate roundings is not contracted: no fp64 fma outside a division
        assert backend != "cuda" or "fma.rn.f64" not in text
        assert (
            kernel is not triton_head.head_pointer_kernel
            or ("wgmma" if backend == "cuda" else "v_mfma_f32_16x16") in text
        )
