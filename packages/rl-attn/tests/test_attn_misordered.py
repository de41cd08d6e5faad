"""The bit check notices a kernel that adds in another order."""

from functools import reduce
from itertools import pairwise

import pytest
import torch

from rl_attn.reference import (
    attention_reference,
    empty_state,
    finish_reference,
    fold_reference,
    scores_reference,
    segment_reference,
)
from rl_contract import compare
from rl_contract.profile import KEY_TILE


def attend(s, rows, bounds, *, backwards=False, key_tile=KEY_TILE):
    """Reference steps with segments at ``bounds``, folded left or right to left."""
    q = s.q[rows]
    scores = scores_reference(q, s.k, s.scale)
    parts = [segment_reference(scores, s.v, rows, a, b, key_tile) for a, b in pairwise(bounds)]
    total = reduce(fold_reference, parts[::-1] if backwards else parts, empty_state(*q.shape))
    return finish_reference(total, s.q.dtype)


@pytest.fixture
def case(lab):
    s = lab.sequence(1300, heads=8, kv_heads=2, head_dim=32, dtype=torch.float32, segment=512)
    assert lab.folded_segments() == [3]
    return s, torch.arange(1200, 1300)


def test_the_right_order_passes(case):
    s, rows = case
    out, lse = attend(s, rows, [0, 512, 1024, 1300])
    assert compare(out, s.out[rows]).bitwise_equal
    assert compare(lse, s.lse[rows]).bitwise_equal


def test_segments_folded_right_to_left_are_caught(case):
    s, rows = case
    out, _ = attend(s, rows, [0, 512, 1024, 1300], backwards=True)
    assert compare(out, s.out[rows]).mismatch_count > 1000


def test_segments_from_the_chunk_start_are_caught(case):
    s, rows = case
    out, _ = attend(s, rows, [0, 100, 612, 1124, 1300])
    assert compare(out, s.out[rows]).mismatch_count > 1000


def test_split_count_from_the_length_is_caught(case):
    s, rows = case
    out, _ = attend(s, rows, [0, 325, 650, 975, 1300])
    assert compare(out, s.out[rows]).mismatch_count > 1000


@pytest.mark.parametrize(("key_tile", "segment"), [(64, 512), (128, 1024), (128, 2048)])
def test_another_tile_or_segment_is_caught(lab, case, key_tile, segment):
    s, _ = case
    tiles = {"key_tile": key_tile, "segment": segment}
    other = lab.sequence(1300, heads=8, kv_heads=2, head_dim=32, dtype=torch.float32, **tiles)
    assert compare(other.out, s.out).mismatch_count > 1000


def test_unrounded_weights_are_caught(lab):
    s = lab.sequence(600)
    out, _ = attention_reference(s.q, s.k, s.v.float(), torch.arange(600), s.scale)
    assert compare(out, s.out).mismatch_count > 1000
