"""Either every engine serves verified bytes under its label, or none serves: each step made to fail, each lie told."""

import threading

import pytest
import torch

from rl_contract import ContractError
from vime_sync import EngineClient, Manifest, ModelShape, PolicyVersion, Publisher, PublishError, verify, write_weights
from vime_sync.testing import FakeEngine

SHAPE = ModelShape.from_hf_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 70,
    }
)
STATES = ["prepared", "paused", "caches_cleared", "transferred", "verified", "published", "resumed"]


@pytest.fixture
def push(tmp_path):
    """Write the weights of a step; each step has its own."""

    def write(step, run="run", **changed):
        g = torch.Generator().manual_seed(step)
        named = {n: torch.randn(size, generator=g).to(torch.bfloat16) for n, size in SHAPE.hf_shapes()}
        named.update(changed)
        manifest = Manifest.from_tensors(named)
        version = PolicyVersion(run, step, manifest.digest)
        directory = tmp_path / f"{run}-{step}-{len(list(tmp_path.iterdir()))}"
        return write_weights(directory, named, version, manifest), version

    return write


def fleet(*faults_of_second):
    return [FakeEngine("a", SHAPE, tp=1), FakeEngine("b", SHAPE, tp=4, faults=faults_of_second)]


def held(engine):
    return engine.held_digest()


@pytest.mark.field_report("R57")
@pytest.mark.parametrize("parallel", [False, True])
def test_publish_reaches_every_state_in_order_and_all_engines_serve_the_bytes(push, parallel):
    engines = fleet()
    assert all(isinstance(engine, EngineClient) for engine in engines)
    publisher = Publisher(engines, SHAPE, parallel=parallel)
    assert publisher.serving() == []
    for step in range(3):
        directory, version = push(step)
        publisher.publish(directory, version)
        assert publisher.version == version
        assert [t.state for t in publisher.history[-7:]] == STATES
        assert all(t.version == str(version) and t.seconds >= 0 and t.at > 1e9 for t in publisher.history[-7:])
        assert publisher.serving() == engines
        publisher.verify()
        for engine in engines:
            assert engine.calls[:8] == [
                *("begin", "pause", "clear_caches", "transfer", "shard_digests", "finish", "resume", "shard_digests")
            ]
            engine.calls.clear()
            assert engine.generate("2+2=").version == str(version)


@pytest.mark.field_report("R58")
def test_publish_of_own_weights_leaves_the_bits_unchanged(push):
    engines = fleet()
    publisher = Publisher(engines, SHAPE)
    directory, version = push(0)
    publisher.publish(directory, version)
    before = [held(engine) for engine in engines]
    publisher.publish(directory, version)
    assert [held(engine) for engine in engines] == before


@pytest.mark.field_report("R61")
def test_publish_clears_the_prefix_cache_between_two_equal_prompts(push):
    engine = FakeEngine("a", SHAPE)
    publisher = Publisher([engine], SHAPE)
    for step in range(2):
        publisher.publish(*push(step))
        answer = engine.generate("same prompt")
        assert answer.prefix == answer.weights


STEP_OF_FAULT = {
    "pause": "prepared",
    "clear_caches": "paused",
    "caches_held": "paused",
    "transfer": "caches_cleared",
    "half_transfer": "caches_cleared",
    "shard_digests": "transferred",
    "skip_tensor": "transferred",
    "flip_bit": "transferred",
    "label_early": "transferred",
    "finish": "verified",
    "label_lost": "verified",
    "resume": "published",
}


@pytest.mark.field_report("R61", "R62")
@pytest.mark.parametrize("fault", STEP_OF_FAULT)
def test_publish_that_fails_at_any_step_poisons_all_advances_nothing_and_can_be_repaired(push, fault):
    engines = fleet()
    publisher = Publisher(engines, SHAPE)
    old_directory, old = push(0)
    publisher.publish(old_directory, old)
    engines[1].faults.add(fault)
    engines[0].calls.clear(), engines[1].calls.clear()
    directory, version = push(1)
    with pytest.raises(PublishError) as error:
        publisher.publish(directory, version)
    assert error.value.reached == STEP_OF_FAULT[fault]
    assert set(error.value.failures) == {"b"}
    assert publisher.version == old
    assert publisher.history[-1].state == "failed"
    assert publisher.serving() == []
    engines[1].faults.clear()
    for engine in engines:
        assert engine.poisoned
        assert engine.session is None
        with pytest.raises(RuntimeError):
            engine.generate("x")
        with pytest.raises(RuntimeError):
            engine.resume()
        # nobody is published before everybody is verified, nobody resumes unless everybody is published
        if STEP_OF_FAULT[fault] not in ("verified", "published"):
            assert "finish" not in engine.calls
        if STEP_OF_FAULT[fault] != "published":
            assert engine.calls.count("resume") <= 1
    with pytest.raises(PublishError, match="need a full push") as error:
        publisher.check_serving()
    assert set(error.value.failures) == {"a", "b"}
    publisher.publish(directory, version)
    assert publisher.serving() == engines
    publisher.verify()


