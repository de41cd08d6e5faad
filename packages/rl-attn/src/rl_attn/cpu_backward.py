"""Backward attention on the CPU, contract ``attention``: two passes, each output one fp32 chain, rounded once.

delta: chain over head_dim of dO * O. Queries pass: dQ adds its keys in ascending order, times scale. Keys pass: dV and
dK of a key add its queries in ascending position and, inside a position, heads of the group ascending; dK times scale.
p = exp2(s - lse * log2(e)) and dS = p * (dP - delta) stay fp32. Scratch is a few tiles a thread: no S x S buffer.
"""

import numpy as np

from rl_attn.cpu_tiles import LOG2E_F32, NEG_INF, add_rows, dot_tile, load_row
from rl_contract.arrays import narrow, widen
from rl_contract.jit import kernel
from rl_contract.primitives import exp2_f32

KEYS_PER_TASK = 64
ROWS_PER_BLOCK = 64


@kernel
def row_delta(grad_out, grad_strides, out, out_strides, head_dim, delta):
    """delta fp32 [T, H] = chain over head_dim of grad_out * out; both flat storages with strides (token, head)."""
    for t in range(delta.shape[0]):
        for h in range(delta.shape[1]):
            a = t * grad_strides[0] + h * grad_strides[1]
            b = t * out_strides[0] + h * out_strides[1]
            x, y = grad_out[a : a + head_dim], out[b : b + head_dim]
            total = np.float32(0.0)
            for d in range(head_dim):
                total = total + widen(x[d]) * widen(y[d])
            delta[t, h] = total
    return 0


@kernel
def _probabilities(q_row, grad_row, k_columns, v_columns, c, lse2, delta, p, ds):
    """p[j] and ds[j] of one row over one tile of keys, fp32."""
    dot_tile(q_row, k_columns, p)
    dot_tile(grad_row, v_columns, ds)
    for j in range(p.shape[0]):
        e = exp2_f32(p[j] * c - lse2)
        # a row whose every score is -inf has no weights
        p[j] = e if lse2 != NEG_INF else np.float32(0.0)
    for j in range(p.shape[0]):
        ds[j] = p[j] * (ds[j] - delta)


@kernel
def _load_columns(source, start, columns, j):
    row = source[start : start + columns.shape[0]]
    for d in range(columns.shape[0]):
        columns[d, j] = widen(row[d])


