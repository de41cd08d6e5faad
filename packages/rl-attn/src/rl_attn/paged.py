"""The paged key/value cache as two strided views, and the layouts of engines by name."""

from dataclasses import dataclass

import torch

from rl_attn.checks import require_indices
from rl_contract import ContractError, memory
from rl_contract.checks import require_tensor, whole_number

LAYOUTS = ("vllm_cpu", "vllm_split")


@dataclass(frozen=True)
class PagedKV:
    """Keys and values, each a view ``[num_blocks, Hkv, block_size, D]`` with unit stride along D; any other strides.

    Raises:
        ContractError: shapes, dtypes or devices of the two differ, D is not contiguous, or two elements of them
            share a place.
    """

    k: torch.Tensor
    v: torch.Tensor

    def __post_init__(self) -> None:
        k, v = self.k, self.v
        if not (isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
            raise ContractError(f"PagedKV got {type(k).__name__} and {type(v).__name__}; supported: two tensors")
        require_tensor("PagedKV", "k", k)
        require_tensor("PagedKV", "v", v)
        if k.dim() != 4 or k.shape != v.shape or k.dtype != v.dtype or k.device != v.device:
            raise ContractError(
                f"PagedKV got k {tuple(k.shape)} {k.dtype} {k.device} and v {tuple(v.shape)} {v.dtype} {v.device}; "
                "supported: two [num_blocks, Hkv, block_size, D] views of one dtype and device"
            )
        if k.shape[2] < 1:
            raise ContractError(
                f"PagedKV got pages of {k.shape[2]} tokens in {tuple(k.shape)}; supported: a block_size of 1 or more, "
                "take the engine's"
            )
        if k.numel() and (k.stride(3) != 1 or v.stride(3) != 1):
            raise ContractError(
                f"PagedKV got strides {k.stride()} and {v.stride()}; head_dim must have stride 1, permute the view"
            )
        if not (memory.known(k) and memory.known(v)):
            return
        if not memory.apart(k.shape, k.element_size(), k.data_ptr(), k.stride(), v.data_ptr(), v.stride()):
            raise ContractError(
                f"PagedKV got k {tuple(k.shape)} with strides {k.stride()} and v with {v.stride()}, in which elements "
                "share memory; supported: a place of its own for every element of both, make the cache with torch.empty"
            )

    def refuse_overlap(self, where: str, **tensors: torch.Tensor) -> None:
        """Raises ContractError naming the first of ``tensors`` that lies in the memory of the cache."""
        if not memory.known(self.k):
            return
        own = {self.k.untyped_storage().data_ptr(), self.v.untyped_storage().data_ptr()}
        for name, x in tensors.items():
            # what lies in other storages needs no closer look, and that is nearly everything
            if x.untyped_storage().data_ptr() not in own:
                continue
            if memory.overlap(x, self.k) or memory.overlap(x, self.v):
                raise ContractError(
                    f"{where} got {name} {tuple(x.shape)} in the memory of the cache; supported: memory apart from it, "
                    f"pass {name}.clone(), or a buffer of its own where it is an output"
                )

    @property
    def num_blocks(self) -> int:
        return self.k.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def block_size(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]

    @classmethod
    def from_layout(cls, layout: str, cache: torch.Tensor, *, num_kv_heads: int, head_dim: int) -> "PagedKV":
        """View an engine's cache by the name of its layout; nothing is copied, nothing is guessed from a shape.

        ``vllm_cpu``: ``[num_blocks, Hkv, block_size, 2*D]``, keys in ``[..., :D]``, values in ``[..., D:]``.
        ``vllm_split``: ``[2, num_blocks, block_size, Hkv, D]``, keys first (vLLM 0.24).
        """
        if layout == "vllm_cpu":
            return cls.from_vllm_cpu(cache, num_kv_heads=num_kv_heads, head_dim=head_dim)
        if layout == "vllm_split":
            return cls.from_vllm_split(cache, num_kv_heads=num_kv_heads, head_dim=head_dim)
        raise ContractError(f"PagedKV got layout {layout!r}; supported: {LAYOUTS}, or pass two views to PagedKV(k, v)")

    @classmethod
    def from_vllm_cpu(cls, cache: torch.Tensor, *, num_kv_heads: int, head_dim: int) -> "PagedKV":
        """``[num_blocks, Hkv, block_size, 2*D]``: a token's key, then its value."""
        _require_cache("vllm_cpu", cache, num_kv_heads, head_dim)
        if cache.dim() != 4 or cache.shape[1] != num_kv_heads or cache.shape[3] != 2 * head_dim:
            raise ContractError(
                f"layout 'vllm_cpu' got {tuple(cache.shape)}; supported: "
                f"[num_blocks, {num_kv_heads}, block_size, {2 * head_dim}]"
            )
        return cls(cache[..., :head_dim], cache[..., head_dim:])

    @classmethod
    def from_vllm_split(cls, cache: torch.Tensor, *, num_kv_heads: int, head_dim: int) -> "PagedKV":
        """``[2, num_blocks, block_size, Hkv, D]``: all keys, then all values."""
        _require_cache("vllm_split", cache, num_kv_heads, head_dim)
        if cache.dim() != 5 or cache.shape[0] != 2 or cache.shape[3] != num_kv_heads or cache.shape[4] != head_dim:
            raise ContractError(
                f"layout 'vllm_split' got {tuple(cache.shape)}; supported: "
                f"[2, num_blocks, block_size, {num_kv_heads}, {head_dim}]"
            )
        return cls(cache[0].permute(0, 2, 1, 3), cache[1].permute(0, 2, 1, 3))


def _require_cache(layout: str, cache: torch.Tensor, num_kv_heads: int, head_dim: int) -> None:
    require_tensor(f"layout {layout!r}", "cache", cache)
    if not (whole_number(num_kv_heads) and whole_number(head_dim)):
        raise ContractError(
            f"layout {layout!r} got num_kv_heads={num_kv_heads!r}, head_dim={head_dim!r}; supported: integers, those "
            "of the model on this rank"
        )


def check_paged(
    cache: PagedKV, *, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor
) -> None:
    """Look at the values that ``attention_paged`` on a GPU takes on trust: once a step, or after an output of NaN.

    Raises:
        ContractError: no PagedKV, shapes, dtypes, or the first row start, length or page id that the cache or the table
            does not hold.
    """
    if not isinstance(cache, PagedKV):
        raise ContractError(
            f"check_paged got cache as {type(cache).__name__}; supported: a PagedKV, make one with PagedKV.from_layout"
        )
    require_indices("check_paged", query_start_loc=query_start_loc, seq_lens=seq_lens, block_table=block_table)
    requests = seq_lens.numel()
    tables = block_table.dim() == 2 and block_table.shape[0] == requests
    if seq_lens.dim() != 1 or query_start_loc.shape != (requests + 1,) or not tables:
        raise ContractError(
            f"check_paged got seq_lens {tuple(seq_lens.shape)}, query_start_loc {tuple(query_start_loc.shape)}, "
            f"block_table {tuple(block_table.shape)}; supported: [requests], [requests + 1], [requests, pages]"
        )
    starts, lens, table = (x.to("cpu", torch.int64) for x in (query_start_loc, seq_lens, block_table))
    if int(starts[0]) != 0:
        raise ContractError(
            f"attention_paged got query_start_loc[0]={int(starts[0])}; supported: a query_start_loc that starts at 0, "
            "rows before it belong to no request"
        )
    rows = starts.diff()
    entries = torch.arange(table.shape[1])
    needed = (entries[None, :] < (lens[:, None] + cache.block_size - 1) // cache.block_size) & (rows[:, None] > 0)
    unknown = needed & ((table < 0) | (table >= cache.num_blocks))
    for bad, what, supported in (
        (rows < 0, "a negative number of rows", "query_start_loc that never falls"),
        (lens < rows, "fewer keys than rows", "seq_lens that count context plus queries"),
        (lens > table.shape[1] * cache.block_size, "more keys than its table holds", "a wider block_table"),
        (unknown.any(1), "a page id outside the cache", f"ids 0 to {cache.num_blocks} - 1"),
    ):
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            raise ContractError(
                f"attention_paged got {what} in request {at} (rows {int(rows[at])}, keys {int(lens[at])}, "
                f"pages {table[at][needed[at]].tolist()[:16]}); supported: {supported}"
            )
