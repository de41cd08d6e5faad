"""GPUs without a GPU: who runs where, how much each takes, in which order they take turns, and what is refused."""

import dataclasses

import parity_workers
import pytest

from rl_contract import ContractError, MissingSupport
from rl_parity import cli, fleet, gpus, placement, preflight, preflight_cuda
from rl_parity.config import RolloutLayout, RunConfig, TrainLayout
from rl_parity.placement import GIB, place
from rl_parity.rundir import RunDirectory

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

H200 = "{i}, GPU-{i}{i}{i}, NVIDIA H200, 143771, {free}, 9.0, 580.159.03"


def smi(count: int, free: int = 143000) -> str:
    return "\n".join(H200.format(i=i, free=free) for i in range(count)) + "\n"


@pytest.fixture
def machine(monkeypatch):
    """Put GPUs into this machine, and a CUDA build of torch."""

    def put(text, certificates=True):
        monkeypatch.setattr(gpus, "_query", lambda: text)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(preflight_cuda.torch.version, "cuda", "13.0")
        monkeypatch.setattr(preflight_cuda, "_ASK_HOOKS", "print('missing:')")
        monkeypatch.setattr(preflight_cuda, "environment", lambda: CERTIFIED if certificates else {"device": "other"})
        memory = preflight.psutil.virtual_memory()
        monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: memory._replace(available=64 * GIB))

    return put


CERTIFIED = {
    "device": "NVIDIA H200",
    "driver": "13.0",
    "torch": "2.11.0+cu130",
    "cublas": "13.1.0.3",
    "workspace": "/",
}


def config(tmp_path, **changes):
    return dataclasses.replace(RunConfig(device="cuda", out=str(tmp_path / "out")), **changes)


def layout(tp=1, cp=1, rollout_tp=1, engines=1):
    return {"train": TrainLayout(tp=tp, cp=cp), "rollout": RolloutLayout(tp=rollout_tp, engines=engines)}


@pytest.mark.parametrize(
    ("count", "kind", "sizes", "trainers", "engines", "found", "backend"),
    [
        (1, "auto", {}, (0,), ((0,),), "colocated", "nccl"),
        (2, "auto", {}, (0,), ((1,),), "split", "nccl"),
        (2, "colocated", {}, (0,), ((0,),), "colocated", "nccl"),
        (2, "auto", {"tp": 2, "rollout_tp": 2}, (0, 1), ((0, 1),), "colocated", "nccl"),
        (4, "auto", {"tp": 2, "engines": 2}, (0, 1), ((2,), (3,)), "split", "nccl"),
        (8, "auto", {"tp": 2, "cp": 2, "rollout_tp": 2, "engines": 2}, (0, 1, 2, 3), ((4, 5), (6, 7)), "split", "nccl"),
        (4, "auto", {"tp": 4, "rollout_tp": 2, "engines": 2}, (0, 1, 2, 3), ((0, 1), (2, 3)), "colocated", "nccl"),
        (1, "shared", {"tp": 2, "cp": 2, "engines": 2}, (0, 0, 0, 0), ((0,), (0,)), "shared", "gloo"),
        (2, "shared", {"tp": 4, "rollout_tp": 2}, (0, 1, 0, 1), ((0, 1),), "shared", "gloo"),
        (3, "shared", {"tp": 2, "rollout_tp": 2, "engines": 2}, (0, 1), ((0, 1), (2, 0)), "shared", "nccl"),
    ],
)
def test_who_runs_where(tmp_path, count, kind, sizes, trainers, engines, found, backend):
    placed = place(config(tmp_path, placement=kind, **layout(**sizes)), gpus.parse(smi(count)))
    assert (placed.kind, placed.trainers, placed.engines, placed.backend) == (found, trainers, engines, backend)
    assert placed.takes_turns == (found != "split")
    assert all(len(set(engine)) == len(engine) for engine in placed.engines)


@pytest.mark.parametrize(
    ("count", "kind", "sizes", "words"),
    [
        (1, "split", {}, "placement split needs 2 GPU"),
        (1, "auto", {"tp": 2}, "placement colocated needs 2 GPU"),
        (1, "shared", {"rollout_tp": 2}, "placement shared needs 2 GPU"),
        (0, "shared", {}, "placement shared needs 1 GPU"),
    ],
)
def test_too_few_gpus_are_named(tmp_path, count, kind, sizes, words):
    with pytest.raises(ContractError, match=words):
        place(config(tmp_path, placement=kind, **layout(**sizes)), gpus.parse(smi(count)))


