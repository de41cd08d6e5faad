"""tools/two_gpus keeps what a part has found however it ends, and judges runs by what they counted."""

import importlib.machinery
import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
SETTINGS = {"model": "tiny-qwen3", "steps": 3, "layouts": "", "keep": ""}


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """The tool, with parts of our own in place of those that need GPUs."""
    loader = importlib.machinery.SourceFileLoader("two_gpus", str(TOOLS / "two_gpus"))
    made = importlib.util.module_from_spec(importlib.util.spec_from_loader("two_gpus", loader))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(made)
    (tmp_path / "two_gpu_parts").mkdir()
    copy = tmp_path / "two_gpus"
    copy.write_text((TOOLS / "two_gpus").read_text())
    (tmp_path / "command_line.py").write_text((TOOLS / "command_line.py").read_text())
    monkeypatch.setattr(made, "__file__", str(copy))
    monkeypatch.setattr(made, "GRACE", 3.0)
    return made


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    for name in [n for n in sys.modules if n.split(".")[0] in ("two_gpu_parts", "benches")]:
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module
    for name in [n for n in sys.modules if n.split(".")[0] in ("two_gpu_parts", "benches")]:
        del sys.modules[name]


def together(tool, tmp_path, bodies, budget=60.0, ranks=2):
    for name, body in bodies.items():
        tool.RANKS[name] = ranks
        (tmp_path / "two_gpu_parts" / f"{name}.py").write_text(f"def run(rank, folder, settings):\n{body}")
    seen = []
    tool.run_together(list(bodies), SETTINGS, budget, lambda name, found: seen.append((name, found)))
    return dict(seen), seen


def test_findings_of_both_ranks_end_in_one_answer(tool, tmp_path):
    last, _ = together(tool, tmp_path, {"good": "    yield {'a': rank}\n    yield {'steps': settings['steps']}\n"})
    assert last["good"] | {"seconds": 0} == {"ok": True, "a": 0, "steps": 3, "seconds": 0}


def test_a_part_that_finds_nothing_is_no_success(tool, tmp_path):
    last, _ = together(tool, tmp_path, {"mute": "    settings['stage']('here')\n    yield from ()\n"})
    assert last["mute"]["ok"] is False
    assert "mute found nothing" in last["mute"]["error"]
    # the other ranks of a part may leave it to the first
    last, _ = together(tool, tmp_path, {"first": "    if not rank: yield {'a': 1}\n"})
    assert last["first"]["ok"] is True


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--layouts", "foo"], "letters of a,n,b,c,d"),
        (["--layouts", ","], "letters of a,n,b,c,d"),
        (["--steps", "-3"], "less than 1"),
        (["--budget", "-5"], "seconds over 0"),
        (["--budget", "nan"], "seconds over 0"),
        (["--parts", "decode+bench", "decode"], "each part once"),
        ([], "needs 2 GPUs"),
        (["--one-gpu"], "needs 1 GPU, torch"),
        (["--one-gpu", "--parts", "engines", "decode"], "no such part with --one-gpu: decode; parts are collectives"),
        (["--one-gpu", "--layouts", "an"], "letters of a,b,c,d"),
    ],
)
def test_bad_input_starts_and_writes_nothing(tmp_path, arguments, names):
    command = [sys.executable, str(TOOLS / "two_gpus"), "--json", str(tmp_path / "deep" / "x.json"), *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode != 0
    assert names in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["{", "[]", "", '{"meta": []}', '{"parity": 1}'])
