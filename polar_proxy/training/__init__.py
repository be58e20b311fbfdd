"""GRPO training on the traces that Polar records. `grpo.py` is the loop, one step from top to bottom.

run.py                start of a run; its rollouts run in this process or on a server
feed.py               leases of finished groups, and readers of their rollouts and traces
batch.py              groups -> advantages (advantages.py) -> training sequences
policy/packing.py     sequences -> prefix trees (policy/tree.py, with attention over them) -> microbatches
policy/model.py       forward, loss (losses.py), backward, optimiser; policy/lora.py, policy/fsdp.py
policy/checkpoint.py  weights, optimiser and state on disk
weight_sync.py        new weights into the engine, and the proof that they arrived
metrics.py            one line per event; curves
selection.py          curriculum and replay, not used by the loop yet
"""
