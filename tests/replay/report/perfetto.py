"""Perfetto's own viewer in a headless Chromium, without a network: the pages lie in a folder, and are served to this machine only.

    with perfetto.Viewer(folder) as viewer, Chromium.start() as browser:
        page = viewer.open(browser, "job.trace.json", width=1200, height=900)
        viewer.query(page, "select count(*) from flow")
"""
import functools
import http.server
import json
import threading

TRACE = "/job.trace.json"


class Handler(http.server.SimpleHTTPRequestHandler):
    trace = None

    def do_GET(self):
        if self.path != TRACE:
            return super().do_GET()
        with open(self.trace, "rb") as file:
            data = file.read()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        return self.wfile.write(data)

    def log_message(self, *_):
        pass


class Viewer:
    def __init__(self, folder):
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.server.shutdown()
        self.server.server_close()

    def open(self, browser, trace, **view):
        """The trace, loaded. What the viewer had to leave out of it is an error."""
        Handler.trace = trace
        address = f"http://127.0.0.1:{self.server.server_port}"
        page = browser.open(f"{address}/#!/?url={address}{TRACE}", **view)
        page.until("window.app && app.trace && document.querySelector('canvas') !== null", 120)
        settle(page)
        left_out = query(page, "select name, value from stats where severity in ('error', 'data_loss') and value > 0")
        if left_out:
            raise AssertionError(f"Perfetto does not take all of {trace}: {left_out}")
        return page


def settle(page):
    page.evaluate("m.redraw()")
    page.evaluate("waitForPerfettoIdle()")


def query(page, sql):
    """The rows that SQL over the trace gives (see perfetto.dev/docs/analysis)."""
    return page.evaluate("(async () => { const result = await app.trace.engine.query(" + json.dumps(sql) + """);
      const rows = [], names = result.columns(), plain = v => typeof v === 'bigint' ? Number(v) : v;
      for (const at = result.iter({}); at.valid(); at.next()) rows.push(names.map(name => plain(at.get(name))));
      return rows; })()""")


def by_rank(page):
    """All tracks open, processes in the order that the trace asks for (this version of the viewer does not look at it, later ones do)."""
    page.evaluate("""(() => {
      const workspace = app.trace.workspace, open = node => { node.expand(); node.children.forEach(open); };
      const sorted = [...workspace.children].sort((a, b) => a.name.localeCompare(b.name, 'en', {numeric: true}));
      for (const node of sorted) { workspace.removeChild(node); workspace.addChildLast(node); open(node); }
    })()""")
    settle(page)


def show(page, begin_ns, end_ns):
    page.evaluate(f"""(() => {{ const start = app.trace.traceInfo.start;
      app.trace.timeline.timestampFormat = 'milliseconds';
      app.trace.timeline.setViewportTime(start + {begin_ns}n, start + {end_ns}n); }})()""")
    settle(page)


def mark(page, begin_ns, end_ns):
    """Selects a stretch of time on all tracks, which draws the arrows in it."""
    page.evaluate(f"""(() => {{ const start = app.trace.traceInfo.start, tracks = [];
      const collect = node => {{ if (node.uri) tracks.push(node.uri); node.children.forEach(collect); }};
      app.trace.workspace.children.forEach(collect);
      app.trace.selection.selectArea({{start: start + {begin_ns}n, end: start + {end_ns}n, trackUris: tracks}});
      app.trace.flows.setCategoryVisible('_all_', true); }})()""")
    settle(page)
