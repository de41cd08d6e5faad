"""RMSNorm whose bits depend on the row alone."""
