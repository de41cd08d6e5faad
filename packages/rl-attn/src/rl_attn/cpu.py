"""Forward attention on the CPU, contract ``attention`` (segments): one kernel for packed, chunked and paged calls.

Scores are chains over head_dim; a tile adds its keys in ascending order onto the rescaled O, the row sum as one more
column of the same dot; a segment starts from the empty state; segments are folded left. Rounded: P to the value type,
O / l once, the output once. Only ``_gather`` knows where key j lies; a task is (sequence, block of rows, kv head).
"""

import numpy as np

from rl_attn.cpu_tiles import LN2_F32, NEG_INF, SUM_COLUMNS, add_rows, dot_tile, load_row
from rl_contract.arrays import narrow, widen
from rl_contract.jit import kernel
from rl_contract.primitives import exp2_f32, log_f32

ROWS_PER_TASK = 64


@kernel
def plan_tasks(cu_rows, rows_per_block):
    """[N, 3] int64: sequence, first row, row count, for every block of rows of every sequence."""
    count = 0
    for b in range(cu_rows.shape[0] - 1):
        count += (cu_rows[b + 1] - cu_rows[b] + rows_per_block - 1) // rows_per_block
    tasks = np.empty((count, 3), np.int64)
    n = 0
    for b in range(cu_rows.shape[0] - 1):
        for row in range(cu_rows[b], cu_rows[b + 1], rows_per_block):
            tasks[n, 0], tasks[n, 1] = b, row
            tasks[n, 2] = min(rows_per_block, cu_rows[b + 1] - row)
            n += 1
    return tasks