def test_bad_input_a_file_of_something_else_stays_as_it_is(tmp_path, text):
    held = tmp_path / "x.json"
    held.write_text(text)
    done = subprocess.run(
        [sys.executable, str(TOOLS / "two_gpus"), "--json", str(held)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    assert done.stderr.startswith(str(held))
    assert held.read_text() == text


def test_parity_without_a_run_is_refused(parts, tmp_path):
    module = parts("two_gpu_parts.parity")
    assert module.chosen("a,c") == module.chosen("ac") == ["a", "c"]
    assert module.chosen("") == list(module.RUNS)
    # native's own reductions do not share a GPU
    assert module.chosen("", one_gpu=True) == ["a", "b", "c", "d"]
    assert sorted("".join(module.LANES_IN_TURNS)) == module.chosen("", one_gpu=True)
    with pytest.raises(ValueError, match="'foo' must be letters"):
        list(module.run(0, str(tmp_path), SETTINGS | {"layouts": "foo", "end": time.time() + 60}))


def test_a_part_that_hangs_is_ended_and_what_it_found_is_kept(tool, tmp_path):
    body = (
        "    import time\n    time.sleep(0.2)\n    settings['stage']('here')\n    yield {'first': 1}\n"
        "    time.sleep(100 * rank)\n"
        "    yield {'second': 2}\n"
    )
    begin = time.monotonic()
    last, seen = together(tool, tmp_path, {"slow": body}, budget=4)
    assert time.monotonic() - begin < 30
    assert last["slow"]["ok"] is False
    assert (last["slow"]["first"], last["slow"]["second"]) == (1, 2)
    assert "[1]" in last["slow"]["late"]
    assert 0.2 <= last["slow"]["stages"]["here"] < 4
    assert 0.2 <= last["slow"]["stages of rank 1"]["here"] < 4
    # it could be read before the part's end
    assert any(found.get("first") == 1 for _, found in seen[:-1])


def test_a_rank_that_fails_is_named_and_its_peer_is_not_waited_for(tool, tmp_path):
    body = "    import time\n    yield {'first': 1}\n    if rank: raise ValueError('the reason')\n    time.sleep(100)\n"
    begin = time.monotonic()
    last, _ = together(tool, tmp_path, {"bad": body})
    assert time.monotonic() - begin < 30
    assert last["bad"]["ok"] is False
    assert last["bad"]["first"] == 1
    assert "the reason" in last["bad"]["error of rank 1"]
    assert "late" not in last["bad"]


def test_errors_that_a_part_lists_are_no_success_and_other_parts_go_on(tool, tmp_path):
    bodies = {"listing": "    yield {'errors': ['a differs']}\n", "fine": "    yield {'b': 1}\n"}
    last, _ = together(tool, tmp_path, bodies, ranks=1)
    assert last["listing"]["ok"] is False
    assert last["listing"]["errors"] == ["a differs"]
    assert last["fine"]["ok"] is True


def test_programs_that_a_late_part_started_are_ended_with_it(tool, tmp_path):
    body = (
        "    import sys\n    sys.path.insert(0, settings['tools'])\n"
        "    import importlib, pathlib\n    del sys.modules['two_gpu_parts']\n"
        "    from two_gpu_parts.processes import Job, run_lanes\n"
        "    pid = pathlib.Path(settings['pid'])\n"
        "    code = 'import os, time, sys; open(sys.argv[1], \"w\").write(str(os.getpid())); time.sleep(100)'\n"
        "    job = Job(name='x', command=[sys.executable, '-c', code, str(pid)], log=pid.with_suffix('.l'), limit=99)\n"
        "    yield {'begun': 1}\n    for _ in run_lanes([[job]], 1e12): pass\n"
    )
    settings = {"tools": str(TOOLS), "pid": str(tmp_path / "pid")}
    tool.RANKS["starting"] = 1
    (tmp_path / "two_gpu_parts" / "starting.py").write_text(f"def run(rank, folder, settings):\n{body}")
    last = {}
    tool.run_together(["starting"], settings, 4, lambda name, found: last.update({name: found}))
    assert last["starting"]["begun"] == 1
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_lanes_run_in_turn_and_what_is_late_or_never_began_has_no_status(parts, tmp_path):
    processes = parts("two_gpu_parts.processes")

    def job(name, code, limit=60.0):
        return processes.Job(name=name, command=[sys.executable, "-c", code], log=tmp_path / name, limit=limit)

    lanes = [[job("a", "print('said')"), job("b", "raise SystemExit(3)")], [job("c", "import time; time.sleep(60)", 1)]]
    found = {j.name: status for j, status in processes.run_lanes(lanes, time.time() + 60)}
    assert found == {"a": 0, "b": 3, "c": None}
    assert job("a", "").tail() == "said\n"
    assert [status for _, status in processes.run_lanes([[job("d", "")]], time.time() - 1)] == [None]
    assert job("d", "").tail() == "never started"


def test_late_programs_are_asked_to_end_all_at_once(parts, tmp_path):
    processes = parts("two_gpu_parts.processes")
    slow = (
        "import signal, time; signal.signal(signal.SIGINT, lambda *_: (time.sleep(1), exit(0))); print(1, flush=True)"
    )
    jobs = [
        processes.Job(
            name=str(i), command=[sys.executable, "-c", f"{slow}; time.sleep(60)"], log=tmp_path / str(i), limit=1.5,
            stop=signal.SIGINT, grace=20.0,
        )
        for i in range(4)
    ]  # fmt: skip
    begin = time.monotonic()
    found = [status for _, status in processes.run_lanes([[j] for j in jobs], time.time() + 60)]
    assert found == [None] * 4
    assert time.monotonic() - begin < 5


PARITY = """
import json, pathlib, sys
a = sys.argv[1:]
if a[0] == "compare":
    sys.exit(1 if a[2].endswith(FAULTY) else 0)
o = dict(zip(a[1::2], a[2::2]))
out = pathlib.Path(o["--out"]); out.mkdir(); arm = o["--arm"]
wrong = int(arm == "native" or out.name == FAULTY[:1] and FAULTY.endswith("!"))
if out.name == CUT:
    (out / arm).mkdir()
    line = json.dumps({"valid_count": 5, "mismatch_count": 0})
    (out / arm / "steps.jsonl").write_text(line + "\\n" + line[:9])
    sys.exit(3)
figures = {"steps": int(o["--steps"]), "valid_count": 7, "mismatch_count": wrong, "max_abs_diff": 0.0}
(out / "summary.json").write_text(json.dumps({"arms": {arm: figures}}))
sys.exit(int(wrong and arm == "strict"))
"""


def parity(parts, tmp_path, faulty="-", cut="-"):
    module = parts("two_gpu_parts.parity")
    code = PARITY.replace("FAULTY", repr(faulty)).replace("CUT", repr(cut))
    settings = SETTINGS | {"end": time.time() + 60, "program": [sys.executable, "-c", code], "options": "--x y"}
    found = {}
    for answer in module.run(0, str(tmp_path), settings):
        found |= answer
    return found


def test_parity_takes_runs_that_are_equal_and_compares_them(parts, tmp_path):
    found = parity(parts, tmp_path)
    assert found["errors"] == []
    assert found["TP2/CP1 -> TP2"]["valid_count"] == 7
    assert found["native TP2/CP1 -> TP2"]["mismatch_count"] == 1
    same = found["compared with TP2/CP1 -> TP2"]
    assert set(same) == {"TP1/CP2 -> TP1 x 2 engines", "TP2/CP1 -> TP1", "TP1/CP1 -> TP2"}
    assert set(same.values()) == {"equal bit for bit"}


def test_parity_names_a_mismatch_a_run_cut_off_and_runs_that_differ(parts, tmp_path):
    found = parity(parts, tmp_path, faulty="b!", cut="c")
    assert any(e.startswith("TP1/CP2 -> TP1 x 2 engines: status 1; 1 mismatches") for e in found["errors"])
    assert "TP2/CP1 -> TP1: status 3; 1 of 3 steps" in found["errors"]
    assert found["TP2/CP1 -> TP1"]["valid_count"] == 5
    (tmp_path / "again").mkdir()
    assert "TP1/CP1 -> TP2 differs from TP2/CP1 -> TP2" in parity(parts, tmp_path / "again", faulty="d")["errors"]


def test_engines_that_differ_in_one_bit_or_did_not_answer_are_errors(parts, tmp_path):
    module = parts("two_gpu_parts.engines")
    answer = [{"ids": [1, 2], "bits": [3, 4]}]
    errors = []
    found = module.compared({"TP1 eager": answer, "TP2 eager": [{"ids": [1, 2], "bits": [3, 5]}]}, errors)
    assert found["TP2 eager = TP1 eager"]["differing"] == 1
    assert len(errors) == 1
    errors = []
    assert module.compared({"TP1 eager": answer, "TP2 graphs": answer}, errors)
    assert errors == []
    module.compared({"TP1 eager": answer}, errors)
    assert errors == ["no two engines to compare"]


ENGINE = """
import json, pathlib, sys, time
asked = json.loads(sys.argv[1])
if asked["name"] == "TP2 graphs":
    sys.exit(5)
answers = [{"ids": [asked["name"] != "TP2 eager"], "bits": [7]}]
pathlib.Path(asked["out"]).write_text(json.dumps({"facts": {"workers": asked["tp"]}, "answers": answers}))
"""


def test_engines_all_start_and_what_fails_leaves_the_others(parts, tmp_path):
    module = parts("two_gpu_parts.engines")
    settings = SETTINGS | {"end": time.time() + 60, "program": [sys.executable, "-c", ENGINE], "model": str(tmp_path)}
    found = {}
    for answer in module.run(0, str(tmp_path), settings):
        found |= answer
    assert found["TP1 graphs = TP1 eager"]["differing tokens"] == 0
    assert found["TP2 eager = TP1 eager"]["differing tokens"] == 1
    assert found["TP2 eager"]["workers"] == 2
    assert found["TP2 graphs"]["status"] == 5
    assert [e.split(":")[0] for e in found["errors"]] == ["TP2 graphs", "TP2 eager is not TP1 eager"]


def test_training_that_differs_in_one_bit_is_counted(parts):
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    module = parts("two_gpu_parts.training")

    def side(value, weight=1.0):
        step = {"logprobs": np.array([1.0, value], dtype=np.float32), "loss": 0.5, "grad_norm": 1.0}
        tensors = {"w": torch.tensor([weight, 2.0])}
        return {"steps": [step], "gradients": tensors, "weights": {n: t.bfloat16() for n, t in tensors.items()}}

    assert not any(n for kind, n in module.compared(side(2.0), side(2.0)).items() if kind.startswith("differing"))
    assert module.compared(side(2.0), side(2.0))["gradients"] == 2
    found = module.compared(side(0.0), side(-0.0, 1.0 + 2.0**-20))
    wanted = ("log-probabilities", "losses and norms", "weights", "gradients")
    assert [found[f"differing {k}"] for k in wanted] == [1, 0, 0, 1]


def test_decode_measures_in_turns_and_takes_the_better_round(parts, tmp_path):
    module = parts("two_gpu_parts.decode")
    for arm, decodes in (("native", (90.0, 100.0)), ("strict", (98.0, 97.0))):
        lines = [{"ready s": 1.0}]
        lines += [{"case": [512, b], "prefill": 1.0, "decode": d} for d in decodes for b in (64, 1)]
        (tmp_path / f"{arm}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = module.speeds(tmp_path)
    assert found["strict TP2 decode of native at batch 64 >= 0.95"] == 0.98
    assert found["tokens/s, batch 1, prompt 512"]["native"]["decode"] == 100.0
    native, strict = (module.Turns(tmp_path, arm, time.time() + 15.4) for arm in module.ARMS)
    native.say("ready")
    strict.say("ready")
    native.wait(0)
    begin = time.time()
    strict.wait(0)
    # nobody plays the native arm here, so its turn is waited for until time runs out
    assert time.time() - begin > 0.3
    native.say("round0")
    strict.wait(0)
    strict.say("round0")
    native.wait(1)


def test_decode_asks_the_bench_for_every_case_and_round(parts, tmp_path, monkeypatch):
    module = parts("two_gpu_parts.decode")
    arms, asked, resets = module.engine_arms, [], []
    llm = types.SimpleNamespace(
        llm_engine=types.SimpleNamespace(output_processor=types.SimpleNamespace(process_outputs=None)),
        reset_prefix_cache=lambda: resets.append(len(asked)),
    )
    start, measure = inspect.signature(arms.start), inspect.signature(arms.measure)

    def begun(*args, **kwargs):
        given = start.bind(*args, **kwargs).arguments
        assert (given["engine"], given["layers"]) == ("strict", 36)
        return llm

    def measured(*args, **kwargs):
        given = measure.bind(*args, **kwargs).arguments
        assert isinstance(given["steps"], arms.Steps)
        asked.append((given["prompt"], given["batch"], given["new"], given["seeded"]))
        return {"prefill": 1.0, "decode": 2.0}

    monkeypatch.setattr(arms, "start", begun)
    monkeypatch.setattr(arms, "measure", measured)
    monkeypatch.setattr(module.os, "_exit", lambda status: None)
    module.measure("strict", str(tmp_path), time.time(), 36)
    assert asked == [(*case, True) for case in module.CASES] * (1 + module.ROUNDS)
    assert resets == list(range(len(asked)))
    assert module.speeds(tmp_path)["tokens/s, batch 1, prompt 512"]["strict"]["decode"] == 2.0


ARM = """
import json, pathlib, sys
arm, folder, end, layers = sys.argv[1:]
assert layers == LAYERS
if arm == FAILING:
    raise SystemExit("no engine")
cases = [{"case": [512, b], "prefill": 1.0, "decode": 10.0 + (arm == "native")} for b in (64, 1)]
(pathlib.Path(folder) / f"{arm}.jsonl").write_text("\\n".join(map(json.dumps, cases)))
"""


@pytest.mark.parametrize(("failing", "part", "layers"), [("nobody", "decode", "8"), ("strict", "decode36", "36")])
def test_decode_keeps_one_arms_figures_where_the_other_fails(parts, tmp_path, failing, part, layers):
    module = parts(f"two_gpu_parts.{part}")
    code = ARM.replace("FAILING", repr(failing)).replace("LAYERS", repr(layers))
    found = {}
    for answer in module.run(0, str(tmp_path), {"end": time.time() + 60, "program": [sys.executable, "-c", code]}):
        found |= answer
    assert found["tokens/s, batch 64, prompt 512"]["native"]["decode"] == 11.0
    ratio = found.get("strict TP2 decode of native at batch 64 >= 0.95")
    assert (ratio, found["errors"]) == ((0.909, []) if failing == "nobody" else (None, ["strict: status 1"]))
    assert ("no engine" in found.get("log of strict", "")) == (failing == "strict")


def test_engines_stay_on_the_gpus_that_were_shown(parts, monkeypatch):
    module = parts("two_gpu_parts.engines")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert module.shown("0,1") == "0,1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3")
    assert [module.shown(gpus) for gpus in ("0", "1", "0,1")] == ["2", "3", "2,3"]


def test_page_names_every_finding_and_draws_targets_and_layouts(parts, tmp_path):
    module = parts("two_gpu_parts.page")
    payload = {
        "meta": {"gpu": ["x", "x"], "driver": "5", "torch": "2", "nccl": "2", "commit": "c0ffee", "date": "today"},
        "decode": {"ok": True, "strict TP2 decode of native at batch 64 >= 0.95": 0.97, "log": "a | b\nc"},
        "parity": {
            "TP2/CP1 -> TP2": {"valid_count": 15000, "mismatch_count": 0},
            "native": {"valid_count": 15000, "mismatch_count": 14000},
            "errors": [],
        },
    }
    assert module.ratios(payload) == [("decode: strict TP2 decode of native at batch 64", 0.95, 0.97)]
    assert module.layouts(payload) == [("TP2/CP1 -> TP2", 15000, 0), ("native", 15000, 14000)]
    alone = module.table(payload | {"meta": payload["meta"] | {"gpu": ["x"]}})
    assert alone.startswith("# Two ranks on one GPU\n\n1 x x, driver 5")
    assert "`tools/two_gpus --one-gpu`" in alone
    text = module.table(payload)
    assert text.startswith("# Two GPUs\n\n2 x x, driver 5")
    assert "2 x x" in text
    assert "| native: mismatch_count | 14,000 |" in text
    assert "| log | a / b c |" in text
    pytest.importorskip("matplotlib")
    module.picture(payload, str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
