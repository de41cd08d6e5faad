import sys
from pathlib import Path

# importlib mode puts no test folder on the path; the decoder is shared by the tests of this one
sys.path.insert(0, str(Path(__file__).parent))
