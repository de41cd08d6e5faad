"""The verdict of a step: order of the checks, integer counts, the first mismatch by name."""

import numpy as np
import pytest
from parity_rundir import VERSION, profile, samples, verdict_of

from rl_parity import metrics
from rl_parity.checks import Identity, describe_mismatch, foreign_tokens
from rl_parity.config import RunConfig


def test_equal_bits_give_zero_counts():
    v = verdict_of(samples())
    assert (v.valid_count, v.mismatch_count, v.max_abs_diff, v.not_compared) == (48, 0, 0.0, None)


@pytest.mark.field_report("R44")
def test_one_ulp_in_one_token_is_a_mismatch_with_its_place():
    s = samples()
    s.train[13] = np.nextafter(s.train[13], np.float32(0))
    v = verdict_of(s, step=3)
    assert v.mismatch_count == 1
    assert (v.first_mismatch["step"], v.first_mismatch["sample"], v.first_mismatch["position"]) == (3, 2, 1)
    assert v.first_mismatch["token"] == int(s.tokens[13])
    text = describe_mismatch(v.first_mismatch, "7")
    assert "step 3, sample 2, position 1" in text
    assert text.count("0x") == 2


def test_negative_zero_is_not_zero():
    s = samples()
    s.rollout[0], s.train[0] = np.float32(0.0), np.float32(-0.0)
    assert verdict_of(s).mismatch_count == 1


@pytest.mark.field_report("R99")
def test_a_kl_that_rounds_to_zero_is_still_a_mismatch():
    s = samples()
    s.train[5] += np.float32(1e-7)
    s.train[5] = np.nextafter(s.rollout[5], np.float32(-100)) if s.train[5] == s.rollout[5] else s.train[5]
    assert verdict_of(s).mismatch_count == 1
    assert abs(metrics.step_metrics(s)["kl_rollout_to_train"]) < 1e-6


@pytest.mark.field_report("R82")
def test_absent_values_are_counted_and_never_read_as_zero():
    s = samples()
    s.rollout[4], s.absent[4] = np.nan, True
    v = verdict_of(s)
    assert (v.absent_count, v.valid_count, v.mismatch_count) == (1, 47, 0)


def test_nan_on_both_sides_is_nonfinite_not_equal_silently():
    s = samples()
    s.rollout[4] = s.train[4] = np.nan
    assert verdict_of(s).nonfinite_count == 1


@pytest.mark.field_report("R66")
def test_token_ids_come_first_and_stop_the_comparison():
    s = samples()
    s.train[:] += 1
    scored = s.tokens.astype(np.int64)
    scored[[3, 9]] += 1
    v = verdict_of(s, scored_tokens=scored, versions=[[("other:0:0123456789ab", 0, 6)]] * 8)
    assert v.token_id_mismatch_count == 2
    assert (v.valid_count, v.max_abs_diff) == (0, None)
    assert "token ids" in v.not_compared


@pytest.mark.field_report("R66")
def test_shifted_pairing_is_named_as_pairing_not_as_numerics():
    s = samples()
    v = verdict_of(s, scored_tokens=np.roll(s.tokens, 6).astype(np.int64))
    assert v.token_id_mismatch_count > 30
    assert v.not_compared


@pytest.mark.field_report("R62")
def test_tokens_of_other_weights_stop_the_comparison():
    s = samples()
    versions = [[(VERSION, 0, 6)]] * 7 + [[("run-test:1:0123456789ab", 0, 2), (VERSION, 2, 6)]]
    v = verdict_of(s, versions=versions)
    assert v.weight_version_mismatch_count == 2
    assert "weights" in v.not_compared


def test_a_token_without_a_version_counts_as_foreign():
    assert foreign_tokens([(VERSION, 0, 3)], 5, VERSION) == 2
    assert foreign_tokens([], 5, VERSION) == 5


@pytest.mark.field_report("R01", "R06")
@pytest.mark.parametrize("temperature", [0.6, 0.7, 1.5])
def test_other_sampling_semantics_are_not_compared(temperature):
    rollout = Identity(
        semantics=metrics.semantics(RunConfig(temperature=temperature), "raw"),
        profiles=[profile().fingerprint],
    )
    v = verdict_of(samples(), rollout=rollout)
    assert "temperature" in v.not_compared
    assert "'raw'" in v.not_compared


@pytest.mark.field_report("R44")
def test_another_contract_is_not_compared():
    semantics = metrics.semantics(RunConfig())
    v = verdict_of(samples(), train=Identity(semantics=semantics, profiles=[profile(leaves=4).fingerprint]))
    assert "contract" in v.not_compared
    v = verdict_of(samples(), rollout=Identity(semantics=semantics, profiles=[]))
    assert "rollout holds contract none" in v.not_compared


@pytest.mark.field_report("R16")
def test_ratio_histogram_has_a_bucket_for_equal_bits_alone():
    s = samples()
    s.train[0] = np.nextafter(s.train[0], np.float32(0))
    s.train[1] += np.float32(0.9)
    counts = metrics.step_metrics(s)["ratio_histogram"]
    assert counts["exactly 1"] == 46
    assert counts["above 2"] == 1
    assert sum(counts.values()) == 48


@pytest.mark.field_report("R98")
def test_directions_of_the_divergences():
    s = samples()
    s.train[:] = s.rollout - np.float32(0.25)
    m = metrics.step_metrics(s)
    assert m["kl_rollout_to_train"] == pytest.approx(0.25, abs=1e-6)
    assert m["k3"] == pytest.approx(np.exp(-0.25) - 1 + 0.25, abs=1e-6)
