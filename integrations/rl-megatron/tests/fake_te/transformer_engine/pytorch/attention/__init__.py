from . import rope

__all__ = ["rope"]
