"""Lent memory: the same weights and the same refusals as files."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from rl_contract import ContractError, MissingSupport
from vime_sync import (
    Loan,
    Manifest,
    ModelShape,
    PolicyVersion,
    Publisher,
    PublishError,
    lend_weights,
    read_weights,
    shard_digests,
    tree_digests,
    write_weights,
)
from vime_sync.lend import gpu_uuid
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


def weights(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(size, generator=g).to(torch.bfloat16) for n, size in SHAPE.hf_shapes()}


@pytest.fixture
def loan(tmp_path):
    made = Loan("cpu", tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_lent_push_brings_the_bytes_and_the_label_of_a_pushed_file(tmp_path, loan, tp):
    publishers: list[Any] = []
    for step in (0, 1):
        named = weights(step)
        manifest = loan.fill(named)
        assert manifest.digest == Manifest.from_tensors(named).digest
        version = PolicyVersion("run", step, manifest.digest)
        lent = lend_weights(tmp_path / f"lent-{step}", loan, version, SHAPE, [1, 2])
        files = write_weights(tmp_path / f"files-{step}", named, version, manifest)
        with read_weights(lent) as weights_lent:
            lent_by = {weights_lent.algorithm}
        for i, directory in enumerate((lent, files)):
            if not step:
                publishers.append(Publisher([FakeEngine("e", SHAPE, tp)], SHAPE))
            publishers[i].publish(directory, version)
        mine, theirs = (p.engines["e"] for p in publishers)
        assert mine.held_digest() == theirs.held_digest()
        assert mine.label == theirs.label == str(version)
        assert lent_by == {"sha256-tree"}
        # the digests of what the engine holds can be had at any time
        assert mine.shard_digests() == shard_digests(named, SHAPE, tp)
        publishers[0].verify()


def test_a_lent_push_that_arrives_with_another_bit_is_never_published(tmp_path, loan):
    version = PolicyVersion("run", 0, loan.fill(weights(0)).digest)
    directory = lend_weights(tmp_path / "push", loan, version, SHAPE, [2])
    engine = FakeEngine("e", SHAPE, 2, {"flip_bit"})
    with pytest.raises(PublishError, match=r"rank 1 model.norm.weight \(other bytes\)"):
        Publisher([engine], SHAPE).publish(directory, version)
    assert engine.poisoned
    assert engine.label == "default"


def test_a_lent_push_without_digests_for_an_engines_tp_touches_no_engine(tmp_path, loan):
    version = PolicyVersion("run", 0, loan.fill(weights(0)).digest)
    directory = lend_weights(tmp_path / "push", loan, version, SHAPE, [1])
    engine = FakeEngine("e", SHAPE, 2)
    with pytest.raises(ContractError, match="tp=2; lend with it"):
        Publisher([engine], SHAPE).publish(directory, version)
    assert engine.calls == []


def test_a_loan_refuses_another_model_damaged_values_and_readers_after_its_end(tmp_path, loan):
    manifest = loan.fill(weights(0))
    version = PolicyVersion("run", 0, manifest.digest)
    directory = lend_weights(tmp_path / "push", loan, version, SHAPE, [1])
    with pytest.raises(ContractError, match="another loan"):
        loan.fill({**weights(0), "extra": torch.zeros(2, dtype=torch.bfloat16)})
    with pytest.raises(ContractError, match="fill it first"):
        _ = loan.manifest
    with pytest.raises(ContractError, match="NaN"):
        loan.fill({**weights(0), "model.norm.weight": torch.full((16,), float("nan"), dtype=torch.bfloat16)})
    with pytest.raises(ContractError, match="expected was"):
        read_weights(directory, PolicyVersion("run", 1, manifest.digest))
    loan.close()
    with read_weights(directory, version) as lent, pytest.raises(MissingSupport, match="not there"):
        lent["model.norm.weight"]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({}, "no tensor was given"),
        ({"x": torch.zeros(2, dtype=torch.float16)}, "x is torch.float16"),
        ({"x": torch.tensor([float("inf")])}, "x holds 1 NaN or infinite"),
        ({"x": 3}, "x is a int"),
        ({"x": torch.zeros(2, device="meta")}, "x is a meta tensor"),
        ([("x", torch.zeros(2)), ("x", torch.zeros(2))], "x is given twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failed_first_fill_does_not_bind_the_loan(tmp_path, bad, named):
    with Loan("cpu", tmp_path) as loan:
        with pytest.raises(ContractError, match=named):
            loan.fill(bad)
        assert list(tmp_path.iterdir()) == []
        for call in (lambda: loan.manifest, loan.describe):
            with pytest.raises(ContractError, match="fill it first"):
                call()
        assert loan.fill(weights(0)).digest == Manifest.from_tensors(weights(0)).digest
        # a bound loan stays bound, and takes its model again
        with pytest.raises(ContractError):
            loan.fill(bad)
        assert loan.fill(weights(1)).digest == Manifest.from_tensors(weights(1)).digest


def test_a_closed_loan_stays_closed(tmp_path):
    with Loan("cpu", tmp_path) as loan:
        version = PolicyVersion("run", 0, loan.fill(weights(0)).digest)
        assert len(list(tmp_path.iterdir())) == 1
    loan.close()
    calls = (
        lambda: loan.fill(weights(0)),
        lambda: loan.manifest,
        loan.describe,
        lambda: lend_weights(tmp_path / "push", loan, version, SHAPE, [1], source=weights(0)),
    )
    for call in calls:
        with pytest.raises(ContractError, match="closed"):
            call()
    assert list(tmp_path.iterdir()) == []


LEAVER = """
import os, sys, torch
from vime_sync import Loan
loan = Loan("cpu", sys.argv[1])
loan.fill({"x": torch.zeros(3)})
child = os.fork()
if child == 0:
    sys.exit()
