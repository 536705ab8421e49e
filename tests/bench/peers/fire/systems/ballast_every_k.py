"""Ballast with durability every-K: what a crash of servers costs where the log is left out."""

from fire.systems import ballast


class System(ballast.System):
    durability = 'every-K'

    def __init__(self, args, events) -> None:
        super().__init__(args, events)
        self.pin_interval = args.interval
