"""Rotary positions and attention: one order for training, prefill, chunks and decode."""
