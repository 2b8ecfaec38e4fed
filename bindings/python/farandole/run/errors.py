"""Why a launch does not come about."""


class UsageError(Exception):
    """Wrong use or a setting that cannot work: one sentence for the user; exit code 2."""
