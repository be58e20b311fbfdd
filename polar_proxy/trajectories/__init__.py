"""From recorded calls to training sequences."""

from polar_proxy.trajectories.build import BUILDERS, AccountingError, Built, account, exclusion, merged, per_call

__all__ = ["BUILDERS", "AccountingError", "Built", "account", "exclusion", "merged", "per_call"]
