"""Vector pieces of the CPU GEMM as LLVM IR, for the parts a loop vectoriser cannot be trusted with.

Everything here is lane-wise: one lane is one output column, it multiplies and then adds (two instructions without the
`contract` flag, so never one FMA), and its k ascends. Wider or narrower machines split the 16-lane vectors; bits stay.
Addresses and strides are int64; addresses in bytes, strides in elements.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16
VECTORS = 4
COLUMNS = LANES * VECTORS

_F32 = ir.FloatType()
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_VF = ir.VectorType(_F32, LANES)
_VI16 = ir.VectorType(_I16, LANES)
_VI32 = ir.VectorType(_I32, LANES)


def _ptr(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    value = builder.load(_ptr(builder, address, kind))
    value.align = align
    return value


def _store(builder: Any, value: Any, address: Any, kind: Any) -> None:
    builder.store(value, _ptr(builder, address, kind)).align = 4


def _load_row(builder: Any, address: Any, bf16: bool) -> Any:
    """16 neighbours as fp32; a bf16 is the upper half of its fp32."""
    if not bf16:
        return _load(builder, address, _VF, 4)
    wide = builder.zext(_load(builder, address, _VI16, 2), _VI32)
    return builder.bitcast(builder.shl(wide, ir.Constant(_VI32, [16] * LANES)), _VF)


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """16 x 16 by four rounds of swapping off-diagonal blocks of 1, 2, 4 and 8."""
    for half in (1, 2, 4, 8):
        low = [i if not i & half else LANES + i - half for i in range(LANES)]
        high = [i + half if not i & half else LANES + i for i in range(LANES)]
        masks = [ir.Constant(_VI32, m) for m in (low, high)]
        swapped = list(rows)
        for i in range(LANES):
            if not i & half:
                swapped[i] = builder.shuffle_vector(rows[i], rows[i + half], masks[0])
                swapped[i + half] = builder.shuffle_vector(rows[i], rows[i + half], masks[1])
        rows = swapped
    return rows


def _step(builder: Any, count: int) -> Any:
    return ir.Constant(ir.IntType(64), count)


def _make_transpose(bf16: bool) -> Callable[..., Any]:
    size = 2 if bf16 else 4

    @intrinsic
    def transpose16(typingctx, source, stride, panel):
        """panel[k, 0:16] = source[0:16, k] for 16 k; rows of ``panel`` are COLUMNS apart."""

        def codegen(context, builder, signature, args):
            at, stride_, to = args
            jump = builder.mul(stride_, _step(builder, size))
            rows = []
            for _ in range(LANES):
                rows.append(_load_row(builder, at, bf16))
                at = builder.add(at, jump)
            for row in _transpose(builder, rows):
                _store(builder, row, to, _VF)
                to = builder.add(to, _step(builder, 4 * COLUMNS))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return transpose16


def _make_widen(bf16: bool) -> Callable[..., Any]:
    @intrinsic
    def widen64(typingctx, source, panel):
        """panel[0:64] = source[0:64] as fp32."""

        def codegen(context, builder, signature, args):
            source_, to = args
            for v in range(VECTORS):
                at = builder.add(source_, _step(builder, v * LANES * (2 if bf16 else 4)))
                _store(builder, _load_row(builder, at, bf16), builder.add(to, _step(builder, 4 * LANES * v)), _VF)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return widen64


def _make_tile(rows: int) -> Callable[..., Any]:
    @intrinsic
    def tile(typingctx, acc, a, a_row, a_k, panel, depth):
        """acc[r, 0:64] += sum over k ascending of a[r, k] * panel[k, 0:64], for ``rows`` rows; fp32, acc contiguous."""

        def codegen(context, builder, signature, args):
            acc_, a_, a_row_, a_k_, panel_, depth_ = args
            four = _step(builder, 4)
            row_bytes, k_bytes = builder.mul(a_row_, four), builder.mul(a_k_, four)
            cells = [
                [builder.add(acc_, _step(builder, 4 * (r * COLUMNS + v * LANES))) for v in range(VECTORS)]
                for r in range(rows)
            ]
            sums = [[cgutils.alloca_once(builder, _VF) for _ in range(VECTORS)] for _ in range(rows)]
            for r in range(rows):
                for v in range(VECTORS):
                    builder.store(_load(builder, cells[r][v], _VF, 4), sums[r][v])
            with cgutils.for_range(builder, depth_) as loop:
                at = builder.add(panel_, builder.mul(loop.index, _step(builder, 4 * COLUMNS)))
                columns = [
                    _load(builder, builder.add(at, _step(builder, 4 * LANES * v)), _VF, 4) for v in range(VECTORS)
                ]
                a_at = builder.add(a_, builder.mul(loop.index, k_bytes))
                for r in range(rows):
                    scalar = _load(builder, a_at, _F32, 4)
                    one = builder.insert_element(ir.Constant(_VF, ir.Undefined), scalar, ir.Constant(_I32, 0))
                    splat = builder.shuffle_vector(one, one, ir.Constant(_VI32, [0] * LANES))
                    for v in range(VECTORS):
                        total = builder.fadd(builder.load(sums[r][v]), builder.fmul(splat, columns[v]))
                        builder.store(total, sums[r][v])
                    a_at = builder.add(a_at, row_bytes)
            for r in range(rows):
                for v in range(VECTORS):
                    _store(builder, builder.load(sums[r][v]), cells[r][v], _VF)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return tile


transpose16_bf16, transpose16_f32 = _make_transpose(True), _make_transpose(False)
widen64_bf16, widen64_f32 = _make_widen(True), _make_widen(False)
tile1, tile2, tile3, tile4 = (_make_tile(r) for r in (1, 2, 3, 4))


@intrinsic
def read_f32(typingctx, address):
    """The fp32 at ``address``."""

    def codegen(context, builder, signature, args):
        return _load(builder, args[0], _F32, 4)

    return types.float32(types.int64), codegen


@intrinsic
def read_bf16(typingctx, address):
    """The bf16 at ``address`` as fp32."""

    def codegen(context, builder, signature, args):
        wide = builder.zext(_load(builder, args[0], _I16, 2), _I32)
        return builder.bitcast(builder.shl(wide, ir.Constant(_I32, 16)), _F32)

    return types.float32(types.int64), codegen


@intrinsic
def write_f32(typingctx, address, value):
    """Store an fp32 at ``address``."""

    def codegen(context, builder, signature, args):
        _store(builder, args[1], args[0], _F32)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen
