"""Tests that did not run are said loudly at the end, and fail where ``HOTPREFIX_REQUIRE_ENGINES=1``
says that this machine can run them."""

import os

import pytest

_MARK = "engines"
REQUIRED = os.environ.get("HOTPREFIX_REQUIRE_ENGINES") == "1"


class EngineTests:
    """Counts the tests with real engines that were chosen for this run and what became of them."""

    def __init__(self, required: bool) -> None:
        self.required = required
        self.chosen: set[str] = set()
        self.left_out = 0
        self.ran: set[str] = set()
        self.reasons: list[str] = []

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.left_out += sum(1 for item in items if item.get_closest_marker(_MARK))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.chosen = {item.nodeid for item in session.items if item.get_closest_marker(_MARK)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self.chosen:
            return
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reasons.append(report.longrepr[2].removeprefix("Skipped: "))
        elif report.when == "call" or report.failed:
            self.ran.add(report.nodeid)

    @property
    def missing(self) -> int:
        """Chosen tests that were skipped."""
        return len(self.chosen - self.ran)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        stopped_early = session.shouldstop or session.shouldfail or session.config.option.collectonly
        if self.required and self.missing and exitstatus == pytest.ExitCode.OK and not stopped_early:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if terminalreporter.config.option.collectonly:
            return
        if self.missing:
            verdict = "this machine must run them: FAILED" if self.required else "nothing is known of them"
            terminalreporter.write_sep("!", f"{self.missing} TESTS WITH REAL ENGINES DID NOT RUN", red=True)
            for reason in sorted(set(self.reasons)):
                terminalreporter.write_line(f"  {reason}")
            terminalreporter.write_line(f"  {verdict}")
        if self.left_out:
            terminalreporter.write_line(f"{self.left_out} tests with real engines were left out on request")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(EngineTests(REQUIRED), "hotprefix-engine-tests")
