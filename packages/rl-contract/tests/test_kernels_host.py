"""What kernels share on the host: ranges over threads, model-type arrays, and the compile cache."""

import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
from numba.core import caching

from rl_contract import jit
from rl_contract.arrays import as_array, narrow, widen
from rl_contract.jit import kernel
from rl_contract.threads import for_ranges


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("work", [0.0, 1e9])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_ranges_cover_every_unit_once(count, work, threads):
    before, seen = torch.get_num_threads(), np.zeros(count, int)

    def body(first, last):
        seen[first:last] += 1

    try:
        torch.set_num_threads(threads)
        for_ranges(body, count, work)
    finally:
        torch.set_num_threads(before)
    assert (seen == 1).all()


def test_small_work_stays_on_the_calling_thread_and_large_work_is_shared():
    before, seen = torch.get_num_threads(), set()
    try:
        torch.set_num_threads(3)
        for_ranges(lambda first, last: seen.add(threading.get_ident()), 9, 100.0)
        assert seen == {threading.get_ident()}
        ranges = []
        for_ranges(lambda first, last: ranges.append((first, last)), 9, 1e9)
        assert sorted(ranges) == [(0, 3), (3, 6), (6, 9)]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("broken", [0, 5])
def test_an_error_in_any_range_reaches_the_caller_after_all_are_done(broken):
    before, done = torch.get_num_threads(), []

    def body(first, last):
        if first <= broken < last:
            raise RuntimeError("broken range")
        done.append(first)

    try:
        torch.set_num_threads(3)
        with pytest.raises(RuntimeError, match="broken range"):
            for_ranges(body, 6, 1e9)
    finally:
        torch.set_num_threads(before)
    assert len(done) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_starts_threads_of_its_own():
    for_ranges(lambda first, last: None, 4, 1e9)
    child = os.fork()
    if child == 0:
        done = []
        for_ranges(lambda first, last: done.append(first), 4, 1e9)
        os._exit(0 if done else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@kernel
def _double(x, y):
    for i in range(len(x)):
        y[i] = narrow(widen(x[i]) * np.float32(2.0), y[i])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_arrays_carry_both_types(dtype):
    x = torch.randn(8, 300).to(dtype)[:, ::3]
    y = torch.empty(800, dtype=dtype)
    _double(as_array(x).reshape(-1), as_array(y))
    assert torch.equal(y, (x * 2).reshape(-1))
    assert as_array(torch.ones(3, requires_grad=True)).flags.writeable


def test_helpers_are_for_kernels_only():
    with pytest.raises(NotImplementedError):
        widen(1)
    with pytest.raises(NotImplementedError):
        narrow(1.0, 1)


@pytest.mark.field_report("R32")
def test_processes_that_start_together_compile_once_and_changed_sources_are_compiled_again(tmp_path):
    package = tmp_path / "little"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("import numba\n@numba.njit\ndef part(x):\n    return x + 1.0\n")
    (package / "main.py").write_text(
        textwrap.dedent(
            """
            import sys
            from rl_contract.jit import kernel
            from little.part import part

            @kernel
            def whole(x):
                return part(x)

            if __name__ == "__main__":
                from little import main
                kind = int if int(sys.argv[1]) % 2 else float
                value = main.whole(kind(1))
                print(value, sum(main.whole.stats.cache_misses.values()))
            """
        )
    )

    def run(count):
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-m", "little.main"]
        started = [
            subprocess.Popen([*command, str(i)], env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
            for i in range(count)
        ]
        return [tuple(float(v) for v in p.communicate(timeout=120)[0].split()) for p in started]

    answers = run(4)
    assert [value for value, _ in answers] == [2.0] * 4
    assert sum(misses for _, misses in answers) == 2
    assert run(1) == [(2.0, 0.0)]
    # the kernel's own file stays as it is; only what it inlines changes
    (package / "part.py").write_text("import numba\n@numba.njit\ndef part(x):\n    return x + 2.0\n")
    assert run(1) == [(3.0, 1.0)]


def test_without_a_folder_for_the_cache_kernels_compile_with_one_warning(monkeypatch):
    def refuse(self):
        raise OSError("read-only file system")

    monkeypatch.setattr(caching._CacheLocator, "ensure_cache_path", refuse)
    jit._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR") as seen:
        once, twice = kernel(lambda x: x + 1.0), kernel(lambda x: x * 2.0)
    assert len(seen) == 1
    assert (once(1.0), twice(3.0)) == (2.0, 6.0)
    assert once.signatures
