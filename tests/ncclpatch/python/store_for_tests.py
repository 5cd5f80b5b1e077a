"""A key-value store with the calls of torch.distributed.Store that AMem needs: in this process, and over a Unix socket, with one thread
for each connection.
"""
import contextlib
import json
import socket
import threading
import time


class Values:
    def __init__(self):
        self.values, self.changed = {}, threading.Condition()
        self.most = 0  # characters of all values, at any time
        self.in_vain = 0  # deletions of what was not there

    def _set(self, key, value):
        with self.changed:
            self.values[key] = value
            self.most = max(self.most, sum(map(len, self.values.values())))
            self.changed.notify_all()

    def _get(self, key):
        with self.changed:
            return self.values.get(key)

    def _wait(self, keys, seconds):
        with self.changed:
            return self.changed.wait_for(lambda: all(key in self.values for key in keys), seconds)

    def _compare_set(self, key, expected, desired):
        with self.changed:
            current = self.values.get(key)
            if current == expected or (current is None and expected == ""):
                self.values[key] = desired
                self.changed.notify_all()
                return desired
            return expected if current is None else current

    def _delete_key(self, key):
        with self.changed:
            there = self.values.pop(key, None) is not None
            self.in_vain += not there
            return there

    def _count(self):
        with self.changed:
            return len(self.values)


class Server(Values):
    def __init__(self, path):
        super().__init__()
        self.open = []
        self.answers = threading.Event()  # cleared: a host that is cut off, whose connections stay open
        self.answers.set()
        self.requests = 0  # but for waits, of which more end by their time on a busy machine; about: threads count it without a lock
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(256)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self.listener.close()
        for connection in self.open:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with contextlib.suppress(OSError), connection, connection.makefile("rw") as file:  # a client that dies, or close()
            for line in file:
                call, *arguments = json.loads(line)
                self.requests += call != "wait"
                self.answers.wait()
                file.write(json.dumps(getattr(self, "_" + call)(*arguments)) + "\n")
                file.flush()


class Local:
    """What every store has, to Values of this process. Values are bytes, as PyTorch's are."""

    def __init__(self, values):
        self.values = values

    def _call(self, name, *arguments):
        return getattr(self.values, "_" + name)(*arguments)

    def set(self, key, value):
        self._call("set", key, value.decode("latin-1") if isinstance(value, bytes) else value)

    def get(self, key):
        deadline = time.monotonic() + 10
        while (value := self._call("get", key)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(key)
            self._call("wait", [key], 1)
        return value.encode("latin-1")

    def wait(self, keys, timeout):
        if not self._call("wait", keys, timeout.total_seconds()):
            raise TimeoutError("wait timeout")

    def compare_set(self, key, expected, desired):
        return self._call("compare_set", key, expected, desired).encode("latin-1")

    def delete_key(self, key):
        return self._call("delete_key", key)

    def num_keys(self):
        return self._call("count")


class Asked(Local):
    """That is asked in place of waited for, as PyTorch's stores are."""

    def check(self, keys):
        return self._call("wait", keys, 0)


class Client(Local):
    """To the Values of a Server."""

    def __init__(self, path):
        super().__init__(None)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.file = self.socket.makefile("rw")

    def close(self):
        self.file.close()
        self.socket.close()

    def _call(self, name, *arguments):
        self.file.write(json.dumps([name, *arguments]) + "\n")
        self.file.flush()
        line = self.file.readline()
        if not line:
            raise ConnectionError("the store is gone")
        return json.loads(line)


class Life:
    """A life of a group that ends as a whole at its `last`-th request that reads or changes a value: neither that one nor any later one
    is carried out."""

    class Killed(BaseException):
        pass

    def __init__(self, last=float("inf")):
        self.lock, self.left, self.requests = threading.Lock(), last, 0

    def request(self, polls=False):
        with self.lock:
            self.requests += not polls
            self.left -= not polls
            if self.left <= 0:
                raise self.Killed

    def store(self, store):
        """A member's store."""
        return _Mortal(store, self)


class _Mortal:
    def __init__(self, store, life):
        self._store, self._life = store, life

    def __getattr__(self, name):
        function = getattr(self._store, name)

        def call(*arguments):
            self._life.request(name in ("check", "wait"))
            return function(*arguments)
        return call


def open_store(text):
    """plain:PATH, or PyTorch's tcp:PORT and file:PATH."""
    kind, _, where = text.partition(":")
    if kind == "plain":
        return Client(where)
    import datetime
    from torch import distributed
    if kind == "file":
        return distributed.FileStore(where, -1)
    return distributed.TCPStore("127.0.0.1", int(where), is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=30))