def test_publish_interrupted_by_hand_poisons_and_raises_the_interrupt(push):
    engines = fleet()
    publisher = Publisher(engines, SHAPE)
    publisher.publish(*push(0))
    engines[1].transfer = lambda path, version: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        publisher.publish(*push(1))
    assert all(engine.poisoned for engine in engines)
    assert "resume" not in engines[0].calls[-3:]


def test_publish_engine_that_cannot_be_poisoned_is_named_and_never_routed_to(push):
    engines = fleet("transfer", "poison")
    publisher = Publisher(engines, SHAPE)
    directory, version = push(0)
    with pytest.raises(PublishError, match="could not be poisoned"):
        publisher.publish(directory, version)
    engines[1].faults.clear()
    with pytest.raises(PublishError, match="could not be claimed"):
        publisher.publish(directory, version)
    engines[1].restart()
    publisher.replace(engines[1])
    publisher.publish(directory, version)
    assert publisher.serving() == engines


@pytest.mark.parametrize(
    "problem", ["truncated", "version", "older", "run", "model", "text", "own text", "no version", "no directory"]
)
def test_publish_of_a_bad_directory_touches_no_engine(push, problem):
    engines = fleet()
    publisher = Publisher(engines, SHAPE)
    publisher.publish(*push(3))
    before = [held(engine) for engine in engines]
    for engine in engines:
        engine.calls.clear()
    directory, version = push(4)
    if problem == "truncated":
        path = directory / "weights-00000.safetensors"
        path.write_bytes(path.read_bytes()[:-10])
    elif problem == "version":
        version = PolicyVersion("run", 5, version.digest)
    elif problem == "older":
        directory, version = push(2)
    elif problem == "run":
        directory, version = push(4, run="other")
    elif problem == "model":
        directory, version = push(4, stranger=torch.zeros(1, dtype=torch.bfloat16))
    elif problem == "text":
        version = "run:4:x"
    elif problem == "own text":
        version = str(version)
    elif problem == "no version":
        version = None
    elif problem == "no directory":
        directory = None
    label = str(publisher.version)
    with pytest.raises(ContractError):
        publisher.publish(directory, version)
    assert [engine.calls for engine in engines] == [[], []]
    assert [held(engine) for engine in engines] == before
    assert publisher.serving() == engines
    assert {engine.weight_version() for engine in engines} == {label} == {str(publisher.version)}


def test_two_publishers_cannot_interleave_and_the_one_refused_disturbs_nothing(push):
    engines = fleet()
    first, second = Publisher(engines, SHAPE), Publisher(engines, SHAPE)
    started, go_on = threading.Event(), threading.Event()
    transfer = engines[0].transfer

    def slow(path, version):
        started.set()
        assert go_on.wait(20)
        transfer(path, version)

    engines[0].transfer = slow
    directory, version = push(0)
    other_directory, other = push(0, run="rival")
    thread = threading.Thread(target=first.publish, args=(directory, version))
    thread.start()
    assert started.wait(20)
    with pytest.raises(PublishError, match="could not be claimed") as error:
        second.publish(other_directory, other)
    assert set(error.value.failures) == {"a", "b"}
    with pytest.raises(ContractError, match="under way"):
        first.publish(directory, version)
    go_on.set()
    thread.join(20)
    assert first.version == version
    assert second.version is None
    assert first.serving() == engines
    first.verify()


def test_a_claim_that_fails_on_one_engine_leaves_all_serving_the_old_version(push):
    engines = fleet()
    publisher = Publisher(engines, SHAPE)
    publisher.publish(*push(0))
    engines[1].faults.add("begin")
    with pytest.raises(PublishError, match="all go on as before"):
        publisher.publish(*push(1))
    assert publisher.serving() == engines
    assert engines[0].session is None
    engines[1].faults.add("cancel")
    with pytest.raises(PublishError, match="could not be released"):
        publisher.publish(*push(1))
    assert publisher.serving() == engines[:1]


