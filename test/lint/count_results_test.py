"""The last line of test/run.sh counts every kind of outcome once."""

import importlib.util
import pathlib

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "count_results.py"
spec = importlib.util.spec_from_file_location("count_results", SCRIPT)
count_results = importlib.util.module_from_spec(spec)
spec.loader.exec_module(count_results)

CTEST = """<testsuite>
  <testcase name="good" status="run"/>
  <testcase name="bad" status="fail"><failure message=""/></testcase>
  <testcase name="unwilling" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>
    <system-out>x_test.cc:7: Skipped
no such machine
</system-out></testcase>
  <testcase name="disabled" status="disabled"/>
  <testcase name="missing" status="notrun"><skipped message="Unable to find executable"/></testcase>
</testsuite>"""
GTEST = """<testsuites name="AllTests"><testsuite name="A">
  <testcase name="Good" status="run" result="completed" time="0.1" classname="A"/>
  <testcase name="Bad" status="run" result="completed" time="0" classname="A"><failure message="x"/></testcase>
  <testcase name="Unwilling" status="run" result="skipped" time="0" classname="A">
    <skipped message="a_test.cc:7&#x0A;no such machine&#x0A;"/></testcase>
  <testcase name="DISABLED_Huge" status="notrun" result="suppressed" time="0" classname="A"/>
</testsuite></testsuites>"""
PYTEST = """<testsuites><testsuite>
  <testcase classname="a" name="good"/>
  <testcase classname="a" name="broken"><error message="x"/></testcase>
  <testcase classname="a" name="skipped"><skipped message="no GPU"/></testcase>
  <testcase classname="" name="b"><skipped message="collection skipped">('b.py', 2, "Skipped: no yaml")</skipped>
  </testcase>
</testsuite></testsuites>"""


@pytest.fixture(autouse=True)
def _no_machine_of_its_own(monkeypatch):
    monkeypatch.delenv("FARANDOLE_TEST_MAY_SKIP", raising=False)


@pytest.fixture
def all_allowed(monkeypatch):
    monkeypatch.setattr(count_results, "ALLOWED", [(".*", ".*")])


def test_a_test_that_ctest_could_not_find_counts_as_failed(tmp_path, capsys, all_allowed):
    (tmp_path / "release.xml").write_text(CTEST)
    assert count_results.main(str(tmp_path), []) == 1
    assert capsys.readouterr().out == "1 passed, 2 failed\n"


def test_reports_of_pytest_and_ctest_are_added_up(tmp_path, capsys, all_allowed):
    (tmp_path / "release.xml").write_text(CTEST)
    (tmp_path / "pytest.xml").write_text(PYTEST)
    assert count_results.main(str(tmp_path), []) == 1
    assert capsys.readouterr().out == "2 passed, 3 failed\n"


def test_a_broken_step_counts_as_failed_and_is_named(tmp_path, capsys):
    (tmp_path / "a.xml").write_text('<testsuite><testcase name="good"/></testsuite>')
    assert count_results.main(str(tmp_path), ["build for asan"]) == 1
    output = capsys.readouterr()
    assert output.out == "1 passed, 1 failed\n"
    assert "build for asan" in output.err


def test_only_passed_tests_give_exit_status_zero(tmp_path, capsys):
    assert count_results.main(str(tmp_path), []) == 1, "no test at all is no success"
    (tmp_path / "a.xml").write_text('<testsuite><testcase name="good"/></testsuite>')
    assert count_results.main(str(tmp_path), []) == 0
    assert capsys.readouterr().out.endswith("1 passed, 0 failed\n")


def test_a_skip_without_a_reason_on_the_list_is_a_failure_that_says_it(tmp_path, capsys):
    (tmp_path / "release.xml").write_text(CTEST)
    (tmp_path / "pytest.xml").write_text(PYTEST)
    assert count_results.main(str(tmp_path), []) == 1
    output = capsys.readouterr()
    assert output.out == "2 passed, 7 failed\n"
    assert "FAILED release: .unwilling: skipped: no such machine\n" in output.err
    assert "FAILED release: .disabled: skipped: disabled in its source: disabled\n" in output.err
    assert "FAILED pytest: a.skipped: skipped: no GPU\n" in output.err
    assert "FAILED pytest: .b: skipped: no yaml\n" in output.err


def test_a_skip_on_the_list_is_printed_with_its_reason_in_that_report_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(count_results, "ALLOWED", [("pytest", "no (GPU|yaml)")])
    (tmp_path / "pytest.xml").write_text(PYTEST.replace("<error message=\"x\"/>", ""))
    assert count_results.main(str(tmp_path), []) == 0
    assert "SKIPPED pytest: 1 of: no GPU\n" in capsys.readouterr().err
    (tmp_path / "pytest.xml").rename(tmp_path / "pytest-lint.xml")
    assert count_results.main(str(tmp_path), []) == 1


def test_a_machine_says_what_it_cannot_do(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FARANDOLE_TEST_MAY_SKIP", "no (GPU|yaml)")
    (tmp_path / "pytest.xml").write_text(PYTEST.replace("<error message=\"x\"/>", ""))
    assert count_results.main(str(tmp_path), []) == 0
    assert capsys.readouterr().out == "2 passed, 0 failed\n"


def test_the_slowest_of_all_reports_are_printed_the_slowest_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(count_results, "SLOWEST", 2)
    (tmp_path / "pytest.xml").write_text('<testsuite><testcase classname="a" name="b" time="31.26"/></testsuite>')
    cases = '<testcase classname="c" name="d" time="100"/><testcase classname="e" name="f" time="0.5"/>'
    (tmp_path / "asan.xml").write_text(f"<testsuite>{cases}</testsuite>")
    assert count_results.main(str(tmp_path), []) == 0
    assert capsys.readouterr().err == "SLOW  100.0 s asan: c.d\nSLOW   31.3 s pytest: a.b\n"


def test_cases_of_a_gtest_program_count_beside_the_program(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(count_results, "ALLOWED", [("asan", "no such machine|disabled in its source: .*Huge")])
    program = '<testcase name="unit_a" status="fail"><failure/></testcase>'
    (tmp_path / "asan.xml").write_text(f"<testsuite>{program}</testsuite>")
    (tmp_path / "asan.unit_a.xml").write_text(GTEST)
    assert count_results.main(str(tmp_path), []) == 1
    output = capsys.readouterr()
    assert output.out == "1 passed, 2 failed\n"
    assert "FAILED asan.unit_a: A.Bad\n" in output.err
    assert "SKIPPED asan: 1 of: no such machine\n" in output.err
