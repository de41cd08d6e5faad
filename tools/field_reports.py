"""Write docs/field-reports.md: what users of RL stacks reported, and the tests that show the right behaviour here.

Rows are in field_reports.toml. A test says that it shows a row by ``@pytest.mark.field_report("R18")``; tests are read
as text, so nothing has to be installed. Run without arguments; exit status 1 lists what is inconsistent.
"""

import argparse
import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "tools" / "field_reports.toml"
PAGE = ROOT / "docs" / "field-reports.md"
MARK = "field_report"
# kind -> (needs a test, needs a reason, how the page introduces the reason)
KINDS = {
    "shown": (True, False, "Note: "),
    "refused": (True, True, "Refused: "),
    "hardware": (False, True, "Not shown on a CPU: "),
}
FIELDS = {"seen", "symptom", "right", "kind", "reason"}


@dataclass(frozen=True)
class Row:
    """One report; ``section`` is the title it stands under."""

    name: str
    section: str
    seen: str
    symptom: str
    right: str
    kind: str
    reason: str


@dataclass(frozen=True, order=True)
class Test:
    """A test function, by file relative to the repository's root."""

    file: str
    name: str

    @property
    def project(self) -> str:
        parts = self.file.split("/")
        return parts[1] if len(parts) > 3 else parts[0]


def read_rows(path: Path = ROWS) -> tuple[dict[str, Row], list[str]]:
    """Rows by name in the file's order, and what is wrong with them."""
    rows: dict[str, Row] = {}
    problems: list[str] = []
    for section in tomllib.loads(path.read_text(encoding="utf-8")).values():
        for name, fields in section.items():
            if name == "title":
                continue
            problems += _row_problems(name, fields, rows)
            values: dict[str, Any] = {field: fields.get(field, "") for field in FIELDS}
            values["kind"] = fields.get("kind", "shown")
            rows[name] = Row(name=name, section=section["title"], **values)
    return rows, problems


def _row_problems(name: str, fields: dict[str, Any], rows: dict[str, Row]) -> Iterator[str]:
    if name in rows:
        yield f"{name} is given twice"
    if unknown := set(fields) - FIELDS:
        yield f"{name} has unknown fields {sorted(unknown)}; known are {sorted(FIELDS)}"
    for field in ("seen", "symptom", "right"):
        if not fields.get(field):
            yield f"{name} has no {field}"
    if fields.get("kind", "shown") not in KINDS:
        yield f"{name} has kind {fields['kind']!r}; known are {', '.join(KINDS)}"


def read_marks(root: Path = ROOT) -> tuple[dict[str, list[Test]], list[str]]:
    """Tests by row name, sorted, and what is wrong with the marks."""
    marks: dict[str, list[Test]] = {}
    problems: list[str] = []
    for pattern in ("packages/*/tests", "integrations/*/tests", "tests"):
        for file in sorted(f for folder in root.glob(pattern) for f in folder.rglob("*.py")):
            where = file.relative_to(root).as_posix()
            for function, call in _mark_calls(ast.parse(file.read_text(encoding="utf-8"))):
                names = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                if not names or len(names) != len(call.args) or call.keywords:
                    problems.append(f'{where}:{call.lineno}: write the rows as text, @pytest.mark.{MARK}("R01")')
                elif function is None or not (file.name.startswith("test_") and function.startswith("test_")):
                    problems.append(f"{where}:{call.lineno}: {MARK} belongs on a test function that pytest collects")
                else:
                    for name in names:
                        marks.setdefault(name, []).append(Test(where, function))
    return {name: sorted(set(tests)) for name, tests in marks.items()}, problems


def _mark_calls(tree: ast.Module) -> Iterator[tuple[str | None, ast.Call]]:
    """Every call of the mark, with the function it decorates."""
    owner = {
        id(node): function.name
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for decorator in function.decorator_list
        for node in ast.walk(decorator)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == MARK:
            yield owner.get(id(node)), node


def problems_of(rows: dict[str, Row], marks: dict[str, list[Test]]) -> list[str]:
    """Rows without what their kind needs, and marks of rows that are not there."""
    found = [
        f"{test.file}::{test.name} shows {name}, which field_reports.toml lacks"
        for name, tests in marks.items()
        if name not in rows
        for test in tests
    ]
    for row in rows.values():
        needs_test, needs_reason, _ = KINDS.get(row.kind, (False, False, ""))
        if needs_test and not marks.get(row.name):
            found.append(f'{row.name} has no test; mark one with @pytest.mark.{MARK}("{row.name}")')
        if needs_reason and not row.reason:
            found.append(f"{row.name} is {row.kind} and has no reason")
    return found


def render(rows: dict[str, Row], marks: dict[str, list[Test]]) -> str:
    """The page."""
    kinds = [row.kind for row in rows.values()]
    lines = [
        "# Field reports as tests",
        "",
        "Differences between rollout and training log-probabilities that users of RL stacks have reported in public, "
        "and the tests that show what happens here instead. A row claims no more than its tests show.",
        "",
        f"{len(rows)} reports: {kinds.count('shown')} shown by tests on a CPU, {kinds.count('refused')} out of scope "
        f"and refused by name, {kinds.count('hardware')} that need other hardware.",
        "",
        "Generated by `python tools/field_reports.py` from `tools/field_reports.toml` and the tests' `field_report` "
        "marks; do not edit. `pytest -m field_report` runs the tests.",
    ]
    section = None
    for row in rows.values():
        if row.section != section:
            section = row.section
            lines += [
                "",
                f"## {section}",
                "",
                "| row | reported as | first seen | right behaviour | shown by |",
                "|---|---|---|---|---|",
            ]
        cells = [row.name, row.symptom, row.seen, row.right, _shown_by(row, marks.get(row.name, []))]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _shown_by(row: Row, tests: list[Test]) -> str:
    links = [f"[{t.project}: {t.name.removeprefix('test_')}](../{t.file})" for t in tests]
    reason = [KINDS.get(row.kind, ("", "", ""))[2] + row.reason] if row.reason else []
    return "<br>".join(reason + links)


def build(root: Path = ROOT, rows_path: Path = ROWS) -> tuple[str, list[str]]:
    """The page as it should be, and everything inconsistent."""
    rows, bad_rows = read_rows(rows_path)
    marks, bad_marks = read_marks(root)
    return render(rows, marks), bad_rows + bad_marks + problems_of(rows, marks)


def main(arguments: list[str] | None = None) -> None:
    """Write the page; there is nothing to ask for."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    page, problems = build()
    if problems:
        sys.exit("\n".join(problems))
    PAGE.write_text(page, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
