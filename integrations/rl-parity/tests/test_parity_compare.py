"""Compare notices every stored bit, every setting and everything that is missing; damaged input is a usage error."""

import dataclasses
import json
import shutil
import zipfile

import numpy as np
import pytest
from parity_rundir import write_run

from rl_parity import cli
from rl_parity.compare import compare_runs
from rl_parity.config import RunConfig
from rl_parity.rundir import RunDirectory, StepSamples


@pytest.fixture
def runs(tmp_path):
    return write_run(tmp_path / "a"), write_run(tmp_path / "b")


def status(runs):
    return cli.main(["compare", *(str(run.root) for run in runs)])


def edit_manifest(run, *path, value):
    manifest = run.manifest()
    inner = manifest
    for key in path[:-1]:
        inner = inner.setdefault(key, {})
    inner[path[-1]] = value
    run.write_manifest(manifest)


def edit_steps(run, change, arm="strict"):
    path = run.root / arm / "steps.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records = change(records) or records
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize("arm", ["native", "strict"])
@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(StepSamples) if "length" not in f.name])
def test_one_flipped_bit_of_any_stored_array_is_one_difference(runs, arm, name):
    path = runs[1].samples_path(arm, 3)
    s = StepSamples.load(path)
    array = getattr(s, name)
    bits = array.view(f"u{array.dtype.itemsize}")
    bits[-1] ^= 1
    s.save(path)
    comparison = compare_runs(*runs)
    assert sum(comparison.different.values()) == 1
    (where,) = comparison.first.values()
    assert where.startswith("step 3, sample 7")
    assert status(runs) == 1


@pytest.mark.parametrize(("name", "rest"), [("prompt_length", "prompt position"), ("length", "position")])
def test_lengths_that_differ_with_the_same_total_are_a_difference(runs, name, rest):
    path = runs[1].samples_path("strict", 0)
    s = StepSamples.load(path)
    getattr(s, name)[:2] += np.array([1, -1], dtype=np.int32)
    s.save(path)
    comparison = compare_runs(*runs)
    assert comparison.different[f"strict {name}"] == 2
    assert sum(comparison.different.values()) == 2


def test_the_sign_of_zero_and_the_payload_of_nan_are_bits(runs):
    for run, zero, nan in zip(runs, (0.0, -0.0), (0x7FC00000, 0x7FC00001)):
        path = run.samples_path("strict", 1)
        s = StepSamples.load(path)
        s.forward[0] = zero
        s.forward.view(np.uint32)[1] = nan
        s.save(path)
    comparison = compare_runs(*runs)
    assert comparison.different["strict forward logprob"] == 2
    assert "0.0 (0x00000000) against -0.0 (0x80000000)" in comparison.first["strict forward logprob"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("config", "seed"), 1),
        (("config", "model"), "tiny-llama"),
        (("config", "temperature"), 0.5),
        (("config", "lr"), 1e-3),
        (("config", "plant"), "gemm.row"),
        (("sampling", "mode"), "raw"),
        (("profile", "settings", "leaves"), 4),
        (("fingerprints", "profile"), "0" * 64),
    ],
)
def test_a_differing_setting_is_a_difference(runs, path, value, capsys):
    edit_manifest(runs[1], *path, value=value)
    assert status(runs) == 1
    assert f"setting {'.'.join(path)}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("config", "launcher"), "local"),
        (("config", "timeout"), 5.0),
        (("versions", "vllm"), "0.0.0"),
        (("hardware", "cores"), 64),
    ],
)
def test_what_may_differ_is_listed_and_no_difference(runs, path, value, capsys):
    edit_manifest(runs[1], *path, value=value)
    assert status(runs) == 0
    assert f"note: {'.'.join(path)}: " in capsys.readouterr().out


@pytest.mark.parametrize(("name", "layout"), [("train.tp", {"tp": 4}), ("rollout.engines", {"engines": 1})])
def test_another_layout_is_listed_and_no_difference(tmp_path, name, layout, capsys):
    assert status((write_run(tmp_path / "a"), write_run(tmp_path / "b", **layout))) == 0
    assert f"note: config.{name}: 2 against {next(iter(layout.values()))}" in capsys.readouterr().out


# settings that every run has, and one that says what there was before it
OTHERWISE = {"steps", "arm", "train", "rollout", "native_operators"}


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", sorted(set(RunConfig().to_dict()) - OTHERWISE))
def test_a_setting_that_an_older_run_lacks_has_its_default(runs, name, side, capsys):
    held = [run.manifest() for run in runs]
    held[1 - side]["config"][name] = RunConfig().to_dict()[name]
    del held[side]["config"][name]
    for run, manifest in zip(runs, held):
        run.write_manifest(manifest)
    assert status(runs) == 0
    words = (
        f"note: config.{name}: not said by {runs[side].root}, compared as its default {RunConfig().to_dict()[name]!r}"
    )
    assert words in capsys.readouterr().out