def test_an_engine_sees_its_own_gpus_first_and_that_of_the_lender(tmp_path):
    c = config(tmp_path, **layout(rollout_tp=2, engines=2))
    placed = place(c, gpus.parse("\n".join(smi(7).splitlines()[2:])))
    assert placed.trainer_devices(0) == "2"
    assert [placed.engine_devices(e) for e in range(2)] == ["3,4,2", "5,6,2"]


def test_engines_take_what_the_trainer_leaves(tmp_path):
    c = config(tmp_path)
    one = place(c, gpus.parse(smi(1)))
    weights = int(1.2 * 2**30)
    share = placement.engine_share(c, weights, one, 0)
    # 20 bytes a parameter, two bf16 copies for the push, and the context, of 140 GiB
    left = one.gpus[0].memory - (10 * weights + 2 * weights + 3 * GIB)
    assert share == int(100 * left / one.gpus[0].memory) / 100 == 0.87
    assert placement.engine_share(c, weights, place(c, gpus.parse(smi(2))), 0) == 0.9
    two = place(config(tmp_path, placement="shared", **layout(engines=2)), gpus.parse(smi(1)))
    assert placement.engine_share(c, weights, two, 1) == 0.43
    with pytest.raises(ContractError, match=r"trainer ranks hold .* use more GPUs"):
        placement.engine_share(c, 14 * GIB, one, 0)
    with pytest.raises(ContractError, match="another --gpu-memory-utilization"):
        placement.engine_share(dataclasses.replace(c, gpu_memory_utilization=0.95), weights, one, 0)
    assert placement.engine_share(dataclasses.replace(c, gpu_memory_utilization=0.3), weights, one, 0) == 0.3


def test_gpus_are_chosen_by_option_or_environment(machine, monkeypatch):
    machine(smi(4))
    assert [g.index for g in gpus.visible()] == [0, 1, 2, 3]
    assert [g.index for g in gpus.visible("2,0")] == [2, 0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-333,1")
    assert [g.index for g in gpus.visible()] == [3, 1]
    for asked, error, words in (
        ("9", MissingSupport, r"no GPU 9; there are \[0, 1, 2, 3\]"),
        ("1,1", ContractError, "names GPU 1 twice"),
        ("one", ContractError, "'one' is no index"),
    ):
        with pytest.raises(error, match=words):
            gpus.visible(asked)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(MissingSupport, match="is empty"):
        gpus.visible()
    with pytest.raises(MissingSupport, match="nvidia-smi answered"):
        gpus.parse("0, GPU-0, NVIDIA H200, [N/A], 1, 9.0, 580\n")


def test_a_run_on_gpus_passes(tmp_path, machine):
    machine(smi(2))
    for changes in ({}, {"placement": "colocated"}, {"model": "random:qwen3-0.6b", "reward": "even"}):
        assert preflight.check(config(tmp_path, **changes)) == []
    assert preflight.profile(config(tmp_path), preflight.model_config(config(tmp_path))).settings.arch == "sm90"
    assert preflight.notes(config(tmp_path)) == []


def test_a_machine_without_the_certificates_environment_is_noted_not_refused(tmp_path, machine):
    machine(smi(1), certificates=False)
    assert preflight.check(config(tmp_path)) == []
    (note,) = preflight.notes(config(tmp_path))
    assert "no certificate" in note
    assert "the same bits" in note


def test_everything_wrong_with_the_gpus_is_listed_at_once(tmp_path, machine, monkeypatch, capsys):
    machine(smi(1, free=90000))
    monkeypatch.setattr(preflight_cuda.torch.version, "cuda", None)
    monkeypatch.setattr(preflight_cuda, "_ASK_HOOKS", "print('missing:vllm.x.y')")
    c = config(tmp_path, placement="split", lr=-1.0, gpu_memory_utilization=0.99, model="random:qwen3-0.6b")
    found = "\n".join(preflight.check(c))
    words = ["build without CUDA", "needs 2 GPU(s)", "vllm.x.y", "--lr -1.0", "0.05 to 0.95", "--reward exact"]
    assert all(word in found for word in words), found
    monkeypatch.setattr(preflight_cuda.torch.version, "cuda", "13.0")
    found = "\n".join(preflight.check(config(tmp_path)))
    assert "88 of 140 GiB are free, needed are 126" in found
    options = ["--device", "cuda", "--out", str(tmp_path / "out"), "--placement", "split"]
    assert cli.main(["run", *options]) == 2
    assert not (tmp_path / "out").exists()
    assert cli.main(["doctor", *options]) == 2
    shown = capsys.readouterr()
    assert "needs 2 GPU(s)" in shown.err
    assert cli.main(["doctor", "--device", "cuda", "--out", str(tmp_path / "out")]) == 2
    assert "NVIDIA H200, 140 GiB" in capsys.readouterr().out


def test_a_share_that_was_asked_for_leaves_room_for_others(tmp_path, machine):
    c = config(tmp_path, gpu_memory_utilization=0.2)
    machine(smi(1, free=40000))
    assert preflight.check(c) == []
    # a fifth of 140 GiB, and what a trainer of the tiny model holds
    machine(smi(1, free=30000))
    (found,) = preflight.check(c)
    assert "29 of 140 GiB are free, needed are 31" in found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (smi(1).replace("9.0", "8.0"), "compute capability 8.0"),
        (smi(2).replace("9.0", "8.0", 1), "of one architecture"),
    ],
)
def test_an_architecture_without_contracts_is_refused(tmp_path, machine, text, words):
    machine(text)
    assert any(words in v for v in preflight.check(config(tmp_path)))