@kernel
def grad_queries(
    grad_out, q, k, v, strides, lse, delta, starts, positions, tasks, kv_heads, group, head_dim, c, scale, dq,
    first_task, step,
):  # fmt: skip
    """dq [T, Hq, D] of tasks (sequence, first row, rows) x kv head.

    Flat storages; strides int64 [8]: token and head of grad_out, q, k, v. starts: first key row of each sequence.
    """
    rows_max = 0
    for t in range(tasks.shape[0]):
        rows_max = max(rows_max, tasks[t, 2])
    q_rows = np.empty((rows_max * group, head_dim), np.float32)
    grad_rows = np.empty((rows_max * group, head_dim), np.float32)
    acc = np.empty((rows_max * group, head_dim), np.float32)
    k_columns = np.zeros((head_dim, KEYS_PER_TASK), np.float32)
    v_columns = np.zeros((head_dim, KEYS_PER_TASK), np.float32)
    k_rows = np.zeros((KEYS_PER_TASK, head_dim), np.float32)
    p = np.empty(KEYS_PER_TASK, np.float32)
    ds = np.empty(KEYS_PER_TASK, np.float32)

    for task in range(first_task, tasks.shape[0] * kv_heads, step):
        sequence, row0, count = tasks[task // kv_heads, 0], tasks[task // kv_heads, 1], tasks[task // kv_heads, 2]
        kv_head = task % kv_heads
        keys = 0
        for i in range(count):
            keys = max(keys, positions[row0 + i] + 1)
            for g in range(group):
                head = kv_head * group + g
                load_row(grad_out, (row0 + i) * strides[0] + head * strides[1], grad_rows[i * group + g], head_dim)
                load_row(q, (row0 + i) * strides[2] + head * strides[3], q_rows[i * group + g], head_dim)
        acc[:] = np.float32(0.0)
        for first in range(0, keys, KEYS_PER_TASK):
            width = min(KEYS_PER_TASK, keys - first)
            for j in range(width):
                token = starts[sequence] + first + j
                k_at = token * strides[4] + kv_head * strides[5]
                load_row(k, k_at, k_rows[j], head_dim)
                _load_columns(k, k_at, k_columns, j)
                _load_columns(v, token * strides[6] + kv_head * strides[7], v_columns, j)
            for i in range(count):
                visible = min(width, positions[row0 + i] + 1 - first)
                if visible > 0:
                    for g in range(group):
                        r, head = i * group + g, kv_head * group + g
                        lse2 = lse[row0 + i, head] * LOG2E_F32
                        _probabilities(
                            q_rows[r], grad_rows[r], k_columns, v_columns, c, lse2, delta[row0 + i, head], p, ds
                        )
                        add_rows(ds, k_rows, 0, visible, acc[r])
        for i in range(count):
            for g in range(group):
                row = dq[row0 + i, kv_head * group + g]
                for d in range(head_dim):
                    row[d] = narrow(acc[i * group + g, d] * scale, row[d])
    return 0


@kernel
def grad_keys(
    grad_out, q, k, v, strides, lse, delta, cu_rows, order, positions, key_positions, tasks, kv_heads, group, head_dim,
    c, scale, dk, dv, first_task, step,
):  # fmt: skip
    """dk, dv [Tk, Hkv, D] of tasks (sequence, first key row, keys) x kv head.

    order int64 [Tq]: query rows, ascending in position inside each sequence (cu_rows). key_positions int64 [Tk],
    ascending inside each sequence. strides as in ``grad_queries``.
    """
    rows_per_block = max(1, ROWS_PER_BLOCK // group)
    rows = rows_per_block * group
    q_rows = np.empty((rows, head_dim), np.float32)
    grad_rows = np.empty((rows, head_dim), np.float32)
    k_columns = np.zeros((head_dim, KEYS_PER_TASK), np.float32)
    v_columns = np.zeros((head_dim, KEYS_PER_TASK), np.float32)
    k_acc = np.empty((KEYS_PER_TASK, head_dim), np.float32)
    v_acc = np.empty((KEYS_PER_TASK, head_dim), np.float32)
    p = np.empty(KEYS_PER_TASK, np.float32)
    ds = np.empty(KEYS_PER_TASK, np.float32)
    # transposed, so that the weights of one key lie together
    p_of_key = np.empty((KEYS_PER_TASK, rows), np.float32)
    ds_of_key = np.empty((KEYS_PER_TASK, rows), np.float32)

    for task in range(first_task, tasks.shape[0] * kv_heads, step):
        sequence, key0, width = tasks[task // kv_heads, 0], tasks[task // kv_heads, 1], tasks[task // kv_heads, 2]
        kv_head = task % kv_heads
        for j in range(width):
            _load_columns(k, (key0 + j) * strides[4] + kv_head * strides[5], k_columns, j)
            _load_columns(v, (key0 + j) * strides[6] + kv_head * strides[7], v_columns, j)
        k_acc[:] = np.float32(0.0)
        v_acc[:] = np.float32(0.0)
        begin, end = cu_rows[sequence], cu_rows[sequence + 1]
        while begin < end and positions[order[begin]] < key_positions[key0]:
            begin += 1
        for block in range(begin, end, rows_per_block):
            count = min(rows_per_block, end - block)
            for i in range(count):
                row = order[block + i]
                for g in range(group):
                    r, head = i * group + g, kv_head * group + g
                    load_row(grad_out, row * strides[0] + head * strides[1], grad_rows[r], head_dim)
                    load_row(q, row * strides[2] + head * strides[3], q_rows[r], head_dim)
                    lse2 = lse[row, head] * LOG2E_F32
                    _probabilities(q_rows[r], grad_rows[r], k_columns, v_columns, c, lse2, delta[row, head], p, ds)
                    for j in range(width):
                        p_of_key[j, r] = p[j]
                        ds_of_key[j, r] = ds[j]
            first = 0
            for j in range(width):
                while first < count and positions[order[block + first]] < key_positions[key0 + j]:
                    first += 1
                add_rows(p_of_key[j], grad_rows, first * group, count * group, v_acc[j])
                add_rows(ds_of_key[j], q_rows, first * group, count * group, k_acc[j])
        for j in range(width):
            k_row, v_row = dk[key0 + j, kv_head], dv[key0 + j, kv_head]
            for d in range(head_dim):
                k_row[d] = narrow(k_acc[j, d] * scale, k_row[d])
                v_row[d] = narrow(v_acc[j, d], v_row[d])
    return 0
