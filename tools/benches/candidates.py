"""Launch shapes worth timing, by rows of output. ``tools/tune`` times them; the plan file keeps the best."""

from rl_gemm.plans import Kernel


def _k(kind: str, m: int, n: int, k: int, warps: int, stages: int, **more: int | bool) -> Kernel:
    return Kernel(kind=kind, block_m=m, block_n=n, block_k=k, warps=warps, stages=stages, **more)


def small(m: int) -> list[Kernel]:
    """Chains of up to 32 rows: bandwidth of the weight decides."""
    leaf = [
        (16, 256, 2, 4),
        (16, 512, 2, 3),
        (32, 128, 4, 6),
        (32, 256, 4, 4),
        (32, 256, 2, 4),
        (64, 64, 4, 8),
        (64, 128, 4, 5),
    ]
    leaf += [(64, 256, 4, 3), (128, 64, 4, 6), (128, 128, 4, 4), (128, 128, 8, 4)]
    swapped = [(64, 128, 4, 5), (64, 256, 4, 3), (128, 128, 8, 4)]
    tma = [
        (16, 256, 2, 4, 3),
        (32, 128, 4, 6, 2),
        (32, 256, 4, 4, 2),
        (64, 64, 4, 8, 2),
        (64, 128, 4, 5, 2),
        (64, 256, 4, 4, 1),
    ]
    tma += [(128, 64, 4, 6, 1), (128, 128, 4, 4, 1)]
    tma_swapped = [(64, 128, 4, 5, 2), (64, 256, 4, 4, 1), (128, 64, 4, 5, 2), (128, 128, 4, 5, 1), (128, 128, 8, 5, 1)]
    return (
        [_k("leaf", m, *spec) for spec in leaf]
        + [_k("leaf", m, *spec, swap=True) for spec in swapped]
        + [_k("tma", m, *spec[:4], per_sm=spec[4]) for spec in tma]
        + [_k("tma", m, *spec[:4], per_sm=spec[4], swap=True) for spec in tma_swapped]
    )


def middle() -> list[Kernel]:
    """64 to 1024 rows: enough programs to fill the GPU."""
    return [
        _k("leaf", 64, 32, 128, 4, 5),
        _k("leaf", 64, 64, 64, 4, 5),
        _k("leaf", 64, 128, 64, 4, 4),
        _k("tma", 64, 32, 128, 4, 5, per_sm=2),
        _k("tma", 64, 64, 64, 4, 6, per_sm=2),
        _k("tma", 64, 64, 128, 4, 5),
        _k("tma", 64, 128, 64, 4, 4, per_sm=2),
        _k("tma", 64, 128, 128, 4, 4),
        _k("tma", 128, 64, 64, 4, 6),
        _k("tma", 128, 128, 64, 8, 5),
        _k("tma", 128, 128, 64, 4, 3, per_sm=2),
        _k("tma", 64, 256, 64, 4, 4),
    ]


def large() -> list[Kernel]:
    return [
        _k("tma", 128, 128, 64, 8, 5),
        _k("tma", 128, 128, 64, 4, 3, per_sm=2),
        _k("tma", 128, 256, 64, 8, 3, slices=4),
        _k("tma", 128, 256, 64, 8, 4, slices=4),
        _k("tma", 256, 128, 64, 8, 3),
        _k("leaf", 128, 128, 64, 8, 3),
    ]


