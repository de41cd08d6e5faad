"""Prompts, answers, rewards, seeds."""

import json

import pytest

from rl_contract import ContractError
from rl_parity import data
from rl_parity.preflight import _BuiltIn
from rl_parity.vocabulary import VOCABULARY


def write(path, *rows):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return str(path)


def test_built_in_sets_are_encodable_by_the_built_in_vocabulary():
    for name in data.BUILT_IN:
        examples = data.read_examples(name)
        prompts = data.encode(examples, _BuiltIn(), vocab_size=77, max_prompt=64)
        assert len(prompts) == len(examples)
        assert all(data.reward_exact(e.answer, e.answer) == 1.0 for e in examples)


def test_arithmetic_answers_are_right():
    for e in data.arithmetic(seed=3, count=50):
        expression = "".join(c for c in e.prompt if c in "0123456789+-*")
        assert str(eval(expression.rstrip("-"))) == e.answer


def test_gsm8k_style_files_work(tmp_path):
    rows = {"question": "How many?", "answer": "First 3, then 4.\n#### 1,207"}
    (example,) = data.read_examples(write(tmp_path / "g.jsonl", rows))
    assert data.final_answer(example.answer) == "1207"
    assert data.reward_exact("so it is 1,207.", example.answer) == 1.0
    assert data.reward_exact("so it is 1208", example.answer) == 0.0


def test_partial_credit_lies_between():
    assert data.reward_partial("42", "42") == 1.0
    assert data.reward_partial("no idea", "42") == 0.0
    assert 0.2 < data.reward_partial("41", "42") < 1.0
    assert data.reward_partial("99", "42") == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "holds no examples"),
        (("",), "holds no examples"),
        ((json.dumps({"prompt": "a", "answer": "b"}), "{broken"), "line 2"),
        (({"prompt": "a"},), "line 1: no text under 'answer'"),
        (({"answer": "a"},), "line 1: no text under 'prompt'"),
        (({"prompt": 3, "answer": "a"},), "line 1"),
        (("[1, 2]",), "line 1: got list"),
    ],
)
def test_bad_files_name_the_line(tmp_path, rows, message):
    with pytest.raises(ContractError, match=message):
        data.read_examples(write(tmp_path / "bad.jsonl", *rows))


def test_a_missing_file_names_what_is_built_in():
    with pytest.raises(ContractError, match=r"no such file.*arithmetic"):
        data.read_examples("/nowhere/prompts.jsonl")


def test_long_prompts_and_foreign_ids_are_listed_together():
    examples = [data.Example("1+1=", "2"), data.Example("x" * 40, "2"), data.Example("é", "1")]
    with pytest.raises(ContractError) as error:
        data.encode(examples, _BuiltIn(), vocab_size=77, max_prompt=20)
    assert "example 2: 40 tokens" in str(error.value)
    assert "example 3" in str(error.value)
    with pytest.raises(ContractError, match="outside the model's vocabulary of 5"):
        data.encode(examples[:1], _BuiltIn(), vocab_size=5, max_prompt=20)


def test_every_prompt_comes_once_an_epoch_and_steps_repeat_by_seed():
    prompts = data.encode(data.easy(), _BuiltIn(), vocab_size=77, max_prompt=10)
    seen = [p.index for step in range(5) for p in data.batch_for_step(prompts, step=step, batch=4, seed=1)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    again = [p.index for step in range(5) for p in data.batch_for_step(prompts, step=step, batch=4, seed=1)]
    other = [p.index for step in range(5) for p in data.batch_for_step(prompts, step=step, batch=4, seed=2)]
    assert seen == again != other


def test_sampling_seeds_differ_by_step_prompt_and_sample():
    seeds = {data.sampling_seed(s, t, p, i) for s in range(3) for t in range(5) for p in range(8) for i in range(8)}
    assert len(seeds) == 3 * 5 * 8 * 8
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_vocabulary_is_no_multiple_of_a_padding():
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 77


def test_a_byte_order_mark_crlf_and_line_separators_in_strings_are_read(tmp_path):
    path = tmp_path / "p.jsonl"
    text = '{"prompt": "a\u2028b\x85c", "answer": "1"}\r\n{"prompt": "d", "answer": "2"}\r\n'
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert data.read_examples(str(path)) == [data.Example("a\u2028b\x85c", "1"), data.Example("d", "2")]


def test_prompts_that_are_not_utf8_are_refused_by_name(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "\xff", "answer": "1"}')
    with pytest.raises(ContractError, match="save it as UTF-8"):
        data.read_examples(str(path))


def test_random_prompts_are_seeded_in_range_and_of_the_lengths_asked_for():
    prompts = data.random_prompts("random:5-9", vocab_size=1000, max_prompt=9, seed=3)
    assert prompts == data.random_prompts("random:5-9", vocab_size=1000, max_prompt=9, seed=3)
    assert prompts != data.random_prompts("random:5-9", vocab_size=1000, max_prompt=9, seed=4)
    assert {len(p.ids) for p in prompts} == {5, 6, 7, 8, 9}
    assert all(0 <= token < 1000 for p in prompts for token in p.ids)
    assert {len(p.ids) for p in data.random_prompts("random:7", vocab_size=10, max_prompt=9, seed=0)} == {7}
    with pytest.raises(ContractError, match="leaves 8 tokens"):
        data.random_prompts("random:5-9", vocab_size=1000, max_prompt=8, seed=3)
    for wrong in ("random:", "random:0", "random:9-5", "random:x", "random:1-2-3"):
        with pytest.raises(ContractError, match="give a length"):
            data.random_lengths(wrong)


def test_repeat_reward_is_the_share_of_ids_that_came_before():
    assert data.reward_repeat([5, 6, 5, 5]) == 0.5
    assert data.reward_repeat([1, 2, 3]) == 0.0
    assert data.reward_repeat([]) == 0.0


def test_even_reward_is_the_share_of_even_ids():
    assert data.reward_even([2, 3, 4, 5]) == 0.5
    assert data.reward_even([]) == 0.0
