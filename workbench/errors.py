"""The one exception that means: the input is wrong, not the program."""


class InputError(ValueError):
    """Bad input. The message is one line that names the place, the value and the rule.

    The command line prints it without a traceback and exits with code 2.
    """
