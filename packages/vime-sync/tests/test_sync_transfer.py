"""A label is tied to bytes, and a directory of weights is whole, right, or refused with everything wrong listed."""

import hashlib
import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rl_contract import ContractError
from vime_sync import (
    Loan,
    Manifest,
    ModelShape,
    PolicyVersion,
    Publisher,
    StepLedger,
    lend_weights,
    read_weights,
    write_weights,
)
from vime_sync.manifest import nonfinite_count
from vime_sync.testing import FakeEngine


def tensors():
    g = torch.Generator().manual_seed(1)
    return {
        "b.weight": torch.randn(65, 33, generator=g).to(torch.bfloat16),
        "a.weight": torch.randn(7, 129, generator=g),
        "norm.weight": torch.ones(65, dtype=torch.bfloat16),
        "scalar": torch.tensor(-0.0),
    }


def write(path, named=None, step=3, **options):
    named = tensors() if named is None else named
    manifest = Manifest.from_tensors(named)
    version = PolicyVersion("run", step, manifest.digest)
    return write_weights(path, named, version, manifest, **options), version, manifest


def refused(call, *texts):
    with pytest.raises(ContractError) as error:
        call()
    for text in texts:
        assert text in str(error.value)


def test_manifest_digest_follows_bytes_types_and_names_not_order():
    named = tensors()
    base = Manifest.from_tensors(named)
    assert base.names == list(named)
    assert Manifest.from_tensors(dict(reversed(named.items()))).digest == base.digest
    assert Manifest.from_json(base.to_json()) == base
    assert base.differences(Manifest.from_json(base.to_json())) == []
    changed = {name: tensor.clone() for name, tensor in named.items()}
    changed["b.weight"].view(torch.int16)[64, 32] ^= 1
    changed["scalar"] = torch.tensor(0.0)
    changed["norm.weight"] = changed["norm.weight"].float()
    changed["a.weight"] = changed["a.weight"].reshape(129, 7)
    changed["new"] = changed.pop("scalar")
    other = Manifest.from_tensors(changed, config_digests={"tokenizer": "x"})
    assert other.digest != base.digest
    found = "; ".join(base.differences(other))
    for text in (
        "scalar is missing",
        "new is extra",
        "b.weight has other bytes",
        "norm.weight is float32, not bfloat16",
        "a.weight has shape (129, 7), not (7, 129)",
        "config tokenizer is x, not None",
    ):
        assert text in found
    assert len(base.differences(other)) == 7
    for name in ("b.weight", "norm.weight", "a.weight"):
        assert Manifest.from_tensors({**named, name: changed[name]}).digest != base.digest
    assert Manifest.from_tensors(named, config_digests={"rope": "1"}).digest != base.digest
    assert Manifest.from_tensors(named, base_version="run:2:0123456789ab").digest == base.digest


def test_manifest_lists_every_tensor_that_must_not_be_published():
    named = tensors()
    named["b.weight"][3, 3] = float("nan")
    named["a.weight"][0, 0] = -float("inf")
    named["ids"] = torch.zeros(3, dtype=torch.int64)
    pairs = [*named.items(), ("scalar", torch.tensor(1.0))]
    refused(
        lambda: Manifest.from_tensors(pairs),
        "b.weight holds 1 NaN",
        "a.weight holds 1 NaN or infinite",
        "ids is torch.int64",
        "scalar is given twice",
    )
    refused(lambda: Manifest.from_tensors({}), "no tensor")


