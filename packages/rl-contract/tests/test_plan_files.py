"""Plan files of a package: shipped ones, replaced ones, and what a plan may not ask for."""

import json
import sys
from dataclasses import dataclass

import pytest

from rl_contract import ContractError
from rl_contract.plans import PlanFiles, build, refuse_fields


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
    with pytest.raises(ContractError, match=r"got plans 'mine\.json'; supported: what its plans\.read"):
        plain.use("mine.json")


def test_a_field_that_decides_the_bits_is_refused_by_name(tmp_path, package):
    path = tmp_path / "mine.json"
    for data, message in (
        ({"arch": "sm90", "tile": 1, "kpack": 2}, "kpack.*decides the bits"),
        ({"arch": "sm90", "tile": 1, "wraps": 4}, "unknown fields.*wraps"),
    ):
        path.write_text(json.dumps(data))
        with pytest.raises(ContractError, match=message):
            PlanFiles(package, Plans.from_dict).read(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"null", b'{"arch": "sm90", "ti', b"\xff\x00\x93PLAN", b'{"arch": "sm90"}', b"[" * 100_000],
    ids=["empty", "no fields", "list", "null", "cut", "binary", "half", "deep"],
)
def test_a_file_that_is_no_plan_is_refused_and_named(tmp_path, package, content):
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    own = PlanFiles(package, Plans.from_dict)
    with pytest.raises(ContractError, match=r"mine\.json.*supported"):
        own.read(path)
    shipped = tmp_path / "planned" / "plans" / "sm90.json"
    shipped.write_bytes(content)
    with pytest.raises(ContractError, match=r"sm90\.json.*supported"):
        own.shipped("sm90")


def test_a_file_that_is_not_there_is_refused_and_named(tmp_path, package):
    own = PlanFiles(package, Plans.from_dict)
    with pytest.raises(ContractError, match=r"absent\.json cannot be read: .*supported: a plan file of planned"):
        own.read(tmp_path / "absent.json")
    with pytest.raises(ContractError, match=r"cannot be read: .*supported: a plan file of planned"):
        own.read(str(tmp_path))
    with pytest.raises(ContractError, match="got plan file None; supported: a path"):
        own.read(None)


@dataclass(frozen=True)
class Row:
    use: str
    m: int
    swap: bool = False


def test_every_field_of_a_row_has_its_type():
    assert build(Row, {"use": "leaf", "m": 2**62, "swap": True}, (), "f: row") == Row("leaf", 2**62, True)
    with pytest.raises(ContractError, match="f: row: lacks 'm'; use=1, supported: a word; swap='zzz', supported: true"):
        build(Row, {"use": 1, "swap": "zzz"}, (), "f: row")
    for m in (1.5, -1, 2**62 + 1, True, "1", None):
        with pytest.raises(ContractError, match=f"m={m!r}, supported: a whole number"):
            build(Row, {"use": "leaf", "m": m}, (), "f: row")
    with pytest.raises(ContractError, match="f: row is"):
        build(Row, [1], (), "f: row")
