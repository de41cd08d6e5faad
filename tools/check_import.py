"""Import a package and prove that no engine came along: ``python check_import.py rl_logprob``."""

import importlib
import importlib.util
import sys

FOREIGN = ("vllm", "megatron", "ray", "triton")

if __name__ == "__main__":
    name = sys.argv[1]
    importlib.import_module(name)
    loaded = sorted(m for m in FOREIGN if m in sys.modules)
    present = sorted(m for m in FOREIGN if importlib.util.find_spec(m))
    if loaded or set(present) - {"triton"}:
        sys.exit(f"{name}: engines loaded {loaded}, engines installed {present}; expected none")
    print(f"{name} imports alone; engines installed: {present or 'none'}")
