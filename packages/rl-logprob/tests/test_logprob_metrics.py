"""Metrics: integers first, nothing hidden, each name its own formula."""

import json
import math

import pytest
import torch

from rl_contract import ContractError
from rl_logprob import as_logprobs, rollout_metrics


def pair(shape=(4, 50), seed=0):
    g = torch.Generator().manual_seed(seed)
    r = -torch.rand(shape, generator=g) * 5
    return r, torch.ones(shape, dtype=torch.bool)


def test_equal_sides_are_exactly_equal():
    r, mask = pair()
    m = rollout_metrics(r, r.clone(), mask)
    assert (m["valid_count"], m["mismatch_count"], m["max_abs_diff"]) == (200, 0, 0.0)
    assert m["bitwise_equal"]
    assert m["first_mismatch"] is None
    assert m["ratio_histogram"] == {k: 200 if k == "exactly 1" else 0 for k in m["ratio_histogram"]}
    # a plot shows 0, not -0
    assert math.copysign(1, m["kl_rollout_to_train"]) == 1
    assert m["frameworks"]["train/token_mult_prob_error"] == 1.0
    assert m["frameworks"]["train/train_rollout_logprob_abs_diff"] == 0.0


@pytest.mark.field_report("R99")
def test_r99_one_token_a_tenmillionth_off_is_a_mismatch_though_kl_is_nil():
    r, mask = pair()
    t = r.clone()
    t[2, 7] = torch.nextafter(t[2, 7], torch.tensor(0.0))
    tokens = torch.arange(200).view(4, 50)
    m = rollout_metrics(r, t, mask, rollout_tokens=tokens, train_tokens=tokens)
    assert m["mismatch_count"] == m["mismatched_sample_count"] == 1
    assert m["k3"] < 1e-12
    assert not m["bitwise_equal"]
    first = m["first_mismatch"]
    assert (first["index"], first["sample"], first["token"]) == ([2, 7], 2, 107)
    assert (first["rollout"], first["train"]) == (float(r[2, 7]), float(t[2, 7]))
    assert first["rollout_bits"] != first["train_bits"]


@pytest.mark.field_report("R98")
def test_r98_aggregation_and_direction_are_in_the_name():
    """Two samples of 1 and 1000 tokens: token mean and sample mean differ, and k1 has a sign."""
    r = torch.full((1001,), -2.0)
    t = r.clone()
    t[0] = -3.0
    ids = torch.cat((torch.zeros(1), torch.ones(1000))).long()
    m = rollout_metrics(r, t, torch.ones(1001, dtype=torch.bool), sample_ids=ids)
    assert m["kl_rollout_to_train"] == pytest.approx(1 / 1001)
    assert m["sample_mean_kl_rollout_to_train"] == pytest.approx(0.5)
    assert m["token_mean_abs_diff"] == pytest.approx(1 / 1001)
    assert m["sample_mean_abs_diff"] == pytest.approx(0.5)
    assert m["frameworks"]["train/train_rollout_logprob_abs_diff"] == pytest.approx(0.5)
    assert m["frameworks"]["sampling/sampling_logp_difference/mean"] == pytest.approx(1 / 1001)
    k3 = math.exp(-1) + 1 - 1
    assert m["k3"] == pytest.approx(k3 / 1001)
    assert m["frameworks"]["mismatch_kl/all/mean"] == pytest.approx(k3 / 2)
    swapped = rollout_metrics(t, r, torch.ones(1001, dtype=torch.bool), sample_ids=ids)
    assert swapped["kl_rollout_to_train"] == pytest.approx(-1 / 1001)


def test_c13_a_difference_of_probabilities_hides_a_ratio_of_three():
    r, t = torch.tensor([1e-4]).log(), torch.tensor([3e-4]).log()
    m = rollout_metrics(r, t, torch.ones(1, dtype=torch.bool))
    assert m["frameworks"]["training/rollout_probs_diff_mean"] == pytest.approx(2e-4, rel=1e-3)
    assert m["max_abs_diff"] == pytest.approx(1.0986, abs=1e-4)
    assert m["ratio_max"] == pytest.approx(3.0, rel=1e-5)
    assert m["extreme_frac_2x"] == 1.0


@pytest.mark.parametrize(("length", "ratio"), [(100, 1.1051), (1000, 2.7182), (8192, 3611.94)])
def test_c14_a_bias_of_a_thousandth_grows_with_length_in_sequence_figures(length, ratio):
    r = torch.full((1, length), -2.0)
    t = (r.double() + 0.001).float()
    m = rollout_metrics(r, t, torch.ones(1, length, dtype=torch.bool))
    chi2 = m["frameworks"]["rollout_corr/chi2_seq"]
    assert math.sqrt(chi2 + 1) == pytest.approx(ratio, rel=2e-2)
    assert m["ratio_max"] == pytest.approx(1.001, abs=1e-5)


