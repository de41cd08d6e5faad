"""A pytest plugin that writes every result at once, so that a run which is cut off loses nothing.

It also keeps the tests of a module with the marker ``one_worker`` on one of pytest-xdist's workers, each of which would
start anew what they share.
"""

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

# characters of what a failed test has printed
SAID = 8000


class Notes:
    """One line of JSON a test in the file that ``GPU_TESTS_NOTES`` names; first what will run."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open as long as the session
        self._known = False

    def write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")

    def collected(self, ids: list[str]) -> None:
        # with workers every one of them reports the same list
        if not self._known:
            self._known = True
            self.write(collected=ids)

    def pytest_collection_finish(self, session: Any) -> None:
        self.collected([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.collected(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: Any, log: Any) -> Any:
        from xdist.scheduler import LoadScopeScheduling

        class Scheduling(LoadScopeScheduling):
            def _split_scope(self, nodeid: str) -> str:
                module = nodeid.partition("::")[0]
                return module if shares(config.rootpath / module) else nodeid

        return Scheduling(config, log)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = "" if report.outcome == "passed" else str(report.longrepr)
            # programs that a test starts say there why they have failed
            said = report.capstderr + report.capstdout if report.outcome == "failed" else ""
            seconds = round(report.duration, 2)
            self.write(test=report.nodeid, outcome=report.outcome, seconds=seconds, text=text, said=said[-SAID:])

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.write(test=report.nodeid or "collection", outcome="failed", seconds=0.0, text=str(report.longrepr))


@lru_cache
def shares(module: Path) -> bool:
    # the process that gives out tests has seen their names only
    return "mark.one_worker" in module.read_text(encoding="utf-8")


def pytest_configure(config: Any) -> None:
    # xdist's workers hand their results to the process that started them
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Notes(os.environ["GPU_TESTS_NOTES"]), "gpu-notes")
