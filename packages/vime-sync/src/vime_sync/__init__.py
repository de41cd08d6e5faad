"""Policy timeline: weight manifests, versions, verified weight transfer."""
