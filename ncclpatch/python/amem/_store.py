"""The store of a process group, as agreements use it: every call ends in time, and waits can be interrupted. Standard library only."""

import contextlib
import datetime
import functools
import queue
import threading
import time
import weakref
from concurrent import futures

SLICE_SECONDS = 0.2  # of a wait
SHORTEST_SECONDS, LONGEST_SECONDS = 0.0005, 0.02  # between two questions to a store


class Silence(TimeoutError):
    """A store that does not answer."""


class _Answering:
    """A store whose calls end. PyTorch's TCPStore waits for the answer of a host that is cut off for as long as TCP does, or for ever,
    and no signal gets through to Python meanwhile; so a thread of its own waits there, and is left behind when the time is up.

    Calls end GRACE_SECONDS after what within() was told last at the latest, by Silence. Later ones wait for that answer first, and
    fail when the time is up.
    """

    GRACE_SECONDS = 1  # to say how it ended, when the time is up

    def __init__(self, store):
        self._store, self._end, self._last, self._thread = store, 0, None, None

    def within(self, seconds):
        self._end = time.monotonic() + seconds

    def _comes(self, answer, grace=0):
        with contextlib.suppress(futures.TimeoutError):
            answer.exception(max(self._end - time.monotonic(), 0) + grace)
        return answer.done()

    def __getattr__(self, name):
        return functools.partial(self._call, name, getattr(self._store, name))

    def _call(self, name, function, *arguments):
        if self._last and not self._comes(self._last):
            raise Silence("it has not answered an earlier question")
        if self._thread is None or not self._thread.is_alive():  # the first call, also of a forked child
            self._calls = queue.SimpleQueue()
            self._thread = threading.Thread(target=_answer, args=(self._calls,), name="amem-store", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._calls.put, None)
        self._last = answer = futures.Future()
        self._calls.put((answer, function, arguments))
        if not self._comes(answer, self.GRACE_SECONDS):
            raise Silence("no answer to %s in time" % name)
        return answer.result()


def _answer(calls):
    for answer, function, arguments in iter(calls.get, None):
        try:
            answer.set_result(function(*arguments))
        except BaseException as error:  # pylint: disable=broad-except  # for whoever waits
            answer.set_exception(error)
        del answer, function, arguments  # the store may be let go while nobody calls


class Store(_Answering):
    """A store of torch.distributed, or an object with its set, get, wait and compare_set: those, and what agreements need beside them.

    Calls come from one thread at a time.
    """

    def set_once(self, key, value, instead_of=""):
        """Sets the key, unless it has another value than `instead_of` ("": none) already. Returns the text that it has now."""
        return self.compare_set(key, instead_of, value).decode()

    def text(self, key):
        """Of a key that is there."""
        return self.get(key).decode()

    def peek(self, key):
        """The text, or None if nobody has set it."""
        return self.text(key) if self.are_there([key], 0) else None

    def texts(self, keys):
        """Of keys that are there."""
        if hasattr(self._store, "multi_get"):
            with contextlib.suppress(Exception):  # some have the name only
                return [value.decode() for value in self.multi_get(keys)]
        return [self.text(key) for key in keys]

    def value_by(self, key, end):
        """The value as bytes; None if nobody sets it until `end` of the monotonic clock."""
        while not self.are_there([key], min(SLICE_SECONDS, max(0, end - time.monotonic()))):
            if time.monotonic() >= end:
                return None
        return self.get(key)

    def are_there(self, keys, seconds):
        """Waits for all keys, at most so long."""
        if hasattr(self._store, "check"):
            return self._asked_until_there(keys, seconds)
        limit = max(seconds, 0.001)
        began = time.monotonic()
        try:
            self.wait(keys, datetime.timedelta(seconds=limit))
            return True
        except Silence:
            raise
        except Exception:  # pylint: disable=broad-except  # stores raise different errors when the time is up
            if time.monotonic() - began < 0.9 * limit:
                raise  # not the time: the connection, for example
            return False

    def _asked_until_there(self, keys, seconds):
        """PyTorch's stores write a warning for each wait that ends by its time, and cannot be used meanwhile: so they are asked."""
        end, pause = time.monotonic() + seconds, SHORTEST_SECONDS
        while not self.check(keys):
            if time.monotonic() >= end:
                return False
            time.sleep(min(pause, max(0, end - time.monotonic())))
            pause = min(2 * pause, LONGEST_SECONDS)
        return True

    def forget(self, keys):
        with contextlib.suppress(Exception):  # some stores cannot; a few bytes stay
            for key in keys:
                self.delete_key(key)
