"""From timings to a plan file: the fastest kernel of each cell whose bits were right; needs no GPU."""

import json
import sys

from command_line import read_json

from rl_contract import ContractError
from rl_gemm import plans

# of timings that hold no launch of a kernel: the library as it comes, without split-K, and two calls in turn
NO_KERNELS = {"default", "library", "pair"}
TIMING = {"operation", "n", "k", "leaves", "m", "use", "us"}


def _generic(copy_engine: bool) -> list[dict]:
    """Rows for shapes without timings of their own."""
    any_m = plans.ANY_M
    rows = []
    for operation in plans.OPERATIONS:
        steps = (
            (16, "leaf-16x64x128-4w5-swap"),
            (32, "leaf-32x64x128-4w5-swap"),
            (128, "leaf-64x64x64-4w5"),
            (any_m, "leaf-128x128x64-8w3"),
        )
        if operation != "forward":
            steps = ((64, "leaf-64x64x64-4w5"), (any_m, "leaf-128x128x64-8w3"))
        if not copy_engine:
            steps = ((32, "leaf-32x64x64-4w2"), (128, "leaf-64x64x64-4w2"), (any_m, "leaf-128x128x64-8w2"))
        rows += [_row(operation, 0, 0, 0, m, use) for m, use in steps]
        if not copy_engine:
            continue
        chain = ((128, "tma-64x64x128-4w5"), (any_m, "tma-128x128x64-8w5"))
        if operation == "forward":
            rows += [
                _row(operation, 0, 0, 1, 16, "tma-16x64x256-4w4-swap"),
                _row(operation, 0, 0, 1, 32, "tma-32x64x256-4w4-swap"),
            ]
        # without split-K the library is slow for few rows of a small weight, so Triton takes those
        rows += [_row(operation, 0, 0, 1, m, *((use,) if m <= 128 else (plans.LIBRARY, use))) for m, use in chain]
        for leaves in (2, 4, 8, 16) if operation != "grad_weight" else ():
            if operation == "forward":
                rows += [_row(operation, 0, 0, leaves, m, f"tree-{m}x64x256-4w4-swap-h3") for m in (16, 32)]
            rows.append(_row(operation, 0, 0, leaves, 128, "tma-64x64x128-4w5"))
            rows.append(_row(operation, 0, 0, leaves, 256, "tma-128x128x64-8w5"))
            many = ("hopper-128x128x64-8w5", "tree-128x128x64-4w3-s4-x2")
            rows.append(_row(operation, 0, 0, leaves, any_m, *many[leaves == 16 :]))
    return rows


def _row(operation, n, k, leaves, m, use, otherwise=""):
    row = {"operation": operation, "n": n, "k": k, "leaves": leaves, "m": m, "use": use}
    return row | {"otherwise": otherwise} if otherwise else row


def _by_shape(rows):
    found = {}
    for r in rows:
        found.setdefault((r["operation"], r["n"], r["k"], r["leaves"]), {})[r["m"]] = r
    return found


def _best(shape, m, found):
    """The row for ``m``: the fastest kernel, or the library or the unfused pair where they are as fast."""
    kernels = {use: us for use, us in found.items() if use not in NO_KERNELS}
    best = min(kernels, key=kernels.get)
    if shape[0] == plans.GATE_UP:
        return _row(*shape, m, best if kernels[best] < 0.99 * found["pair"] else plans.UNFUSED)
    if m > 32 and found.get("library", float("inf")) <= 1.01 * kernels[best]:
        return _row(*shape, m, plans.LIBRARY, best)
    return _row(*shape, m, best)


def _check_timings(file, rows):
    """End here where a row is no timing of a candidate, or there is none at all."""
    if not rows:
        sys.exit(f"{file} holds no timing; time again with a longer --budget, or leave the file out")
    for number, r in enumerate(rows):
        if not isinstance(r, dict) or not r.keys() >= TIMING:
            sys.exit(f"{file} has rows without {', '.join(sorted(TIMING))}; give files of tools/tune time")
        wrong = [name for name in ("n", "k", "leaves", "m") if type(r[name]) is not int or r[name] < 1]
        if type(r["us"]) not in (int, float) or not 0 < r["us"] < float("inf"):
            wrong.append("us")
        if r["operation"] not in (*plans.OPERATIONS, plans.GATE_UP):
            wrong.append("operation")
        try:
            if r["use"] not in NO_KERNELS:
                _kernel(r["use"])
        except (ContractError, ValueError, KeyError, IndexError, AttributeError, TypeError):
            wrong.append("use")
        if wrong:
            given = ", ".join(f"{name}={r[name]!r}" for name in wrong)
            sys.exit(f"{file}, row {number}: {given} is of no timing; give files of tools/tune time")


def _check_cells(times):
    """End here where a cell has no kernel to choose, or nothing to hold it against."""
    for shape, by_m in times.items():
        for m, found in by_m.items():
            if not found.keys() - NO_KERNELS:
                sys.exit(f"{shape} m={m} has timings of no kernel whose bits were right; time it again")
            if shape[0] == plans.GATE_UP and "pair" not in found:
                sys.exit(f"{shape} m={m} has no timing of the two calls in turn, use pair; time it again")