os.waitpid(child, 0)
assert len(os.listdir(sys.argv[1])) == 1
if sys.argv[2] == "raise":
    raise SystemExit(3)
if sys.argv[2] == "collect":
    del loan
    assert os.listdir(sys.argv[1]) == []
"""


@pytest.mark.parametrize("how", ["end", "raise", "collect"])
def test_a_loan_that_nobody_closed_leaves_no_file_and_a_forked_child_takes_none(tmp_path, how):
    done = subprocess.run([sys.executable, "-c", LEAVER, str(tmp_path), how], capture_output=True, text=True)
    assert done.returncode == (3 if how == "raise" else 0), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_is_named(tmp_path):
    with Loan("cpu", tmp_path / "nowhere") as loan, pytest.raises(ContractError, match=r"nowhere takes no file"):
        loan.fill(weights(0))


def test_a_loan_of_a_device_that_is_not_there_is_refused():
    with pytest.raises(MissingSupport, match=r"meta.*write files"):
        Loan("meta")
    for device in ("foo", "cuda:-1", "cuda:x", None, 1.5):
        with pytest.raises(ContractError, match=r"Loan got device=.*; supported: 'cpu'"):
            Loan(device)
    with pytest.raises(MissingSupport, match=r"CUDA devices; lend memory of the host with Loan\('cpu'\)"):
        Loan(f"cuda:{torch.cuda.device_count()}")


DAMAGES = {
    "kind": lambda loan: loan.update(kind="rented"),
    "algorithm": lambda loan: loan.pop("algorithm"),
    "unknown algorithm": lambda loan: loan.update(algorithm="words128"),
    "another algorithm": lambda loan: loan.update(algorithm="sha256"),
    "no digests": lambda loan: loan.update(shards=[]),
    "half a digest": lambda loan: loan["shards"].update({"1": [[0, "x"]]}),
    "no file": lambda loan: loan.pop("file"),
    "no offset": lambda loan: loan["offsets"].popitem(),
    "odd offset": lambda loan: loan["offsets"].update({"model.norm.weight": 3}),
    "short": lambda loan: loan.update(bytes=100),
    "infinite": lambda loan: loan.update(bytes=float("inf")),
}


@pytest.mark.parametrize("damage", [*DAMAGES, "a list"])
def test_a_damaged_description_of_lent_memory_is_refused_before_an_engine_is_touched(tmp_path, loan, damage):
    version = PolicyVersion("run", 0, loan.fill(weights(0)).digest)
    directory = lend_weights(tmp_path / "push", loan, version, SHAPE, [1])
    described = json.loads((directory / "manifest.json").read_text())
    if damage == "a list":
        described["loan"] = [1]
    else:
        DAMAGES[damage](described["loan"])
    (directory / "manifest.json").write_text(json.dumps(described))
    engine = FakeEngine("e", SHAPE, 1)
    with pytest.raises(ContractError, match=r"no readable manifest\.json"):
        Publisher([engine], SHAPE).publish(directory, version)
    assert engine.calls == []


def test_lent_memory_that_was_cut_is_not_read(tmp_path, loan):
    version = PolicyVersion("run", 0, loan.fill(weights(0)).digest)
    directory = lend_weights(tmp_path / "push", loan, version, SHAPE, [1])
    copy = tmp_path / "cut"
    copy.write_bytes(b"0" * 100)
    text = (directory / "manifest.json").read_text()
    (directory / "manifest.json").write_text(text.replace(loan.describe()["file"], str(copy)))
    with read_weights(directory) as lent, pytest.raises(MissingSupport, match="not there"):
        lent["model.norm.weight"]
    assert copy.stat().st_size == 100


READER = """
import sys
from vime_sync import read_weights, tree_digests
with read_weights(sys.argv[1]) as weights:
    print(tree_digests((name, weights[name]) for name in sorted(weights)))
