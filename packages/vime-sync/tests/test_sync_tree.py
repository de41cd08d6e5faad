"""``sha256-tree``: its definition, what it notices, which tensors it takes; and the kernel's bytes are hashlib's."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from rl_contract import ContractError, MissingSupport
from vime_sync import Manifest, digests, tensor_digest, tree_digests
from vime_sync.tree import CHUNK

SIZES = [0, 1, 31, 63, 64, 4095, 4096, 4097, 8192, 12289, 128 * 4096, 128 * 4096 + 1, 300 * 4096 + 5]

KNOWN = "538a4528bba0bb9ad97cd787093c868b04b20140242d16eeb55a05de436ead6c"


def defined(data: bytes) -> str:
    """The definition, word by word."""

    def level(data: bytes) -> list[bytes]:
        chunks = [data[i : i + 4096] for i in range(0, len(data), 4096)] or [b""]
        return [hashlib.sha256(chunk).digest() for chunk in chunks]

    found = level(data)
    while len(found) > 1:
        found = level(b"".join(found))
    return hashlib.sha256(b"vime-sync sha256-tree 4096\n" + len(data).to_bytes(8, "little") + found[0]).hexdigest()


def some_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_tree_digest_is_its_definition():
    tensors = {n: some_bytes(n, n) for n in SIZES}
    assert tree_digests(tensors.items()) == [(n, defined(x.numpy().tobytes())) for n, x in tensors.items()]
    # fixed for good: digests of runs lie on disks
    assert dict(tree_digests([("x", torch.arange(10000))])) == {"x": KNOWN}
    assert digests("sha256-tree", tensors.items()) == dict(tree_digests(tensors.items()))
    # keys may repeat, and the order is the one given
    twice = [("x", some_bytes(9000)), ("y", some_bytes(5)), ("x", some_bytes(9001))]
    assert [name for name, _ in tree_digests(twice)] == ["x", "y", "x"]
    assert tree_digests([]) == []


def test_tree_digest_in_pieces_is_that_of_one(monkeypatch):
    x = some_bytes(5 * 4096 + 7)
    whole = tree_digests([("x", x)])
    monkeypatch.setattr("vime_sync.tree._PIECE", 4096)
    assert tree_digests([("x", x)]) == whole


def views(device: str = "cpu") -> dict[str, torch.Tensor]:
    """Types, strides and offsets of every kind."""
    g = torch.Generator().manual_seed(1)
    base = torch.randn(130, 67, generator=g).to(device)
    raw = some_bytes(20000).to(device)
    found = {
        "fp32": base,
        "transposed": base.t(),
        "strided": base[::3, 5::2],
        "expanded": base[:1].expand(200, 67),
        "bf16 from an odd place": base.bfloat16().reshape(-1)[1:6000],
        "scalar": torch.tensor(-0.0, device=device),
        "empty": base[:0],
        "empty of three dimensions": torch.empty(3, 0, 2, device=device),
        "bool": base > 0,
        "int8": raw.view(torch.int8)[3:],
        "int64": torch.arange(3000, device=device),
        "fp64": base.double(),
        "fp16": base.half(),
        "complex": torch.complex(base, -base),
        "conjugate": torch.complex(base, -base).conj(),
        "fp8": base.to(torch.float8_e4m3fn),
        "fp8 of another kind": base.to(torch.float8_e5m2)[1:],
    }
    ones = {"column": base[:1, 0], "of a transposed": base.t()[:1, :1], "every second": base[0, :2][::2]}
    found |= {f"one element, {name}": x for name, x in ones.items()}
    return found | {f"bytes from {at}": raw[at : at + 9001 + at] for at in range(5)}


def test_tree_digest_takes_every_type_stride_and_offset():
    for name, digest in tree_digests(views().items()):
        x = views()[name].resolve_conj()
        x = torch.stack(list(x.reshape(-1))) if 0 < x.numel() < 9 else x.clone(memory_format=torch.contiguous_format)
        data = x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
        assert digest == defined(data), name
        assert tensor_digest(views()[name]) == hashlib.sha256(data).hexdigest(), name


@pytest.mark.parametrize(
    "dtype", [getattr(torch, x) for x in ("float4_e2m1fn_x2", "float8_e8m0fnu", "bits8") if hasattr(torch, x)]
)
def test_types_whose_elements_torch_does_not_copy_have_the_digest_of_their_bytes(dtype):
    raw = some_bytes(64 * 129).view(64, 129)
    for x in (raw, raw.t(), raw[::3, 5::2], raw[:1].expand(40, 129), raw[5:6, 7:8]):
        data = x.contiguous().numpy().tobytes()
        assert tree_digests([("x", x.view(dtype))]) == [("x", defined(data))]
        assert tensor_digest(x.view(dtype)) == hashlib.sha256(data).hexdigest()


def noticed(x: torch.Tensor) -> None:
    """A bit in every kind of place, a swap of chunks, a byte more or less: all are told apart."""
    places = sorted({*range(70), 4095, 4096, 4097, 8191, 8192, x.numel() - 65, x.numel() - 2, x.numel() - 1})
    cases = {"itself": x, "shorter": x[:-1], "longer": torch.cat([x, x.new_zeros(1)]), "nothing": x[:0]}
    for place in places:
        y = x.clone()
        y[place] ^= 1 << (place % 8)
        cases[f"bit at {place}"] = y
    y = x.clone()
    y[:4096], y[4096:8192] = x[4096:8192], x[:4096]
    cases["swapped"] = y
    cases |= {f"{n} zeros": torch.zeros(n, dtype=torch.uint8, device=x.device) for n in (1, 2, 4096, 4097, 8192)}
    # what a level hashes is no message of another length
    below = b"".join(hashlib.sha256(x[i : i + CHUNK].cpu().numpy()).digest() for i in range(0, x.numel(), CHUNK))
    cases["its own first level"] = torch.frombuffer(bytearray(below), dtype=torch.uint8).to(x.device)
    found = dict(tree_digests(cases.items()))
    assert len(set(found.values())) == len(cases)


def test_tree_digest_notices_a_bit_in_every_place():
    noticed(some_bytes(4 * 4096 + 77))


def test_tensors_without_bytes_are_refused_by_name():
    for bad, text in (
        (torch.empty(1, device="meta"), "x is a meta tensor"),
        (torch.eye(3).to_sparse(), "x is torch.sparse_coo"),
        (torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8), "x is quantized"),
        (torch.empty(2, dtype=torch.int4), "x is torch.int4"),  # type: ignore[attr-defined]
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "x is nested"),
        (None, "x is a NoneType"),
    ):
        for algorithm in ("sha256-tree",):
            with pytest.raises(ContractError, match=text):
                digests(algorithm, [("x", bad)])
        with pytest.raises(ContractError, match=text.removeprefix("x ")):
            tensor_digest(bad)


def test_an_unknown_digest_is_refused_by_name():
    for name in ("crc32", "words128", None):
        with pytest.raises(ContractError, match=rf"{name!r} is unknown, supported: sha256-tree, sha256"):
            digests(name, [])


def test_packages_do_not_need_triton():
    code = (
        "import sys, vime_sync, torch; vime_sync.tree_digests([('x', torch.ones(3))]); print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_a_gpus_tensor_without_triton_is_refused(monkeypatch):
    from vime_sync import tree

    monkeypatch.setitem(sys.modules, "vime_sync.triton_sha256", None)
    with pytest.raises(MissingSupport, match="needs Triton"):
        tree._Batch()


INTERPRETED = """
import hashlib
import torch
from vime_sync import tree, triton_sha256

