"""vLLM plugin: the strict operators inside stock vLLM."""
