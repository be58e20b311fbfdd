"""Suites of other projects that `make test-full` runs: the AI SDK, langchain-tests and the agent frameworks.

`make test-foreign` runs the others, too. Installing them takes about 90 seconds of CPU time once, running them 35.
"""

from __future__ import annotations

import shutil

import pytest

from tests.foreign.run import install, read_suites, run

CASES = {"Vercel AI SDK": 112, "langchain-tests": 158, "openai-agents": 21, "pydantic-ai": 20, "instructor": 7}
"""The number of cases of each suite, so that none is lost."""


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_suite_of_another_project_passes(name: str) -> None:
    (suite,) = [one for one in read_suites() if one.name == name]
    if suite.javascript and shutil.which("npm") is None:
        pytest.skip("needs Node.js 20 or newer with npm")
    install(suite)
    result = run(suite)
    assert result.failures == []
    assert result.passed == result.total == CASES[name]