@pytest.mark.parametrize("given", [None, 3, "w", b"w", torch.zeros(2), [None], ["ab"], [("x",)], [(1, torch.zeros(1))]])
def test_what_is_no_list_of_tensors_is_refused_by_name(tmp_path, given):
    shown = repr(given[0] if isinstance(given, list) else given)[:20]
    refused(lambda: Manifest.from_tensors(given), "Manifest.from_tensors got " + shown, "supported: ")
    manifest = Manifest.from_tensors(tensors())
    version = PolicyVersion("run", 0, manifest.digest)
    refused(lambda: write_weights(tmp_path / "v", given, version, manifest), "write_weights got " + shown)
    with Loan("cpu", tmp_path) as loan:
        refused(lambda: loan.fill(given), "Loan.fill got " + shown)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.ones(3, device="meta"), "a meta tensor"),
        (lambda: torch.ones(3).to_sparse(), "torch.sparse_coo"),
        (lambda: torch.ones(3, 3).to_sparse_csr(), "torch.sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]), "nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged), "nested"),
        (torch.nn.UninitializedParameter, "UninitializedParameter"),
        (torch.nn.UninitializedBuffer, "UninitializedBuffer"),
    ],
)
def test_a_tensor_without_bytes_is_refused_by_name(tmp_path, make, kind):
    named = {"x": torch.zeros(3), "w": make(), "n": torch.tensor(float("nan"))}
    problem = f"w is {kind}"
    refused(lambda: Manifest.from_tensors(named), problem, "; supported: ", "n holds 1 NaN")
    refused(lambda: Manifest.from_tensors(named, algorithm="sha256"), problem)
    manifest = Manifest.from_tensors({"x": torch.zeros(3), "w": torch.ones(3)})
    version = PolicyVersion("run", 0, manifest.digest)
    refused(lambda: write_weights(tmp_path / "v", named, version, manifest), problem, "n is not in the manifest")
    with Loan("cpu", tmp_path) as loan:
        refused(lambda: loan.fill(named), problem)
        # it is bound to nothing
        assert loan.fill({"x": torch.zeros(3), "w": torch.ones(3)}) == manifest
        assert len(os.listdir(tmp_path)) == 1
    assert os.listdir(tmp_path) == []


def test_a_value_that_is_no_tensor_is_refused_by_name(tmp_path):
    refused(lambda: Manifest.from_tensors({"x": None, "y": [1]}), "x is a NoneType", "y is a list")
    manifest = Manifest.from_tensors({"x": torch.zeros(1)})
    version = PolicyVersion("run", 0, manifest.digest)
    refused(lambda: write_weights(tmp_path / "v", {"x": 1.5}, version, manifest), "x is a float")


@pytest.mark.parametrize("given", ["run:0:0123456789ab", "", 0, False, b"x", ("run", 0, "0123456789ab")])
def test_a_version_is_a_policy_version_to_whoever_takes_one(tmp_path, given):
    named = tensors()
    manifest = Manifest.from_tensors(named)
    version = PolicyVersion("run", 0, manifest.digest)
    path = write_weights(tmp_path / "v", named, version, manifest)
    read_weights(path, version).close()
    read_weights(path, manifest).close()
    refused(lambda: read_weights(path, given), "read_weights got the version", "PolicyVersion.parse")
    refused(lambda: write_weights(tmp_path / "w", named, given, manifest), f"got the version {given!r}")
    refused(lambda: version.matches(given), "PolicyVersion.matches got the version")
    refused(lambda: StepLedger(run_id="run").add_version(given), "add_version got the version")
    assert os.listdir(tmp_path) == ["v"]


@pytest.mark.parametrize("given", [None, "", 3, b"x", torch.zeros(2), "a\0b"])
def test_what_is_no_path_and_no_manifest_is_refused_by_name(tmp_path, given):
    manifest = Manifest.from_tensors(tensors())
    version = PolicyVersion("run", 0, manifest.digest)
    refused(lambda: read_weights(given), "read_weights got the path")
    refused(lambda: write_weights(given, tensors(), version, manifest), "got the path")
    refused(lambda: Loan("cpu", given), "Loan got the path")
    refused(lambda: write_weights(tmp_path / "w", tensors(), version, given), "got the manifest")
    refused(lambda: manifest.differences(given), "got the manifest")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("place", ["file/v", "file/a/v", "/proc/v", "/proc/a/v", "/dev/null/v", "n" * 300])
