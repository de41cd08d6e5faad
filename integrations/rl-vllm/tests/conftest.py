import os
import sys
from pathlib import Path

# importlib mode puts no test folder on the path
sys.path.insert(0, str(Path(__file__).parent))

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
