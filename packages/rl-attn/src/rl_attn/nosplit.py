"""The family ``nosplit``: a library kernel, certified to give a row the same bits in every phase.

The contract names the library, its version and the digest of its file; a call loads exactly that file or is refused.
The order inside is the library's: one left fold over the whole row. The gradient is ours, from the library's O and LSE.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_attn import counting, gpu
from rl_attn.paged import PagedKV
from rl_contract import ContractError, MissingSupport
from rl_contract.opaque import opaque_op


@dataclass(frozen=True)
class Library:
    """One certified library file.

    Attributes:
        name, shipped_in: what it is, and the distribution whose wheel holds it.
        path: where the wheel has it.
        sha256: digest of the file; another build is another library.
        arch, head_dims, dtypes, pages: where it was certified.
        evidence: what the certification compared.
    """

    name: str
    shipped_in: str
    path: str
    sha256: str
    arch: str
    head_dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    pages: tuple[int, ...]
    evidence: str

    @property
    def id(self) -> str:
        return f"{self.name} of {self.shipped_in}, sha256 {self.sha256[:16]}, num_splits=1"


@cache
def certified() -> tuple[Library, ...]:
    """Every certified library, from ``plans/nosplit.json``."""

    data = json.loads((files("rl_attn") / "plans" / "nosplit.json").read_text())
    lists = ("head_dims", "dtypes", "pages")
    return tuple(Library(**{**row, **{name: tuple(row[name]) for name in lists}}) for row in data)


def library_for(arch: str) -> Library:
    """The certified library of an architecture.

    Raises:
        ContractError: none is certified there.
    """
    for library in certified():
        if library.arch == arch:
            return library
    raise ContractError(
        f"attention family 'nosplit' on {arch!r}: no certified library; certified: "
        f"{[(x.arch, x.id) for x in certified()]}; use 'segments'"
    )


_files: dict[str, Path] = {}


def use_file(path: Path | str) -> None:
    """Load the library from ``path`` instead of an installed wheel; its digest must be the certified one."""
    _files["path"] = Path(path)
    _load.cache_clear()


@cache
def _load(arch: str) -> Any:
    library = library_for(arch)
    found = _files.get("path")
    if found is None:
        package, _, rest = library.path.partition("/")
        spec = find_spec(package)
        for room in (spec.submodule_search_locations or []) if spec else []:
            if (Path(room) / rest).is_file():
                found = Path(room) / rest
    if found is None or not found.is_file():
        raise MissingSupport(f"nosplit needs {library.id}: no file {library.path}; install {library.shipped_in}")
    with found.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != library.sha256:
        raise MissingSupport(
            f"nosplit found {found.name} with sha256 {digest[:16]}, certified: {library.id}; install "
            f"{library.shipped_in}, or certify this build"
        )
    torch.ops.load_library(str(found))
    return torch.ops._vllm_fa3_C.fwd


def _check(q: Tensor) -> str:
    arch = gpu.arch(q.device.index or 0)
    library = library_for(arch)
    dtype = str(q.dtype).removeprefix("torch.")
    if q.shape[2] not in library.head_dims or dtype not in library.dtypes:
        raise ContractError(
            f"nosplit got head_dim={q.shape[2]}, {dtype}; certified: {library.head_dims}, {library.dtypes}; "
            "use 'segments'"
        )
    return arch


def check_page(library: Library, page: int) -> None:
    """Refuse page sizes without a certificate.

    Raises:
        ContractError: naming those that have one.
    """
    if page not in library.pages:
        raise ContractError(
            f"nosplit got pages of {page} tokens; certified: {library.pages}; choose such a block size, or use "
            "'segments'"
        )


def _forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, most_rows: int, most_keys: int, scale: float,
    key_starts: Tensor | None, keys: Tensor | None, table: Tensor | None, layout: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    arch = _check(q)
    out, lse, *partial = _load(arch)(
        q, k, v, None, None, None, None, starts, key_starts, None, None, keys, most_rows, most_keys, table, None, None,
        None, None, None, None, None, None, scale, True, -1, -1, 0.0, True, None, 1, None, 0, None, 1, 0, None,
    )  # fmt: skip
    gpu.record("attention", "rl_attn.nosplit", library_for(arch).id, layout)
    for counts in counting.places(q):
        if counts is not None:
            counts.fill_(_splits(partial))
    return out, lse.t()


def _splits(partial: list[Tensor | None]) -> int:
    """Splits that a call ran: the library hands back their results, ``[splits, ...]``, and nothing where it had one."""
    found = partial[0] if partial else None
    return 1 if found is None or found.numel() == 0 else found.shape[0]


def _int32(x: Tensor) -> Tensor:
    return x.to(torch.int32).contiguous()


def _library_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, positions: Tensor, most_rows: int,
    most_keys: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Packed rows, queries last in their sequence; out as q, lse fp32 [Tq, Hq]."""
    q, k, v = (gpu.unit_last(x) for x in (q, k, v))
    return _forward(
        q, k, v, _int32(cu_seqlens_q), most_rows, most_keys, scale, _int32(cu_seqlens_k), None, None, "packed"
    )


library_packed = opaque_op("rl_attn::library_packed", device_type="cuda")(_library_packed)


@library_packed.register_fake
def _(q, k, v, cu_seqlens_q, cu_seqlens_k, positions, most_rows, most_keys, scale):
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32).t()


def _context(ctx, inputs, output):
    q, k, v, cu_q, cu_k, positions, _, _, ctx.scale = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, positions)


def _backward(ctx, grad_out, grad_lse):
    from rl_attn.ops_backward import packed_gradients

    return *packed_gradients(ctx, grad_out), None, None, None, None, None, None


library_packed.register_autograd(_backward, setup_context=_context)


@opaque_op("rl_attn::library_paged", device_type="cuda")
def library_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor,
    most_rows: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Keys on pages; out as q, lse fp32 [Tq, Hq]. The library follows page ids without looking at them."""
    k, v = k_cache.permute(0, 2, 1, 3), v_cache.permute(0, 2, 1, 3)
    most = block_table.shape[1] * k_cache.shape[2]
    return _forward(
        gpu.unit_last(q), k, v, _int32(query_start_loc), most_rows, most, scale, None, _int32(seq_lens),
        _int32(block_table), "paged",
    )  # fmt: skip


@library_paged.register_fake
def _(q, k_cache, v_cache, query_start_loc, seq_lens, block_table, most_rows, scale):
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32).t()


def packed(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, positions: Tensor, scale: float, eager: bool = False
) -> Any:
    """``library_packed`` with the lengths that the library wants as numbers; ``eager``: without the op around it."""
    require_gpu("attention_packed", q)
    run = _library_packed if eager else library_packed
    return run(q, k, v, cu_q, cu_k, positions, q.shape[0], k.shape[0], scale)


def paged(
    q: Tensor,
    cache: PagedKV,
    starts: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    scale: float,
    most_rows: int | None = None,
) -> Any:
    """``library_paged``; ``most_rows`` bounds the queries of a request, all rows of the call where nobody knows."""
    require_gpu("attention_paged", q)
    check_page(library_for(_check(q)), cache.block_size)
    return library_paged(q, cache.k, cache.v, starts, seq_lens, table, most_rows or q.shape[0], scale)


def require_gpu(where: str, q: Tensor) -> None:
    if not q.is_cuda:
        raise MissingSupport(
            f"{where}: family 'nosplit' got tensors on {q.device.type!r}; it needs a GPU, use 'segments'"
        )