def test_a_place_that_takes_no_weights_is_refused_by_name(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    refused(lambda: write(tmp_path / place), f"{tmp_path / place} cannot be made (", "; give a place in a folder")
    refused(lambda: StepLedger(tmp_path / place, run_id="run"), f"ledger {tmp_path / place} cannot be opened (")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


def test_names_of_a_manifests_digests_are_text():
    for digests in ("x", {"rope": 1}, {1: "x"}, [("rope", "1")]):
        refused(lambda digests=digests: Manifest.from_tensors(tensors(), config_digests=digests), "config_digests=")
    refused(lambda: Manifest.from_tensors(tensors(), base_version=3), "base_version=3")


def test_a_manifest_names_its_digest_and_an_old_one_is_of_plain_sha256(tmp_path):
    named = tensors()
    new, old = (Manifest.from_tensors(named, algorithm=a) for a in ("sha256-tree", "sha256"))
    assert new == Manifest.from_tensors(named) != old
    assert old["scalar"].digest == hashlib.sha256(b"\0\0\0\x80").hexdigest()
    assert new.digest != old.digest
    assert old.differences(new)[:1] == ["digests are sha256-tree, not sha256"]
    # as written before there were two
    entries = sorted([e.name, e.dtype, list(e.shape), e.digest] for e in old.entries)
    assert old.digest == hashlib.sha256(json.dumps([entries, []], separators=(",", ":")).encode()).hexdigest()
    text = json.loads(old.to_json())
    assert text.pop("algorithm") == "sha256"
    assert Manifest.from_json(json.dumps(text)) == old
    # nor can a tree's digests pass for plain ones, or the other way round
    for manifest, other in ((new, "sha256"), (old, "sha256-tree"), (new, None)):
        text = {**json.loads(manifest.to_json()), "algorithm": other}
        refused(lambda: Manifest.from_json(json.dumps(text)), "altered" if other else "algorithm None is unknown")  # noqa: B023
    del text["algorithm"]
    refused(lambda: Manifest.from_json(json.dumps(text)), "altered")
    refused(
        lambda: Manifest.from_json(new.to_json().replace('"sha256-tree"', '"crc32"')),
        "algorithm 'crc32' is unknown, supported: sha256-tree, sha256",
    )
    refused(lambda: Manifest.from_tensors(named, algorithm="md5"), "'md5' is unknown, supported: sha256-tree, sha256")
    # a directory written then is read, verified, and damage in it found
    path = write_weights(tmp_path / "v", named, PolicyVersion("run", 0, old.digest), old)
    described = json.loads((path / "manifest.json").read_text())
    del described["manifest"]["algorithm"]
    (path / "manifest.json").write_text(json.dumps(described))
    with read_weights(path, old) as weights:
        assert weights.algorithm == "sha256"
    held = load_file(path / "weights-00000.safetensors")
    held["a.weight"].view(torch.int32)[3, 100] ^= 1
    save_file(held, path / "weights-00000.safetensors")
    refused(lambda: read_weights(path), "a.weight has digest")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_manifest_nonfinite_count_is_that_of_isfinite(dtype):
    integer = torch.int16 if dtype == torch.bfloat16 else torch.int32
    low = -(2 ** (8 * torch.empty(0, dtype=dtype).element_size() - 1))
    # random bit patterns: every kind of NaN, subnormals, both signs
    x = torch.randint(low, -low, (701, 1501), dtype=integer, generator=torch.Generator().manual_seed(0)).view(dtype)
    x[700, 1500] = float("inf")
    assert nonfinite_count(x) == int((~torch.isfinite(x)).sum()) > 1000
    assert nonfinite_count(x.t()[:, :3]) == int((~torch.isfinite(x.t()[:, :3])).sum())
    assert nonfinite_count(torch.full((3,), torch.finfo(dtype).max, dtype=dtype)) == 0


def test_manifest_altered_or_cut_text_is_refused():
    text = Manifest.from_tensors(tensors()).to_json()
    refused(lambda: Manifest.from_json(text[:-20]), "not a manifest")
    refused(lambda: Manifest.from_json(text.replace("norm.weight", "norm.weighs")), "altered")


@given(
    run=st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True),
    step=st.integers(0, 10**9),
    digest=st.binary(min_size=32, max_size=32),
)
def test_version_string_round_trip(run, step, digest):
    version = PolicyVersion(run, step, digest.hex())
    parsed = PolicyVersion.parse(str(version))
    assert str(parsed) == str(version)
    assert parsed.matches(version)
    assert version.matches(parsed)
    assert not parsed.matches(PolicyVersion(run, step + 1, digest.hex()))
    flipped = f"{int(digest.hex()[0], 16) ^ 1:x}" + digest.hex()[1:]
    assert not parsed.matches(PolicyVersion(run, step, flipped))


