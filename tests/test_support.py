"""The support table is what the gates of both engines answer, and each refusal names what it refuses."""

import importlib.util
import json
from pathlib import Path

import pytest

from rl_contract import ContractError, MissingSupport

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


@pytest.mark.parametrize("case", support_table.SECTIONS["Models"], ids=lambda case: case.label)
def test_support_of_a_model_is_the_trainers_own_answer_not_the_profiles(case):
    """Where no profile can be made the table asks with another model's; that refusal says nothing of the trainer."""
    from rl_megatron import ModelConfig

    config = {**support_table.base(), **case.changes}
    if not case.named:
        ModelConfig.from_hf(config)
        return
    with pytest.raises((ContractError, MissingSupport)) as refusal:
        ModelConfig.from_hf(config)
    assert case.named in str(refusal.value)


def test_support_positions_are_those_transformers_reads():
    from transformers import AutoConfig

    from rl_megatron import ModelConfig
    from rl_vllm import settings_from_hf

    rule, theta = support_table.LLAMA3, {"rope_theta": 5e5}
    for changes in (
        {"rope_theta": 7e5},
        {**theta, "rope_scaling": rule},
        {"rope_scaling": {**rule, **theta}},
        {"rope_parameters": {**rule, **theta}, "rope_theta": 7e5},
        {"rope_parameters": {**rule, **theta}, "rope_scaling": rule, **theta},
    ):
        config = {**support_table.base(), **support_table.LLAMA, "rope_theta": 1e6, **changes}
        read = dict(AutoConfig.for_model(**config).rope_parameters)
        wanted = {"theta": read.pop("rope_theta"), "rotary_dim": 32}
        wanted |= {} if read == {"rope_type": "default"} else read
        assert ModelConfig.from_hf(config).rope == settings_from_hf(config, leaves=1).rope == wanted


@pytest.mark.parametrize(
    ("label", "named"),
    [
        pytest.param("rope_scaling (llama3) beside another rope_parameters", "which say different rules"),
        pytest.param("rope_scaling (YaRN) beside another rope_parameters", "which say different rules"),
        pytest.param("YaRN positions", "supported: ('default', 'llama3')"),
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
