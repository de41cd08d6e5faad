"""Launches that are looked up, without a GPU: Triton's driver is replaced, hence a process of their own."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")


def looked_up():
    """A launch that is looked up runs what Triton itself would run; the driver here only notes what that is."""
    import triton

    from rl_contract.pretend import pretend_gpu

    active, ran = pretend_gpu()
    from rl_logprob.triton_launch import _compiled, launch

    @triton.jit(do_not_specialize=["T"])
    def kernel(a, b, T, stride, size, A: triton.language.constexpr, B: triton.language.constexpr):
        triton.language.store(b + stride * T, triton.language.load(a + size) + A)

    floats, ints = torch.empty(64), torch.empty(64, dtype=torch.int64)
    shifted = floats[1:]
    assert floats.data_ptr() % 16 == 0
    cases = [
        ((a, b, tokens, stride, size), constants, warps)
        for a, b in ((floats, floats), (shifted, floats), (floats, shifted), (floats, ints))
        for tokens, stride, size in (
            (5, 1, 7), (5, 16, 7), (1, 17, 1), (16, 48, 1), (5, 0, 7), (5, 1, 16), (5, 2**31 + 1, 16), (5, -16, 16),
            (5, 2**40, 1),
        )
        for constants, warps in (({"A": 1, "B": 2}, 4), ({"A": 2, "B": 2}, 4), ({"A": 1, "B": 2}, 8))
    ]  # fmt: skip
    for device in (0, 1):
        active.device = device
        for _ in range(2):
            for args, constants, warps in cases:
                ran.clear()
                kernel[(3, 2, 1)](*args, **constants, num_warps=warps)
                launch(kernel, (3, 2, 1), args, constants, num_warps=warps)
                want, got = ran
                assert want == got, (args, constants)
    assert 0 < len(_compiled) < 2 * len(cases)
    # what may be taken for another is a launch with other constants in another order
    with pytest.raises(TypeError, match="takes"):
        launch(kernel, (1, 1, 1), cases[0][0], {"B": 3, "A": 9}, num_warps=4)


def targets_anywhere():
    """Targets of a prompt begin at any of its tokens, 8 bytes behind a multiple of 16 as a rule."""
    from rl_contract.pretend import aligned, pretend_gpu

    _, ran = pretend_gpu("sm90")
    from rl_logprob.triton_scores import score_logits

    def launched(rows, first):
        targets = aligned(rows + 16, dtype=torch.int64)[first : first + rows]
        m, logits = aligned(8, rows, dtype=torch.float32), aligned(rows, 4096, dtype=torch.float32)
        ran.clear()
        stats = m, aligned(8, rows, dtype=torch.float64), aligned(0, dtype=torch.float64)
        score_logits(stats, logits, targets, torch.empty(0), 4096)
        (launch,) = ran
        return launch.function

    for rows in (1, 2, 16, 17, 510, 512, 2048):
        functions = {launched(rows, first) for first in (0, 1, 2, 3)}
        assert len(functions) == 1, rows


@pytest.mark.parametrize("what", ["looked_up", "targets_anywhere"])
def test_a_launch_that_is_looked_up_runs_what_triton_would_run(what):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", __file__, what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    {"looked_up": looked_up, "targets_anywhere": targets_anywhere}[sys.argv[1]]()


def test_certificates_are_those_of_the_plans_in_force(monkeypatch):
    from dataclasses import replace

    from rl_gemm import plans, vendor
    from rl_logprob import gpu

    own = plans.shipped("sm90")
    claim = own.certificates[0]
    monkeypatch.setattr(gpu, "arch", lambda _: "sm90")
    monkeypatch.setattr(vendor, "environment", lambda _: dict(claim.environment))
    monkeypatch.setattr(plans.Plans, "certified", lambda self, *_: bool(self.certificates))
    monkeypatch.setitem(plans.plan_files.own, "sm90", own)
    for given, want in ((own, True), (replace(own, certificates=()), False), (own, True)):
        plans.plan_files.own["sm90"] = given
        for _ in range(2):
            assert gpu.certified(0, "forward", 4096, 1024, 512) is want
