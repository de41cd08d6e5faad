"""Whole runs on fake workers: exit status, order of the checks, what is written, however a run ends."""

import json

import parity_workers
import pytest

from rl_parity import cli, preflight
from rl_parity.config import RolloutLayout, RunConfig, TrainLayout
from rl_parity.fleet import engine_cores
from rl_parity.rundir import RunDirectory, StepSamples

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")


@pytest.fixture(autouse=True)
def workers(monkeypatch):
    launchers = []

    def make(kind, logs):
        launchers.append(parity_workers.InlineLauncher())
        return launchers[-1]

    monkeypatch.setattr("rl_parity.fleet.make_launcher", make)
    memory = preflight.psutil.virtual_memory()
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: memory._replace(available=64 * preflight.GIB))
    parity_workers.FAULTS.clear()
    yield launchers
    parity_workers.FAULTS.clear()
    assert all(launcher.closed for launcher in launchers)


def run(tmp_path, *options, faults=()):
    parity_workers.FAULTS.update(faults)
    out = tmp_path / "out"
    layout = [
        "--train",
        "tp=2,cp=2",
        "--rollout",
        "tp=2,engines=2",
        "--batch",
        "3",
        "--group",
        "2",
        "--max-new-tokens",
        "5",
    ]
    return cli.main(["run", "--out", str(out), "--steps", "3", *layout, *options]), RunDirectory(out)


@pytest.mark.field_report("R13", "R16")
def test_an_equal_run_exits_0_and_writes_everything(tmp_path, capsys):
    code, directory = run(tmp_path)
    assert code == 0
    assert directory.manifest()["status"] == "finished"
    strict = directory.summary()["arms"]["strict"]
    assert (strict["valid_count"], strict["mismatch_count"], strict["max_abs_diff"]) == (90, 0, 0.0)
    steps = directory.steps("strict")
    assert len({s["weight_digest"] for s in steps}) == 3
    assert [s["weight_version"].split(":")[1] for s in steps] == ["0", "1", "2"]
    assert all(s["ratio_histogram"]["exactly 1"] == 30 for s in steps)
    for name in ("ledger.jsonl", "sync.json", "evidence.json"):
        assert (directory.root / "strict" / name).stat().st_size > 0
    states = [row["state"] for row in json.loads((directory.root / "strict" / "sync.json").read_text())]
    assert states.index("verified") < states.index("published") < states.index("resumed")
    assert "verdict: EQUAL" in capsys.readouterr().out
    assert "<h1>Equal: 0 of 90" in (directory.root / "report.html").read_text()


def test_the_native_arm_may_differ_without_failing_the_run(tmp_path):
    code, directory = run(tmp_path, "--arm", "both")
    arms = directory.summary()["arms"]
    assert code == 0
    assert arms["native"]["mismatch_count"] == 18
    assert arms["strict"]["mismatch_count"] == 0
    assert not arms["native"]["bitwise_equal"]


@pytest.mark.field_report("R44", "R62", "R66")
@pytest.mark.parametrize(
    ("fault", "words", "counted"),
    [
        ("rollout bits", ["first mismatch: step 0, sample 0, position 1", "rollout", "train", "0x"], "mismatch_count"),
        ("training forward", ["step 0, sample 1, position 2", "training forward"], "forward_mismatch_count"),
        ("absent value", ["absent_count 6"], "absent_count"),
        ("swapped samples", ["not compared", "token ids differ"], "token_id_mismatch_count"),
        ("stale label", ["not compared", "were not made by weights"], "weight_version_mismatch_count"),
        ("raw", ["not compared", "semantics differ", "mode"], None),
        ("trainer contract", ["not compared", "train holds contract ffff"], None),
    ],
)
def test_every_kind_of_difference_exits_1_and_names_itself(tmp_path, capsys, fault, words, counted):
    code, directory = run(tmp_path, faults=[fault])
    assert code == 1
    err = capsys.readouterr().err
    for word in words:
        assert word in err
    steps = directory.steps("strict")
    assert len(steps) == 1
    assert counted is None or steps[0][counted] > 0
    assert directory.manifest()["status"] == "mismatch"
    assert "<h1>Equal" not in (directory.root / "report.html").read_text()
    assert not directory.summary()["arms"]["strict"]["bitwise_equal"]


def test_a_pairing_error_ends_the_native_arm_too(tmp_path):
    code, directory = run(tmp_path, "--arm", "native", faults=["stale label"])
    assert code == 1
    assert len(directory.steps("native")) == 1


@pytest.mark.field_report("R56", "R61")
@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ("caches_held", "caches were not cleared"),
        ("flip_bit", "do not hold the published bytes"),
        ("transfer", "engine-1"),
        ("engine dies", "ended with status 9"),
    ],
)
def test_an_engine_or_sync_failure_exits_3_before_a_token_is_trained(tmp_path, capsys, fault, word):
    code, directory = run(tmp_path, faults=[fault])
    assert code == 3
    assert word in capsys.readouterr().err
    assert directory.manifest()["status"] == "failed"
    assert directory.steps("strict") == []
    assert "The run failed" in (directory.root / "report.html").read_text()


def test_an_interrupted_run_leaves_a_readable_directory(tmp_path):
    code, directory = run(tmp_path, faults=["interrupt"])
    assert code == 130
    assert directory.manifest()["status"] == "interrupted"
    assert "The run was interrupted" in (directory.root / "report.html").read_text()


def test_two_runs_of_one_seed_compare_equal_and_another_seed_does_not(tmp_path, capsys):
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        (tmp_path / name).mkdir()
        assert run(tmp_path / name, "--seed", seed)[0] == 0
    a, b, c = (str(tmp_path / n / "out") for n in "abc")
    assert cli.main(["compare", a, b]) == 0
    assert cli.main(["compare", a, c]) == 1
    assert "verdict: DIFFERENT" in capsys.readouterr().out


def test_tokens_do_not_depend_on_the_number_of_engines(tmp_path):
    for name, engines in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        assert run(tmp_path / name, "--rollout", f"tp=2,engines={engines}")[0] == 0
    one, two = (RunDirectory(tmp_path / n / "out") for n in ("one", "two"))
    for step in range(3):
        x, y = (StepSamples.load(d.samples_path("strict", step)) for d in (one, two))
        assert x.tokens.tolist() == y.tokens.tolist()


def test_report_and_compare_refuse_what_is_no_run(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert cli.main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert "rl-parity run --out" in capsys.readouterr().err


def test_engines_share_cores_out_and_never_overlap_where_there_are_enough():
    config = RunConfig(train=TrainLayout(tp=2, cp=2), rollout=RolloutLayout(tp=2, engines=2))
    binds = [engine_cores(config, i, list(range(16)))["VLLM_CPU_OMP_THREADS_BIND"] for i in range(2)]
    assert binds == ["0,1|2,3", "4,5|6,7"]
    binds = [engine_cores(config, i, [0, 1])["VLLM_CPU_OMP_THREADS_BIND"] for i in range(2)]
    assert binds == ["0|1", "0|1"]


def test_an_engine_that_was_killed_is_named_first(tmp_path, capsys):
    code, directory = run(tmp_path, faults={"engine gone"})
    assert code == 3
    reason = directory.manifest()["reason"]
    assert reason.splitlines()[0] == "engine-1: the process ended with status -9 (SIGKILL)"
    assert "verdict: FAILED\nengine-1: the process ended" in capsys.readouterr().err
