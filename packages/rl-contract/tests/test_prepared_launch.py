"""Prepared launches run what Triton itself would run; a driver that only notes launches stands in for the GPU."""

import os
import subprocess
import sys
import threading

import pytest

triton = pytest.importorskip("triton")


def body_same_launches():
    import torch
    import triton
    from triton import knobs
    from triton.tools.tensor_descriptor import TensorDescriptor

    from rl_contract import triton_launch
    from rl_contract.pretend import pretend_gpu
    from rl_contract.triton_launch import Prepared, at, without_base

    active, ran = pretend_gpu()

    @triton.jit(do_not_specialize=["T"])
    def leading(a, b, c, T, stride, eps, A: triton.language.constexpr, HAS: triton.language.constexpr):
        value = triton.language.load(a + stride) + A + eps
        if HAS:
            value += triton.language.load(c)
        triton.language.store(b + T, value)

    @triton.jit
    def mixed(a, size, b, A: triton.language.constexpr, extra=None):
        triton.language.store(b, triton.language.load(a + size) + A)

    @triton.jit
    def described(desc, b, A: triton.language.constexpr):
        tile = desc.load([0, 0])
        triton.language.store(b + triton.language.arange(0, A), triton.language.sum(tile, 0))

    def moving(kind):
        room = torch.empty(64, dtype=kind)
        assert room.data_ptr() % 16 == 0
        return room

    floats, others, ints = moving(torch.float32), moving(torch.float32), moving(torch.int64)
    shifted = floats[1:]
    cases = []
    for a, b in ((floats, floats), (ints, floats)):
        for c in (None, floats):
            for fixed in (
                {"T": 3, "stride": 16, "eps": 0.5},
                {"T": 3, "stride": 1, "eps": 0.5},
                {"T": 3, "stride": 1, "eps": 0.25},
                {"T": 3, "stride": 2**40, "eps": 1e-6},
                {"T": -3, "stride": 7, "eps": 1e-6},
            ):
                cases.append((leading, (a, b, c), {**fixed, "A": 1, "HAS": c is not None}))
    cases += [(mixed, (ints, floats), {"size": s, "A": 2, "extra": None}) for s in (1, 3, 32)]
    cases += [(mixed, (ints, floats, floats), {"size": 3, "A": 2})]
    desc = TensorDescriptor.from_tensor(torch.empty(16, 16), [16, 16])
    template = without_base(desc)
    assert template.base is None
    assert desc.base is not None
    cases += [(described, (at(template, desc.base), floats), {"A": 16})]
    options = [{"num_warps": 4}, {"num_warps": 2, "enable_fp_fusion": False}]
    checked = 0
    for kernel, given, fixed in cases:
        chosen = options[checked % 2]
        prepared = Prepared(kernel, (2, 5), fixed, **chosen)
        names = [name for name in kernel.arg_names if name not in fixed]

        def check(*values, prepared=prepared, kernel=kernel, fixed=fixed, chosen=chosen, names=names):
            ran.clear()
            prepared(*values)
            kernel[(2, 5)](**dict(zip(names, values)), **fixed, **chosen)
            assert [ran[0]] == ran[1:], ran

        check(*given)
        known = prepared._compiled
        assert known is not None
        assert prepared._direct is not None
        real = Prepared._by_triton
        Prepared._by_triton = lambda *_: pytest.fail("Triton was asked again")
        ran.clear()
        prepared(*given)
        assert len(ran) == 1
        Prepared._by_triton = real
        check(*given)
        # another place
        check(*[others if value is floats else value for value in given])
        # a pointer that Triton compiles another kernel for
        if kernel is not described:
            check(*[shifted if value is floats else value for value in given])
            assert ran[0].function != known.function
        # streams and devices are those of the moment
        active.stream = 100
        check(*given)
        assert ran[0].stream == 100
        active.device = 1
        check(*given)
        assert ran[0].stream == 101
        active.device, active.stream = 0, 7
        assert prepared._compiled is known
        checked += 1
    assert checked == 25, checked

    # whoever watches sees every launch
    prepared, seen = Prepared(leading, (1,), {"T": 3, "stride": 16, "eps": 0.5, "A": 1, "HAS": False}), []
    prepared(floats, floats, None)
    assert prepared._direct is not None
    asked, real = [], Prepared._by_triton
    Prepared._by_triton = lambda self, given: (asked.append(1), real(self, given))[1]
    prepared(floats, floats, None)
    assert not asked
    leading.add_pre_run_hook(lambda *_, **__: seen.append(1))
    prepared(floats, floats, None)
    assert asked == seen == [1]
    leading.pre_run_hooks.clear()
    hook = lambda _: None  # noqa: E731
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(hook)
        prepared(floats, floats, None)
        chain.remove(hook)
    assert len(asked) == 3
    # nothing is kept of a launch under watch
    knobs.runtime.debug = True
    late = Prepared(leading, (1,), {"T": 3, "stride": 16, "eps": 0.5, "A": 1, "HAS": False})
    late(floats, floats, None)
    assert late._compiled is None
    knobs.runtime.debug = False
    late(floats, floats, None)
    assert late._direct is not None
    Prepared._by_triton = real

    # a launcher that nobody has tried is called as Triton documents
    triton_launch._KNOWN_LAUNCHER = ()
    triton_launch._triton.cache_clear()
    other = Prepared(leading, (3,), {"T": 3, "stride": 16, "eps": 0.5, "A": 1, "HAS": False})
    other(floats, floats, None)
    assert other._compiled is not None
    assert other._direct is None
    ran.clear()
    other(others, floats, None)
    prepared(others, floats, None)
    assert ran[0].function == ran[1].function
    assert ran[0].arguments == ran[1].arguments
    assert ran[0].grid == (3, 1, 1)

    with pytest.raises(TypeError, match=r"no parameters \['B'\]"):
        Prepared(leading, (1,), {"B": 3})