@pytest.mark.field_report("R81")
def test_r81_empty_mask_gives_zero_valid_and_no_nan():
    r, mask = pair()
    m = rollout_metrics(r, r + 1, mask & False)
    assert (m["valid_count"], m["mismatch_count"], m["absent_count"], m["nonfinite_count"]) == (0, 0, 0, 0)
    assert m["max_abs_diff"] is None
    assert m["k3"] is None
    assert not m["bitwise_equal"]
    assert m["frameworks"]["training/rollout_probs_diff_valid"] == 0
    json.dumps(m, allow_nan=False)
    empty = rollout_metrics(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.bool))
    assert empty["valid_count"] == 0


@pytest.mark.field_report("R82")
def test_r82_only_masked_in_tokens_count():
    """Half of the response is tool output, whose placeholder would inflate every figure."""
    r, mask = pair()
    t = r.clone()
    mask[:, ::2] = False
    t[:, ::2] = 0.0
    m = rollout_metrics(r, t, mask)
    assert (m["valid_count"], m["mismatch_count"], m["max_abs_diff"]) == (100, 0, 0.0)
    inflated = rollout_metrics(r, t, torch.ones_like(mask))
    assert inflated["mismatch_count"] == 100


@pytest.mark.field_report("R82", "R97")
def test_r97_absent_values_are_absent_never_zero():
    mask = torch.ones(2, 3, dtype=torch.bool)
    given = as_logprobs([-1.0, None, -2.0, -0.5, None, -0.25]).view(2, 3)
    t = torch.tensor([[-1.0, -7.0, -2.0], [-0.5, -9.0, -0.25]])
    m = rollout_metrics(given, t, mask)
    assert (m["valid_count"], m["absent_count"], m["mismatch_count"]) == (4, 2, 0)
    assert m["max_abs_diff"] == 0.0
    assert not m["bitwise_equal"]
    none = rollout_metrics(None, t, mask)
    assert (none["valid_count"], none["absent_count"], none["rollout_logprob_given"]) == (0, 6, False)
    assert none["max_abs_diff"] is None


def test_nonfinite_values_are_counted_and_named():
    r, mask = pair((1, 4))
    t = r.clone()
    t[0, 1] = float("nan")
    r[0, 2] = t[0, 2] = -torch.inf
    m = rollout_metrics(r, t, mask)
    assert (m["valid_count"], m["nonfinite_count"], m["mismatch_count"], m["absent_count"]) == (4, 2, 1, 0)
    assert not m["bitwise_equal"]
    assert m["first_mismatch"]["train"] == "nan"
    assert m["max_abs_diff"] == 0.0
    json.dumps(m, allow_nan=False)


@pytest.mark.field_report("R66")
def test_r66_wrong_pairing_shows_as_wholly_different_samples():
    """Responses of two samples swapped: few samples, all of their tokens, whole nats; ids tell it outright."""
    r, mask = pair((8, 50))
    tokens = torch.randint(0, 1000, (8, 50))
    order = [1, 0, *range(2, 8)]
    m = rollout_metrics(r[order], r, mask, rollout_tokens=tokens[order], train_tokens=tokens)
    assert (m["mismatched_sample_count"], m["sample_count"], m["mismatch_count"]) == (2, 8, 100)
    assert m["token_id_mismatch_count"] > 90
    assert m["p99_abs_diff"] > 1
    numeric = rollout_metrics(r, r + 1e-5, mask)
    assert numeric["mismatched_sample_count"] == 8
    assert numeric["max_abs_diff"] < 1e-4


def test_negative_zero_is_a_mismatch_at_distance_zero():
    m = rollout_metrics(torch.tensor([0.0]), torch.tensor([-0.0]), torch.ones(1, dtype=torch.bool))
    assert (m["mismatch_count"], m["max_abs_diff"]) == (1, 0.0)
    assert m["ratio_histogram"]["exactly 1"] == 1


def test_histogram_counts_every_pair_once_at_its_edges():
    ratios = [0.0, 0.1, 0.5, 0.79, 0.8, 0.98, 0.99, 0.999, 1.0, 1.001, 1.01, 1.1, 1.25, 1.5, 2.0, 5.0, math.exp(90)]
    t = torch.tensor([math.log(x) if x else -100.0 for x in ratios])
    m = rollout_metrics(torch.zeros(len(t)), t, torch.ones(len(t), dtype=torch.bool))
    assert sum(m["ratio_histogram"].values()) == len(t)
    assert m["ratio_histogram"]["exactly 1"] == 1
    tiny = rollout_metrics(torch.tensor([-2.0, -2.0]), torch.tensor([-2.0 + 2**-22, -2.0 - 2**-22]), torch.ones(2) > 0)
    assert (tiny["ratio_histogram"]["(1, 1.01]"], tiny["ratio_histogram"]["[0.99, 1)"]) == (1, 1)


