"""The HTTP API: submitting, watching and cancelling rollouts, rewards, and the trainer feed."""
