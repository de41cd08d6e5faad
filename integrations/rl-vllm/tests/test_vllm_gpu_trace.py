"""A profiler's trace says which kernels ran inside the model; a stock one among them is refused. No GPU needed."""

from types import SimpleNamespace

import pytest
import torch

from rl_contract import ContractError
from rl_vllm import trace

pytest.importorskip("vllm")


def event(name, category, start, length, correlation=None, thread=1):
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": length, "tid": thread, "args": args}


def eager_trace(*more):
    return {
        "traceEvents": [
            event(trace.MODEL, "user_annotation", 0, 100),
            event("rl_gemm::matmul", "cpu_op", 10, 10),
            event("cuLaunchKernelEx", "cuda_driver", 12, 1, 1),
            event("gemm_kernel", "kernel", 200, 5, 1),
            event("rl_gemm::matmul", "cpu_op", 30, 10),
            event("cudaLaunchKernel", "cuda_runtime", 33, 1, 2),
            event("nvjet_tst_128x64", "kernel", 210, 5, 2),
            event("cudaLaunchKernel", "cuda_runtime", 50, 1, 3),
            event("triton_poi_fused_clone_view_3", "kernel", 220, 5, 3),
            # the sampler's, after the model
            event("cudaLaunchKernel", "cuda_runtime", 150, 1, 4),
            event("some_softmax_kernel", "kernel", 230, 5, 4),
            *more,
        ]
    }


def graph_trace(*kernels):
    found = [event("cudaGraphLaunch", "cuda_runtime", 5, 1, 9)]
    return {"traceEvents": found + [event(k, "kernel", 10 + i, 1, 9) for i, k in enumerate(kernels)]}


def test_trace_counts_what_ran_inside_the_model():
    graph = graph_trace("gemm_kernel", "nvjet_tst_128x64", "memcpy32_post")
    found, replay = trace.check([eager_trace(), graph], ["gemm_kernel"])
    assert dict(found.ours) == {"gemm_kernel": 1, "nvjet_tst_128x64": 1}
    assert found.library == {"nvjet_tst_128x64"}
    assert dict(found.moves) == {"triton_poi_fused_clone_view_3": 1}
    assert dict(replay.moves) == {"memcpy32_post": 1}
    assert (found.steps, found.graphs, replay.graphs) == (1, 0, 1)


@pytest.mark.field_report("R17")
@pytest.mark.parametrize(
    ("traces", "named"),
    [
        (
            [eager_trace(event("l", "cuda_driver", 60, 1, 7), event("void rms_norm_kernel<x>", "kernel", 300, 1, 7))],
            "stock kernel void rms_norm_kernel",
        ),
        ([eager_trace(event("l", "cuda_driver", 60, 1, 7), event("triton_poi_fused_add_mul_1", "kernel", 300, 1, 7))],
         "triton_poi_fused_add_mul_1"),
        ([eager_trace(event("l", "cuda_driver", 60, 1, 7), event("triton_red_fused_view_1", "kernel", 300, 1, 7))],
         "triton_red_fused_view_1"),
        # a library kernel that no operator of ours was ever seen to launch
        ([graph_trace("gemm_kernel", "nvjet_tst_128x64")], "nvjet_tst_128x64"),
        ([{"traceEvents": [event(trace.MODEL, "user_annotation", 0, 100)]}], "proves nothing"),
        # launched by another thread while the model's forward runs
        ([eager_trace(event("l", "cuda_driver", 60, 1, 7, 2), event("void rms_norm_kernel<x>", "kernel", 300, 1, 7))],
         "stock kernel void rms_norm_kernel"),
        # a launch that the profiler dropped, or that a cut file has lost
        ([eager_trace(event("cutlass_80_tensorop_gemm", "kernel", 300, 1, 7))],
         "cutlass_80_tensorop_gemm ran 1 times without a record of its launch"),
        ([eager_trace(event("cutlass_80_tensorop_gemm", "kernel", 300, 1))],
         "cutlass_80_tensorop_gemm ran 1 times without a record of its launch"),
        ([eager_trace(event("gemm_kernel", "kernel", 300, 1, 7))], "gemm_kernel ran 1 times without a record"),
        ([], "no trace was given"),
        ("trace.json", "give a list"),
        (eager_trace(), "give a list"),
    ],
)  # fmt: skip
def test_trace_with_a_stock_kernel_inside_the_model_is_refused(traces, named):
    with pytest.raises(ContractError, match=named):
        trace.check(traces, ["gemm_kernel"])


