"""What a run reads beside weights is recorded as it begins; with another one no sitting goes on, and it is named."""

import hashlib
import json
import shutil

import pytest
from parity_edits import fitted
from parity_kills import copies
from parity_sittings import contents, edited, killed, resume, start

from rl_parity import cli, inputs, models, runner
from rl_parity.models import write_model
from rl_parity.rundir import PARTIAL_MODEL, RunDirectory

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

pytestmark = pytest.mark.usefixtures("inline_workers")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+1=", "answer": "3"}\n')
    return path


def of_format_2(out):
    """As the version before left it."""
    for name in ("manifest.json", "summary.json"):
        held = json.loads((out / name).read_text())
        (out / name).write_text(json.dumps({k: v for k, v in held.items() if k != "inputs_sha256"} | {"format": 2}))
    fitted(out)


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def other_eos(path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 5}))


def spaced(path):
    path.write_text(path.read_text() + "\n")


def test_the_manifest_has_the_sha256_of_prompts_config_and_tokenizer(tmp_path, prompts):
    out, model = tmp_path / "out", write_model("tiny-qwen3", tmp_path / "mine")
    (model / "generation_config.json").write_text('{"top_p": 0.5}\n')
    assert start(out, "--steps", "1", "--prompts", str(prompts), "--model", str(model)) == 0
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    told = RunDirectory(out).manifest()["inputs_sha256"]
    assert told == {"prompts": sha256(prompts)} | {f"model/{name}": sha256(model / name) for name in names}
    assert sha256(prompts) in (out / "report.html").read_text()
    built_in = tmp_path / "built-in"
    assert start(built_in, "--steps", "1") == 0
    told = RunDirectory(built_in).manifest()["inputs_sha256"]
    names = ("config.json", "tokenizer.json", "tokenizer_config.json")
    assert told == {f"model/{name}": sha256(built_in / "model" / name) for name in names}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("p.jsonl", lambda p: p.write_text('{"prompt": "1+2=", "answer": "3"}\n')),
        ("p.jsonl", spaced),
        ("mine/config.json", other_eos),
        ("mine/tokenizer.json", spaced),
        ("mine/tokenizer_config.json", lambda p: p.write_text("{}")),
        ("mine/tokenizer_config.json", lambda p: p.unlink()),
        ("mine/generation_config.json", lambda p: p.write_text('{"top_p": 0.9}')),
        ("mine/generation_config.json", lambda p: p.unlink()),
        ("mine/special_tokens_map.json", lambda p: p.write_text("{}")),
    ],
)
@pytest.mark.parametrize("how", ["ended", "killed"])
def test_a_run_does_not_go_on_with_another_file(how, name, change, tmp_path, prompts, capsys):
    out, model = tmp_path / "out", write_model("tiny-qwen3", tmp_path / "mine")
    (model / "generation_config.json").write_text('{"top_p": 0.5}')
    options = ["--prompts", str(prompts), "--model", str(model), "--save-every", "1"]
    assert start(out, "--steps", "1", *options) == 0
    if how == "killed":
        killed(out)
    path = tmp_path / name
    held = path.read_bytes() if path.exists() else None
    change(path)
    before = contents(out)
    assert resume(out, "--steps", "2") == 2
    assert str(path) in capsys.readouterr().err
    assert contents(out) == before
    # what lies elsewhere is of no weight to those who only read
    assert cli.main(["report", str(out)]) == 0
    path.unlink(missing_ok=True)
    if held is not None:
        path.write_bytes(held)
    assert resume(out, "--steps", "2") == 0


def test_a_killed_run_without_a_step_does_not_go_on_with_other_prompts(tmp_path, prompts, capsys):
    out = tmp_path / "out"
    with copies(out, tmp_path / "killed", lambda what: what == "os.mkdir strict") as found:
        assert start(out, "--steps", "1", "--prompts", str(prompts), "--save-every", "1") == 0
    (_, copy), *_ = found
    (copy / ".lock").unlink()
    held = prompts.read_text()
    prompts.write_text(held.replace("1+1", "1+2"))
    assert resume(copy, "--steps", "1") == 2
    assert f"{prompts} has sha256 {sha256(prompts)[:12]}, the run began with" in capsys.readouterr().err
    prompts.write_text(held)
    assert resume(copy, "--steps", "1") == 0
    assert cli.main(["compare", str(copy), str(out)]) == 0


def test_another_tokenizer_of_a_built_in_model_is_named_by_all_three(tmp_path, capsys):
    out, copy = tmp_path / "out", tmp_path / "copy"
    assert start(out, "--steps", "1", "--save-every", "1") == 0
    shutil.copytree(out, copy)
    path = copy / "model" / "tokenizer.json"
    swapped = json.loads(path.read_text())
    ids = swapped["model"]["vocab"]
    ids["1"], ids["2"] = ids["2"], ids["1"]
    # a byte more is another file to a run that tells, other ids to any
    for text, older in ((path.read_text() + "\n", False), (json.dumps(swapped), False), (json.dumps(swapped), True)):
        path.write_text(text)
        if older:
            of_format_2(copy)
        before = contents(copy)
        for command in (["report", str(copy)], ["compare", str(out), str(copy)]):
            assert cli.main(command) == 2
            assert str(path) in capsys.readouterr().err
        assert resume(copy, "--steps", "2") == 2
        assert str(path) in capsys.readouterr().err
        assert contents(copy) == before


