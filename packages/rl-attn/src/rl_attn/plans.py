"""Frozen launch choices: which tile serves which (kernel, head_dim, rows). Read from ``plans/*.json``, never timed.

A plan can only choose among things that leave the bits alone. Key tile, segment and whatever regroups a sum in the
matrix unit are no fields of a plan, and a file that asks for one is rejected by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_contract import ContractError
from rl_contract.plans import PlanFiles, build, check_fields, limit_problems, refuse_fields
from rl_contract.profile import ARCHS

GENERIC = "generic"
KERNELS = ("forward", "paged", "segments", "fold", "grad_queries", "grad_keys")
MAX_HEAD_DIM = 256
FORBIDDEN = (
    "key_tile", "segment", "kpack", "matrix_instr_nonkdim", "input_precision", "allow_tf32", "max_num_imprecise_acc",
    "enable_fp_fusion", "fp_fusion", "acc_dtype", "num_splits",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """Launch shape of ``kernel`` for heads up to ``head_dim`` and up to ``rows`` query rows a sequence (0: any number).

    ``rows`` counts (sequence, kv head, segment) for ``segments``, segments of a row for ``fold``, keys of a sequence
    for ``grad_keys``.

    block_m: query rows a program holds. block_n: keys a backward program holds or takes at a time. programs: persistent
    programs per processor (segments), unroll: segments in flight (fold). specialised: ``triton_hopper`` (forward and
    paged), ``triton_hopper_decode`` (segments), ``triton_hopper_fold`` (fold).
    """

    kernel: str
    head_dim: int
    rows: int = 0
    block_m: int = 0
    block_n: int = 0
    warps: int
    stages: int = 1
    programs: int = 0
    unroll: int = 0
    max_registers: int = 0
    specialised: bool = False

    def __post_init__(self) -> None:
        problems = []
        if self.kernel not in KERNELS:
            problems.append(f"kernel={self.kernel!r}, supported: {KERNELS}")
        for name in ("block_m", "block_n", "warps", "unroll"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0 or value & (value - 1):
                problems.append(f"{name}={value!r}, supported: powers of two")
        if 0 < self.block_m < 16 or 0 < self.block_n < 16:
            problems.append("blocks below 16 do not fill the matrix unit")
        if self.warps < 1 or self.stages < 1:
            problems.append("warps and stages start at 1")
        needed = {"fold": (), "grad_queries": ("block_m", "block_n"), "grad_keys": ("block_m", "block_n")}
        needed |= {"segments": ("block_m", "programs")}
        if self.kernel == "fold" and not self.specialised:
            needed |= {"fold": ("unroll",)}
        problems += [
            f"{name}=0, supported for kernel={self.kernel}: from 1"
            for name in ("head_dim", *needed.get(self.kernel, ("block_m",)))
            if not getattr(self, name)
        ]
        if self.head_dim % 8 or self.head_dim > MAX_HEAD_DIM:
            problems.append(f"head_dim={self.head_dim}, supported: multiples of 8 up to {MAX_HEAD_DIM}, as heads are")
        problems += limit_problems(self)
        if problems:
            raise ContractError(f"plan {self}: " + "; ".join(problems))

    @property
    def name(self) -> str:
        parts = (("m", self.block_m), ("n", self.block_n), ("w", self.warps), ("s", self.stages), ("u", self.unroll))
        return self.kernel + "-" + "".join(f"{letter}{value}" for letter, value in parts if value)


@dataclass(frozen=True, kw_only=True)
class Plans:
    """One plan file. Rows are asked in order; the first that is wide enough serves."""

    arch: str
    rows: tuple[Row, ...]

    def choose(self, kernel: str, head_dim: int, rows: int = 0, *, specialised: bool = False) -> Row:
        """The first row that fits; rows for specialised warps only where the call allows them."""
        for row in self.rows:
            fits = row.kernel == kernel and head_dim <= row.head_dim and (row.rows == 0 or rows <= row.rows)
            if fits and specialised >= row.specialised:
                return row
        raise ContractError(
            f"no plan of {self.arch} fits {kernel} with head_dim={head_dim}; add a row to the plan file"
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "plan file") -> "Plans":
        """Check and build.

        Raises:
            ContractError: an unknown or forbidden field, one that is missing or of another type, or a kernel without
                a row for every call.
        """
        types = {"arch": str, "rows": list}
        if isinstance(data, Mapping):
            refuse_fields(data, types, FORBIDDEN, where)
        check_fields(data, types, types, where)
        supported = (*(arch for arch in ARCHS if arch != "cpu"), GENERIC)
        if data["arch"] not in supported:
            raise ContractError(f"{where}: arch={data['arch']!r}, supported: {supported}")
        rows = tuple(build(Row, row, FORBIDDEN, f"{where}: row {row}") for row in data["rows"])
        for kernel in KERNELS:
            # the widest head that rl-attn takes, any number of rows, and nothing that a call must allow
            last = (r.kernel == kernel and r.head_dim >= MAX_HEAD_DIM and not (r.rows or r.specialised) for r in rows)
            if not any(last):
                raise ContractError(
                    f"{where}: {kernel} needs a row for every call: head_dim={MAX_HEAD_DIM}, rows=0, not specialised"
                )
        return cls(arch=data["arch"], rows=rows)


plan_files = PlanFiles("rl_attn", Plans.from_dict, fallback=GENERIC)
shipped = plan_files.shipped
use = plan_files.use
current = plan_files.current
read = plan_files.read
