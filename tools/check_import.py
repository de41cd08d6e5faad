"""Import a package and prove that no engine came along: ``python check_import.py rl_logprob``."""

import argparse
import importlib
import importlib.util
import sys

FOREIGN = ("vllm", "megatron", "ray", "triton")


def main(arguments: list[str] | None = None) -> None:
    """Exit with the engines' names where one was loaded or, but for Triton, is installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", help="import name, as rl_logprob")
    name = parser.parse_args(arguments).package
    try:
        importlib.import_module(name)
    except (ImportError, ValueError, TypeError) as error:
        sys.exit(f"{name} cannot be imported ({error}); give the import name of a package that is installed here")
    loaded = sorted(m for m in FOREIGN if m in sys.modules)
    present = sorted(m for m in FOREIGN if importlib.util.find_spec(m))
    if loaded or set(present) - {"triton"}:
        sys.exit(f"{name}: engines loaded {loaded}, engines installed {present}; expected none")
    print(f"{name} imports alone; engines installed: {present or 'none'}")


if __name__ == "__main__":
    main()