@pytest.mark.field_report("R56")
def test_a_restarted_engine_is_not_served_until_it_is_healed_and_the_others_are_left_alone(push):
    engines = fleet()
    publisher = Publisher(engines, SHAPE)
    with pytest.raises(ContractError, match="nothing is published"):
        publisher.heal("nowhere")
    directory, version = push(0)
    publisher.publish(directory, version)
    engines[1].restart()
    assert publisher.serving() == engines[:1]
    with pytest.raises(PublishError, match="reports version 'default'"):
        publisher.check_serving()
    engines[0].calls.clear()
    assert publisher.heal(directory) == ["b"]
    assert engines[0].calls == []
    publisher.check_serving()
    assert publisher.heal(directory) == []
    newcomer = FakeEngine("c", SHAPE, tp=2)
    newcomer.label = str(version)
    publisher.replace(newcomer)
    assert newcomer not in publisher.serving()
    assert publisher.heal(directory) == ["c"]
    publisher.verify()
    engines[0].faults.add("silent")
    with pytest.raises(PublishError, match="does not answer"):
        publisher.check_serving()


@pytest.mark.field_report("R56")
def test_verify_notices_weights_that_changed_behind_the_label_and_poisons_only_that_engine(push):
    engines = fleet()
    publisher = Publisher(engines, SHAPE)
    with pytest.raises(ContractError, match="nothing is published"):
        publisher.verify()
    directory, version = push(0)
    publisher.publish(directory, version)
    # as a wake from deep sleep does, which loads the original checkpoint again and keeps the label
    engines[1].shards[2]["lm_head.weight"] = torch.zeros_like(engines[1].shards[2]["lm_head.weight"])
    with pytest.raises(PublishError, match=r"rank 2 lm_head.weight \(other bytes\)"):
        publisher.verify()
    assert publisher.serving() == engines[:1]
    assert engines[1].poisoned
    assert not engines[0].poisoned
    publisher.heal(directory)
    publisher.verify()


def test_verify_on_demand_names_missing_extra_and_changed_shards(push):
    engines = fleet()
    directory, version = push(0)
    Publisher(engines, SHAPE).publish(directory, version)
    named = {n: torch.zeros(size, dtype=torch.bfloat16) for n, size in SHAPE.hf_shapes()}
    for name in named:
        named[name] = torch.cat([e[name] for e in engines[0].shards])[: named[name].shape[0]]
    assert verify(engines, named, SHAPE) == {"a": [], "b": []}
    del engines[0].shards[0]["model.norm.weight"]
    engines[1].shards[2]["rotary"] = torch.zeros(1)
    assert verify(engines, named, SHAPE) == {
        "a": ["rank 0 model.norm.weight (missing)"],
        "b": ["rank 2 rotary (extra)"],
    }


def test_publisher_refuses_no_engine_two_of_one_name_and_a_tp_that_does_not_fit():
    with pytest.raises(ContractError, match="at least one"):
        Publisher([], SHAPE)
    with pytest.raises(ContractError, match="two engines"):
        Publisher([FakeEngine("a", SHAPE), FakeEngine("a", SHAPE)], SHAPE)
    engine = FakeEngine("a", SHAPE)
    engine.tp = 3
    with pytest.raises(ContractError, match="tensor parallel 3"):
        Publisher([engine], SHAPE)
    for engines in ("ab", None, [None], ["a"]):
        with pytest.raises(ContractError, match="supported: "):
            Publisher(engines, SHAPE)
    with pytest.raises(ContractError, match="ModelShape"):
        Publisher([FakeEngine("a", SHAPE)], {"hidden": 16})
    with pytest.raises(ContractError, match="is no engine"):
        Publisher([FakeEngine("a", SHAPE)], SHAPE).replace("a")
    forwards = type("Proxy", (), {"__getattr__": lambda self, name: getattr(engine, name)})()
    engine.tp = 2
    assert list(Publisher([forwards], SHAPE).engines) == ["a"]
    with pytest.raises(ContractError, match="is no engine"):
        verify(["a"], {}, SHAPE)
    with pytest.raises(ValueError, match="unknown faults"):
        FakeEngine("a", SHAPE, faults=["typo"])
