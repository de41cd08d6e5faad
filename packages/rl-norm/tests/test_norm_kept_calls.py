"""What is decided once for tensors that look alike: the same launches as when everything is decided anew.

A process of its own takes the operators' way for a GPU on CPU tensors; a driver that only notes launches stands in.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def body():
    import torch

    from rl_contract.pretend import aligned, pretend_gpu

    _, launched = pretend_gpu()
    from rl_contract import ContractError, launches, reset_launches
    from rl_norm import ops, ops_gpu

    def views(m, width):
        yield aligned(m, width)
        yield aligned(m, width)
        yield aligned(m, width, off=2)
        yield aligned(width, m).t()
        yield aligned(m, width + 8)[:, :width]
        yield aligned(1, width).expand(m, width)

    makers = {
        "forward": lambda x, r, w, s: ops.rms_norm(x, w, 1e-6),
        "eps": lambda x, r, w, s: ops.rms_norm(x, w, 1e-5),
        "residual": lambda x, r, w, s: ops.add_rms_norm(x, r, w, 1e-6),
        "residual first": lambda x, r, w, s: ops.add_rms_norm(r, x, w, 1e-6),
        "grad_input": lambda x, r, w, s: ops.grad_input(x, r, w, s),
        "grad_input more": lambda x, r, w, s: ops.grad_input(r, r, w, s, x),
        "grad_weight": lambda x, r, w, s: ops.grad_weight(x, r, s),
        "grad_weight heads": lambda x, r, w, s: ops.grad_weight(r, x, s, 8, 4),
    }

    def place(value, found):
        """Addresses of what a call makes anew tell nothing."""
        if isinstance(value, tuple):
            return tuple(place(v, found) for v in value)
        return value if not isinstance(value, int) or value < 2**32 or value in found else "new"

    def run(name, tensors):
        launched.clear()
        reset_launches()
        made = makers[name](*tensors)
        made = made if isinstance(made, tuple) else (made,)
        found = {t.data_ptr() for t in tensors}
        shapes = [(t.shape, t.stride(), t.dtype) for t in made]
        return [tuple(place(part, found) for part in launch) for launch in launched], launches(), shapes

    cases, anew = [], []
    for m, width in ((0, 64), (8, 128), (40, 1000)):
        for x in views(m, width):
            for weight in (aligned(width), aligned(width, off=2), aligned(2 * width)[::2]):
                tensors = x, aligned(m, width), weight, aligned(m, dtype=torch.float32)
                cases += [(name, tensors) for name in makers]
    with torch.no_grad():
        for name, tensors in cases:
            ops_gpu._calls.clear()
            anew.append(run(name, tensors))
        for _ in range(2):
            for (name, tensors), want in zip(cases, anew, strict=True):
                assert run(name, tensors) == want, (name, [(t.shape, t.stride()) for t in tensors])
        assert all(counts and bool(launched) == bool(len(t[0])) for (_, t), (launched, counts, _) in zip(cases, anew))
        assert len({launch[0] for launched, _, _ in anew for launch in launched}) == 4
        kept = dict(ops_gpu._calls)
        for bad in (
            lambda: ops.rms_norm(x.float(), weight.float(), 1e-6),
            lambda: ops.rms_norm(x, weight, 0.0),
            lambda: ops.rms_norm(x, weight[1:], 1e-6),
        ):
            for _ in range(2):
                with pytest.raises(ContractError):
                    bad()
        assert ops_gpu._calls == kept


def test_kept_calls():
    code = "import test_norm_kept_calls as t; t.body()"
    paths = os.path.dirname(__file__), os.environ.get("PYTHONPATH")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