@pytest.mark.parametrize(
    "text", ["default", "", "a:b", "a:1:xyz", "a:-1:0123456789ab", "a:01:0123456789ab", "a:1:0123456789ab:c"]
)
def test_version_that_is_no_version_is_refused(text):
    with pytest.raises(ContractError):
        PolicyVersion.parse(text)


@pytest.mark.parametrize("max_file_bytes", [1, 5000, 2 << 30])
def test_weights_come_back_bitwise_lazily_and_by_slice(tmp_path, max_file_bytes):
    path, version, manifest = write(tmp_path / "v3", max_file_bytes=max_file_bytes)
    with read_weights(path, version) as weights:
        assert weights.version == version
        assert weights.manifest == manifest
        assert list(weights) == list(tensors())
        for name, tensor in tensors().items():
            assert weights[name].dtype == tensor.dtype
            assert torch.equal(
                weights[name].view(torch.uint8) if tensor.dim() else weights[name],
                tensor.view(torch.uint8) if tensor.dim() else tensor,
            )
        assert torch.equal(weights.slice("b.weight")[3:9, 5:7], tensors()["b.weight"][3:9, 5:7])
    assert os.listdir(tmp_path) == ["v3"]


def test_weights_that_share_a_storage_are_written(tmp_path):
    fused = torch.randn(12, 4).to(torch.bfloat16)
    named = {"q": fused[:8], "k": fused[8:], "t": fused.t()}
    path, _, manifest = write(tmp_path / "v", named)
    with read_weights(path, manifest) as weights:
        assert all(torch.equal(weights[name], tensor) for name, tensor in named.items())


def test_weights_that_do_not_fit_the_manifest_leave_nothing_behind(tmp_path):
    named = tensors()
    manifest = Manifest.from_tensors(named)
    version = PolicyVersion("run", 0, manifest.digest)
    wrong = {
        **named,
        "extra": torch.zeros(1),
        "a.weight": named["a.weight"].double(),
        "b.weight": named["b.weight"][:3],
    }
    del wrong["scalar"]
    refused(
        lambda: write_weights(tmp_path / "v", wrong, version, manifest),
        "extra is not in the manifest",
        "a.weight is torch.float64",
        "b.weight is torch.bfloat16 (3, 33)",
        "scalar is missing",
    )
    refused(lambda: write_weights(tmp_path / "v", named, PolicyVersion("run", 0, "0" * 64), manifest), "does not carry")
    assert os.listdir(tmp_path) == []
    write_weights(tmp_path / "v", named, version, manifest)
    refused(lambda: write_weights(tmp_path / "v", named, version, manifest), "exists")


@pytest.mark.parametrize("most", [True, 0, -1, 1.5, "1", None])
def test_weights_in_files_of_no_size_are_refused(tmp_path, most):
    refused(lambda: write(tmp_path / "v", max_file_bytes=most), f"max_file_bytes={most!r}; supported")
    assert not list(tmp_path.iterdir())


def test_weights_changed_between_manifest_and_write_are_refused_on_read(tmp_path):
    named = tensors()
    manifest = Manifest.from_tensors(named)
    named["norm.weight"].view(torch.int16)[64] ^= 1
    write_weights(tmp_path / "v", named, PolicyVersion("run", 0, manifest.digest), manifest)
    refused(lambda: read_weights(tmp_path / "v"), "norm.weight has digest")


def test_weights_read_lists_everything_that_is_wrong(tmp_path):
    path, _, _ = write(tmp_path / "v", max_file_bytes=1)
    file_of = json.loads((path / "manifest.json").read_text())["files"]
    altered = load_file(path / file_of["b.weight"])
    altered["b.weight"][0, 0] = float("nan")
    altered["stranger"] = torch.zeros(1)
    save_file(altered, path / file_of["b.weight"])
    save_file({"a.weight": torch.zeros(3)}, path / file_of["a.weight"])
    save_file({"other": torch.zeros(3)}, path / file_of["norm.weight"])
    (path / file_of["scalar"]).write_bytes((path / file_of["scalar"]).read_bytes()[:-2])
    refused(
        lambda: read_weights(path, PolicyVersion("run", 4, "0" * 64)),
        "holds version run:3",
        "b.weight has digest",
        "b.weight holds 1 NaN",
        "holds stranger",
        "a.weight is float32 (3,), the manifest says float32 (7, 129)",
        "norm.weight is missing",
        "cannot be read",
    )
    (path / file_of["a.weight"]).unlink()
    refused(lambda: read_weights(path, check_bytes=False), f"{file_of['a.weight']} cannot be read")


