"""Conformance: every real agent program against the real gateway, with a scripted engine, measured from outside.

The program is installed by its adapter and runs in a sandbox (`runner.py`). Between it and the gateway a TCP proxy
records exchanges and breaks connections (`recording_proxy.py`). The engine answers with the tool calls that the program
needs (`scripted_model.py`, `profiles.py`). Each check has a measured result; what cannot be measured is marked as such
(`checks.py`, which also defines *lost* and *doubled*; `measure.py` makes the rows, `report.py` the files).

Fidelity: real agents and a real vLLM with forced answers show whether the trained tokens are the sampled ones.
`awkward_answers.py` writes the answers, `forced_vllm.py` makes vLLM sample them, and `fidelity.py` counts every sampled
token as trained or excluded and explains where a prompt differs from the sampled tokens.
"""
