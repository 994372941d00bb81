"""The one exception for mistakes that a user can mend. The command line prints its text and no traceback."""


class UserError(ValueError):
    """Something in a call, a file or a machine that the caller can change. The text names the remedy."""