def trees(m: int) -> list[Kernel]:
    """All leaves of a tile in one program."""
    if m <= 32:
        block = 16 if m <= 16 else 32
        return [
            _k("tree", block, 64, 256, 4, 4, swap=True, held=3),
            _k("tree", block, 64, 128, 4, 5, swap=True, held=3, per_sm=2),
            _k("tree", block, 32, 256, 4, 4, held=3, per_sm=2),
            _k("tree", block, 16, 256, 2, 4, held=3, per_sm=3),
        ]
    small = [
        _k("tree", 64, 32, 128, 4, 5, held=3, per_sm=2),
        _k("tree", 64, 64, 128, 4, 5, held=3),
        _k("tree", 64, 64, 128, 4, 5, held=1),
        _k("tree", 64, 64, 64, 4, 5, held=2, per_sm=2),
        _k("tree", 128, 64, 64, 8, 5, held=3),
    ]
    large = [
        _k("hopper", 128, 128, 64, 8, 5),
        _k("hopper", 128, 128, 64, 8, 4),
        _k("hopper", 128, 128, 64, 8, 6),
        _k("hopper", 128, 128, 64, 8, 5, group_m=16),
        _k("hopper", 128, 128, 64, 8, 5, parts=2),
        _k("hopper", 128, 128, 64, 8, 5, parts=4),
        _k("hopper", 128, 128, 64, 8, 5, parts=8),
        _k("tree", 128, 256, 64, 8, 3, slices=4),
        _k("tree", 128, 128, 64, 4, 3, slices=4, per_sm=2),
        _k("tree", 64, 128, 64, 4, 4, slices=2, per_sm=2),
    ]
    return small + large if m <= 512 else large


def chains(m: int) -> list[Kernel]:
    """Candidates of a chain with ``m`` rows."""
    if m <= 16:
        return small(16)
    if m <= 32:
        return small(32)
    return middle() if m <= 512 else large()


def leaf_grids(m: int) -> list[Kernel]:
    """Candidates of several leaves on programs of their own."""
    if m <= 32:
        block = 16 if m <= 16 else 32
        wanted = {
            (32, 128, "leaf"),
            (64, 64, "leaf"),
            (64, 128, "leaf"),
            (128, 64, "leaf"),
            (64, 128, "tma"),
            (64, 64, "tma"),
            (128, 64, "tma"),
        }
        return [
            k for k in small(block) if (k.block_n, k.block_k, k.kind) in wanted and not (k.kind == "leaf" and k.swap)
        ]
    return [k for k in middle() if k.block_m * k.block_n >= 64 * 64]


def gated(m: int) -> list[Kernel]:
    """gate_up and SwiGLU in one kernel; ``block_n`` counts the columns of each half."""
    if m <= 32:
        rows = 16 if m <= 16 else 32
        swapped = [(64, 128, 4, 4, 1), (64, 128, 4, 5, 1), (64, 64, 4, 5, 2)]
        swapped += [(64, 256, 4, 3, 1), (64, 128, 4, 3, 2)] if rows == 16 else [(64, 256, 4, 2, 1)]
        plain = [(32, 256, 4, 4, 1), (32, 128, 4, 5, 2), (32, 128, 4, 3, 3), (32, 128, 2, 4, 2), (16, 256, 2, 3, 3)]
        return [_k("gated", rows, *s[:4], per_sm=s[4], swap=True) for s in swapped] + [
            _k("gated", rows, *s[:4], per_sm=s[4]) for s in plain
        ]
    if m <= 64:
        shapes = [(64, 32, 128, 4, 5, 1), (64, 32, 128, 4, 3, 2), (64, 32, 64, 4, 5, 2), (64, 64, 128, 4, 4, 1)]
        shapes += [(64, 64, 64, 4, 4, 2)]
    elif m <= 128:
        shapes = [(64, 64, 128, 4, 4, 1), (64, 64, 64, 4, 4, 2), (128, 32, 64, 4, 4, 2), (128, 64, 64, 8, 6, 1)]
        shapes += [(128, 64, 128, 8, 3, 1)]
    else:
        shapes = [(128, 64, 64, 8, 6, 1), (128, 64, 64, 4, 3, 2), (128, 128, 64, 8, 4, 1)]
    return [_k("gated", *s[:5], per_sm=s[5]) for s in shapes]


