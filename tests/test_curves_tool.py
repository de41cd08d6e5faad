"""tools/curves draws what arms of runs have written, and says what was compared."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl_contract import ContractError

TOOL = Path(__file__).resolve().parents[1] / "tools" / "curves"


def arm(folder, wrong=0, steps=3, torn='{"step": 3, "rew', change=lambda lines: lines):
    folder.mkdir(parents=True)
    lines = [
        {"step": n, "reward": 0.1 * n, "grad_norm": 1.0, "max_abs_diff": 0.01 * wrong, "k3": 1e-4 * wrong,
         "valid_count": 5, "loss": 0.1, "mismatch_count": wrong, "seconds": {"rollout": 1.0, "train": 0.5}}
        for n in range(steps)
    ]  # fmt: skip
    (folder / "steps.jsonl").write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in change(lines)) + torn
    )
    return folder


def run(*arguments):
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_curves_count_what_was_compared_and_draw_it(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "pictures" / "x.png"
    done = run(arm(tmp_path / "a" / "strict", 0), arm(tmp_path / "b" / "strict", 2), "--out", out)
    assert done.returncode == 0, done.stderr
    assert "a/strict: 3 steps, 15 log-probabilities compared, 0 differ" in done.stdout
    assert "b/strict: 3 steps, 15 log-probabilities compared, 6 differ" in done.stdout
    assert out.read_bytes()[:4] == b"\x89PNG"
    assert done.stderr.count("its last line was cut off and is left out") == 2


def test_arms_of_one_name_in_runs_of_one_name_are_all_drawn(tmp_path, run_tool):
    pytest.importorskip("matplotlib")
    arms = [arm(tmp_path / folder / "run" / "strict", wrong) for folder, wrong in (("a", 0), ("b", 2))]
    done = run_tool("curves", *arms, "--out", tmp_path / "x.svg")
    assert done.stdout.splitlines() == [
        "a/run/strict: 3 steps, 15 log-probabilities compared, 0 differ",
        "b/run/strict: 3 steps, 15 log-probabilities compared, 6 differ",
    ]
    twice = run_tool("curves", arms[0], arms[0].parent / "." / "strict", "--out", tmp_path / "y.svg")
    assert (twice.returncode, twice.stderr.count("are one directory; give each arm once")) == (1, 1)
    assert not (tmp_path / "y.svg").exists()


def test_a_step_that_could_not_be_compared_or_trained_is_a_gap(tmp_path, run_tool):
    pytest.importorskip("matplotlib")

    def last(lines):
        del lines[-1]["k3"]
        lines[-1] |= {"valid_count": 0, "max_abs_diff": None, "loss": None, "grad_norm": None, "not_compared": "why"}
        return lines

    done = run_tool("curves", arm(tmp_path / "strict", torn="", change=last), "--out", tmp_path / "x.png")
    assert (done.stdout, done.stderr) == ("strict: 3 steps, 10 log-probabilities compared, 0 differ\n", "")


@pytest.mark.parametrize("names", [("strict", "native"), ("strict TP1", "strict TP2"), ("a", "b", "c")])
def test_every_arm_has_a_colour_of_its_own_and_its_seconds_a_panel(names, tmp_path, load_tool, monkeypatch):
    pytest.importorskip("matplotlib")
    from pictures import panels
    from run_page_parts import picture

    made = []
    monkeypatch.setattr(panels, "save", lambda figure, path: made.append(figure))
    steps = load_tool("curves").steps_of(arm(tmp_path / "strict", 2, torn=""))
    picture.draw(dict.fromkeys(names, steps), "x.png")
    axes = made[0].axes
    assert len(axes) == len(picture.PANELS) + len(names)
    for axis in axes[: len(picture.PANELS)]:
        drawn = {line.get_label(): line.get_color() for line in axis.lines if not line.get_label().startswith("_")}
        assert len(drawn) == len({*drawn.values()}) == len(names)
    assert [axis.get_title().split(": ")[1] for axis in axes[len(picture.PANELS) :]] == list(names)
    differing = next(axis for axis in axes if "that differ" in axis.get_title()).lines[0]
    assert list(differing.get_ydata()) == [2, 2, 2]


def changed(**figures):
    return lambda lines: [lines[0], lines[1] | figures, lines[2]]


BAD = {
    "a broken line in the middle": (
        lambda lines: [lines[0], '{"step": 1, "rew', lines[2]],
        "line 2 is not whole JSON",
    ),
    "a list": (lambda lines: [[], *lines], "line 1 holds list"),
    "a step alone": (lambda lines: [{"step": 0}], "step 0: valid_count is None"),
    "a step twice": (lambda lines: [*lines, lines[2]], "step 2"),
    "a gap": (lambda lines: [lines[0], lines[2]], "step 2"),
    "another order": (lambda lines: [lines[0], lines[2], lines[1]], "step 2"),
    "a later beginning": (lambda lines: lines[1:], "step 1"),
    "no reward": (changed(reward=None), "step 1: reward is None"),
    "a reward of text": (changed(reward="0.1"), "step 1: reward is '0.1'"),
    "no k3": (changed(k3=None), "step 1: k3 is None"),
    "a loss of text": (changed(loss="0.1"), "step 1: loss is '0.1'"),
    "no gradient norm": (changed(grad_norm=None), "step 1: grad_norm is None"),
    "a count below 0": (changed(mismatch_count=-1), "step 1: mismatch_count is -1"),
    "half a count": (changed(valid_count=2.5), "step 1: valid_count is 2.5"),
    "seconds of text": (changed(seconds={"train": "1"}), "step 1: seconds is"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_steps_that_are_not_whole_are_named(case, tmp_path, load_tool):
    change, words = BAD[case]
    bad = arm(tmp_path / "strict", torn="", change=change)
    with pytest.raises(ContractError, match=words) as refusal:
        load_tool("curves").steps_of(bad)
    assert str(refusal.value).startswith(str(bad / "steps.jsonl"))


def test_bad_input_one_arm_that_is_not_whole_draws_nothing(tmp_path, run_tool):
    bad = arm(tmp_path / "strict", change=lambda lines: lines[1:])
    done = run_tool("curves", arm(tmp_path / "native", 2), bad, "--out", tmp_path / "x.png")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith(f"{bad / 'steps.jsonl'}, line 1: step 1 where step 0 belongs")
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [("x.xyz", 1, "supported are names that end with"), ("f/x.png", 2, "is a file, so")],
)
def test_bad_input_a_picture_that_cannot_be_written_is_named(tmp_path, name, status, words, run_tool):
    pytest.importorskip("matplotlib")
    (tmp_path / "f").write_text("kept")
    done = run_tool("curves", arm(tmp_path / "strict"), "--out", tmp_path / name)
    assert (done.returncode, done.stdout) == (status, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "x.xyz").exists()


def test_bad_input_no_step_draws_nothing(tmp_path, run_tool):
    done = run_tool("curves", tmp_path / "nowhere", "--out", tmp_path / "x.png")
    assert done.returncode == 1
    assert "holds no step" in done.stderr
    assert not (tmp_path / "x.png").exists()
