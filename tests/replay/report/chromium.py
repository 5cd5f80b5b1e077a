"""A headless Chromium, driven over its DevTools protocol with nothing but Python's standard library.

    with Chromium.start() as browser:          # None where there is no Chromium
        page = browser.open("file:///...")
        page.evaluate("document.title")
"""
import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find():
    """The program's path: AMEM_CHROMIUM if set, else whatever PATH has; None if there is none."""
    chosen = os.environ.get("AMEM_CHROMIUM")
    if chosen:
        return chosen if os.access(chosen, os.X_OK) else None
    return next(filter(None, map(shutil.which, NAMES)), None)


class WebSocket:
    """The client's half of RFC 6455, as far as the protocol needs it: text messages, no extensions."""

    def __init__(self, host, port, path, timeout):
        self.socket = socket.create_connection((host, port), timeout)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall((f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                             f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n").encode())
        self.buffer = b""
        while b"\r\n\r\n" not in self.buffer:
            self.buffer += self._receive()
        head, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
        if b" 101 " not in head.split(b"\r\n")[0] + b" ":
            raise ConnectionError(f"Chromium refused the connection: {head!r}")

    def _receive(self):
        data = self.socket.recv(1 << 20)
        if not data:
            raise ConnectionError("Chromium closed the connection")
        return data

    def _take(self, count):
        parts, have = [self.buffer], len(self.buffer)
        while have < count:
            parts.append(self._receive())
            have += len(parts[-1])
        data = b"".join(parts)
        self.buffer = data[count:]
        return data[:count]

    def send(self, text):
        data, mask = text.encode(), os.urandom(4)
        length = len(data)
        head = bytes([0x81])
        if length < 126:
            head += bytes([0x80 | length])
        elif length < 1 << 16:
            head += bytes([0x80 | 126]) + struct.pack(">H", length)
        else:
            head += bytes([0x80 | 127]) + struct.pack(">Q", length)
        repeated = mask * (length // 4 + 1)
        masked = (int.from_bytes(data, "big") ^ int.from_bytes(repeated[:length], "big")).to_bytes(length, "big")
        self.socket.sendall(head + mask + masked)

    def receive(self):
        message = b""
        while True:
            first, second = self._take(2)
            length = second & 0x7F
            if length == 126:
                length = struct.unpack(">H", self._take(2))[0]
            elif length == 127:
                length = struct.unpack(">Q", self._take(8))[0]
            data = self._take(length)
            if first & 0x0F == 8:
                raise ConnectionError("Chromium closed the connection")
            if first & 0x0F in (0, 1, 2):
                message += data
                if first & 0x80:
                    return message.decode()


class Chromium:
    @classmethod
    def start(cls, timeout=60):
        program = find()
        return cls(program, timeout) if program else None

    def __init__(self, program, timeout):
        self.profile = tempfile.mkdtemp(prefix="amem-chromium-")
        self.timeout = timeout
        self.process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
             "--disable-extensions", "--disable-background-networking", "--force-color-profile=srgb", "--remote-debugging-port=0",
             "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={self.profile}", "about:blank"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            self.socket = self._connect()
        except BaseException:
            self.close()
            raise
        self.next = 0
        self.messages = []  # events that nobody waited for yet

    def _connect(self):
        port_file, deadline = os.path.join(self.profile, "DevToolsActivePort"), time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"Chromium ended at once with status {self.process.returncode}")
            try:
                with open(port_file, encoding="ascii") as file:
                    port, path = file.read().split()
                return WebSocket("127.0.0.1", int(port), path, self.timeout)
            except (FileNotFoundError, ValueError, ConnectionRefusedError):
                time.sleep(0.05)
        raise TimeoutError("Chromium did not open its DevTools port")

    def call(self, method, session=None, **parameters):
        self.next += 1
        message = {"id": self.next, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        self.socket.send(json.dumps(message))
        number = self.next
        while True:
            answer = json.loads(self.socket.receive())
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error'].get('message')}")
                return answer["result"]
            self.messages.append(answer)

    def open(self, url, **view):
        return Page(self, url, **view)

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


class Page:
    """One tab. `errors` are what the console or an uncaught exception said, and requests that went anywhere but to the file."""

    def __init__(self, browser, url, width=1280, height=900, dark=False, mobile=False, scale=1):
        self.browser, self.url, self.errors, self.requests = browser, url, [], []
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")
        self.view(width, height, dark=dark, mobile=mobile, scale=scale)
        began = time.monotonic()
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")
        self.seconds = time.monotonic() - began

    def call(self, method, **parameters):
        result = self.browser.call(method, session=self.session, **parameters)
        self._sort()
        return result

    def _sort(self):
        for message in self.browser.messages:
            method, parameters = message.get("method"), message.get("params", {})
            if message.get("sessionId") != self.session:
                continue
            if method == "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in parameters["args"]))
            elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                self.errors.append(parameters["entry"]["text"])
            elif method == "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
        self.browser.messages = [m for m in self.browser.messages if m.get("sessionId") != self.session]

    def view(self, width, height, dark=False, mobile=False, media="", scale=1):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile)
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        self.call("Emulation.setEmulatedMedia", media=media,
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
                            {"name": "prefers-reduced-motion", "value": "reduce"}])

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise AssertionError(f"{expression[:120]}: {details.get('exception', {}).get('description') or details['text']}")
        return result["result"].get("value")

    def until(self, expression, seconds=20):
        deadline = time.monotonic() + seconds
        while not self.evaluate(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {expression}")
            time.sleep(0.03)

    def key(self, key, code=None, text=None, modifiers=0):
        parameters = {"key": key, "code": code or key, "modifiers": modifiers}
        if text:
            parameters["text"] = text
        numbers = {"Tab": 9, "Enter": 13, " ": 32, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        parameters["windowsVirtualKeyCode"] = numbers.get(key, ord(key.upper()[0]))
        self.call("Input.dispatchKeyEvent", type="keyDown", **parameters)
        self.call("Input.dispatchKeyEvent", type="keyUp", **parameters)

    def screenshot(self, path, clip=None):
        """A PNG of the view, or of `clip` (x, y, width, height of the document)."""
        parameters = {"format": "png", "captureBeyondViewport": clip is not None}
        if clip:
            parameters["clip"] = dict(zip(("x", "y", "width", "height"), clip), scale=1)
        data = base64.b64decode(self.call("Page.captureScreenshot", **parameters)["data"])
        with open(path, "wb") as file:
            file.write(data)
        return len(data)

    def pdf(self, path, **parameters):
        data = base64.b64decode(self.call("Page.printToPDF", **parameters)["data"])
        with open(path, "wb") as file:
            file.write(data)
        return len(data)

    def box(self, selector):
        """x, y, width, height of an element in the document."""
        return self.evaluate(f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                             " return [r.left + scrollX, r.top + scrollY, r.width, r.height]; })()")