def test_a_run_of_the_format_before_is_read_and_resumed(tmp_path, prompts, capsys):
    out, whole = tmp_path / "out", tmp_path / "whole"
    options = ["--prompts", str(prompts), "--save-every", "1"]
    assert start(whole, "--steps", "2", *options) == 0
    assert start(out, "--steps", "1", *options) == 0
    of_format_2(out)
    assert cli.main(["report", str(out)]) == 0
    assert resume(out, "--steps", "2") == 0
    manifest = RunDirectory(out).manifest()
    assert manifest["format"] == 2
    assert "inputs_sha256" not in manifest
    assert cli.main(["compare", str(out), str(whole)]) == 0
    assert "inputs_sha256" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (..., "lacks inputs_sha256, which every run of format 3 has"),
        ([], "inputs_sha256 is [], supported is the sha256 of each file"),
        ({"prompts": 3}, "supported is the sha256 of each file"),
        ({"prompts": "0" * 64}, "has the sha256 of prompts in inputs_sha256, they are arithmetic"),
    ],
)
def test_what_is_told_of_them_cannot_be_taken_out_or_be_something_else(value, words, tmp_path, capsys):
    out = tmp_path / "out"
    assert start(out, "--steps", "1", "--save-every", "1") == 0
    path = out / "manifest.json"
    held = json.loads(path.read_text())
    held["inputs_sha256"] = held["inputs_sha256"] | value if isinstance(value, dict) else value
    path.write_text(json.dumps({k: v for k, v in held.items() if v is not ...}))
    before = contents(out)
    assert resume(out, "--steps", "2") == 2
    assert words in capsys.readouterr().err
    assert contents(out) == before


def test_a_file_that_changes_while_the_run_begins_ends_it(tmp_path, prompts, monkeypatch, capsys):
    out, load = tmp_path / "out", runner.load_prompts

    def and_change(*args):
        prompts.write_text(prompts.read_text().replace("1+1", "1+2"))
        return load(*args)

    monkeypatch.setattr(runner, "load_prompts", and_change)
    assert start(out, "--steps", "1", "--prompts", str(prompts)) == 2
    assert f"{prompts} has sha256" in capsys.readouterr().err
    assert RunDirectory(out).manifest()["status"] == "failed"
    assert not (out / "strict").exists()


def test_a_model_that_changes_between_two_arms_ends_the_run(tmp_path, monkeypatch, capsys):
    out, model = tmp_path / "out", write_model("tiny-qwen3", tmp_path / "mine")
    ran, arm_run = [], runner.Arm.run

    def and_change(arm):
        arm_run(arm)
        ran.append(arm.name)
        spaced(model / "tokenizer_config.json")

    monkeypatch.setattr(runner.Arm, "run", and_change)
    assert start(out, "--steps", "1", "--arm", "both", "--model", str(model)) == 2
    assert f"{model / 'tokenizer_config.json'} has sha256" in capsys.readouterr().err
    assert RunDirectory(out).manifest()["status"] == "failed"
    # what has run stays, and no other arm begins
    assert len(ran) == 1
    assert [arm for arm in ("native", "strict") if (out / arm).exists()] == ran


def test_two_runs_of_other_prompts_are_told_apart_in_a_note(tmp_path, prompts, capsys):
    for name in ("a", "b"):
        assert start(tmp_path / name, "--steps", "1", "--prompts", str(prompts)) == 0
        prompts.write_text(prompts.read_text() + "\n")
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "note: inputs_sha256.prompts: " in capsys.readouterr().out


def test_a_built_in_model_is_there_whole_or_not_at_all(tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert start(out, "--steps", "1", "--save-every", "1") == 0
    shutil.copytree(out, whole)
    shutil.rmtree(out / "model")
    with copies(out, tmp_path / "killed", lambda what: "model" in what) as found:
        assert resume(out, "--steps", "2") == 0
    assert len(found) > 3
    assert resume(whole, "--steps", "2") == 0
    for _, copy in found:
        (copy / ".lock").unlink()
        assert resume(copy, "--steps", "2") == 0
        assert cli.main(["compare", str(copy), str(whole)]) == 0
        assert not (copy / PARTIAL_MODEL).exists()


def test_a_model_that_would_be_made_otherwise_is_not_made_again(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    assert start(out, "--steps", "1", "--save-every", "1") == 0
    shutil.rmtree(out / "model")
    written = models.write_tokenizer

    def otherwise(folder):
        written(folder)
        spaced(folder / "tokenizer.json")

    monkeypatch.setattr(models, "write_tokenizer", otherwise)
    before = contents(out)
    assert resume(out, "--steps", "2") == 2
    err = capsys.readouterr().err
    assert f"{out / 'model' / 'tokenizer.json'} is gone, and these packages make one of sha256" in err
    assert contents(out) == before


@pytest.mark.parametrize("kind", ["a file", "a broken link"])
def test_a_model_that_is_no_folder_is_named(kind, tmp_path, capsys):
    out = tmp_path / "out"
    assert start(out, "--steps", "1", "--save-every", "1") == 0
    shutil.rmtree(out / "model")
    (out / "model").write_text("") if kind == "a file" else (out / "model").symlink_to(out / "nothing")
    assert inputs.has_copy(out)
    assert cli.main(["report", str(out)]) == 2
    assert f"{out / 'model' / 'config.json'} is missing" in capsys.readouterr().err
    assert resume(out, "--steps", "2") == 2
    assert f"{out / 'model' / 'config.json'} is missing" in capsys.readouterr().err


def test_a_later_sitting_keeps_what_the_first_one_told(tmp_path, prompts):
    out = tmp_path / "out"
    assert start(out, "--steps", "1", "--prompts", str(prompts), "--save-every", "1") == 0
    told = RunDirectory(out).manifest()["inputs_sha256"]
    assert resume(out, "--steps", "2") == 0
    assert RunDirectory(out).manifest()["inputs_sha256"] == told
    edited(out / "manifest.json", inputs_sha256={**told, "prompts": told["prompts"][:-1] + "x"})
    assert resume(out, "--steps", "3") == 2
