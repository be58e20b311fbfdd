"""Repositories of the rollout service: jobs, groups, the queue, events, and the trainer feed."""
