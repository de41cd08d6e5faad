"""A GPU engine's weight versions, sleep, wake and pushes, as far as they can be shown without one."""

from types import SimpleNamespace

import pytest
import torch
from tiny_checkpoint import tiny_config, tiny_weights

import rl_vllm
from rl_contract import ContractError
from rl_vllm import versions

pytest.importorskip("vllm")

CONFIG = tiny_config()


def step(scheduled, new=(), old=(), finished=()):
    cached = SimpleNamespace(
        req_ids=[name for name, _, _ in old], num_computed_tokens=[c for _, c, _ in old],
        num_output_tokens=[n for _, _, n in old],
    )  # fmt: skip
    added = [
        SimpleNamespace(req_id=name, prompt_token_ids=[0] * prompt, prefill_token_ids=[0] * total,
                        num_computed_tokens=computed)
        for name, prompt, total, computed in new
    ]  # fmt: skip
    return SimpleNamespace(
        num_scheduled_tokens=scheduled, scheduled_new_reqs=added, scheduled_cached_reqs=cached,
        finished_req_ids=set(finished),
    )  # fmt: skip


def test_sampled_tokens_are_known_from_the_schedule():
    sampled = versions.SampledTokens()
    # a prompt of 10 in chunks of 6 and 4; one of 3 whose first token comes at once
    sampled.observe(step({"a": 6, "b": 3}, new=[("a", 10, 10, 0), ("b", 3, 3, 0)]))
    assert sampled.counts() == {"a": 0, "b": 1}
    sampled.observe(step({"a": 4, "b": 1}, old=[("a", 6, 0), ("b", 3, 1)]))
    assert sampled.counts() == {"a": 1, "b": 2}
    sampled.observe(step({"a": 1}, old=[("a", 10, 1)]))
    assert sampled.counts() == {"a": 2, "b": 2}
    # b was preempted: it comes back with its tokens, recomputed in two chunks
    sampled.observe(step({"b": 4}, new=[("b", 3, 5, 0)], finished=["a"]))
    assert sampled.counts() == {"b": 2}
    sampled.observe(step({"b": 1}, old=[("b", 4, 2)]))
    assert sampled.counts() == {"b": 3}


def test_version_ledger_gives_every_token_its_version():
    ledger = versions.VersionLedger()
    ledger.push("v1", {"a": 4, "b": 0})
    ledger.push("v2", {"a": 4, "c": 2})
    assert [(s.version, s.start, s.end) for s in ledger.spans("a", 9)] == [("default", 0, 4), ("v2", 4, 9)]
    assert [(s.version, s.start, s.end) for s in ledger.spans("b", 3)] == [("v1", 0, 3)]
    # sampled, but thrown away with the request
    assert [(s.version, s.start, s.end) for s in ledger.spans("c", 1)] == [("v1", 0, 1)]
    assert [(s.version, s.start, s.end) for s in ledger.spans("d", 5)] == [("v2", 0, 5)]


def test_tokens_in_flight_at_a_push_are_sampled_anew_and_belong_to_its_version():
    sampled, ledger = versions.SampledTokens(), versions.VersionLedger()
    # the engine schedules ahead: tokens 2 and 3 of a, and the first one of b, are in flight when both are preempted
    sampled.observe(step({"a": 3, "c": 2}, new=[("a", 3, 3, 0), ("c", 2, 2, 0)]))
    sampled.observe(step({"a": 1, "b": 2, "c": 1}, new=[("b", 2, 2, 0)], old=[("a", 3, 1), ("c", 2, 1)]))
    sampled.observe(step({"a": 1}, old=[("a", 4, 2)], finished=["c"]))
    ledger.push("v1", sampled.pushed())
    assert sampled.kept() == {}
    # one runner sees them as new, the other as old
    sampled.observe(step({"a": 4, "b": 2}, new=[("a", 3, 4, 0)], old=[("b", 0, 0)]))
    sampled.observe(step({"a": 1, "b": 1}, old=[("a", 4, 2), ("b", 2, 1)]))
    assert sampled.kept() == {"a": 1, "b": 0}
    ledger.settle(sampled.kept())
    # a second push, after which nothing was thrown away
    ledger.push("v2", sampled.pushed())
    sampled.observe(step({"a": 6}, old=[("a", 0, 3)]))
    ledger.settle(sampled.kept())
    assert [(s.version, s.start, s.end) for s in ledger.spans("a", 5)] == [
        ("default", 0, 1), ("v1", 1, 3), ("v2", 3, 5),
    ]  # fmt: skip
    assert [(s.version, s.start, s.end) for s in ledger.spans("b", 9)] == [("v1", 0, 2), ("v2", 2, 9)]


