"""Stands in for TransformerEngine 2.14 on a CPU: parameters as its constructors have them, computed by torch."""

from . import common, pytorch

__version__ = "2.14.1"
__all__ = ["common", "pytorch"]
