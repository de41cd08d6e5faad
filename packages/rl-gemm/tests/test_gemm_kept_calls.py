"""What is decided once for tensors that look alike: the same launches as when everything is decided anew.

A process of its own takes the operators' way for a GPU on CPU tensors; a driver that only notes launches stands in.
"""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("triton")


def start():
    """The pretended GPU, which has the certificates of the plans, and a library that notes its calls."""
    import torch

    from rl_contract.pretend import pretend_gpu

    active, launched = pretend_gpu()
    library = [torch._C._get_blas_preferred_backend()]
    torch._C._get_blas_preferred_backend = lambda: library[0]
    torch._C._set_blas_preferred_backend = lambda value: library.__setitem__(0, value)
    from rl_gemm import vendor

    def mm(a, b, out_dtype=None):
        switches = torch._C._get_cublas_allow_bf16_reduced_precision_reduction()
        assert (library[0], switches) == (torch._C._BlasBackend.Cublaslt, (False, False))
        launched.append(("mm", a.data_ptr(), a.shape, a.stride(), b.data_ptr(), b.shape, b.stride(), out_dtype))
        return torch.empty((len(a), b.shape[1]), dtype=out_dtype or a.dtype)

    from rl_gemm import plans

    def addmm(total, a, b, out_dtype, out):
        assert out is total
        launched.append(("addmm", total.data_ptr(), a.data_ptr(), a.shape, a.stride(), b.data_ptr(), b.shape))

    torch.mm, torch.addmm = mm, addmm
    environment = dict(plans.shipped("sm90").certificates[0].environment)
    vendor.environment = lambda _: environment
    return active, launched


def names(launched):
    return [launch[0] for launch in launched]