def test_weights_with_a_manifest_that_is_cut_altered_or_absent_are_refused(tmp_path):
    path, version, _ = write(tmp_path / "v")
    text = (path / "manifest.json").read_text()
    for broken, named in (
        (text[:-30], "no readable manifest.json"),
        (text.replace("norm.weight", "norm.weighs", 1), "names no file|altered"),
        (text.replace(version.digest, "0" * 64, 1), "does not carry"),
        (text.replace("weights-00000", "../weights-00000"), "outside its directory"),
        ("[]", "no readable manifest.json"),
    ):
        (path / "manifest.json").write_text(broken)
        with pytest.raises(ContractError, match=named):
            read_weights(path)
    refused(lambda: read_weights(tmp_path / "nowhere"), "no readable manifest.json")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"\xff" + text,
        lambda text: text.replace(b"norm", b"n\xf6rm"),
        lambda text: text.decode().encode("utf-16"),
        lambda text: b"\x00" * len(text),
        lambda text: b"[" * 100_000,
        lambda text: b"7",
        lambda text: b"",
        lambda text: text.replace(b"run:3", b"run:" + b"9" * 5000),
        lambda text: text.replace(b'"bfloat16"', b'"float16"'),
        lambda text: text.replace(b"norm.weight", b"\\ud800"),
        lambda text: text.replace(b'"entries": [', b'"entries": 3, "was": ['),
    ],
    ids=["byte", "latin", "utf16", "zeros", "nested", "number", "empty", "step", "dtype", "surrogate", "entries"],
)
def test_a_manifest_of_any_damage_is_a_refusal_to_reader_and_publisher(tmp_path, damage):
    path, version, _ = write(tmp_path / "v")
    whole = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(damage(whole))
    assert (path / "manifest.json").read_bytes() != whole
    refused(lambda: read_weights(path), "manifest")
    shape = ModelShape.from_hf_config(
        {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8,
         "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 64}
    )  # fmt: skip
    engine = FakeEngine("e", shape, 1)
    refused(lambda: Publisher([engine], shape).publish(path, version), "manifest")
    assert engine.calls == []


def test_weights_files_of_any_damage_are_refused_by_name(tmp_path):
    path, _, _ = write(tmp_path / "v")
    file = sorted(path.glob("*.safetensors"))[0]
    whole = file.read_bytes()
    with read_weights(path) as opened:
        name = next(n for n, at in opened._files.items() if at == file.name)
    late = read_weights(path, check_bytes=False)
    for broken in (b"", b"\xff" * 100, whole[:7], whole[:-1], b"\xff" * 8 + whole[8:], whole[:8] + b"\xff" + whole[9:]):
        file.write_bytes(broken)
        refused(lambda: read_weights(path), f"{file.name} cannot be read")
    # damaged after it was checked
    refused(lambda: late[name], f"{file.name} cannot be read")


def test_weights_killed_while_writing_are_not_visible(tmp_path, monkeypatch):
    import vime_sync.transfer as transfer

    monkeypatch.setattr(transfer, "save_file", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "v")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0o027, 0o640, 0o750)]
)
def test_a_push_has_the_modes_that_the_umask_gives(tmp_path, umask, file, folder):
    named = tensors()
    manifest = Manifest.from_tensors(named)
    before = os.umask(umask)
    try:
        path, _, _ = write(tmp_path / "files", max_file_bytes=1)
        with Loan("cpu", folder=tmp_path) as loan:
            loan.fill(named)
            lent = lend_weights(tmp_path / "lent", loan, PolicyVersion("run", 3, manifest.digest), None, ())
    finally:
        os.umask(before)
    found = sorted(path.iterdir())
    assert [x.name for x in found] == ["manifest.json", *(f"weights-{n:05d}.safetensors" for n in range(len(named)))]
    assert {x.stat().st_mode & 0o7777 for x in (*found, *lent.iterdir())} == {file}
    assert {x.stat().st_mode & 0o7777 for x in (path, lent)} == {folder}
