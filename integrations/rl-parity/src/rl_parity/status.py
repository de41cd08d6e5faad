"""Exit statuses of ``rl-parity``, stated once."""

EQUAL, MISMATCH, USAGE, FAILURE, INTERRUPTED = 0, 1, 2, 3, 130
