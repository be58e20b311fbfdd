"""Conformance: every real agent program against the real gateway, with a scripted engine, measured from outside.

The program is installed by its adapter and runs in a sandbox (`runner.py`). Between it and the gateway a TCP proxy
records exchanges and breaks connections (`recording_proxy.py`). The engine answers with the tool calls that the program
needs (`scripted_model.py`, `profiles.py`). `checks.py` defines the checks. Each check gives a measured result, or says
that nothing could be measured. `measure.py` makes a row of results for each program, and `report.py` writes the report.

Fidelity: real agents and a real vLLM with forced answers show whether the trained tokens are the sampled tokens.
`awkward_answers.py` writes the answers, and `forced_vllm.py` makes vLLM sample them. `fidelity.py` counts every sampled
token as trained or excluded, and explains where a prompt differs from the sampled tokens.
"""
