"""The support table is what the gates of both engines answer, and each refusal names what it refuses."""

import importlib.util
import json
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("support_table", Path(__file__).parents[1] / "tools" / "support_table.py")
support_table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(support_table)

CASES = [(title, case) for title, cases in support_table.SECTIONS.items() for case in cases]


@pytest.mark.field_report("R28")
def test_support_table_is_what_the_gates_answer():
    assert support_table.PAGE.read_text() == support_table.build(), "run python tools/support_table.py"


@pytest.mark.field_report("R28")
def test_support_table_accepts_and_refuses():
    answers = [any(support_table.answers(case)) for _, case in CASES]
    assert answers.count(True) >= 15
    assert answers.count(False) >= 12


@pytest.mark.field_report("R28")
@pytest.mark.parametrize("title", ["Models", "Types", "Tensor parallel"])
def test_support_is_the_same_on_both_sides_and_refusals_name_the_reason(title):
    """A case that one side alone accepts could be trained or served, but never compared."""
    for case in support_table.SECTIONS[title]:
        rollout, train = support_table.answers(case)
        assert bool(rollout) == bool(train), (case.label, rollout, train)
        if rollout:
            assert case.named in rollout, (case.label, rollout)
            assert case.named in train, (case.label, train)
            for reason in (rollout, train):
                assert any(word in reason for word in ("supported", "choose", "use a", "build the profile")), reason


@pytest.mark.parametrize(
    ("label", "named"),
    [
        pytest.param("vision: Qwen2.5-VL", "Qwen2_5_VL", marks=pytest.mark.field_report("R11", "R77")),
        pytest.param("vision: Qwen3-VL", "Qwen3VL", marks=pytest.mark.field_report("R11")),
        pytest.param("state space: Mamba-2", "Mamba2", marks=pytest.mark.field_report("R55")),
        pytest.param("hybrid: Nemotron-H", "NemotronH", marks=pytest.mark.field_report("R55")),
        pytest.param("hybrid: linear-attention layers", "linear_attention", marks=pytest.mark.field_report("R55")),
        pytest.param("mixture of experts: Qwen3-MoE", "Qwen3Moe", marks=pytest.mark.field_report("R57")),
    ],
)
def test_a_run_of_an_uncovered_model_is_refused_before_anything_starts(label, named, tmp_path, capsys):
    from rl_parity.cli import USAGE, main

    (case,) = [c for c in support_table.SECTIONS["Models"] if c.label == label]
    folder, out = tmp_path / "model", tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**support_table.base(), **case.changes}))
    assert main(["run", "--model", str(folder), "--launcher", "local", "--out", str(out)]) == USAGE
    assert named in capsys.readouterr().err
    assert not out.exists()
