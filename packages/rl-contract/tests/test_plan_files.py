"""Plan files of a package: shipped ones, replaced ones, and what a plan may not ask for."""

import json
import sys
from dataclasses import dataclass

import pytest

from rl_contract import ContractError
from rl_contract.plans import PlanFiles, refuse_fields


@dataclass(frozen=True)
class Plans:
    arch: str
    tile: int

    @classmethod
    def from_dict(cls, data, where):
        refuse_fields(data, ("arch", "tile"), ("kpack",), where)
        return cls(**data)


@pytest.fixture
def package(tmp_path, monkeypatch):
    room = tmp_path / "planned" / "plans"
    room.mkdir(parents=True)
    (room.parent / "__init__.py").write_text("")
    for arch, tile in (("sm90", 128), ("generic", 16)):
        (room / f"{arch}.json").write_text(json.dumps({"arch": arch, "tile": tile}))
    monkeypatch.syspath_prepend(tmp_path)
    yield "planned"
    sys.modules.pop("planned", None)


def test_shipped_fallback_and_replaced(package):
    plain, falling = PlanFiles(package, Plans.from_dict), PlanFiles(package, Plans.from_dict, fallback="generic")
    assert plain.shipped("sm90").tile == 128
    assert falling.shipped("sm80").tile == 16
    with pytest.raises(ContractError, match=r"no plans for 'sm80'.*\['generic', 'sm90'\]"):
        plain.shipped("sm80")
    plain.use(Plans("sm90", 64))
    assert (plain.current("sm90").tile, plain.shipped("sm90").tile) == (64, 128)
    assert falling.current("sm90").tile == 128


def test_a_field_that_decides_the_bits_is_refused_by_name(tmp_path, package):
    path = tmp_path / "mine.json"
    for data, message in (
        ({"arch": "sm90", "tile": 1, "kpack": 2}, "kpack.*decides the bits"),
        ({"arch": "sm90", "tile": 1, "wraps": 4}, "unknown fields.*wraps"),
    ):
        path.write_text(json.dumps(data))
        with pytest.raises(ContractError, match=message):
            PlanFiles(package, Plans.from_dict).read(path)