def test_client_asks_with_how_many_tokens_a_request_came_back():
    asked = []

    def rpc(name, args=()):
        asked.append(name)
        return [{"rl_finish": {"r-1": 3}, "rl_kept": {"r-1": 2}}[name]]

    client = rl_vllm.VllmEngineClient.__new__(rl_vllm.VllmEngineClient)
    client.llm, client._ledger = SimpleNamespace(collective_rpc=rpc), versions.VersionLedger()
    client.finish("v1")
    assert [(s.version, s.start, s.end) for s in client._spans("r-1", 4)] == [("default", 0, 2), ("v1", 2, 4)]
    asked.clear()
    # one that no push has met costs no call
    assert [s.version for s in client._spans("r-2", 4)] == ["v1"]
    assert asked == []


def test_version_ledger_stamps_finished_outputs():
    completion = SimpleNamespace(token_ids=[1, 2, 3])
    output = SimpleNamespace(finished=True, outputs=[completion], request_id="mine")
    state = SimpleNamespace(external_req_id="mine")
    engine = SimpleNamespace(
        output_processor=SimpleNamespace(request_states={"mine-1234": state}), step=lambda: [output]
    )
    ledger = versions.VersionLedger()
    versions.attach(engine, ledger.spans)
    ledger.push("v1", {"mine-1234": 2})
    assert engine.step() == [output]
    assert rl_vllm.version_spans(completion) == [("default", 0, 2), ("v1", 2, 3)]


@pytest.fixture
def worker(monkeypatch):
    """A strict GPU worker around a vLLM worker that only notes what is asked of it."""
    from vllm.v1.worker.gpu_worker import Worker

    from rl_vllm.gpu_worker import StrictGPUWorker

    asked = []

    def note(name):
        return lambda self, *args, **kwargs: asked.append((name, args, kwargs))

    for name in ("sleep", "wake_up", "update_weights", "finish_weight_update", "execute_model"):
        monkeypatch.setattr(Worker, name, note(name))

    # as vLLM 0.24 has it
    def start_weight_update(self, is_checkpoint_format=True):
        asked.append(("start", is_checkpoint_format))

    monkeypatch.setattr(Worker, "start_weight_update", start_weight_update)
    made = StrictGPUWorker.__new__(StrictGPUWorker)
    made._rl_sampled = versions.SampledTokens()
    made._weight_update_active = False
    return made, asked


def test_sleeping_weights_are_neither_read_nor_written(worker):
    made, asked = worker
    made.sleep(1)
    made.rl_begin("a")
    for call in (lambda: made.rl_transfer("p", "v"), made.rl_shard_digests):
        with pytest.raises(ContractError, match="weights are asleep"):
            call()
    made.wake_up(["kv_cache"])
    with pytest.raises(ContractError, match="weights are asleep"):
        made.rl_transfer("p", "v")
    made.wake_up(["weights"])
    made.rl_transfer("p", "v")
    # vLLM's layerwise reload would take the weights apart
    assert ("start", False) in asked
    assert ("update_weights", ({"path": "p", "version": "v"},), {}) in asked
    assert made.rl_finish() == {}


def test_sleep_survives_another_process_that_takes_memory_meanwhile(worker, monkeypatch):
    from vllm.v1.worker.gpu_worker import Worker

    made, _ = worker

    def sleep(self, level):
        raise AssertionError("Memory usage increased after sleeping." if level == 1 else "something else")

    monkeypatch.setattr(Worker, "sleep", sleep)
    made.sleep(1)
    with pytest.raises(ContractError, match="weights are asleep"):
        made.rl_shard_digests()
    with pytest.raises(AssertionError, match="something else"):
        made.sleep(2)


