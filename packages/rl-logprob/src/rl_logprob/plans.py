"""Frozen launch choices of the head: which kernel serves how many tokens. Read from ``plans/*.json``, never timed at
run time.

A plan can only choose among things that leave the bits alone. The tile of the vocabulary, the blocks of the gradients
and whatever would move a k to another accumulator are no fields of a plan, and a file that asks for one is rejected by
name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_contract import ContractError
from rl_contract.plans import PlanFiles, build, check_fields, limit_problems, refuse_fields
from rl_logprob.contract import GPU_ARCHS

OPERATIONS = ("stats", "gradient")
# logits in memory, a bounded number of ids at a time: the product is rl-gemm's, and so is its choice of library or
# kernel
MATERIALISED = "materialised"
ANY = 2**62
# rows of the largest block of logits: gradients of several blocks of ids lie whole blocks of rows apart
MAX_BLOCK_M = 256
FORBIDDEN = (
    "stat_tile", "vocab_tile", "grad_block", "token_block", "fixed_point_bits", "merge_bits", "split_k", "kpack",
    "matrix_instr_nonkdim", "input_precision", "allow_tf32", "max_num_imprecise_acc", "enable_fp_fusion",
    "fp_fusion", "acc_dtype",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One launch shape of the fused head. ``kind``: ``tma`` (persistent, copy engine) or ``pointer``."""

    kind: str
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 8
    per_sm: int = 1
    slices: int = 1

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in ("tma", "pointer"):
            problems.append(f"kind={self.kind!r}, supported: tma, pointer")
        for name in ("block_m", "block_n", "block_k", "warps", "slices"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1 or value & (value - 1):
                problems.append(f"{name}={value!r}, supported: powers of two")
        if not problems and (not 16 <= self.block_m <= MAX_BLOCK_M or self.block_k < 16 or self.block_n < 128):
            problems.append(f"a block holds 16 to {MAX_BLOCK_M} rows, at least 16 k and one tile of 128 ids")
        if self.stages < 1 or self.group_m < 1 or self.per_sm < 1:
            problems.append("stages, group_m and per_sm start at 1")
        problems += limit_problems(self)
        if problems:
            raise ContractError(f"plan kernel {self}: " + "; ".join(problems))

    @property
    def name(self) -> str:
        optional = (("g", self.group_m, 8), ("s", self.slices, 1), ("x", self.per_sm, 1))
        extra = "".join(f"-{letter}{value}" for letter, value, usual in optional if value != usual)
        return f"{self.kind}-{self.block_m}x{self.block_n}x{self.block_k}-{self.warps}w{self.stages}{extra}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """``operation`` with up to ``tokens`` tokens and rows of up to ``hidden`` elements: ``use`` a kernel or
    ``materialised``; ``otherwise`` where the copy engine cannot read the operands.
    """

    operation: str
    tokens: int
    hidden: int = ANY
    use: str
    otherwise: str = ""

    def __post_init__(self) -> None:
        problems = [f"{name}=0, supported: from 1" for name in ("tokens", "hidden") if not getattr(self, name)]
        if not self.use:
            problems.append(f"use='', supported: a kernel or {MATERIALISED}")
        if problems:
            raise ContractError("; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class Plans:
    """One plan file. Rows are asked in order; the first that is wide enough serves."""

    arch: str
    kernels: Mapping[str, Kernel]
    rows: tuple[Row, ...]

    def choose(self, operation: str, tokens: int, hidden: int, copy_engine: bool) -> str:
        """Name of a kernel, or ``materialised``."""
        for row in self.rows:
            if row.operation == operation and tokens <= row.tokens and hidden <= row.hidden:
                fits = row.use == MATERIALISED or copy_engine or self.kernels[row.use].kind != "tma"
                return row.use if fits else row.otherwise
        raise ContractError(f"no plan of {self.arch} fits {operation} with {tokens} tokens; add a row to the plan file")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "plan file") -> "Plans":
        """Check and build.

        Raises:
            ContractError: an unknown or forbidden field, a use of a kernel that is not there, a missing fallback.
        """
        types = {"arch": str, "kernels": Mapping, "rows": list, "note": str}
        if isinstance(data, Mapping):
            refuse_fields(data, types, FORBIDDEN, where)
        check_fields(data, types, ("arch", "kernels", "rows"), where)
        if data["arch"] not in GPU_ARCHS:
            raise ContractError(f"{where}: arch={data['arch']!r}, supported: {sorted(GPU_ARCHS)}")
        kernels = {}
        for name, spec in data["kernels"].items():
            kernels[name] = build(Kernel, spec, FORBIDDEN, f"{where}: kernel {name!r}")
            if kernels[name].name != name:
                raise ContractError(
                    f"{where}: kernel {name!r} describes {kernels[name].name!r}; names follow the fields"
                )
        rows = []
        for spec in data["rows"]:
            row = build(Row, spec, FORBIDDEN, f"{where}: row {spec}")
            if row.operation not in OPERATIONS:
                raise ContractError(f"{where}: row {spec}: operation, supported: {OPERATIONS}")
            for name in (row.use, row.otherwise):
                if name not in ("", MATERIALISED) and name not in kernels:
                    raise ContractError(f"{where}: row {spec} uses a kernel that the file does not have: {name!r}")
            names = (row.use, row.otherwise)
            copies = [name in kernels and kernels[name].kind == "tma" for name in names]
            if copies[0] and (copies[1] or not row.otherwise):
                raise ContractError(f"{where}: row {spec} needs an 'otherwise' that reads any stride")
            if row.otherwise and not copies[0]:
                raise ContractError(f"{where}: row {spec} has an 'otherwise' that nothing takes; leave it out")
            rows.append(row)
        for operation in OPERATIONS:
            if not any(r.operation == operation and r.tokens == ANY and r.hidden == ANY for r in rows):
                raise ContractError(f"{where}: {operation} needs a row with tokens={ANY}")
        return cls(arch=data["arch"], kernels=kernels, rows=tuple(rows))


plan_files = PlanFiles("rl_logprob", Plans.from_dict)
shipped = plan_files.shipped
use = plan_files.use
current = plan_files.current
read = plan_files.read