def test_options_of_gpus_are_refused_on_a_cpu(tmp_path):
    c = dataclasses.replace(RunConfig(out=str(tmp_path / "out")), gpus="0", placement="split", sleep="2", weights="ipc")
    found = "\n".join(preflight.check(c))
    assert all(word in found for word in ("--gpus 0", "--placement split", "--sleep 2", "--weights ipc"))


def test_the_certified_attention_library_is_looked_for_byte_for_byte(tmp_path, machine, monkeypatch):
    machine(smi(1))
    c = config(tmp_path, attention="nosplit", model="random:qwen3-0.6b", reward="even")
    monkeypatch.setattr(preflight_cuda.sys, "path", [str(tmp_path)])
    assert any("install vllm 0.24.0, or use segments" in v for v in preflight.check(c))
    file = tmp_path / "vllm" / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"another build")
    (found,) = [v for v in preflight.check(c) if "sha256" in v]
    assert "certified is ebbbc6fe6a67d065" in found
    monkeypatch.setattr(preflight_cuda, "KV_BLOCK", 32)
    assert any("nosplit got pages of 32 tokens; certified: (16, 64)" in v for v in preflight.check(c))
    assert preflight.profile(c, preflight.model_config(c)).settings.attention == "nosplit"
    machine(smi(4))
    found = preflight.check(dataclasses.replace(c, train=TrainLayout(cp=2)))
    assert any("cp=2 with attention='nosplit'" in v for v in found)


def test_a_machine_without_a_driver_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(preflight_cuda, "_ASK_HOOKS", "print('missing:')")
    assert any("nvidia-smi lists no GPU" in v for v in preflight.check(config(tmp_path)))


def test_the_installed_engines_are_asked_in_another_process_that_never_outlives_the_preflight(monkeypatch):
    def answer(program, patience=60.0):
        monkeypatch.setattr(preflight_cuda, "_ASK_HOOKS", program)
        monkeypatch.setattr(preflight_cuda, "_HOOKS_SECONDS", patience)
        with preflight_cuda.EngineQuestion() as question:
            out = question.answer()
        assert question._process.poll() is not None
        return out

    assert answer("print('noise'); print('missing:a.b, c.d')") == [
        "this vLLM lacks a.b, c.d, which strict mode needs; install a supported version"
    ]
    assert answer("print('missing:')") == []
    assert "no_such_module" in answer("import no_such_module")[0]
    assert "did not import within 0 s" in answer("import time; time.sleep(60)", 0.2)[0]


@pytest.fixture
def launchers(monkeypatch):
    made = []

    def make(kind, logs):
        made.append(parity_workers.InlineLauncher())
        return made[-1]

    monkeypatch.setattr("rl_parity.fleet.make_launcher", make)
    parity_workers.FAULTS.clear()
    yield made
    parity_workers.FAULTS.clear()


def run(tmp_path, *options):
    small = ["--batch", "2", "--group", "2", "--max-new-tokens", "3", "--steps", "2", "--device", "cuda"]
    return cli.main(["run", "--out", str(tmp_path / "out"), *small, *options]), RunDirectory(tmp_path / "out")


