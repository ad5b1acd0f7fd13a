"""What a command can tell its user. The tree:

UserError            one clear line, exit status 2: the user can put it right
└── NoEngine         a real engine cannot be installed here; the simulated one still can
"""


class UserError(Exception):
    """A mistake of the user or of the machine; its text is the one line that is shown."""


class NoEngine(UserError):
    """vLLM cannot be installed here."""
