"""The two errors every package raises; both messages name what was given, what is supported and what to do."""


class ContractError(ValueError):
    """An input, a setting or a layout that the contract does not cover."""


class MissingSupport(RuntimeError):
    """Something this call needs is not there: a device, a library, an engine hook."""