def body_same_launches():
    """Kept or not, other places, alignment, strides: what is launched is a function of the tensors alone."""
    import torch

    from rl_contract import launches, reset_launches

    _, launched = start()
    from rl_contract.pretend import aligned
    from rl_gemm import gpu, ops, ops_gpu

    def views(m, k):
        yield aligned(m, k)
        yield aligned(m, k)
        yield aligned(m, k, off=16)
        yield aligned(m, k, off=2)
        yield aligned(k, m).t()
        yield aligned(m, k + 8)[:, :k]

    gate_up, plain = aligned(6144, 1024), torch.Tensor.contiguous
    totals = [aligned(2048, 1024, dtype=torch.float32, off=off) for off in (4, 0)]

    def contiguous(x):
        return x if x.is_contiguous() else aligned(*x.shape).copy_(plain(x))

    torch.Tensor.contiguous = contiguous
    makers = {
        "matmul": lambda x, w, dy: ops.matmul(x, w, None, 1, x.dtype),
        "tree": lambda x, w, dy: ops.matmul_tree(x, w, 2),
        "grad_input": lambda x, w, dy: ops.grad_input(dy, w, 2, 1),
        "grad_weight": lambda x, w, dy: ops.grad_weight(dy, x),
        "onto": lambda x, w, dy: ops.add_grad_weight(totals[w.data_ptr() % 512 == 0], dy, x),
        "gate_up": lambda x, w, dy: ops.gate_up_swiglu(x, gate_up),
        "swiglu": lambda x, w, dy: ops.swiglu(x),
        "swiglu_backward": lambda x, w, dy: ops.swiglu_backward(dy[:, : x.shape[1] // 2], x),
    }

    def place(value, found):
        """Addresses of what a call makes anew tell nothing."""
        if isinstance(value, tuple):
            return tuple(place(v, found) for v in value)
        return value if not isinstance(value, int) or value < 2**32 or value in found else "new"

    def run(name, tensors):
        launched.clear()
        reset_launches()
        makers[name](*tensors)
        found = {t.data_ptr() for t in (*tensors, *totals, gate_up)}
        return [tuple(place(part, found) for part in launch) for launch in launched], launches()

    cases = []
    for m in (1, 24, 512):
        for x in views(m, 1024):
            for off in (0, 16):
                cases += [(name, (x, aligned(2048, 1024, off=off), aligned(m, 2048))) for name in makers]
    anew = []
    with torch.no_grad():
        for name, tensors in cases:
            gpu._calls.clear()
            ops_gpu._swiglus.clear()
            anew.append(run(name, tensors))
        for _ in range(2):
            for (name, tensors), want in zip(cases, anew, strict=True):
                assert run(name, tensors) == want, (name, [(t.shape, t.stride()) for t in tensors])
    assert all(launched and counts for launched, counts in anew)
    checked = {(name, launch[0]) for (name, _), (launched, _) in zip(cases, anew, strict=True) for launch in launched}
    assert {("matmul", "mm"), ("matmul", "gemm_tma_kernel"), ("matmul", "gemm_leaf_kernel")} <= checked, checked
    assert {("onto", "addmm"), ("onto", "mm"), ("onto", "gemm_tma_kernel")} <= checked, checked
    assert {("grad_weight", "mm"), ("gate_up", "gate_up_swiglu_kernel"), ("tree", "merge_kernel")} <= checked, checked


def body_plans_and_refusals():
    """A call that is kept is asked for no more; plans put in force take effect at once; a refusal stays one."""
    import torch

    _, launched = start()
    from rl_contract import ContractError, MissingSupport, launches, reset_launches
    from rl_contract.pretend import aligned
    from rl_gemm import gpu, ops, plans

    x, w = aligned(512, 1024), aligned(4096, 1024)

    def call():
        launched.clear()
        ops.matmul(x, w, None, 1, torch.bfloat16)
        return names(launched)

    with torch.no_grad():
        assert call() == ["mm"]
        prepare, gpu.prepare = gpu.prepare, lambda *_: pytest.fail("decided again")
        reset_launches()
        assert call() == call() == ["mm"]
        assert [(row["kernel"], row["count"]) for row in launches()] == [("rl_gemm.cublaslt-nosplit", 2)]
        gpu.prepare = prepare
        own = plans.shipped("sm90")
        plans.use(replace(own, certificates=()))
        assert call() == call() == ["gemm_tma_kernel"]
        plans.use(own)
        assert call() == ["mm"]
        # certificates are of operands that lie as the layers' own
        dy, turned, turned_dy = aligned(512, 4096), aligned(1024, 512).t(), aligned(4096, 512).t()
        turned_w = aligned(1024, 4096).t()
        for whole, others in (
            (lambda x, w, dy: ops.matmul(x, w, None, 1, x.dtype), ((turned, w, dy), (x, turned_w, dy))),
            (lambda x, w, dy: ops.grad_input(dy, w), ((x, w, turned_dy), (x, turned_w, dy))),
            (lambda x, w, dy: ops.grad_weight(dy, x), ((x, w, turned_dy), (turned, w, dy))),
        ):
            for tensors, certified in (((x, w, dy), True), *((other, False) for other in others)):
                for _ in range(2):
                    launched.clear()
                    whole(*tensors)
                    assert ("mm" in names(launched)) == certified, (names(launched), [t.stride() for t in tensors])
        # what is captured is counted as such, though the call was prepared before
        reset_launches()
        torch.cuda.is_current_stream_capturing = lambda: True
        assert call() == ["mm"]
        assert [row["phase"] for row in launches()] == ["capture"]
        kept = dict(gpu._calls)
        for bad in (
            lambda: ops.matmul(x.float(), w.float(), None, 1, torch.float32),
            lambda: ops.matmul(x, w, None, 3, torch.float32),
            lambda: ops.matmul(x, w, None, 32, torch.float32),
            lambda: ops.matmul(x, w, torch.empty(5), 1, torch.float32),
            lambda: ops.grad_input(x, w.t(), 1, 3),
            lambda: ops.gate_up_swiglu(x.float(), w.float()),
            lambda: ops.swiglu(x.float()),
        ):
            for _ in range(2):
                with pytest.raises(ContractError):
                    bad()
        leaf = own.kernels["tma-64x64x128-4w5"]
        plans.use(replace(own, rows=(), kernels={"tma-64x64x128-4w5": leaf}, certificates=()))
        for _ in range(2):
            with pytest.raises(MissingSupport):
                call()
        assert gpu._calls == kept


def body_switches():
    """Split-K is forbidden inside and allowed as before outside, with PyTorch's own functions and without."""
    import torch

    start()
    from rl_gemm import vendor

    get = torch._C._get_cublas_allow_bf16_reduced_precision_reduction
    found = get()
    for hidden in (False, True):
        if hidden:
            del torch._C._get_cublas_allow_bf16_reduced_precision_reduction
            torch.backends.cuda.cuBLASModule.__getattr__ = lambda self, name: get()[name.endswith("split_k")]
            vendor._switches.cache_clear()
        for given in ((True, True), (False, True), (False, False)):
            torch._C._set_cublas_allow_bf16_reduced_precision_reduction(*given)
            before = torch._C._get_blas_preferred_backend(), get()
            assert before[1] == given
            with vendor.no_split_k():
                inside = torch._C._get_blas_preferred_backend(), get()
                assert inside == (torch._C._BlasBackend.Cublaslt, (False, False))
                with vendor.no_split_k():
                    assert (torch._C._get_blas_preferred_backend(), get()) == inside
                assert (torch._C._get_blas_preferred_backend(), get()) == inside
            assert (torch._C._get_blas_preferred_backend(), get()) == before
            with pytest.raises(ZeroDivisionError), vendor.no_split_k():
                raise ZeroDivisionError
            assert (torch._C._get_blas_preferred_backend(), get()) == before
            assert vendor._lock.acquire(blocking=False)
            vendor._lock.release()
    torch._C._set_cublas_allow_bf16_reduced_precision_reduction(*found)
    for autocast in (True, False):
        torch.set_autocast_enabled("cuda", autocast)
        with vendor.no_split_k():
            assert not torch.is_autocast_enabled("cuda")
        assert torch.is_autocast_enabled("cuda") == autocast
        with pytest.raises(ZeroDivisionError), vendor.no_split_k():
            raise ZeroDivisionError
        assert torch.is_autocast_enabled("cuda") == autocast


@pytest.mark.parametrize("name", ["same_launches", "plans_and_refusals", "switches"])
def test_kept_calls(name):
    code = f"import test_gemm_kept_calls as t; t.body_{name}()"
    paths = os.path.dirname(__file__), os.environ.get("PYTHONPATH")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
