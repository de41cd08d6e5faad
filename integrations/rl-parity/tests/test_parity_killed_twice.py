"""A run of two arms that was killed in each goes on: what was killed is told of when the run ends, not before."""

import pytest
from parity_sittings import resume, start

from rl_parity import loop, runner

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")


@pytest.mark.usefixtures("inline_workers")
def test_a_run_killed_in_one_arm_and_then_in_the_other_can_be_finished(tmp_path, monkeypatch):
    out, dead, kill = tmp_path / "run", [], {}
    # a killed process writes nothing any more
    for module, name in (
        (loop, "write_evidence"), (loop, "write_sync"), (runner, "_finish"), (runner, "write_json"), (runner, "_say"),
    ):  # fmt: skip
        written = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, w=written, **k: None if dead else w(*a, **k))
    stepped = loop.Arm._step

    def step(self, number, *given, **named):
        if kill.get(self.name) == number:
            dead.append(True)
            raise KeyboardInterrupt
        return stepped(self, number, *given, **named)

    monkeypatch.setattr(loop.Arm, "_step", step)
    kill["native"] = 2
    start(out, "--steps", "4", "--save-every", "1", "--arm", "both")
    dead.clear()
    kill.clear()
    kill["strict"] = 2
    resume(out, "--steps", "4")
    dead.clear()
    kill.clear()
    assert resume(out, "--steps", "4") == 0