def test_colocated_engines_sleep_while_the_trainer_works_and_wake_in_two_parts(tmp_path, machine, launchers):
    machine(smi(1))
    code, directory = run(tmp_path, "--weights", "host")
    assert code == 0
    engine = launchers[0].workers["engine-0"].target
    # asleep from the start, until there is something to sample
    assert engine.calls == ["sleep 1", *["wake weights", "wake kv_cache", "sleep 1"] * 2]
    assert engine.kwargs["gpu"] == {
        "gpu_memory_utilization": 0.9,
        "enable_sleep_mode": True,
        "enforce_eager": False,
        "block_size": 16,
        # four requests at most
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]},
        # 34 blocks of 16 tokens in two layers of four heads of 32, keys and values of two bytes
        "kv_cache_memory_bytes": 34 * 16 * 2 * 4 * 32 * 2 * 2,
    }
    # blocks of 16: one sequence of all the model's 512 positions, which is more than the step's four short ones
    assert engine.kwargs["kv_blocks"] == 34
    assert launchers[0].workers["trainer-0"].target.calls == ["rest", "rest"]
    # the engine's weights, its cache and 1 GiB, twice
    room, gpu = launchers[0].workers["trainer-0"].target.room, engine.kwargs["gpu"]
    weights = (directory.root / "model" / "model.safetensors").stat().st_size
    assert 0 <= weights - (room // 2 - gpu["kv_cache_memory_bytes"] - (1 << 30)) < 1 << 16
    # what the trainer made ready while the engine woke is what was pushed
    assert launchers[0].workers["trainer-0"].target.exports == ["0-host", "1-host"]
    assert launchers[0].env["engine-0"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert launchers[0].env["trainer-0"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    manifest = directory.manifest()
    assert manifest["gpus"][0]["uuid"] == "GPU-000"
    assert "free" not in manifest["gpus"][0]
    assert manifest["placement"] == {
        "kind": "colocated",
        "backend": "nccl",
        "trainers": ["GPU-000"],
        "engines": [["GPU-000"]],
    }
    assert directory.steps("strict")[0]["memory"]["trainers"] == [{"peak_gib": 1.5, "reserved_gib": 2.0}]
    weights = directory.evidence("strict")["weights"]
    assert weights["transport"] == "host"
    assert [p["step"] for p in weights["sha256_proofs"]] == [0, 1]
    assert all(p["shards"] > 20 and p["different"] == 0 for p in weights["sha256_proofs"])
    page = (directory.root / "report.html").read_text()
    assert all(
        word in page for word in ("GPU-000", "NVIDIA H200", "colocated", "lent as memory of the host", "Time by phase")
    )


def test_engines_on_gpus_of_their_own_never_sleep(tmp_path, machine, launchers):
    machine(smi(2))
    code, _ = run(tmp_path, "--weights", "host", "--sleep", "2", "--eager")
    engine = launchers[0].workers["engine-0"].target
    assert (code, engine.calls) == (0, [])
    assert engine.kwargs["gpu"] == {
        "gpu_memory_utilization": 0.9,
        "enable_sleep_mode": False,
        "enforce_eager": True,
        "block_size": 16,
        "kv_cache_memory_bytes": 34 * 16 * 2 * 4 * 32 * 2 * 2,
    }
    assert launchers[0].env["engine-0"]["CUDA_VISIBLE_DEVICES"] == "1,0"


def test_cuda_ipc_that_cannot_work_here_gives_way_to_the_hosts_memory_once_and_says_so(tmp_path, machine, launchers):
    machine(smi(1))
    parity_workers.FAULTS.add("no ipc")
    code, directory = run(tmp_path)
    assert code == 0
    weights = directory.evidence("strict")["weights"]
    assert (weights["asked"], weights["transport"]) == ("auto", "host")
    assert launchers[0].workers["trainer-0"].target.exports == ["0-ipc", "0-host", "1-host"]
    assert "is not there" in weights["reason"]
    assert "lent as memory of the host, because CUDA IPC failed" in (directory.root / "report.html").read_text()


def test_cuda_ipc_that_was_asked_for_never_gives_way(tmp_path, machine, launchers, capsys):
    machine(smi(1))
    parity_workers.FAULTS.add("no ipc")
    assert run(tmp_path, "--weights", "ipc")[0] == 3
    assert "is not there" in capsys.readouterr().err


def test_engines_that_hold_other_bytes_by_sha256_end_the_run(tmp_path, machine, launchers, capsys):
    machine(smi(1))
    parity_workers.FAULTS.add("proof")
    assert run(tmp_path)[0] == 3
    assert "another sha256-tree: rank 0 model.norm.weight (other bytes)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "named"), [("0,,1", "'' is no index"), ("a", "'a' is no"), ("-1", "'-1' is no"), ("0,0", "twice")]
)
def test_odd_indices_are_listed_without_any_gpu(given, named):
    from rl_parity.config import RunConfig
    from rl_parity.preflight_options import options

    assert any(named in line for line in options(RunConfig(device="cuda", gpus=given)))
    assert not any("--gpus" in line for line in options(RunConfig(device="cuda", gpus="0,1")))


@pytest.mark.parametrize("answer", [True, False, None, "ok", 200])
def test_a_remote_engines_answer_on_its_caches_is_passed_on_as_it_is(answer):
    class Answering:
        name = "engine-0"

        def call(self, *asked):
            assert asked == ("client", "clear_caches")
            return self

        def result(self, timeout):
            return answer

    assert fleet.RemoteEngine(Answering(), 1, 1.0).clear_caches() is answer
