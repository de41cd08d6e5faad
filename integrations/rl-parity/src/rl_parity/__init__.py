"""Runner, diagnostics and report: train and rollout, equal bit for bit."""
