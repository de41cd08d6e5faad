"""Generated pages are what their tools write now, and their sources are consistent."""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


field_reports = tool("field_reports")


def test_field_reports_page_is_fresh_and_every_row_is_shown_or_explained():
    page, problems = field_reports.build()
    assert not problems, "\n".join(problems)
    assert field_reports.PAGE.read_text() == page, "run python tools/field_reports.py"


def test_field_reports_cover_the_sections_a_cpu_can_show():
    rows, _ = field_reports.read_rows()
    assert {name for name in rows if int(name[1:]) <= 68 or int(name[1:]) in range(79, 88)} == {
        f"R{n:02d}"
        for n in (
            *(1, 2, 3, 4, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22, 24, 25, 26, 28, 30, 32, 33, 34, 35),
            *(36, 37, 38, 39, 40, 41, 43, 44, 45, 49, 54, 55, 56, 57, 58, 61, 62, 65, 66, 68, 79, 81, 82, 86, 87),
        )
    }


ROWS = """
[A]
title = "A"
[A.R01]
seen = "x#1"
symptom = "s"
right = "r"
[A.R02]
seen = "x#2"
symptom = "s"
right = "r"
kind = "hardware"
reason = "needs eight of them"
"""
TEST = 'import pytest\n@pytest.mark.field_report("R01")\ndef test_it(): pass\n'


@pytest.mark.parametrize(
    ("rows", "test", "problem"),
    [
        (ROWS, TEST, None),
        (ROWS, TEST.replace("R01", "R07"), "shows R07, which field_reports.toml lacks"),
        (ROWS, "def test_it(): pass", "R01 has no test"),
        (ROWS, TEST.replace('"R01"', ""), "write the rows as text"),
        (ROWS, TEST.replace('"R01"', "name"), "write the rows as text"),
        (ROWS, TEST.replace("test_it", "helper"), "belongs on a test function"),
        (ROWS, TEST + "pytestmark = pytest.mark.field_report('R01')", "belongs on a test function"),
        (ROWS.replace('reason = "needs eight of them"', ""), TEST, "R02 is hardware and has no reason"),
        (ROWS.replace('kind = "hardware"', 'kind = "refused"'), TEST, "R02 has no test"),
        (ROWS.replace('kind = "hardware"', 'kind = "later"'), TEST, "R02 has kind 'later'"),
        (ROWS.replace("symptom", "symptoms"), TEST, "R01 has no symptom"),
    ],
)
def test_field_reports_notice_what_is_inconsistent(tmp_path, rows, test, problem):
    (tmp_path / "rows.toml").write_text(rows)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text(test)
    page, problems = field_reports.build(tmp_path, tmp_path / "rows.toml")
    if problem is None:
        assert not problems
        assert "[tests: it](../tests/test_one.py)" in page
        assert "Not shown on a CPU: needs eight of them" in page
    else:
        assert any(problem in p for p in problems), problems


@pytest.mark.parametrize("name", ["contract_tables", "support_table", "field_reports"])
def test_a_tool_that_writes_a_page_is_asked_for_nothing_else(name, tmp_path, monkeypatch, capsys):
    module = tool(name)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(module, "build", lambda: ("page", []) if name == "field_reports" else "page")
    for arguments, code in ((["--help"], 0), (["--hlp"], 2), (["other.md"], 2)):
        with pytest.raises(SystemExit) as end:
            module.main(arguments)
        assert end.value.code == code
        assert not (tmp_path / "page.md").exists()
    assert "Write docs/" in capsys.readouterr().out
    module.main([])
    assert (tmp_path / "page.md").read_text() == "page"


def test_an_import_is_checked_of_a_package_that_is_named(capsys):
    check_import = tool("check_import")
    for arguments, code, words in (
        ([], 2, "required: package"),
        (["--help"], 0, "usage"),
        (["rl_logprobe"], "rl_logprobe cannot be imported", ""),
        ([".x"], ".x cannot be imported", ""),
        ([""], " cannot be imported", ""),
    ):
        with pytest.raises(SystemExit) as end:
            check_import.main(arguments)
        said = capsys.readouterr()
        assert words in said.out + said.err
        assert end.value.code == code if isinstance(code, int) else end.value.code.startswith(code)


def test_contract_tables_are_fresh():
    contract_tables = tool("contract_tables")
    assert contract_tables.PAGE.read_text() == contract_tables.build(), "run python tools/contract_tables.py"


ARCHITECTURE = ROOT / "docs" / "architecture.md"
PROJECTS = sorted(p.parent.name for room in ("packages", "integrations") for p in ROOT.glob(f"{room}/*/pyproject.toml"))


def words_of(package, page=None):
    """Every word of a package's section on the page of the public API."""
    sections = re.split(r"^## ", page or ARCHITECTURE.read_text(), flags=re.M)
    (section,) = [s for s in sections if s.split("\n")[0].strip() == package]
    return set(re.findall(r"\w+", section))


@pytest.mark.parametrize("package", PROJECTS)
def test_architecture_page_has_every_public_name_and_argument(package):
    """A word of its own, in the package's own section; arguments of functions and of the classes that are called."""
    module, words = importlib.import_module(package.replace("-", "_")), words_of(package)
    public = getattr(module, "__all__", [])
    # rl-parity is a command line
    assert public or package == "rl-parity"
    called = [n for n in public if inspect.isfunction(getattr(module, n)) or n in ("TrainerRank", "StrictOptimizer")]
    called += [n for n in public if n in ("OptimizerConfig", "LossConfig", "Publisher", "StepLedger", "Span")]
    lacking = [n for n in public if n not in words]
    for name in called:
        lacking += [f"{name}({a})" for a in inspect.signature(getattr(module, name)).parameters if a not in words]
    assert not lacking, f"docs/architecture.md, {package}: add {lacking}"


def test_architecture_page_is_read_by_section():
    page = "## rl-a\n`share_gpu`, `one(x)`\n## rl-b\n`two`\n"
    assert words_of("rl-a", page) == {"rl", "a", "share_gpu", "one", "x"}
    assert "one" not in words_of("rl-b", page)


def test_links_of_the_pages_lead_somewhere():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not broken