data = torch.randint(0, 256, (1 << 12,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
data[:300] = 255
# every length of a first block and of a last one, chunk borders, trees of several levels, in one batch
sizes = [*range(201), 255, 256, 257, 1153]
tensors = [data[4 * (i % 50) :][:n].clone() if n else data[:0] for i, n in enumerate(sizes)]
found = triton_sha256.tops(tensors, 128)
for n, x, row in zip(sizes, tensors, found):
    raw = x.numpy().tobytes()
    assert row.numpy().tobytes() == tree.top(tree.level(raw, 128), 128), n
    if n <= 128:
        assert row.numpy().tobytes() == hashlib.sha256(raw).digest(), n

# a batch as of a GPU's tensors, one of which begins inside a word; launched in two parts
tree._BATCH = 75
batch, given = tree._Batch(), [data[:50], data[101:151], data[:0], data[300:355]]
for i, x in enumerate(given):
    batch.add(i, x)
assert [(i, tree.root(given[i].numel(), t)) for i, t in batch.tops()] == tree.tree_digests(enumerate(given))
print("interpreted")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter needs a process without a GPU")
def test_interpreted_kernel_is_hashlib(tmp_path):
    pytest.importorskip("triton")
    script = tmp_path / "interpreted.py"
    script.write_text(INTERPRETED)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "interpreted", done.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiling for another GPU needs a process without one")
@pytest.mark.parametrize("arch", ["sm90", "gfx942", "gfx950"])
def test_kernel_compiles_once_and_does_not_spill(arch):
    pytest.importorskip("triton")
    from rl_contract.dry_run import SHARED_LIMIT, no_gpu
    from vime_sync import triton_sha256

    with no_gpu(arch) as built:
        triton_sha256.tops([torch.empty(n, dtype=torch.uint8) for n in (300 * 4096, 3, 0)], CHUNK)
        triton_sha256.tops([torch.empty(16 * 4096, dtype=torch.uint8)] * 16, CHUNK)
    assert len(built) == 5
    for one in built:
        assert one.spilled == 0
        assert one.shared <= SHARED_LIMIT[arch]
    assert len({id(one.text) for one in built}) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestGpu:
    def test_digests_are_hashlibs(self):
        sizes = sorted({*range(201), *SIZES, *(n * 4096 + d for n in (1, 2, 127, 128, 129) for d in (-1, 1, 3))})
        host = {n: some_bytes(n, n) for n in sizes}
        assert tree_digests((n, x.cuda()) for n, x in host.items()) == tree_digests(host.items())

    def test_types_strides_and_offsets(self):
        assert tree_digests(views("cuda").items()) == tree_digests((n, x.cpu()) for n, x in views("cuda").items())

    def test_a_bit_in_every_place_is_noticed(self):
        noticed(some_bytes(4 * 4096 + 77).cuda())

    def test_large_tensors_and_unaligned_views(self):
        x = torch.randint(-(2**31), 2**31 - 1, (30_000_001,), dtype=torch.int32, device="cuda")
        raw = x.view(torch.uint8)
        cases = {at: raw[at : raw.numel() - 7 * at] for at in (0, 1, 2, 3, 4, 5, 8, 9)}
        found = tree_digests(cases.items())
        assert found == tree_digests((n, x.cpu()) for n, x in cases.items())
        raw[raw.numel() - 60] ^= 4
        after = tree_digests(cases.items())
        # only views that end before it do not see it
        assert [a == b for a, b in zip(found, after)] == [7 * at > 59 for at in cases]

    def test_batches_and_mixed_devices_keep_the_order(self, monkeypatch):
        monkeypatch.setattr("vime_sync.tree._BATCH", 10_000)
        host = [(i, some_bytes(1000 * i + i, i)) for i in range(40)]
        mixed = [(i, x.cuda() if i % 3 else x) for i, x in host]
        assert tree_digests(mixed) == tree_digests(host)

    def test_a_manifest_of_a_gpus_tensors_is_that_of_the_hosts(self):
        x = torch.randn(300, 257, generator=torch.Generator().manual_seed(3))
        host = {"a": x, "b": x.bfloat16().t(), "c": x[:0], "d": x[:, 5:200].bfloat16()}
        mixed = {n: t.cuda() if n != "b" else t for n, t in host.items()}
        assert Manifest.from_tensors(mixed) == Manifest.from_tensors(host)
        assert Manifest.from_tensors(mixed, algorithm="sha256") == Manifest.from_tensors(host, algorithm="sha256")
        mixed["d"][3, 3], mixed["d"][299, 1] = float("nan"), -float("inf")
        with pytest.raises(ContractError, match="d holds 2 NaN or infinite values"):
            Manifest.from_tensors(mixed)

    def test_more_than_two_gib(self):
        x = torch.zeros((1 << 31) + 4099, dtype=torch.uint8, device="cuda")
        x[-1] = 1
        first = dict(tree_digests([("x", x)]))
        x[(1 << 31) + 1] = 1
        second = dict(tree_digests([("x", x)]))
        x[(1 << 31) + 1] = 0
        assert second != first == dict(tree_digests([("x", x)])) == dict(tree_digests([("x", x.cpu())]))
