"""TreeCommunicator over gloo: one spawn per world size runs every check of ``rank_values`` and ``rank_refusals``."""

import json
import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from rl_comm import TreeCommunicator
from rl_contract import MissingSupport


@pytest.mark.field_report("R35", "R38", "R41")
@pytest.mark.parametrize("world", [2, 4, 8])
def test_layout_ranks_equal_the_tree(world, tmp_path):
    main = os.path.join(os.path.dirname(__file__), "rank_main.py")
    done = subprocess.run(
        [sys.executable, main, str(world), str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads((tmp_path / "launches.json").read_text())
    kernels = {row["kernel"] for row in rows}
    for transport in ("shared_memory", "gloo") if world < 8 else ("shared_memory",):
        assert {f"rl_comm.{transport}.{op}" for op in ("all_reduce", "reduce_scatter", "all_gather")} <= kernels
    assert {row["layout"] for row in rows} == {f"world{world}"}


@pytest.mark.field_report("R39")
def test_a_group_of_another_backend_is_refused():
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        with pytest.raises(MissingSupport, match="supported: gloo, nccl"):
            TreeCommunicator()
    finally:
        dist.destroy_process_group()
