"""Small worker objects for launcher tests."""

import os
import subprocess
import sys
import time


class Echo:
    def __init__(self, value: int = 0, fail: bool = False) -> None:
        if fail:
            raise ValueError("built to fail")
        self.value = value

    def add(self, x: int) -> int:
        return self.value + x

    def env(self, name: str) -> str | None:
        return os.environ.get(name)

    def boom(self) -> None:
        raise RuntimeError("asked to fail")

    def die(self) -> None:
        os._exit(7)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def pid(self) -> int:
        return os.getpid()

    def grandchild(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid
