"""Makes the helper modules beside the tests importable under any pytest import mode; small runs on fake workers."""

import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))


@contextmanager
def _inline():
    import parity_workers

    from rl_parity import preflight

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_parity.fleet.make_launcher", lambda kind, logs: parity_workers.InlineLauncher())
        memory = preflight.psutil.virtual_memory()
        patch.setattr(preflight.psutil, "virtual_memory", lambda: memory._replace(available=64 * preflight.GIB))
        parity_workers.FAULTS.clear()
        yield
        parity_workers.FAULTS.clear()


@pytest.fixture(scope="module")
def workers():
    """Fake workers in this process, for what a module's tests share."""
    with _inline():
        yield


@pytest.fixture
def inline_workers():
    """The same for one test, whose faults are no other's."""
    with _inline():
        yield


@pytest.fixture(scope="module")
def finished(workers, tmp_path_factory):
    """Both arms, four steps."""
    from parity_edits import SMALL, STEPS

    from rl_parity import cli

    out = tmp_path_factory.mktemp("finished") / "out"
    options = ["--arm", "both", "--steps", str(STEPS), "--save-every", "1"]
    assert cli.main(["run", "--out", str(out), *options, *SMALL]) == 0
    return out


@pytest.fixture(scope="module")
def ended(workers, tmp_path_factory):
    """With a mismatch in its second step."""
    import parity_workers
    from parity_edits import SMALL

    from rl_parity import cli

    out = tmp_path_factory.mktemp("ended") / "out"
    generate = parity_workers.FakeRollout.generate

    def wrong_later(self, *args, **kwargs):
        found = generate(self, *args, **kwargs)
        if ":1:" in self.engine.label:
            found[0]["logprobs"][1] = float(np.nextafter(np.float32(found[0]["logprobs"][1]), np.float32(0)))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity_workers.FakeRollout, "generate", wrong_later)
        assert cli.main(["run", "--out", str(out), "--steps", "4", *SMALL]) == 1
    return out
