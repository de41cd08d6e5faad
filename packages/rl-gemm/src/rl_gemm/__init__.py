"""Linear layers and SwiGLU with a fixed order of addition."""
