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
    ("tcp://127.0.0.1:0", "port 0 can't be"),
    ("tcp://127.0.0.1:99999", "Port out of range 0-65535"),
    ("tcp://127.0.0.1:-1", "Port could not be cast to integer value as '-1'"),
    ("tcp://127.0.0.1:x", "Port could not be cast to integer value as 'x'"),
    ("tcp://:29500", "it has no host"),
    ("tcp://[::1:29500", "Invalid IPv6 URL"),
    ("tcp://localhost:29500?rank=0", "?rank=0 is no query of options"),
    ("tcp://localhost:29500?libuv", "?libuv is no query of options"),
    ("file://", "it has no path"),
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
    for url in ("tcp://h:1", "TCP://h:65535", "tcp://[::1]:29500?use_libuv=0", "file:///a/b", "env://"):
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
    said = re.escape(f"rank 0 of 1 could not join its peers by init_method={url!r} ({error}); give")
    with pytest.raises(ContractError, match=said):
        topology.start(0, ParallelConfig(), url)
    monkeypatch.undo()
    # nothing of it has stayed
    topology.start(0, ParallelConfig(), url)
    assert current_device().type == "cpu"
    topology.stop()
