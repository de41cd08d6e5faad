"""Collectives whose order of addition is fixed by rank."""
