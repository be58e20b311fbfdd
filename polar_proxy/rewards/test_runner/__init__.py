"""Polar's own test runner, which is sent into an evaluation sandbox and runs there with the image's Python (3.8+).

It uses nothing but the standard library, and imports its own parts relatively, because inside the sandbox it is a
package of another name. `polar_proxy.rewards.isolated` sends it. Its processes:

* The *judge* (`judge.py`) is started first and never imports the agent's code. It reads a job and a nonce from standard
  input, collects the verdicts and signs its report with the nonce, so that no other process can write a report.
* The *worker* is forked before the nonce is read, and has neither standard input nor the descriptor of the report.

There are two ways to run tests:

* `values` (`values.py`): the judge runs the tests, which the worker never sees. The worker imports the agent's code; a
  call of one of its functions is a message to the worker, and only plain values come back. Nothing that the code does
  to its own process can change a comparison.
* `unittest` and `pytest` (`children.py`): these tests need the agent's code in their own process. The worker imports
  unittest and forks a child for each group of tests, and only this child imports the tests and the agent's
  code. Among its tests are canaries (`canaries.py`), which must fail. Verdicts count only if the child ended by
  itself, every canary failed, and neither assertions nor comparisons were changed (`integrity.py`).

A task whose own command runs pytest uses neither of the two ways. Its command runs unchanged, with a plugin
(`pytest_guard.py`) that runs canaries beside the tests.
"""
