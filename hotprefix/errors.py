"""Why a command ends without having done its work. The tree, with exit statuses:

CommandError         1  what was asked for failed; the text says how
├── UserError        2  a mistake in what was asked for: one clear line, the user can put it right
└── NoEngine         3  a real engine cannot be had on this machine; a simulated one still can
"""


class CommandError(Exception):
    """Its text is all that is shown, never a stack trace."""

    status = 1


class UserError(CommandError):
    """Wrong flags, names, files, values."""

    status = 2


class NoEngine(CommandError):
    """vLLM cannot be installed here."""

    status = 3
