"""The tables of the rollout service: jobs, groups, the queue, their events, and the trainer feed."""
