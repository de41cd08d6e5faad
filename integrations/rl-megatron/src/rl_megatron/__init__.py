"""The strict operators inside stock Megatron-core."""
