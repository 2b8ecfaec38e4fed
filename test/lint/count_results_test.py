"""The last line of test/run.sh counts every kind of outcome once."""

import importlib.util
import pathlib

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "count_results.py"
spec = importlib.util.spec_from_file_location("count_results", SCRIPT)
count_results = importlib.util.module_from_spec(spec)
spec.loader.exec_module(count_results)

CTEST = """<testsuite>
  <testcase name="good" status="run"/>
  <testcase name="bad" status="fail"><failure message=""/></testcase>
  <testcase name="unwilling" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/></testcase>
  <testcase name="disabled" status="disabled"/>
  <testcase name="missing" status="notrun"><skipped message="Unable to find executable"/></testcase>
</testsuite>"""
PYTEST = """<testsuites><testsuite>
  <testcase classname="a" name="good"/>
  <testcase classname="a" name="broken"><error message="x"/></testcase>
  <testcase classname="a" name="skipped"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_a_test_that_ctest_could_not_find_counts_as_failed(tmp_path, capsys):
    (tmp_path / "release.xml").write_text(CTEST)
    assert count_results.main(str(tmp_path), []) == 1
    assert capsys.readouterr().out == "1 passed, 2 failed\n"


def test_reports_of_pytest_and_ctest_are_added_up(tmp_path, capsys):
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