def body_compiled_function():
    """The function that Triton 3.6 compiles for a kernel is called with what Triton's launcher would give it."""
    from types import SimpleNamespace

    import torch
    import triton
    from triton.backends.nvidia import driver as nvidia
    from triton.tools.tensor_descriptor import TensorDescriptor

    from rl_contract.pretend import pretend_gpu
    from rl_contract.triton_launch import _MOST_MAPS, Prepared, at, without_base

    calls, maps = [], []

    class Function:
        def __call__(self, *given):
            calls.append([value.data_ptr() if hasattr(value, "data_ptr") else value for value in given])

    def fill_tma_descriptor(*given):
        maps.append(given)
        return tuple(map(str, given))

    nvidia.compile_module_from_src = lambda **_: SimpleNamespace(launch=Function())
    nvidia.library_dirs = lambda: []
    active, _ = pretend_gpu()
    active.launcher_cls, active.fill_tma_descriptor = nvidia.CudaLauncher, fill_tma_descriptor

    @triton.jit
    def plain(a, b, c, size, eps, A: triton.language.constexpr):
        triton.language.store(b, triton.language.load(a + size) + A + eps)

    @triton.jit
    def described(first, second, b, size, A: triton.language.constexpr):
        tile = first.load([0, 0]) + triton.language.trans(second.load([0, 0]))
        triton.language.store(b + triton.language.arange(0, A), triton.language.sum(tile, 0))

    def descriptor(rows, columns, block):
        return TensorDescriptor.from_tensor(torch.empty(rows, columns, dtype=torch.bfloat16), block)

    def compare(prepared, kernel, given, fixed):
        calls.clear()
        kernel[(2, 3)](*given, *fixed.values(), num_warps=2)
        prepared(*given)
        assert len(calls) == 2
        triton_s, ours = calls
        assert ours[:10] == triton_s[:10]
        # Triton's launch metadata and its chains of hooks, which are empty
        assert ours[10:13] == [None] * 3
        assert ours[13:] == triton_s[13:]

    out = torch.empty(64)
    fixed = {"size": 3, "eps": 0.5, "A": 16}
    prepared = Prepared(plain, (2, 3), fixed, num_warps=2)
    for a in (out, torch.empty(64), torch.empty(64)):
        prepared(a, out, None)
        compare(prepared, plain, (a, out, None), fixed)
    assert isinstance(prepared._direct, Function)
    fixed = {"size": 3, "A": 16}
    prepared = Prepared(described, (2, 3), fixed, num_warps=2)
    first, second = without_base(descriptor(40, 16, [16, 16])), without_base(descriptor(24, 64, [16, 16]))
    places = [torch.empty(40, 64, dtype=torch.bfloat16) for _ in range(3)]
    for a in places:
        for b in places:
            prepared(at(first, a), at(second, b), out)
            compare(prepared, described, (at(first, a), at(second, b), out), fixed)
    assert isinstance(prepared._direct, Function)
    maps.clear()
    prepared(at(first, places[0]), at(second, places[1]), out)
    assert not maps
    # another shape at a place that is known
    other = without_base(descriptor(41, 16, [16, 16]))
    for kind in (other, first):
        compare(prepared, described, (at(kind, places[0]), at(second, places[1]), out), fixed)
    kept = prepared._maps._kept
    room = torch.empty(16 * (_MOST_MAPS + 40), dtype=torch.bfloat16)
    for i in range(_MOST_MAPS + 5):
        prepared(at(first, room[16 * i :]), at(second, places[1]), out)
        assert len(kept) <= _MOST_MAPS


