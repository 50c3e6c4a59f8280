"""The one exception that a user's input raises."""


class InputError(ValueError):
    """Something a user gave is wrong: a file, a field, a model that does not fit.

    The message is one line that names the file or field, what was found and what was expected. The commands print it
    without a traceback and exit with 2; any other exception is a failure of ours and exits with 1.
    """