def short(leaves: int, m: int) -> list[Kernel]:
    """Small tiles for outputs too small to fill the GPU with the usual ones, where latency along K decides."""
    wide = [(64, 16, 256, 4, 4), (64, 16, 128, 4, 8), (64, 32, 256, 4, 3), (64, 32, 128, 4, 6), (32, 32, 256, 4, 4)]
    narrow = [(16, 16, 512, 2, 3), (16, 32, 256, 2, 4), (32, 16, 256, 2, 4), (32, 32, 256, 4, 3), (16, 64, 256, 4, 3)]
    found = [_k("tma", *spec) for spec in wide + narrow]
    found += [_k("leaf", *spec) for spec in narrow]
    found += [_k("tma", 16, 64, 256, 4, 4, swap=True), _k("tma", 32, 64, 256, 4, 3, swap=True)]
    found += [_k("tma", 16, 64, 128, 4, 8, swap=True), _k("tma", 32, 64, 128, 4, 6, swap=True)]
    if leaves > 1:
        found += [_k("tree", 64, 32, 256, 4, 3, held=3), _k("tree", 64, 32, 128, 4, 6, held=2)]
        found += [_k("tree", 64, 128, 64, 4, 4, held=2), _k("tree", 64, 128, 128, 4, 3, held=2)]
        found += [_k("tree", 64, 128, 64, 8, 4, held=3), _k("tree", 64, 64, 128, 4, 4, held=2, per_sm=2)]
        found += [_k("tree", 64, 16, 256, 4, 4, held=3), _k("tree", 128, 128, 64, 8, 4, held=2)]
        found += [_k("tree", 16, 64, 256, 4, 4, swap=True, held=3), _k("tree", 32, 64, 256, 4, 3, swap=True, held=3)]
    return found + (chains(m) if leaves == 1 else leaf_grids(m) + trees(m))


def pipelined(m: int) -> list[Kernel]:
    """One wave of small tiles, fed by a warp that only loads, for 64 to 256 rows; deep pipelines for fewer."""
    if m <= 16:
        # few outputs of a long chain: the latency of its matrix steps, and loads far ahead
        narrow = [(16, 256, 2, 6), (16, 128, 2, 12), (16, 256, 1, 6), (16, 512, 1, 3), (32, 256, 4, 5), (32, 128, 2, 8)]
        swapped = [(64, 128, 4, 10), (64, 64, 4, 16), (64, 256, 4, 5)]
        return [_k("tma", 16, *spec) for spec in narrow] + [_k("tma", 16, *spec, swap=True) for spec in swapped]
    if m <= 64:
        return [
            _k("hopper", 64, 32, 128, 4, 8),
            _k("hopper", 64, 32, 64, 4, 16),
            _k("hopper", 64, 32, 64, 4, 8, per_sm=2),
            _k("hopper", 64, 64, 128, 4, 6, parts=2),
            _k("hopper", 64, 64, 64, 4, 12, parts=2),
            _k("hopper", 64, 128, 64, 8, 8, parts=4),
        ]
    if m <= 128:
        return [
            _k("hopper", 64, 64, 128, 4, 6),
            _k("hopper", 64, 64, 64, 4, 12),
            _k("hopper", 128, 32, 64, 4, 10),
            _k("hopper", 128, 64, 64, 8, 8, parts=2),
            _k("hopper", 64, 128, 64, 8, 8, parts=2),
        ]
    return [
        _k("hopper", 128, 64, 64, 8, 8),
        _k("hopper", 128, 64, 64, 4, 8),
        _k("hopper", 128, 64, 128, 8, 4),
        _k("hopper", 64, 128, 64, 8, 8),
        _k("hopper", 64, 128, 128, 8, 4),
        _k("hopper", 128, 128, 64, 8, 6, parts=2),
    ]


def sharded(m: int) -> list[Kernel]:
    """Chains of a rank's part of a layer: for few rows its usual tiles are too few to fill the GPU."""
    found = chains(m)
    if m <= 256:
        found = found + short(1, m) + [k for k in pipelined(m) if k.parts == 1]
    return list(dict.fromkeys(found))