def test_a_setting_that_one_run_lacks_differs_from_any_value_but_its_default(runs, capsys):
    edit_manifest(runs[0], "config", "lr", value=0.5)
    manifest = runs[1].manifest()
    del manifest["config"]["lr"]
    runs[1].write_manifest(manifest)
    assert status(runs) == 1
    assert "setting config.lr" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "other", "device", "installed", "same"),
    [
        # there was nothing else before there was the option
        (..., "local", "cpu", None, True),
        (..., "local", "cuda", "2.14.1", True),
        (..., "te", "cuda", "2.14.1", False),
        # what auto was decides
        (..., "auto", "cpu", None, True),
        (..., "auto", "cuda", None, True),
        (..., "auto", "cuda", "2.14.1", False),
        ("local", "auto", "cpu", None, True),
        ("local", "auto", "cuda", "2.14.1", False),
        ("auto", "auto", "cuda", "2.14.1", True),
        ("local", "te", "cuda", "2.14.1", False),
    ],
)
def test_native_runs_differ_by_the_operators_that_their_trainers_ran(
    runs, capsys, asked, other, device, installed, same
):
    for run, operators in zip(runs, (asked, other)):
        manifest = run.manifest()
        manifest["config"] |= {"device": device, "native_operators": operators}
        manifest["config"] = {k: v for k, v in manifest["config"].items() if v is not ...}
        manifest["versions"]["transformer-engine"] = installed
        run.write_manifest(manifest)
    assert status(runs) == (0 if same else 1)
    assert ("setting config.native_operators" in capsys.readouterr().out) != same
    assert status(runs[::-1]) == (0 if same else 1)


def test_strict_runs_do_not_differ_by_native_operators(tmp_path):
    strict = [write_run(tmp_path / name, arms=("strict",)) for name in "ab"]
    edit_manifest(strict[0], "config", "native_operators", value="local")
    assert status(strict) == 0


def test_a_run_compared_with_itself_is_named(runs, capsys):
    assert status((runs[0], runs[0])) == 0
    assert f"note: both are {runs[0].root}: a run equals itself" in capsys.readouterr().out
    assert status(runs) == 0
    assert "note: both have the id run-test: one may be a copy" in capsys.readouterr().out


def test_the_name_of_a_run_is_no_difference(runs):
    edit_manifest(runs[1], "run_id", value="run-other")
    for arm in ("native", "strict"):
        for name in ("steps.jsonl", "ledger.jsonl", "sync.json"):
            path = runs[1].root / arm / name
            path.write_text(path.read_text().replace("run-test", "run-other"))
    assert status(runs) == 0


def test_a_status_other_than_finished_is_shown(runs, capsys):
    edit_manifest(runs[1], "status", value="interrupted")
    assert status(runs) == 0
    assert f"note: {runs[1].root}: status interrupted" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["reward", "loss", "grad_norm", "clip_fraction", "weight_digest", "kl_reference"])
def test_a_differing_figure_of_a_step_is_one_difference(runs, name):
    def change(records):
        value = records[2][name]
        records[2][name] = value + "0" if isinstance(value, str) else value + type(value)(2**-52 or 1) + (value == 0)

    edit_steps(runs[1], change)
    assert compare_runs(*runs).different[f"strict {name}"] == 1


def test_an_arm_of_one_side_only_is_a_difference(tmp_path, capsys):
    a = write_run(tmp_path / "a")
    assert status((a, write_run(tmp_path / "b", arms=("strict",)))) == 1
    assert f"only in {a.root}" in capsys.readouterr().out


@pytest.mark.parametrize("both", [False, True])
def test_a_finished_run_without_an_arm_is_refused(runs, both, capsys):
    for run in runs if both else runs[1:]:
        shutil.rmtree(run.root / "native")
    assert status(runs) == 2
    assert "native/steps.jsonl is missing" in capsys.readouterr().err


@pytest.mark.parametrize("both", [False, True])
def test_a_finished_run_without_a_step_is_refused(runs, both, capsys):
    for run in runs if both else runs[1:]:
        edit_steps(run, lambda records: records[:-1])
        run.samples_path("strict", 3).unlink()
    assert status(runs) == 2
    assert "ledger.jsonl holds step 3" in capsys.readouterr().err


def test_a_longer_run_is_a_difference(tmp_path, capsys):
    a = write_run(tmp_path / "a")
    assert status((a, write_run(tmp_path / "b", steps=3))) == 1
    assert f"samples of step 3 only in {a.root}" in capsys.readouterr().out


def test_a_step_without_its_record_on_one_side_is_a_difference(runs):
    edit_manifest(runs[0], "status", value="interrupted")
    edit_manifest(runs[1], "status", value="interrupted")
    edit_steps(runs[1], lambda records: records[:-1])
    assert compare_runs(*runs).first["strict steps"] == f"record of step 3 only in {runs[0].root}"


def _one_array(path):
    with open(path, "wb") as stream:
        np.save(stream, np.zeros(3))


def _without(path, name):
    arrays = dict(np.load(path))
    del arrays[name]
    np.savez(path, **arrays)