"""


def test_a_push_named_by_plain_sha256_is_compared_by_it(tmp_path, loan):
    named = weights(0)
    manifest = loan.fill(named, algorithm="sha256")
    assert manifest == Manifest.from_tensors(named, algorithm="sha256")
    version = PolicyVersion("run", 0, manifest.digest)
    lent = lend_weights(tmp_path / "push", loan, version, SHAPE, [2])
    files = write_weights(tmp_path / "files", named, version, manifest)
    for directory in (lent, files):
        engine = FakeEngine("e", SHAPE, 2)
        publisher = Publisher([engine], SHAPE)
        publisher.publish(directory, version)
        publisher.verify()
        with read_weights(directory) as read:
            assert read.algorithm == "sha256"
            assert read.shard_digests(SHAPE, 2) == shard_digests(named, SHAPE, 2, "sha256")
        with pytest.raises(PublishError, match="other bytes"):
            Publisher([FakeEngine("e", SHAPE, 2, {"flip_bit"})], SHAPE).publish(directory, version)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_a_loan_of_a_gpus_weights_is_read_in_another_process(tmp_path, device):
    loan = Loan(device, tmp_path)
    for step in (0, 1):
        named = {n: t.cuda() for n, t in weights(step).items()}
        version = PolicyVersion("run", step, loan.fill(named).digest)
        directory = lend_weights(tmp_path / f"push-{step}", loan, version, SHAPE, [1], source=named)
        with read_weights(directory) as lent:
            assert lent.algorithm == "sha256-tree"
            expected = lent.shard_digests(SHAPE, 1)
        read = subprocess.run([sys.executable, "-c", READER, str(directory)], capture_output=True, text=True)
        if read.returncode and "CUDA IPC cannot open" in read.stderr:
            pytest.skip("CUDA IPC is not allowed here")
        assert read.returncode == 0, read.stderr
        assert read.stdout.strip() == str(tree_digests((n, named[n].cpu()) for n in sorted(named)))
        assert expected == shard_digests({n: t.cpu() for n, t in named.items()}, SHAPE, 1)
    if device != "cpu":
        assert loan.describe()["gpu"] == gpu_uuid(torch.device("cuda:0"))
    loan.close()
