"""Plan files: every shipped one is valid, covers every call, and none can ask for what would change bits."""

import json
from importlib.resources import files

import pytest

from rl_contract import ContractError
from rl_gemm import plans
from rl_gemm.contract import MATRIX_STEP

SHIPPED = [p.name for p in (files("rl_gemm") / "plans").iterdir() if p.name.endswith(".json")]


def shipped(name):
    return json.loads((files("rl_gemm") / "plans" / name).read_text())


def small():
    leaf = plans.Kernel(kind="leaf", block_m=16, block_n=64, block_k=64, warps=4, stages=3)
    rows = [
        {"operation": op, "n": 0, "k": 0, "leaves": 0, "m": plans.ANY_M, "use": leaf.name} for op in plans.OPERATIONS
    ]
    return {"arch": "sm90", "kernels": {leaf.name: leaf.to_dict()}, "rows": rows, "certificates": []}


def certificate(**change):
    claim = {"operation": "forward", "n": 8, "k": 16, "m_min": 1, "m_max": 8} | change
    return {"library": "l", "environment": {"torch": "2.11"}, "claims": [claim]}


def test_every_arch_has_a_file():
    assert {name.removesuffix(".json") for name in SHIPPED} == set(MATRIX_STEP)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_file_is_valid_and_covers_every_call(name):
    own = plans.Plans.from_dict(shipped(name), name)
    assert own.arch == name.removesuffix(".json")
    for operation in plans.OPERATIONS:
        for n, k in ((4096, 4096), (24576, 4096), (7, 33), (151936, 5120)):
            for leaves in (1, 2, 4, 8, 16):
                for m in (1, 16, 17, 64, 100, 8192, 10**6):
                    choices = own.choices(operation, n, k, leaves, m)
                    assert own.kernels[choices[-1]].kind == "leaf"


@pytest.mark.parametrize("field", plans.FORBIDDEN)
def test_a_forbidden_change_is_rejected_by_name(field):
    for place in ("kernel", "row", "file"):
        bad = small()
        target = {"kernel": next(iter(bad["kernels"].values())), "row": bad["rows"][0], "file": bad}[place]
        target[field] = 2
        with pytest.raises(ContractError, match=field):
            plans.Plans.from_dict(bad)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"block_m": 256}, "64 or 128 rows"),
        ({"block_n": 16}, "64 or 128 rows"),
        ({"block_k": 32}, "depth 64 or 128"),
        ({"warps": 2}, "4 or 8 warps"),
        ({"swap": True}, "no swap"),
        ({"block_n": 256, "block_m": 128}, "64 accumulators"),
        ({"warps": 4}, "64 accumulators"),
    ],
    ids=str,
)
def test_a_hopper_kernel_of_another_shape_is_rejected(shape, words):
    fields = {"kind": "hopper", "block_m": 128, "block_n": 128, "block_k": 64, "warps": 8, "stages": 4}
    plans.Kernel(**fields)
    with pytest.raises(ContractError, match=words):
        plans.Kernel(**fields | shape)


