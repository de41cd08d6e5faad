"""Every token has one version: spans cover a sample exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_runs import refused

from rl_contract import ContractError
from vime_sync import Span, check_spans, spans_from_pauses


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=9), st.data())
def test_spans_that_cover_exactly_pass_and_any_other_boundary_is_refused(parts, data):
    spans, at = [], 0
    for version, length in parts:
        spans.append((version, at, at + length))
        at += length
    assert check_spans(spans, at) == tuple(Span(*span) for span in spans)
    refused(lambda: check_spans(spans, at + 1), "cover")
    if spans:
        i = data.draw(st.integers(0, len(spans) - 1))
        field, shift = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([-1, 1]))
        broken = [list(span) for span in spans]
        broken[i][field] += shift
        with pytest.raises(ContractError):
            check_spans([tuple(span) for span in broken], at)


@pytest.mark.parametrize(
    ("spans", "named"),
    [
        ([("a", 0, 2), ("b", 3, 5)], "gap at token 2"),
        ([("a", 0, 3), ("b", 2, 5)], "overlap at token 3"),
        ([("a", 0, 0), ("b", 0, 5)], "empty span"),
        ([("a", 1, 5)], "gap at token 0"),
        ([("a", 0, 4)], "cover 4 tokens, the sample has 5"),
        ([("a", 0, 6)], "cover 6 tokens, the sample has 5"),
        ([], "cover 0 tokens"),
        (["a"], "no version span"),
    ],
)
def test_spans_with_a_gap_or_overlap_are_refused_at_the_token(spans, named):
    refused(lambda: check_spans(spans, 5), named)


@pytest.mark.field_report("R62")
@given(st.lists(st.integers(0, 30), max_size=6), st.integers(0, 30))
def test_spans_from_pause_boundaries_give_each_token_the_version_then_serving(cuts, generated):
    starts = [(0, "v0")] + [(min(cut, generated), f"v{i + 1}") for i, cut in enumerate(sorted(cuts))]
    spans = spans_from_pauses(starts, generated)
    for token in range(generated):
        owner = [version for at, version in starts if at <= token][-1]
        assert [span.version for span in spans if span.start <= token < span.end] == [owner]
    assert spans_from_pauses([(0, "a"), (2, "a"), (2, "b"), (3, "b")], 3) == (Span("a", 0, 2), Span("b", 2, 3))
    refused(lambda: spans_from_pauses([(0, "a"), (5, "b")], 3), "do not ascend")