def _with(path, name, change):
    arrays = dict(np.load(path))
    np.savez(path, **{**arrays, name: change(arrays[name])})


def _raw_member(path):
    with zipfile.ZipFile(path, "w") as archive:
        for f in dataclasses.fields(StepSamples):
            archive.writestr(f.name, b"not an array")


def _flip(path):
    data = bytearray(path.read_bytes())
    # inside the compressed bytes of the first member
    data[120] ^= 0x10
    path.write_bytes(data)


NPZ, STEPS = "strict/samples/step-00001.npz", "strict/steps.jsonl"
DAMAGE = {
    "npz missing": (NPZ, lambda p: p.unlink(), "is missing"),
    "npz empty": (NPZ, lambda p: p.write_bytes(b""), "EOFError"),
    "npz torn": (NPZ, lambda p: p.write_bytes(p.read_bytes()[:-30]), "BadZipFile"),
    "npz bit": (NPZ, _flip, "cannot be read"),
    "npz text": (NPZ, lambda p: p.write_text("hello"), "cannot be read"),
    "npz is one array": (NPZ, _one_array, "not an archive"),
    "npz without an array": (NPZ, lambda p: _without(p, "reward"), "holds the arrays"),
    "npz of another dtype": (NPZ, lambda p: _with(p, "tokens", lambda x: x.astype(np.int64)), "int64"),
    "npz short": (NPZ, lambda p: _with(p, "reward", lambda x: x[:-1]), "reward has 7 values"),
    "npz of raw bytes": (NPZ, _raw_member, "prompt_index"),
    "steps torn": (STEPS, lambda p: p.write_text(p.read_text()[:-40]), "line 4 is not whole JSON"),
    "steps empty": (STEPS, lambda p: p.write_text(""), "is empty"),
    "steps blank line": (STEPS, lambda p: p.write_text("\n" + p.read_text()), "line 1 is empty"),
    "steps of no object": (STEPS, lambda p: p.write_text("3\n"), "supported is a JSON object"),
    "steps of no step": (STEPS, lambda p: p.write_text("{}\n"), "'step' is None"),
    "steps twice": (STEPS, lambda p: p.write_text(p.read_text() * 2), "recorded twice"),
    "steps not UTF-8": (STEPS, lambda p: p.write_bytes(b"\xff\n"), "UnicodeDecodeError"),
    "manifest missing": ("manifest.json", lambda p: p.unlink(), "has no manifest.json"),
    "manifest empty": ("manifest.json", lambda p: p.write_text(""), "is empty"),
    "manifest torn": ("manifest.json", lambda p: p.write_text(p.read_text()[:100]), "not whole JSON"),
    "manifest a list": ("manifest.json", lambda p: p.write_text("[]"), "supported is a JSON object"),
    "manifest of nothing": ("manifest.json", lambda p: p.write_text("{}"), "'run_id' is None"),
    "manifest a folder": ("manifest.json", lambda p: (p.unlink(), p.mkdir()), "has no manifest.json"),
}


@pytest.mark.parametrize("case", DAMAGE)
@pytest.mark.parametrize("side", [0, 1])
def test_compare_ends_with_2_and_names_the_damaged_file(runs, case, side, capsys):
    name, damage, words = DAMAGE[case]
    damage(runs[side].root / name)
    assert status(runs) == 2
    err = capsys.readouterr().err
    assert str(runs[side].root) in err
    assert name.rpartition("/")[2] in err
    assert words in err


@pytest.mark.parametrize(
    ("case", "name", "damage", "words"),
    [
        *((case, *what) for case, what in DAMAGE.items() if not case.startswith("npz")),
        ("summary empty", "summary.json", lambda p: p.write_text(""), "is empty"),
        ("summary of nothing", "summary.json", lambda p: p.write_text("{}"), "'arms' is None"),
        (
            "summary of no counts",
            "summary.json",
            lambda p: p.write_text('{"arms": {"strict": {}}}'),
            "says steps nothing",
        ),
        ("evidence torn", "strict/evidence.json", lambda p: p.write_text("{"), "not whole JSON"),
        ("evidence of no rows", "strict/evidence.json", lambda p: p.write_text('{"train": 3}'), "'train' is 3"),
        ("steps of no figures", STEPS, lambda p: p.write_text('{"step": 0}\n'), "says None"),
    ],
)
def test_report_ends_with_2_names_the_damaged_file_and_writes_nothing(tmp_path, case, name, damage, words, capsys):
    run = write_run(tmp_path / "run")
    damage(run.root / name)
    assert cli.main(["report", str(run.root)]) == 2
    err = capsys.readouterr().err
    assert str(run.root) in err
    assert name.rpartition("/")[2] in err
    assert words in err
    assert not (run.root / "report.html").exists()


def test_a_directory_that_is_none_is_a_usage_error(tmp_path, capsys):
    assert status((RunDirectory(tmp_path / "x"), RunDirectory(tmp_path / "y"))) == 2
    assert "has no manifest.json" in capsys.readouterr().err
