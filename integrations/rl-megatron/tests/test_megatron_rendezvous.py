"""URLs by which no ranks can meet are refused at once and by name, where torch.distributed would wait or fail raw."""

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rl_contract import ContractError
from rl_megatron import ParallelConfig, TrainerRank, topology
from rl_megatron.cpu_device import device as current_device
from rl_megatron.rendezvous import place_problem, url_problem

BAD = [
    ("foo://x", "torch.distributed knows no 'foo', only tcp, env, file"),
    ("://x", "torch.distributed knows no ''"),
    ("tcp://127.0.0.1", "it has no port"),
    ("tcp://127.0.0.1:99999", "Port out of range 0-65535"),
    ("tcp://127.0.0.1:-1", "Port could not be cast to integer value as '-1'"),
    ("tcp://127.0.0.1:x", "Port could not be cast to integer value as 'x'"),
    ("tcp://:29500", "it has no host"),
    ("tcp://[::1:29500", "Invalid IPv6 URL"),
    ("tcp://localhost:29500?rank=0", "?rank=0 is no query of options"),
    ("tcp://localhost:29500?libuv", "?libuv is no query of options"),
    ("file://", "it has no path"),
    ("file://tmp/x", "'tmp' is a host and no part of the path, which begins at the third slash"),
    ("file://./x", "'.' is a host"),
]


@pytest.mark.parametrize(("url", "words"), BAD)
def test_a_url_that_can_be_none_is_refused_wherever_it_is_given(tiny: Any, url: str, words: str) -> None:
    said = re.escape(f"init_method={url!r}: {words}") + r".*; supported: a URL of torch\.distributed, tcp://host:port"
    with pytest.raises(ContractError, match=said):
        topology.start(0, ParallelConfig(), url)
    profile = tiny.tiny_profile(tiny.tiny_config())
    with pytest.raises(ContractError, match=said):
        TrainerRank(rank=0, init_method=url, hf_path="model", profile=profile)
    assert not dist.is_initialized()


def test_urls_that_torch_knows_are_none_of_these(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in (
        "tcp://h:1",
        "TCP://h:65535",
        "tcp://[::1]:29500?use_libuv=0",
        "file:///a/b",
        "file://localhost/a",
        "env://",
    ):
        assert url_problem("init_method", url) is None
    handlers = {"tcp": None, "own": None}
    # a function of torch.distributed has the module's name
    monkeypatch.setattr(sys.modules["torch.distributed.rendezvous"], "_rendezvous_handlers", handlers)
    assert url_problem("init_method", "own://x") is None
    assert "knows no 'file', only tcp, own" in str(url_problem("init_method", "file:///a"))


def test_a_place_where_no_ranks_can_meet_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "70000")
    for url, words in (
        (f"file://{tmp_path}/none/init", f"No such file or directory: '{tmp_path}/none/init'; give a file in a folder"),
        (f"file://{tmp_path}/file/init", "Not a directory"),
        (f"file://{tmp_path}", "Is a directory"),
        ("file:///proc/init", "No such file or directory: '/proc/init'"),
        ("file:///a\0b", "embedded null byte"),
        ("tcp://nohost.invalid:1", "host 'nohost.invalid' is not known"),
        ("tcp://" + "a" * 70 + ":1", "is not known"),
        ("env://", "MASTER_ADDR not set; set the host and port of rank 0"),
    ):
        began = time.monotonic()
        with pytest.raises(ContractError, match="topology.start: init_method=.*" + re.escape(words)):
            topology.start(0, ParallelConfig(), url)
        # torch would wait for minutes
        assert time.monotonic() - began < 60
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    for port, words in (("70000", "port 70000 can't be"), ("x", "'x' is no port"), ("²", "'²' is no port")):
        monkeypatch.setenv("MASTER_PORT", port)
        assert words in str(place_problem("init_method", "env://", 2))
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert place_problem("init_method", "env://", 2) is None
    # the rank that has the name may come later
    assert place_problem("init_method", "tcp://nohost.invalid:1", 2) is None
    assert not dist.is_initialized()


def test_a_file_that_is_no_store_is_refused_at_once(tmp_path: Path) -> None:
    file, pipe = tmp_path / "init", tmp_path / "pipe"
    os.mkfifo(pipe)
    # torch would read on for good
    for held in (b"a file of someone's", b"\0" * 100, b"\t\0\0\0anything/"):
        file.write_bytes(held)
        for world_size in (1, 2):
            assert "holds something else" in str(place_problem("init_method", f"file://{file}", world_size))
        with pytest.raises(ContractError, match="the file holds something else than ranks that meet; give a path"):
            topology.start(0, ParallelConfig(), f"file://{file}")
        assert file.read_bytes() == held
    assert "it is no regular file" in str(place_problem("init_method", f"file://{pipe}", 1))
    # of a peer that is writing, that has come, and of a run that was killed
    file.unlink()
    store = dist.FileStore(str(file), 2)
    store.set("key", "value")
    written = file.read_bytes()
    for length in range(len(written) + 1):
        (tmp_path / "peers").write_bytes(written[:length])
        assert place_problem("init_method", f"file://{tmp_path}/peers", 2) is None
    topology.start(0, ParallelConfig(), f"file://{file}")
    topology.stop()


def test_a_world_of_one_meets_itself_at_any_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "0")
    for url in ("tcp://127.0.0.1:0", "env://"):
        topology.start(0, ParallelConfig(), url)
        assert dist.get_world_size() == 1
        topology.stop()
        assert "port 0 is another one for each of 2 ranks" in str(place_problem("init_method", url, 2))
        with pytest.raises(ContractError, match=r"port 0 is another one.*; (give|set) one of 1 to 65535"):
            topology.start(0, ParallelConfig(tp=2), url)
    monkeypatch.setenv("MASTER_PORT", "9" * 5000)
    assert "is no port" in str(place_problem("init_method", "env://", 2))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_ours_is_refused_at_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ContractError, match="Permission denied"):
        topology.start(0, ParallelConfig(), f"file://{tmp_path}/init")


@pytest.mark.parametrize("error", [dist.DistStoreError("timed out"), ValueError("no")])
def test_a_world_that_was_not_joined_is_named_by_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(topology.dist, "init_process_group", failing)
    url = f"file://{tmp_path}/init"
    for place, words in ((url, ", of a file that no earlier run has left"), ("tcp://localhost:1", "")):
        said = (
            f"rank 0 of 1 could not join its peers by init_method={place!r} ({error}); give all ranks one URL that "
            f"each of them reaches{words}, and start them together"
        )
        with pytest.raises(ContractError, match=re.escape(said)):
            topology.start(0, ParallelConfig(), place)
    monkeypatch.undo()
    # nothing of it has stayed
    topology.start(0, ParallelConfig(), url)
    assert current_device().type == "cpu"
    topology.stop()