def test_malformed_files_are_rejected():
    def broken(change):
        bad = small()
        change(bad)
        with pytest.raises(ContractError):
            plans.Plans.from_dict(bad)

    name = next(iter(small()["kernels"]))
    broken(lambda d: d["kernels"][name].update(colour=3))
    broken(lambda d: d["kernels"][name].update(block_k=48))
    broken(lambda d: d["kernels"][name].update(block_k=8))
    broken(lambda d: d["kernels"][name].update(kind="split"))
    broken(lambda d: d["kernels"][name].update(stages=5))
    broken(lambda d: d["rows"][0].update(use="nothing"))
    broken(lambda d: d["rows"][0].update(operation="conv"))
    broken(lambda d: d["kernels"][name].update(parts=2))
    broken(lambda d: d["rows"][0].update(use="unfused"))
    broken(lambda d: d["rows"].append(d["rows"][0] | {"operation": plans.GATE_UP}))
    broken(lambda d: d["rows"].pop())
    broken(lambda d: d["rows"][0].update(use="library"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(arch="sm9O"), "arch='sm9O', supported: .*'sm90'"),
        (lambda d: d["rows"][0].update(m=1.5), "m=1.5, supported: a whole number"),
        (lambda d: d["rows"][0].update(n=-1), "n=-1, supported: a whole number"),
        (lambda d: d["rows"][0].update(k=-1), "k=-1, supported: a whole number"),
        (lambda d: d["rows"][0].update(leaves=-2), "leaves=-2, supported: a whole number"),
        (lambda d: d["rows"][0].pop("m"), "lacks 'm'"),
        (lambda d: d["rows"][0].update(m=0), "m=0, supported: from 1"),
        (lambda d: d["rows"][0].update(leaves=3), "leaves=3, supported: 0 and powers of two"),
        (lambda d: d["rows"][0].update(n=8), "n=8, k=0, leaves=0, supported: all three from 1"),
        (lambda d: d["rows"][0].update(n=8, k=8), "n=8, k=8, leaves=0, supported: all three from 1"),
        (lambda d: d["rows"][0].update(use=""), "use='', supported: a kernel or library"),
        (lambda d: d["rows"][0].update(otherwise="library"), "otherwise=library, supported: what needs no certificate"),
        (lambda d: next(iter(d["kernels"].values())).update(swap="zzz"), "swap='zzz', supported: true or false"),
        (lambda d: next(iter(d["kernels"].values())).pop("warps"), "lacks 'warps'"),
        (lambda d: next(iter(d["kernels"].values())).update(stages=10**20), "stages=1.*, supported: a whole number"),
        (lambda d: next(iter(d["kernels"].values())).update(stages=65), "stages=65, supported: at most 64"),
        (lambda d: d.update(certificates=[certificate(operation="x")]), "claim .*operation, supported: .'forward'"),
        (lambda d: d.update(certificates=[certificate(m_min=9, m_max=8)]), "supported: .* 1 <= m_min <= m_max"),
        (lambda d: d.update(certificates=[certificate(n=0)]), "supported: n and k from 1"),
        (lambda d: d.update(certificates=[certificate() | {"environment": {}}]), "environment={}, supported"),
        (lambda d: d.update(certificates=[certificate() | {"environment": {"torch": 2}}]), "environment=.*, supported"),
        (lambda d: d.update(rows={}), "rows={}, supported: a list"),
        (lambda d: d.update(certificates=[{"library": "l"}]), "certificate: lacks 'claims'; lacks 'environment'"),
        (lambda d: d.clear(), "lacks 'arch'; lacks 'kernels'; lacks 'rows'"),
    ],
)  # fmt: skip
def test_a_field_of_another_kind_is_refused_by_name(tmp_path, change, words):
    bad = small()
    change(bad)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(bad))
    with pytest.raises(ContractError, match=f"mine.json.*{words}"):
        plans.read(path)


def test_the_library_needs_a_certificate_of_this_environment():
    claim = plans.Claim(operation="forward", n=8, k=16, m_min=33, m_max=8192)
    here = {"device": "X", "torch": "2.11"}
    own = plans.Plans.from_dict(
        small() | {"certificates": [{"library": "l", "environment": here, "claims": [vars(claim)]}]},
    )
    assert own.certified(here, "forward", 8, 16, 33, False)
    for environment, args in (
        (here | {"torch": "2.12"}, ("forward", 8, 16, 64, False)),
        (here, ("forward", 8, 16, 32, False)),
        (here, ("forward", 8, 16, 8193, False)),
        (here, ("forward", 16, 8, 64, False)),
        (here, ("grad_input", 8, 16, 64, False)),
        (here, ("forward", 8, 16, 64, True)),
    ):
        assert not own.certified(environment, *args)


def test_a_gated_kernel_serves_gate_up_alone():
    gated = plans.Kernel(kind="gated", block_m=16, block_n=64, block_k=64, warps=4, stages=3)
    file = small()
    file["kernels"][gated.name] = gated.to_dict()
    row = {"operation": plans.GATE_UP, "n": 8, "k": 16, "leaves": 1, "m": 16, "use": gated.name}
    last = row | {"m": plans.ANY_M, "use": plans.UNFUSED}
    own = plans.Plans.from_dict(file | {"rows": [*file["rows"], row, last]})
    assert own.choices(plans.GATE_UP, 8, 16, 1, 16) == [gated.name]
    assert own.choices(plans.GATE_UP, 8, 16, 1, 17) == [plans.UNFUSED]
    assert own.choices(plans.GATE_UP, 8, 32, 1, 1) == []
    with pytest.raises(ContractError, match="gated"):
        plans.Plans.from_dict(file | {"rows": [*file["rows"], row | {"operation": "forward"}]})


def test_names_spell_the_kernel():
    for name in SHIPPED:
        for key, spec in shipped(name)["kernels"].items():
            assert plans.Kernel(**spec).name == key