def test_framework_formulas_on_one_worked_batch():
    r = torch.tensor([[-1.0, -2.0], [-0.5, -4.0]])
    t = torch.tensor([[-1.5, -1.0], [-0.5, -4.0]])
    f = rollout_metrics(r, t, torch.ones(2, 2, dtype=torch.bool))["frameworks"]
    p, q = r.double().exp(), t.double().exp()
    assert f["training/rollout_probs_diff_max"] == pytest.approx(float((p - q).abs().max()))
    assert f["training/rollout_probs_diff_std"] == pytest.approx(float((p - q).abs().std()))
    assert f["training/rollout_actor_probs_pearson_corr"] == pytest.approx(
        float(torch.corrcoef(torch.stack((p.flatten(), q.flatten())))[0, 1])
    )
    assert f["rollout_corr/kl"] == pytest.approx(-0.125)
    assert f["rollout_corr/log_ppl_diff"] == pytest.approx((-0.25 + 0) / 2)
    assert f["rollout_corr/log_ppl_abs_diff"] == pytest.approx(0.125)
    assert f["rollout_corr/training_ppl"] == pytest.approx((math.exp(1.25) + math.exp(2.25)) / 2)
    assert f["rollout_corr/ppl_ratio"] == pytest.approx((math.exp(-0.25) + 1) / 2)
    assert f["rollout_corr/chi2_token"] == pytest.approx((math.exp(-1) + math.exp(2) + 2) / 4 - 1)
    assert f["rollout_corr/chi2_seq"] == pytest.approx((math.exp(1) + 1) / 2 - 1)
    assert f["train/token_mult_prob_error"] == pytest.approx((math.exp(0.5) + math.exp(1) + 2) / 4)
    k3 = (math.exp(-0.5) + 0.5 - 1 + math.exp(1) - 1 - 1) / 4
    assert f["train/gen_kl_error"] == pytest.approx(k3)
    assert f["rollout_train_k3_kl"] == pytest.approx(k3)
    assert f["rollout_train_extreme_frac_tau2"] == 0.25
    assert f["sampling/importance_sampling_ratio/max"] == pytest.approx(math.e)
    assert f["policy/rollout_train_logprobs_abs_diff_max"] == 1.0
    assert f["train_current_rollout_logprob_mismatch_count"] == 2
    assert 0 < f["train/js_divergence_error"] < k3
    ratio = torch.tensor([math.exp(-0.5), math.e, 1, 1], dtype=torch.float64)
    assert f["train/tis"] == f["behave_imp_weight"] == f["rollout_corr/rollout_is_mean"]
    assert f["train/tis"] == pytest.approx(float(ratio.mean()))
    assert f["train/tis_abs"] == pytest.approx(float((ratio - 1).abs().mean()))
    assert f["behave_approx_kl"] == 0.125
    assert f["rollout_corr/rollout_is_max"] == pytest.approx(math.e)
    assert f["rollout_corr/rollout_is_min"] == pytest.approx(math.exp(-0.5))
    effective = float(ratio.sum() ** 2 / ratio.square().sum() / 4)
    assert f["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(effective)


def test_refusals():
    r, mask = pair((2, 3))
    cases = [
        (lambda: rollout_metrics([0.0], r, mask), "rollout_logprob is list"),
        (lambda: rollout_metrics(r, [0.0], mask), "train_logprob is list"),
        (lambda: rollout_metrics(None, [0.0], mask), "train_logprob is list"),
        (lambda: rollout_metrics(r, r, [True]), "mask is list"),
        (lambda: rollout_metrics(r, r, mask, sample_ids=[1]), "sample_ids is list"),
        (lambda: rollout_metrics(r, r, mask, rollout_tokens=[1], train_tokens=[1]), "rollout_tokens is list"),
        (lambda: rollout_metrics(r.to_sparse(), r, mask), "rollout_logprob is torch.sparse_coo"),
        (lambda: rollout_metrics(r.double(), r, mask), "rollout_logprob is torch"),
        (lambda: rollout_metrics(r, r.bfloat16(), mask), "train_logprob is torch"),
        (lambda: rollout_metrics(r[:1], r, mask), "all must have one shape"),
        (lambda: rollout_metrics(r, r, mask.float()), "mask is torch"),
        (lambda: rollout_metrics(r, r, mask, train_tokens=torch.zeros(2, 3)), "one side only"),
    ]
    for call, message in cases:
        with pytest.raises(ContractError, match=message):
            call()