# as a profiler of PyTorch names them
MOVES = """\
Memcpy HtoD (Pageable -> Device)
Memset (Device)
memcpy32_post
ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)
void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)
void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true>(x)
void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<at::native::(anonymous namespace)::OpaqueType<2u>, x>
void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_kernel_impl<x> > >(x)
void at::native::index_elementwise_kernel<128, 4, at::native::index_copy_kernel_impl<at::native::OpaqueType<2> >(x) >
void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::BFloat16>, std::array<char*, 1ul> >(x)
void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>
void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(x)>>
void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out(c10::Scalar const&)::{x}>(x)
triton_poi_fused_embedding_0""".splitlines()

COMPUTES = """\
my_arange_softmax_kernel
softmax_memcpy32_post
cutlass_FillFunctor_gemm
void vllm::rms_norm_kernel<at::native::FillFunctor<float> >(x)
void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, x>(x)
void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<at::native::Binary<direct_copy_kernel_cuda(x)>>
void at::native::index_elementwise_kernel<128, 4, at::native::index_add_kernel<x>>
void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::direct_copy_kernel_cuda(x)>>
ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
my_ncclDevKernel_AllGather_RING_LL
triton_poi_fused_embedding_mul_0""".splitlines()


@pytest.mark.parametrize("kernel", MOVES)
def test_trace_kernels_that_move_bytes_alone_are_known(kernel):
    assert trace.moves_bytes(kernel)


@pytest.mark.parametrize("kernel", COMPUTES)
def test_trace_a_word_inside_a_name_makes_no_kernel_a_move(kernel):
    assert not trace.moves_bytes(kernel)


@pytest.mark.parametrize(
    "change", [{"tid": None}, {"dur": "a"}, {"dur": float("nan")}, {"ts": "1"}, {"name": 3}, {"args": [1]}]
)
def test_bad_input_an_event_without_what_it_is_read_for_is_named(change):
    broken = {**event("rl_gemm::matmul", "cpu_op", 10, 10), **change}
    with pytest.raises(ContractError, match="without name, time, thread or arguments"):
        trace.check([eager_trace(broken)], ["gemm_kernel"])


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"traceEvents": {}}', '{"traceEvents": [1]}', '{"traceEvents": [{"ph": "X"}]}']
)
def test_bad_input_a_file_that_is_no_trace_is_named_in_a_line(tmp_path, capsys, text):
    (tmp_path / "x.json").write_text(text)
    assert trace.main([str(tmp_path / "x.json")]) == 1
    said = capsys.readouterr().out
    assert "give a trace that rl_vllm.trace_step wrote" in said or "give one that rl_vllm.trace_step wrote" in said
    assert str(tmp_path / "x.json") in said


def test_trace_knows_the_kernels_of_every_package():
    names = trace.our_kernels()
    assert {"attn_fwd_kernel", "attn_segments_kernel", "rotary_kernel", "write_slots_kernel", "sample_kernel"} <= names
    assert not any("reference" in name for name in names)
    # parts of kernels, which nobody launches
    assert not names & {"_sum", "_mean", "fold", "below"}


def test_recording_marks_the_forward_pass_and_our_operators(tmp_path):
    import json

    import rl_gemm

    class Model(torch.nn.Module):
        def forward(self, x):
            return rl_gemm.swiglu(x)

    model, path = Model(), tmp_path / "step.0"
    with trace.recording(str(path), model):
        model(torch.randn(3, 8).bfloat16())
        rl_gemm.swiglu(torch.randn(3, 8).bfloat16())
    found = trace.read(path, [])
    # nothing ran on a GPU
    assert (found.steps, found.graphs, len(found.ours), len(found.stock)) == (1, 0, 0, 0)
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    (mark,) = [e for e in events if e["name"] == trace.MODEL and e["cat"] == "user_annotation"]
    inside = [e for e in events if e["name"] == "rl_gemm::swiglu" and mark["ts"] <= e["ts"] <= mark["ts"] + mark["dur"]]
    assert inside
    assert all(e["cat"] == "cpu_op" and e["tid"] == mark["tid"] for e in inside)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_cpu_engine_has_no_kernels_to_trace():
    from rl_contract import MissingSupport

    with pytest.raises(MissingSupport, match="an engine on a CPU"):
        trace.trace_step(SimpleNamespace(collective_rpc=print), "x")


def test_bad_input_trace_file(tmp_path, capsys):
    (tmp_path / "t.json").write_text("{")
    assert trace.main([str(tmp_path / "t.json")]) == 1
    assert "give a trace" in capsys.readouterr().out
