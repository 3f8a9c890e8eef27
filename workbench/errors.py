"""The one exception that means: the input is wrong, not the program."""


class InputError(ValueError):
    """Bad input. The message is one line that names the place, the value and the rule.

    The command line prints it without a traceback and exits with code 2.
    """

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback: a notebook's cell too says just the line."""
        return [f"{type(self).__name__}: {self}"]
