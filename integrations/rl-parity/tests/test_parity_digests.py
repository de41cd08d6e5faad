"""Two digests that differ are printed so that they differ."""

import json

import pytest
from parity_sittings import edited, resume, start

from rl_parity.digests import apart
from rl_parity.rundir import RunDirectory

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

A = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("a", "b", "shown"),
    [
        (A, "f" + A[1:], (A[:12], "f" + A[1:12])),
        (A, A[:11] + "0" + A[12:], (A[:12], A[:11] + "0")),
        (A, A[:20] + "f" + A[21:], (A[:21], A[:20] + "f")),
        (A, A[:-1] + "0", (A, A[:-1] + "0")),
        (A, A[:12], (A[:13], A[:12])),
        (A, None, (A[:12], "None")),
        (A, "", (A[:12], "")),
        ("None", None, ("'None'", "None")),
    ],
)
def test_digests_are_cut_where_they_are_still_told_apart(a, b, shown):
    assert apart(a, b) == shown
    assert apart(b, a) == shown[::-1]
    assert shown[0] != shown[1]


@pytest.mark.usefixtures("inline_workers")
def test_weights_that_differ_in_the_last_digit_alone_are_shown_to(tmp_path, capsys):
    out = tmp_path / "out"
    assert start(out, "--steps", "1", "--save-every", "1") == 0
    path = out / "strict" / "state" / "step-00001" / "state.json"
    whole = json.loads(path.read_text())["digest"]
    other = whole[:-1] + ("0" if whole[-1] != "0" else "1")
    edited(path, digest=other)
    assert resume(out, "--steps", "2") == 2
    err = capsys.readouterr().err
    assert f"has weights {whole} at step 1" in err
    assert f"{path} {other}; restore" in err
    edited(path, digest=whole)
    manifest = RunDirectory(out).manifest()
    name = manifest["fingerprints"]["norm"]
    edited(out / "manifest.json", fingerprints__norm=name[:-1] + ("0" if name[-1] != "0" else "1"))
    assert resume(out, "--steps", "2") == 2
    assert f"the profile's is {name}" in capsys.readouterr().err