def body_interpreter():
    import torch
    import triton
    import triton.language as tl

    from rl_contract.triton_launch import Prepared

    @triton.jit
    def double(a, b, size, B: tl.constexpr):
        at = tl.arange(0, B)
        tl.store(b + at, tl.load(a + at, mask=at < size) * 2, mask=at < size)

    prepared = Prepared(double, (1,), {"size": 13, "B": 16}, num_warps=1)
    for _ in range(3):
        a, b = torch.randn(13), torch.empty(13)
        prepared(a, b)
        assert torch.equal(b, 2 * a)
    assert prepared._compiled is None


@pytest.mark.parametrize("name", ["same_launches", "compiled_function", "interpreter"])
def test_prepared_launch(name):
    if name == "compiled_function" and not triton.__version__.startswith("3.6."):
        pytest.skip("needs Triton 3.6")
    paths = os.path.dirname(__file__), os.environ.get("PYTHONPATH")
    env = os.environ | {
        "TRITON_INTERPRET": "1" if name == "interpreter" else "0",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    command = f"import test_prepared_launch as t; t.body_{name}()"
    subprocess.run([sys.executable, "-c", command], env=env, check=True, timeout=300)


def test_a_cache_of_decisions_is_bounded():
    from rl_contract.triton_launch import _MOST, keep

    kept = {}
    for i in range(_MOST + 3):
        assert keep(kept, i, -i) == -i
    assert len(kept) == 3
    assert kept[_MOST + 2] == -_MOST - 2


def test_of_two_first_launches_at_once_one_is_kept(monkeypatch):
    from rl_contract.triton_launch import Prepared

    both, kept = threading.Barrier(2), []

    class Kernel:
        arg_names, pre_run_hooks, __name__ = ("a", "size"), (), "kernel"

        def __getitem__(self, grid):
            def launch(*_):
                both.wait(30)
                return object()

            return launch

    def keep(prepared, compiled):
        kept.append(compiled)
        prepared._compiled = compiled

    monkeypatch.setattr(Prepared, "_keep", keep)
    prepared = Prepared(Kernel(), (1,), {"size": 1})
    threads = [threading.Thread(target=prepared, args=(None,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(kept) == 1
    assert prepared._compiled is kept[0]
