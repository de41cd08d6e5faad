"""Run directories: refused twice, summarised by integers, compared bit for bit, shown in one page."""

import io
import re

import numpy as np
import pytest
from parity_rundir import on_gpus, samples, write_run

from rl_contract import ContractError
from rl_parity.compare import compare_runs
from rl_parity.contracts import markdown
from rl_parity.progress import Progress
from rl_parity.report import render, write_report
from rl_parity.rundir import RunDirectory, StepSamples, summarize


def test_samples_survive_the_disk_bit_for_bit(tmp_path):
    s = samples()
    s.rollout[0] = np.float32(-0.0)
    s.save(tmp_path / "step.npz")
    back = StepSamples.load(tmp_path / "step.npz")
    assert all(np.array_equal(getattr(s, n).view(np.uint8), getattr(back, n).view(np.uint8)) for n in s.__dict__)


def test_flat_positions_map_to_samples_of_different_length():
    s = samples()
    lengths = np.array([2, 0, 3, 1], dtype=np.int32)
    s = StepSamples(**{**s.__dict__, "length": lengths})
    assert [s.locate(i) for i in range(6)] == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2), (3, 0)]


def test_a_directory_holds_one_run(tmp_path):
    write_run(tmp_path / "a")
    assert "holds another run" in RunDirectory.refusal(tmp_path / "a")
    (tmp_path / "b").mkdir()
    assert RunDirectory.refusal(tmp_path / "b") is None
    (tmp_path / "b" / "notes.txt").write_text("mine")
    assert "is not empty" in RunDirectory.refusal(tmp_path / "b")
    assert "is a file" in RunDirectory.refusal(tmp_path / "b" / "notes.txt")


def test_summary_counts_and_never_calls_an_uncompared_run_equal(tmp_path):
    run = write_run(tmp_path / "run")
    arms = run.summary()["arms"]
    assert arms["strict"]["mismatch_count"] == 0
    assert arms["strict"]["max_abs_diff"] == 0.0
    assert arms["strict"]["bitwise_equal"]
    assert arms["native"]["mismatch_count"] == 4 * 24
    steps = run.steps("strict")
    assert not summarize([{**steps[0], "max_abs_diff": None, "valid_count": 0}], 1.0)["bitwise_equal"]
    assert not summarize([steps[0], {**steps[1], "forward_mismatch_count": 1}], 1.0)["bitwise_equal"]
    assert not summarize([], 0.0)["bitwise_equal"]


def test_two_runs_of_one_seed_are_equal_and_one_bit_is_found(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    assert compare_runs(a, b).equal
    s = StepSamples.load(b.samples_path("strict", 2))
    s.train[7] = np.nextafter(s.train[7], np.float32(0))
    s.save(b.samples_path("strict", 2))
    comparison = compare_runs(a, b)
    assert not comparison.equal
    assert comparison.different["strict train logprob"] == 1
    assert "step 2, sample 1, position 1" in comparison.first["strict train logprob"]


def test_other_seeds_and_other_lengths_are_not_equal(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1)
    assert compare_runs(a, b).different["strict tokens"] > 0
    assert compare_runs(a, write_run(tmp_path / "c", steps=2)).different["strict steps"] == 2
    with pytest.raises(ContractError, match="arm in common"):
        compare_runs(write_run(tmp_path / "d", arms=("native",)), write_run(tmp_path / "e", arms=("strict",)))


def test_the_report_is_one_file_with_the_verdict_first(tmp_path):
    run = write_run(tmp_path / "run")
    page = write_report(run).read_text()
    assert not re.findall(r"(?:src|href)=|url\(|@import|<script", page)
    assert page.index("<h1>Equal: 0 of 192 log-probabilities differ</h1>") < page.index("<h2>")
    for part in (
        "96 of 192",
        "Policy ratio",
        "Topology",
        "Evidence, strict arm",
        "Contracts",
        "Provenance",
        "gemm.row",
    ):
        assert part in page
    assert "No launch of our operators was reported" in page


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_an_ended_run_has_a_readable_report_that_claims_nothing(tmp_path, status):
    run = write_run(tmp_path / "run", status=status, steps=1)
    page = render(run)
    assert status in re.search("<h1>(.*?)</h1>", page).group(1)
    assert "<h1>Equal" not in page


def test_a_mismatch_report_names_the_first_token(tmp_path):
    run = write_run(tmp_path / "run", arms=("strict",), differs=("strict",), status="mismatch")
    page = render(run)
    assert "Not equal: 24 of 48" in page
    assert "First at step 0, sample 0, position 0" in page


def test_contract_tables_name_every_boundary_and_its_fingerprint(tmp_path):
    from parity_rundir import profile

    table = markdown(profile())
    assert profile().fingerprint in table
    assert "| gemm.row |" in table


def test_progress_prints_plain_lines_where_there_is_no_terminal(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    progress = Progress("strict", 4)
    progress.phase("starting workers")
    for record in run.steps("strict"):
        progress.step(record)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert "step 4/4  tokens 192  mismatches 0" in lines[-1]


def test_progress_draws_a_bar_with_live_counts_on_a_terminal(tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    run, stream = write_run(tmp_path / "run"), Terminal()
    progress = Progress("strict", 4, stream)
    progress.phase("rollout")
    for record in run.steps("strict"):
        progress.step(record)
    progress.close()
    assert "4/4" in stream.getvalue()
    assert "tokens 192  mismatches 0" in stream.getvalue()


def test_a_run_on_gpus_says_where_each_rank_ran_how_weights_went_and_in_which_sittings(tmp_path):
    page = render(on_gpus(write_run(tmp_path / "run", steps=6)))
    for text in (
        "tiny-qwen3 on NVIDIA H200",
        "GPU-00000003-1111",
        "rank 3<br>tp 1 · cp 1<br><small>GPU 3</small>",
        "worker tp 1<br><small>GPU 3</small>",
        "Placement colocated: trainer and engines take turns",
        "lent as memory of the trainer&#x27;s GPU (CUDA IPC)",
        "sha256 of 1,240 shards",
        "0 engines differ",
        "The run&#x27;s 2 sittings".replace("&#x27;", "'"),
        "strict 1",
        "peak GPU memory of a trainer rank's tensors, GiB",
        "peak GPU memory of an engine worker's tensors, GiB",
        "FULL_AND_PIECEWISE",
        '<td class="n">612</td>',
        "<td>replay</td>",
    ):
        assert text in page, text
    # means leave out the first step of each sitting: 0 and 2
    assert '<tr><td><i class="swatch k-prove"></i>prove</td><td class="n">0.100</td>' in page
    assert '<td>whole step</td><td class="n"><b>7.650</b></td>' in page


def test_a_run_on_a_cpu_names_no_gpu(tmp_path):
    page = render(write_run(tmp_path / "run"))
    assert "GPU " not in page
    assert "sittings" not in page
    assert "Time by phase" in page
