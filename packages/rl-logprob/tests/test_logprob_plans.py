"""Plans may choose speed, never bits; contracts of the GPU architectures."""

import copy
import json
from importlib.resources import files

import pytest

from rl_contract import ContractError, Settings
from rl_logprob import plans
from rl_logprob.contract import GPU_ARCHS, logprob


def data(arch="sm90"):
    return json.loads((files("rl_logprob") / "plans" / f"{arch}.json").read_text())


@pytest.mark.parametrize("arch", GPU_ARCHS)
def test_shipped_plan_serves_every_size(arch):
    own = plans.shipped(arch)
    for operation in plans.OPERATIONS:
        for tokens in (1, 64, 65, 512, 8192, 1 << 20):
            for copy_engine in (False, True):
                name = own.choose(operation, tokens, 4096, copy_engine)
                assert name == plans.MATERIALISED or copy_engine or own.kernels[name].kind == "pointer"


@pytest.mark.parametrize("field", plans.FORBIDDEN)
def test_plan_that_would_change_bits_is_refused_by_name(field):
    for place in ("kernels", "rows"):
        spec = data()
        target = next(iter(spec[place].values())) if place == "kernels" else spec[place][0]
        target[field] = 1
        with pytest.raises(ContractError, match=f"{field}.*decides the bits"):
            plans.Plans.from_dict(spec)


def test_broken_plans_are_refused():
    def broken(change):
        spec = copy.deepcopy(data())
        change(spec)
        with pytest.raises(ContractError) as error:
            plans.Plans.from_dict(spec)
        return str(error.value)

    assert "does not have" in broken(lambda s: s["rows"][0].update(use="tma-1x1x1-1w1"))
    assert "otherwise" in broken(lambda s: s["rows"][0].pop("otherwise"))
    assert "needs a row" in broken(lambda s: s["rows"].pop())
    assert "names follow" in broken(lambda s: next(iter(s["kernels"].values())).update(stages=7))
    assert "powers of two" in broken(lambda s: next(iter(s["kernels"].values())).update(block_m=96))
    assert "one tile of 128" in broken(lambda s: next(iter(s["kernels"].values())).update(block_n=64))
    assert "supported: ('stats'" in broken(lambda s: s["rows"][0].update(operation="sum"))
    assert "unknown fields" in broken(lambda s: s.update(more=1))
    assert "tokens=0, supported: from 1" in broken(lambda s: s["rows"][0].update(tokens=0))
    assert "hidden=0, supported: from 1" in broken(lambda s: s["rows"][0].update(hidden=0))
    assert "use='', supported: a kernel" in broken(lambda s: s["rows"][0].update(use=""))
    spare = {"use": plans.MATERIALISED, "otherwise": plans.MATERIALISED}
    assert "that nothing takes" in broken(lambda s: s["rows"][0].update(spare))
    assert "arch='sm9O', supported" in broken(lambda s: s.update(arch="sm9O"))
    assert "tokens=1.5, supported: a whole number" in broken(lambda s: s["rows"][0].update(tokens=1.5))
    assert "stages=65, supported: at most 64" in broken(lambda s: next(iter(s["kernels"].values())).update(stages=65))
    assert "supported: a whole number" in broken(lambda s: next(iter(s["kernels"].values())).update(stages=10**20))
    assert "lacks 'use'" in broken(lambda s: s["rows"][0].pop("use"))
    assert "rows='all', supported: a list" in broken(lambda s: s.update(rows="all"))
    assert "lacks 'arch'; lacks 'kernels'; lacks 'rows'" in broken(lambda s: s.clear())


@pytest.mark.parametrize("content", ["", "{}", "[]"])
def test_a_file_that_is_no_plan_is_refused_and_named(tmp_path, content):
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(ContractError, match=r"mine\.json"):
        plans.read(path)


def settings(**more):
    given = {"hidden_size": 64, "vocab_size": 1000, "norm_eps": 1e-6, "rope": {"theta": 1e4, "rotary_dim": 16}}
    return Settings(**(given | more))


def test_contracts_of_architectures_differ_and_refuse_what_has_no_kernel():
    found = {logprob(settings(arch=arch)).fingerprint for arch in ("cpu", *GPU_ARCHS)}
    assert len(found) == 4
    for more, message in (
        ({"dtype": "float32"}, "bfloat16"),
        ({"vocab_tile": 192}, "multiples of 128"),
        ({"vocab_size": 1 << 21}, "up to 1048576"),
    ):
        with pytest.raises(ContractError, match=message):
            logprob(settings(arch="sm90", **more))
