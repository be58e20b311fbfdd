"""Sessions: the calls under one API key, and how each new call relates to the earlier ones.

A call passes through `SessionRegistry.find` -> `SessionState.place` (lineage) -> `PromptBuilder.build` (continuation)
-> `SessionState.record_answer`.
"""
