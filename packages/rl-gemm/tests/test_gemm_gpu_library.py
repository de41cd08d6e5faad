"""The vendor library is a backend only where it is certified, and its switches are left as they were."""

import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from rl_contract import launches, reset_launches
from rl_gemm import ops, plans, vendor
from rl_gemm.testing import equal, matrix, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("poisoned"),
]


def test_library_switches_are_restored():
    matmul = torch.backends.cuda.matmul
    state = lambda: (  # noqa: E731
        torch.backends.cuda.preferred_blas_library(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction_split_k,
    )
    before = state()
    with vendor.no_split_k():
        assert state() != before
    assert state() == before
    with pytest.raises(ZeroDivisionError), vendor.no_split_k():
        raise ZeroDivisionError
    assert state() == before


def test_library_that_splits_k_is_no_backend():
    """The layer o at 16 rows: the library's own choice splits K; without the split it has the contract's bits."""
    x, weight = matrix(16, 4096, "normal", 35), matrix(4096, 4096, "normal", 36)
    want = reference(x, weight)
    assert not equal(vendor.uncertified_matmul(x, weight, None, torch.float32), want)
    assert equal(vendor.matmul(x, weight, None, torch.float32), want)


def test_certify_refuses_a_library_that_splits_k():
    """The tool itself, on the layer o at 16 rows: exit status 1 as the library comes, 0 without the split."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "tools" / "certify").exists():
        pytest.skip("needs the repository's tools")
    plan = files("rl_gemm") / "plans" / "sm90.json"
    command = [sys.executable, root / "tools" / "certify", "--plan", plan, "--shape", "4096,4096", "--rows", "16"]
    refused, passed = (
        subprocess.run([*command, *more], capture_output=True, text=True, cwd=root) for more in (["--default"], [])
    )
    assert refused.returncode == 1, refused.stderr[-500:]
    assert "refused, other bits at M=[16]" in refused.stdout
    assert passed.returncode == 0, passed.stdout + passed.stderr[-500:]


def test_without_a_certificate_the_kernel_runs(monkeypatch):
    x, weight = matrix(512, 4096, "normal", 37), matrix(4096, 4096, "normal", 38)
    bare = replace(plans.shipped("sm90"), certificates=())
    monkeypatch.setitem(plans.plan_files.own, "sm90", bare)
    reset_launches()
    y = ops.matmul_tree(x, weight)
    assert all("triton" in r["kernel"] for r in launches())
    assert equal(y, reference(x, weight))


@pytest.mark.parametrize("tokens", [8704, 20000])
def test_more_rows_than_a_certificate_reaches_take_the_memory_of_the_output(tokens, monkeypatch):
    x, weight = matrix(tokens, 4096, "spread", 39), matrix(6144, 4096, "normal", 40)
    dy = matrix(tokens, 6144, "cancel", 41)
    for call in (lambda: ops.matmul(x, weight, None, 1, torch.bfloat16), lambda: ops.grad_input(dy, weight, 1, 1)):
        call()
        reset_launches()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = call()
        assert torch.cuda.max_memory_allocated() - before <= y.nbytes + (1 << 20)
        assert {r["kernel"] for r in launches()} == {f"rl_gemm.{vendor.NAME}"}
        with monkeypatch.context() as patch:
            patch.setitem(plans.plan_files.own, "sm90", replace(plans.shipped("sm90"), certificates=()))
            reset_launches()
            want = call()
            assert all("triton" in r["kernel"] for r in launches())
        assert torch.equal(y.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("tokens", [512, 8704])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_nothing(tokens, out_dtype):
    """It would turn the library's operands into halves."""
    x, weight = matrix(tokens, 4096, "spread", 42), matrix(6144, 4096, "normal", 43)
    reset_launches()
    want = ops.matmul(x, weight, None, 1, out_dtype)
    assert {r["kernel"] for r in launches()} == {f"rl_gemm.{vendor.NAME}"}
    with torch.autocast("cuda", dtype=torch.float16):
        found = ops.matmul(x, weight, None, 1, out_dtype)
        assert torch.is_autocast_enabled("cuda")
    assert found.dtype == out_dtype
    assert torch.equal(found.view(torch.int16), want.view(torch.int16))