@kernel
def gather_tile(k, v, strides, starts, table, block_size, sequence, kv_head, first, count, k_columns, v_rows):
    """Keys first..first+count-1 of a sequence as fp32: k_columns[d, j], v_rows[j, d].

    strides: int64 [6], elements: block, head, token of k, then of v. block_size 0 means packed: key j is token
    starts[sequence] + j; otherwise it is token j % block_size of page table[sequence, j // block_size].
    """
    head_dim = k_columns.shape[0]
    for j in range(count):
        if block_size == 0:
            block, token = 0, starts[sequence] + first + j
        else:
            block = table[sequence, (first + j) // block_size]
            token = (first + j) % block_size
        k_at = block * strides[0] + kv_head * strides[1] + token * strides[2]
        v_at = block * strides[3] + kv_head * strides[4] + token * strides[5]
        k_row = k[k_at : k_at + head_dim]
        for d in range(head_dim):
            k_columns[d, j] = widen(k_row[d])
        load_row(v, v_at, v_rows[j], head_dim)


@kernel
def _attend_tile(q_row, k_columns, v_rows, count, c, v_like, m, o_row, s):
    """One tile onto the state (m, o_row) of one row; returns the new m. s is scratch of key_tile."""
    dot_tile(q_row, k_columns, s)
    tile = s.shape[0]
    for j in range(tile):
        s[j] = s[j] * c
    for j in range(count, tile):
        s[j] = NEG_INF
    # a maximum has no order; 16 lanes let it run on vectors
    top = np.full(16, m, np.float32)
    for j in range(0, tile, 16):
        lane = s[j : j + 16]
        for i in range(16):
            top[i] = lane[i] if lane[i] > top[i] else top[i]
    m_new = m
    for i in range(16):
        m_new = top[i] if top[i] > m_new else m_new
    for j in range(tile):
        x = s[j]
        p = exp2_f32(x - m_new)
        s[j] = widen(narrow(p if x != NEG_INF else np.float32(0.0), v_like[0]))
    alpha = exp2_f32(m - m_new) if m != NEG_INF else np.float32(0.0)
    for d in range(o_row.shape[0]):
        o_row[d] = o_row[d] * alpha
    add_rows(s, v_rows, 0, count, o_row)
    return m_new


@kernel
def _fold(total_m, total_row, m, o_row):
    """total = total (+) segment; returns the new maximum."""
    m_new = m if m > total_m else total_m
    a = exp2_f32(total_m - m_new) if total_m != NEG_INF else np.float32(0.0)
    b = exp2_f32(m - m_new) if m != NEG_INF else np.float32(0.0)
    for d in range(o_row.shape[0]):
        total_row[d] = total_row[d] * a + o_row[d] * b
    return m_new


@kernel
def attention_forward(
    q, q_strides, k, v, kv_strides, starts, table, block_size, positions, tasks, kv_heads, group, head_dim, c, key_tile,
    segment, out, lse, first_task, step,
):  # fmt: skip
    """Rows of tasks first_task, first_task + step, ...; returns the largest number of segments folded into a row.

    q: flat storage, q_strides int64 [2] (token, head). positions int64 [T]. out [T, Hq, D] storage type, lse fp32
    [T, Hq].
    """
    rows_max = 0
    for t in range(tasks.shape[0]):
        rows_max = max(rows_max, tasks[t, 2])
    wide = head_dim + SUM_COLUMNS
    rows = rows_max * group
    q_rows = np.empty((rows, head_dim), np.float32)
    m = np.empty(rows, np.float32)
    o = np.empty((rows, wide), np.float32)
    total_m = np.empty(rows, np.float32)
    total = np.empty((rows, wide), np.float32)
    k_columns = np.zeros((head_dim, key_tile), np.float32)
    v_rows = np.zeros((key_tile, wide), np.float32)
    v_rows[:, head_dim] = np.float32(1.0)
    s = np.empty(key_tile, np.float32)
    most_segments = 0

    for task in range(first_task, tasks.shape[0] * kv_heads, step):
        sequence, row0, count = tasks[task // kv_heads, 0], tasks[task // kv_heads, 1], tasks[task // kv_heads, 2]
        kv_head = task % kv_heads
        keys = 0
        for i in range(count):
            keys = max(keys, positions[row0 + i] + 1)
            for g in range(group):
                at = (row0 + i) * q_strides[0] + (kv_head * group + g) * q_strides[1]
                load_row(q, at, q_rows[i * group + g], head_dim)
        m[:] = NEG_INF
        o[:] = np.float32(0.0)
        total_m[:] = NEG_INF
        total[:] = np.float32(0.0)
        segments = 0

        for first in range(0, keys, key_tile):
            width = min(key_tile, keys - first)
            gather_tile(k, v, kv_strides, starts, table, block_size, sequence, kv_head, first, width, k_columns, v_rows)
            for i in range(count):
                visible = min(width, positions[row0 + i] + 1 - first)
                if visible > 0:
                    for r in range(i * group, (i + 1) * group):
                        m[r] = _attend_tile(q_rows[r], k_columns, v_rows, visible, c, v, m[r], o[r], s)
            if (first + key_tile) % segment == 0 or first + key_tile >= keys:
                segments += 1
                segment_start = first - first % segment
                for i in range(count):
                    if positions[row0 + i] >= segment_start:
                        for r in range(i * group, (i + 1) * group):
                            total_m[r] = _fold(total_m[r], total[r], m[r], o[r])
                            m[r] = NEG_INF
                            o[r, :] = np.float32(0.0)

        most_segments = max(most_segments, segments)
        for i in range(count):
            for g in range(group):
                r = i * group + g
                denominator = total[r, head_dim]
                row = out[row0 + i, kv_head * group + g]
                for d in range(head_dim):
                    # no visible weight at all (an empty row, or scores of -inf only) gives 0, not 0 / 0
                    x = total[r, d] / denominator if denominator != np.float32(0.0) else np.float32(0.0)
                    row[d] = narrow(x, row[d])
                lse[row0 + i, kv_head * group + g] = total_m[r] * LN2_F32 + log_f32(denominator)
    return most_segments


@kernel
def check_pages(cu_rows, seq_lens, table, block_size, num_blocks, tokens):
    """(code, where, value) of the first violation, code 0 if there is none; entries behind a length are not read."""
    requests = seq_lens.shape[0]
    if cu_rows[0] != 0:
        return 1, 0, cu_rows[0]
    if cu_rows[requests] != tokens:
        return 1, requests, cu_rows[requests]
    for b in range(requests):
        if cu_rows[b + 1] < cu_rows[b]:
            return 1, b + 1, cu_rows[b + 1]
        if seq_lens[b] < cu_rows[b + 1] - cu_rows[b]:
            return 2, b, seq_lens[b]
        if seq_lens[b] > table.shape[1] * block_size:
            return 3, b, seq_lens[b]
        # a request without queries reads nothing
        if cu_rows[b + 1] > cu_rows[b]:
            for page in range((seq_lens[b] + block_size - 1) // block_size):
                if table[b, page] < 0 or table[b, page] >= num_blocks:
                    return 4, b, table[b, page]
    return 0, 0, 0


@kernel
def paged_positions(cu_rows, seq_lens, tokens):
    """int64 [T]: the queries of a request are its last positions."""
    positions = np.empty(tokens, np.int64)
    for b in range(seq_lens.shape[0]):
        for row in range(cu_rows[b], cu_rows[b + 1]):
            positions[row] = seq_lens[b] - cu_rows[b + 1] + row
    return positions


@kernel
def write_slots(x, x_strides, slots, cache, cache_strides, heads, block_size, head_dim):
    """cache[slot // block_size, head, slot % block_size] = x[token, head]; negative slots are skipped."""
    for t in range(slots.shape[0]):
        if slots[t] >= 0:
            for h in range(heads):
                source = t * x_strides[0] + h * x_strides[1]
                block, token = slots[t] // block_size, slots[t] % block_size
                at = block * cache_strides[0] + h * cache_strides[1] + token * cache_strides[2]
                cache[at : at + head_dim] = x[source : source + head_dim]
