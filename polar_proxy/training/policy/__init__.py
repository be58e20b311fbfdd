"""The policy under training: its model, forward computations over packed sequences, and checkpoints."""