def select(args):
    """The fastest per shape and M; the library where it is within 1 %, because it adapts to every M between."""
    times, environment = {}, None
    for file in args.files:
        payload = read_json(file, environment=dict, differing=dict, rows=list)
        environment = payload["environment"]
        if not isinstance(environment.get("device"), str):
            sys.exit(f"{file} does not say which device it was timed on; give files of tools/tune time")
        bad = set(payload["differing"])
        _check_timings(file, payload["rows"])
        # clocks differ between runs, so a time counts as a multiple of the library's in the same run
        base = {
            (r["operation"], r["n"], r["k"], r["leaves"], r["m"]): r["us"]
            for r in payload["rows"]
            if r["use"] == "default"
        }
        for r in payload["rows"]:
            shape = (r["operation"], r["n"], r["k"], r["leaves"])
            if (*shape, r["m"]) not in base:
                sys.exit(f"{file} has no timing of the library, use default, at {shape} m={r['m']}")
            if f"{r['use']}:{r['leaves']}" not in bad:
                times.setdefault(shape, {}).setdefault(r["m"], {})[r["use"]] = r["us"] / base[*shape, r["m"]]
    _check_cells(times)
    old = read_json(args.out, rows=list, certificates=list) if args.out.exists() else None
    if old:
        _valid(old, f"{args.out} is no plan that can be changed")
    chosen = _by_shape(old["rows"] if old and args.keep else _generic(args.arch.startswith("sm")))
    for shape, by_m in sorted(times.items()):
        known = chosen.setdefault(shape, {})
        fresh = {m: _best(shape, m, found) for m, found in by_m.items()}
        top = max(fresh)
        if shape[0] == plans.GATE_UP:
            fresh[plans.ANY_M] = _row(*shape, plans.ANY_M, plans.UNFUSED)
        elif not known and top > 128:
            # for more rows than any timed, shapes with few timings keep to the rows for any shape
            last = fresh[top]
            if shape[0] == "forward" and shape[3] == 1 and last["use"] != plans.LIBRARY:
                last = _row(*shape, plans.ANY_M, plans.LIBRARY, last["use"])
            fresh[plans.ANY_M] = last | {"m": plans.ANY_M}
        known.update(fresh)
    rows = []
    for by_m in chosen.values():
        mine = [by_m[m] for m in sorted(by_m)]
        # neighbours that agree are one row
        rows += [r for r, after in zip(mine, [*mine[1:], None]) if after is None or {**r, "m": 0} != {**after, "m": 0}]
    used = {name for r in rows for name in (r["use"], r.get("otherwise"))}
    used = sorted(used - {None, plans.LIBRARY, plans.UNFUSED})
    plan = {
        "arch": args.arch,
        "note": f"chosen by tools/tune select from timings on {environment['device']}"
        if environment
        else "by rule, not timed",
        "kernels": {name: _kernel(name).to_dict() for name in used},
        "rows": rows,
        "certificates": [],
    }
    if old:
        plan["certificates"] = old["certificates"]
    _valid(plan, "no plan is written")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(dump(plan))
    cells = sum(len(by_m) for by_m in times.values())
    others = "as they were" if old and args.keep else "by rule, not timed"
    print(f"{args.out}: {len(rows)} rows, {cells} cells as timed, the others {others}")


def _valid(plan, otherwise):
    try:
        plans.Plans.from_dict(plan)
    except (ContractError, LookupError, TypeError, AttributeError) as error:
        sys.exit(f"{otherwise}: {type(error).__name__}: {error}")


def dump(plan):
    """One row, kernel and claim a line, so that a change of plan is a readable diff."""
    lines = ["{", f'"arch": {json.dumps(plan["arch"])},', f'"note": {json.dumps(plan["note"])},', '"kernels": {']
    lines += [",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in plan["kernels"].items()), "},", '"rows": [']
    lines += [",\n".join(f"  {json.dumps(r)}" for r in plan["rows"]), "],", '"certificates": [']
    blocks = []
    for c in plan["certificates"]:
        head = f'  {{"library": {json.dumps(c["library"])}, "environment": {json.dumps(c["environment"])}, "claims": ['
        blocks.append(head + "\n" + ",\n".join(f"    {json.dumps(claim)}" for claim in c["claims"]) + "\n  ]}")
    return "\n".join([*lines, ",\n".join(blocks), "]", "}", ""])


def _kernel(name):
    """The kernel that ``name`` spells."""
    kind, blocks, pipeline, *rest = name.split("-")
    m, n, k = map(int, blocks.split("x"))
    warps, stages = map(int, pipeline.split("w"))
    more = {}
    for part in rest:
        if part == "swap":
            more["swap"] = True
        else:
            more[{"g": "group_m", "h": "held", "s": "slices", "x": "per_sm", "p": "parts"}[part[0]]] = int(part[1:])
    return plans.Kernel(kind=kind, block_m=m, block_n=n, block_k=k, warps=warps, stages=stages, **more)
