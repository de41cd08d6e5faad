"""Frozen launch choices: which kernel serves which (operation, N, K, leaves, M). Read from ``plans/*.json``, never
timed at run time.

A plan can only choose among things that leave the bits alone. Anything that would move a k to another accumulator
(the leaf size,
``kpack``, ``matrix_instr_nonkdim``, split-K) is no field of a plan, and a file that asks for it is rejected by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rl_contract import ContractError
from rl_contract.plans import PlanFiles, build, check_fields, limit_problems, refuse_fields
from rl_gemm.contract import MATRIX_STEP

OPERATIONS = ("forward", "grad_input", "grad_weight")
# where no row names a kernel for it, the two operations run in turn
GATE_UP = "gate_up_swiglu"
KINDS = ("leaf", "tma", "tree", "hopper", "gated")
LIBRARY = "library"
UNFUSED = "unfused"
ANY_M = 2**62
FORBIDDEN = (
    "leaf", "leaf_k", "leaves_per_program", "split_k", "kpack", "matrix_instr_nonkdim", "input_precision", "allow_tf32",
    "max_num_imprecise_acc", "enable_fp_fusion", "fp_fusion", "token_block", "acc_dtype",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One launch shape. ``kind``: ``leaf`` (pointer loads, a program per tile and leaf), ``tma`` (the same work
    through the copy
    engine, persistent), ``tree`` (``tma``, with all leaves of a tile in one program), ``hopper`` (``tree`` in
    ``gluon_tree``; ``parts`` programs share the leaves of a tile) or ``gated`` (``triton_gate_up``; ``block_n``
    columns of gate and as many of up)."""

    kind: str
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 8
    swap: bool = False
    held: int = 0
    slices: int = 1
    per_sm: int = 1
    parts: int = 1

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in KINDS:
            problems.append(f"kind={self.kind!r}, supported: {', '.join(KINDS)}")
        for name in ("block_m", "block_n", "block_k", "warps", "slices", "parts"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1 or value & (value - 1):
                problems.append(f"{name}={value!r}, supported: powers of two")
        if not problems and (self.block_k < 16 or self.block_m < 16 or self.block_n < 16):
            problems.append("blocks below 16 do not fill the matrix unit")
        if self.stages < 1 or self.group_m < 1 or self.per_sm < 1:
            problems.append("stages, group_m and per_sm start at 1")
        if not 0 <= self.held <= 3:
            problems.append(f"held={self.held}, supported: 0 to 3 levels of finished sub-trees in registers")
        if self.parts > 1 and self.kind != "hopper":
            problems.append(f"parts={self.parts}, supported for kind=hopper only")
        if self.kind == "hopper" and not problems:
            problems += self._hopper_problems()
        problems += limit_problems(self)
        if problems:
            raise ContractError(f"plan kernel {self}: " + "; ".join(problems))

    def _hopper_problems(self) -> list[str]:
        shapes = (64, 128), (32, 64, 128, 256), (64, 128), (4, 8)
        given = self.block_m, self.block_n, self.block_k, self.warps
        if self.swap or any(value not in allowed for value, allowed in zip(given, shapes)):
            return ["kind=hopper has 64 or 128 rows, 32 to 256 columns, depth 64 or 128, 4 or 8 warps, and no swap"]
        if self.block_m * self.block_n > 64 * 32 * self.warps:
            return ["kind=hopper keeps up to 64 accumulators a thread, so that two sub-trees wait beside them"]
        return []

    @property
    def name(self) -> str:
        extra = "".join(
            (f"-g{self.group_m}" if self.group_m != 8 else "", "-swap" if self.swap else "",
             f"-h{self.held}" if self.held else "", f"-s{self.slices}" if self.slices > 1 else "", f"-x{self.per_sm}"
             if self.per_sm > 1 else "", f"-p{self.parts}" if self.parts > 1 else "")
        )  # fmt: skip
        return f"{self.kind}-{self.block_m}x{self.block_n}x{self.block_k}-{self.warps}w{self.stages}{extra}"

    def to_dict(self) -> dict[str, Any]:
        defaults = {f.name: f.default for f in fields(self)}
        return {k: v for k, v in vars(self).items() if v != defaults[k]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str) -> "Kernel":
        return build(cls, data, FORBIDDEN, where)


@dataclass(frozen=True, kw_only=True)
class Row:
    """For ``operation`` on weights [n, k] with ``leaves`` leaves on this rank: up to ``m`` rows (tokens), use ``use``.

    ``use`` is the name of a kernel, or ``library``, which needs a certificate; ``otherwise`` is the kernel taken
    without one. For ``gate_up_swiglu`` it may be ``unfused``, the two operations in turn. n = k = 0 matches every
    shape, leaves = 0 every count; a row that names them is preferred.
    """

    operation: str
    n: int
    k: int
    leaves: int
    m: int
    use: str
    otherwise: str = ""

    def __post_init__(self) -> None:
        problems = []
        if bool(self.n) != bool(self.k) or (self.n and not self.leaves):
            problems.append(f"n={self.n}, k={self.k}, leaves={self.leaves}, supported: all three from 1, or n = k = 0")
        if self.leaves & (self.leaves - 1):
            problems.append(f"leaves={self.leaves}, supported: 0 and powers of two")
        if not self.m:
            problems.append("m=0, supported: from 1")
        if not self.use:
            problems.append("use='', supported: a kernel or library")
        if self.otherwise == LIBRARY:
            problems.append("otherwise=library, supported: what needs no certificate, a kernel")
        if problems:
            raise ContractError("; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The library gave the contract's bits for every tested M of ``m_min`` to ``m_max``."""

    operation: str
    n: int
    k: int
    m_min: int
    m_max: int
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Claims of one run of ``tools/certify``, valid in exactly its environment."""

    library: str
    environment: Mapping[str, str]
    claims: tuple[Claim, ...]

    _index: Mapping[tuple[str, int, int], list[Claim]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        index: dict[tuple[str, int, int], list[Claim]] = {}
        for claim in self.claims:
            index.setdefault((claim.operation, claim.n, claim.k), []).append(claim)
        object.__setattr__(self, "_index", index)

    def covers(self, environment: Mapping[str, str], operation: str, n: int, k: int, m: int, bias: bool) -> bool:
        return any(
            c.m_min <= m <= c.m_max and (c.bias or not bias) for c in self._index.get((operation, n, k), ())
        ) and dict(environment) == dict(self.environment)


@dataclass(frozen=True, kw_only=True)
class Plans:
    """One plan file."""

    arch: str
    kernels: Mapping[str, Kernel]
    rows: tuple[Row, ...]
    certificates: tuple[Certificate, ...] = ()
    _index: Mapping[tuple[str, int, int, int], list[Row]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        index: dict[tuple[str, int, int, int], list[Row]] = {}
        for row in self.rows:
            index.setdefault((row.operation, row.n, row.k, row.leaves), []).append(row)
        for rows in index.values():
            rows.sort(key=lambda r: r.m)
        object.__setattr__(self, "_index", index)

    def choices(self, operation: str, n: int, k: int, leaves: int, m: int) -> list[str]:
        """Names in order of preference: this shape's row, then the rows for any shape; the last always runs."""
        found: list[str] = []
        for key in ((n, k, leaves), (0, 0, leaves), (0, 0, 0)):
            row = next((r for r in self._index.get((operation, *key), ()) if r.m >= m), None)
            if row is not None:
                found += [row.use, row.otherwise] if row.otherwise else [row.use]
        return found

    def certified(self, environment: Mapping[str, str], operation: str, n: int, k: int, m: int, bias: bool) -> bool:
        return any(c.covers(environment, operation, n, k, m, bias) for c in self.certificates)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "plan") -> "Plans":
        """Check and build.

        Raises:
            ContractError: an unknown or forbidden field, a use of a kernel that is not there, a missing fallback.
        """
        types = {"arch": str, "kernels": Mapping, "rows": list, "certificates": list, "note": str}
        if isinstance(data, Mapping):
            refuse_fields(data, types, FORBIDDEN, where)
        check_fields(data, types, ("arch", "kernels", "rows"), where)
        if data["arch"] not in MATRIX_STEP:
            raise ContractError(f"{where}: arch={data['arch']!r}, supported: {sorted(MATRIX_STEP)}")
        kernels = {}
        for name, spec in data["kernels"].items():
            kernels[name] = Kernel.from_dict(spec, f"{where}: kernel {name!r}")
            if kernels[name].name != name:
                raise ContractError(
                    f"{where}: kernel {name!r} describes {kernels[name].name!r}; names follow the fields"
                )
        rows = []
        for spec in data["rows"]:
            row = build(Row, spec, FORBIDDEN, f"{where}: row {spec}")
            if row.operation not in (*OPERATIONS, GATE_UP):
                raise ContractError(f"{where}: row {spec}: operation, supported: {(*OPERATIONS, GATE_UP)}")
            for name in (row.use, row.otherwise):
                if name == UNFUSED and row.operation == GATE_UP:
                    continue
                if name not in ("", LIBRARY) and name not in kernels:
                    raise ContractError(f"{where}: row {spec} uses a kernel that the file does not have: {name!r}")
                gated = name in kernels and kernels[name].kind == "gated"
                if name and gated != (row.operation == GATE_UP):
                    raise ContractError(f"{where}: row {spec}: {GATE_UP} takes gated kernels, and nothing else does")
            rows.append(row)
        for operation in OPERATIONS:
            last = [r for r in rows if r.operation == operation and (r.n, r.k, r.leaves) == (0, 0, 0)]
            if (
                not last
                or max(r.m for r in last) < ANY_M
                or any(r.use == LIBRARY or kernels[r.use].kind != "leaf" for r in last)
            ):
                raise ContractError(
                    f"{where}: {operation} needs rows of leaf kernels with n = k = leaves = 0 up to m={ANY_M}"
                )
        certificates = tuple(_certificate(c, where) for c in data.get("certificates", ()))
        return cls(arch=data["arch"], kernels=kernels, rows=tuple(rows), certificates=certificates)


def _certificate(data: Any, where: str) -> Certificate:
    where = f"{where}: certificate"
    types = {"library": str, "environment": Mapping, "claims": list}
    check_fields(data, types, types, where)
    refuse_fields(data, types, FORBIDDEN, where)
    claims = tuple(build(Claim, claim, FORBIDDEN, f"{where}: claim {claim}") for claim in data["claims"])
    for claim in claims:
        if claim.operation not in OPERATIONS:
            raise ContractError(f"{where}: claim {vars(claim)}: operation, supported: {OPERATIONS}")
        if not 1 <= claim.m_min <= claim.m_max or not (claim.n and claim.k):
            raise ContractError(f"{where}: claim {vars(claim)}: supported: n and k from 1, and 1 <= m_min <= m_max")
    environment = data["environment"]
    if not environment or not all(isinstance(value, str) for value in environment.values()):
        raise ContractError(
            f"{where}: environment={dict(environment)}, supported: the words by which tools/certify names a machine "
            "and its versions; certify again"
        )
    return Certificate(library=data["library"], environment=data["environment"], claims=claims)


plan_files = PlanFiles("rl_gemm", Plans.from_dict)
shipped = plan_files.shipped
use = plan_files.use
current = plan_files.current
read = plan_files.read
