"""For tests that loop or kill: what would make them pass without having tested anything fails them."""
import signal


def each(values):
    """The values as a list, for a loop over them; AssertionError where there is nothing to loop over."""
    found = list(values)
    assert found, "the loop over it would test nothing"
    return found


class Kills:
    """Kills child processes, and counts those that were alive until then. `with Kills(3) as kill: kill(process)`: AssertionError at
    the end if there were fewer."""

    def __init__(self, least):
        self.least, self.done = least, 0

    def __call__(self, process):
        process.kill()
        self.done += process.wait(timeout=10) == -signal.SIGKILL

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        assert kind or self.done >= self.least, "%d were killed, and not %d: the others had ended by themselves" % (self.done, self.least)