def test_push_from_another_gpu_is_first_brought_to_the_engines_own():
    from rl_vllm.transfer import VimeSyncTransferEngine
    from vime_sync import ModelShape

    class Far:
        """A shard in the memory of another GPU, which may not write into an engine's own."""

        is_cuda, device = True, torch.device("cuda", 1)

        def __init__(self, x):
            self.x = x

        def to(self, device):
            return self.x.to(device)

    config = tiny_config(vocab_size=128)
    tensors, shape = tiny_weights(config), ModelShape.from_hf_config(config)
    model = torch.nn.Module()
    live = {name: torch.zeros_like(w) for name, w in tensors.items()}
    engine = VimeSyncTransferEngine.__new__(VimeSyncTransferEngine)
    engine.shape, engine.tp_rank, engine.tp, engine.model = shape, 0, 1, model
    model.named_parameters = lambda: live.items()
    engine._copy((name, Far(w)) for name, w in tensors.items())
    assert all(torch.equal(live[name].view(torch.int16), w.view(torch.int16)) for name, w in tensors.items())


@pytest.mark.field_report("R56")
def test_engine_that_slept_its_weights_away_serves_only_after_a_push(worker):
    made, _ = worker
    made.sleep(2)
    made.wake_up(None)
    schedule = step({"a": 1}, new=[("a", 1, 1, 0)])
    schedule.total_num_scheduled_tokens = 1
    with pytest.raises(RuntimeError, match="sleep level 2 dropped its weights"):
        made.execute_model(schedule)
    made.rl_begin("a")
    with pytest.raises(ContractError, match="brought no weights"):
        made.rl_finish()
    made.rl_transfer("p", "v")
    assert made.rl_finish() == {}
    made.execute_model(schedule)
    assert made._rl_sampled.counts() == {"a": 1}


def test_audited_push_on_0_24_loads_on_the_device_through_the_workers_reload(tmp_path):
    from rl_vllm.transfer import UpdateInfo, VimeSyncTransferEngine
    from vime_sync import Manifest, ModelShape, PolicyVersion, write_weights

    tensors = tiny_weights(CONFIG)
    manifest = Manifest.from_tensors(tensors)
    version = PolicyVersion("run", 1, manifest.digest)
    path = write_weights(tmp_path / "push", tensors, version, manifest)
    engine = VimeSyncTransferEngine.__new__(VimeSyncTransferEngine)
    engine.parallel_config = SimpleNamespace(tensor_parallel_size=1, rank=0)
    engine.received = {}
    hf_config = SimpleNamespace(to_dict=lambda: dict(CONFIG))
    model_config = SimpleNamespace(hf_config=hf_config, dtype=torch.bfloat16)
    engine.bind(SimpleNamespace(model_config=model_config, quant_config=None))
    seen = []
    # the device of the worker, as it calls this
    with torch.device("meta"):
        engine.receive_weights(
            UpdateInfo(path=str(path), version=str(version)),
            load_weights=lambda pairs: seen.append((torch.get_default_device().type, dict(pairs))),
        )
    ((device, loaded),) = seen
    assert device == "meta"
    assert all(torch.equal(loaded[name].view(torch.int16), w.view(torch.int16)) for name, w in tensors.items())
    assert set(engine.received["sha256-tree"]) == {name for name, _ in ModelShape.from_hf_config(CONFIG).hf_shapes()}


@pytest.mark.parametrize("answer", [True, False, None, "ok", 200])
def test_an_engines_answer_on_its_caches_is_passed_on_as_it_is(answer):
    client = rl_vllm.VllmEngineClient.__new__(rl_vllm.VllmEngineClient)
    client.llm = SimpleNamespace(reset_prefix_cache=lambda **options: answer)
    # the publisher takes nothing but True
    assert client.clear_caches() is answer
