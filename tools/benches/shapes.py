"""The weight shapes [N, K] that plans, certificates and benches are made for."""

MODELS = {
    # hidden, heads, kv heads, head_dim, ffn, vocab
    "qwen3-0.6b": (1024, 16, 8, 128, 3072, 151936),
    "qwen3-8b": (4096, 32, 8, 128, 12288, 151936),
    "qwen3-32b": (5120, 64, 8, 128, 25600, 151936),
}
COLUMN, ROW = "column", "row"
M_LIST = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def layers(model: str, tp: int = 1) -> dict[str, tuple[int, int, str]]:
    """name -> (N, K, kind) of one rank's shard."""
    hidden, heads, kv, dim, ffn, vocab = MODELS[model]
    return {
        "qkv": ((heads + 2 * kv) * dim // tp, hidden, COLUMN),
        "o": (hidden, heads * dim // tp, ROW),
        "gate_up": (2 * ffn // tp, hidden, COLUMN),
        "down": (hidden, ffn // tp, ROW),
        "lm_head": (vocab // tp, hidden, COLUMN),
    }


ODD = {"odd_n": (1000, 4096, COLUMN), "odd_k": (1024, 3000, COLUMN), "router": (128, 4096, COLUMN)}


def all_shapes() -> list[tuple[int, int]]:
    """Every distinct (N, K) of the models at TP 1 and 4, small ones first."""
    found = {(n, k) for model in MODELS for tp in (1, 4) for n, k, _ in layers(model, tp).values()}
    return sorted(found, key=lambda s: s[0] * s[1])
