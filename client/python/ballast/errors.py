"""What Ballast raises."""


class Error(RuntimeError):
    """A refusal or failure, with what was expected, what came, and the fix.

    reason: stable across releases, such as JOB_EXISTS or BUDGET; programs may compare it. "" for some.
    code: the kind of error in gRPC's words, such as RESOURCE_EXHAUSTED.
    """

    def __init__(self, message, reason='', code=''):
        super().__init__(f'{message} [{reason}]' if reason else message)
        self.reason = reason
        self.code = code
