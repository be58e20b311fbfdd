"""Sessions: the state of one agent conversation, and how its next call relates to it.

The way of a call: `SessionRegistry.find` -> `SessionState.place` (lineage) -> `PromptBuilder.build` (continuation) ->
`SessionState.record_answer`.
"""
