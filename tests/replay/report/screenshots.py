#!/usr/bin/env python3
"""Makes the screenshots of README:  screenshots.py BIN_DIRECTORY OUTPUT_DIRECTORY PERFETTO

Of the report of a made-up job, and of a trace of the demo in Perfetto's viewer, whose pages lie in the folder PERFETTO. Each is a
PNG under 200 KB. Needs amem-demo, amem-replay and make_report_job in BIN_DIRECTORY, and a Chromium.
"""
import os
import subprocess
import sys
import tempfile

import chromium
import perfetto
import small_png

LIMIT = 200_000
READY = "document.documentElement.dataset.ready === 'yes'"


def job(bin_directory, scratch, name, *arguments):
    journals, page = os.path.join(scratch, name), os.path.join(scratch, name + ".html")
    subprocess.run([os.path.join(bin_directory, "make_report_job"), journals, *arguments], check=True)
    subprocess.run([os.path.join(bin_directory, "amem-replay"), "report", journals, "-o", page], check=True, stdout=subprocess.DEVNULL)
    return "file://" + page


def save(page, path, clip):
    page.screenshot(path, clip)
    with open(path, "rb") as file:
        small = small_png.shrink(file.read())
    with open(path, "wb") as file:
        file.write(small)
    size = len(small)
    if size >= LIMIT:
        sys.exit(f"{path} has {size} bytes; README's pictures have less than {LIMIT}")
    print(f"{path}: {size // 1000} KB")


def from_top_to(page, selector):
    x, y, width, height = page.box(selector)
    return 0, 0, page.evaluate("document.documentElement.clientWidth"), y + height + 14


def around(page, selector):
    x, y, width, height = page.box(selector)
    return max(0, x - 14), y - 14, width + 28, height + 28


def trace_of_demo(bin_directory, scratch):
    directory, trace = os.path.join(scratch, "demo"), os.path.join(scratch, "demo.json")
    os.mkdir(directory)
    subprocess.run([os.path.join(bin_directory, "amem-demo"), "--ranks", "4", "--directory", directory], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([os.path.join(bin_directory, "amem-replay"), "report", "--perfetto", os.path.join(directory, "journal"), "-o", trace], check=True,
                   stdout=subprocess.DEVNULL)
    return trace


def shoot_trace(viewer, browser, trace, path):
    page = viewer.open(browser, trace, width=1120, height=1500)
    page.evaluate("app.sidebar.toggleVisibility()")
    perfetto.by_rank(page)
    ask = lambda sql: perfetto.query(page, sql)[0]
    arrows, first, last = ask("select count(*), min(a.ts), max(b.ts + b.dur) from flow join slice a on a.id = slice_out"
                              " join slice b on b.id = slice_in")
    ranks, begin, end = ask("select count(distinct upid), min(ts), max(ts + slice.dur) from slice join thread_track on thread_track.id ="
                            " track_id join thread using (utid) where category in ('cycle', 'phase')")
    if arrows < 10 or ranks != 4:
        sys.exit(f"{trace}: {arrows} arrows, pauses of {ranks} ranks; what could be seen of it?")
    first = max(first, begin - (end - begin) * 3 // 4)  # more than half for pause and resume
    perfetto.show(page, min(first, last - 2_000_000) - 500_000, end + 2_000_000)
    perfetto.mark(page, min(first, last - 2_000_000), last + 500_000)
    _, top, _, _ = page.box(".pf-timeline-header")
    _, y, width, height = page.box(".pf-track-tree .pf-virtual-overlay-canvas__content")
    save(page, path, (0, top, width, y + height - top))


def main(bin_directory, output, viewer_pages):
    os.makedirs(output, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="amem-screenshots-") as scratch, chromium.Chromium.start() as browser:
        failed = job(bin_directory, scratch, "failed", "--fail", "--ranks", "4", "--events", "90000", "--allocations", "600")
        page = browser.open(failed, width=1120, height=1000)
        page.until(READY)
        page.evaluate("document.querySelector('.verdict details').open = true")
        save(page, os.path.join(output, "overview.png"), from_top_to(page, "#memory"))
        page.evaluate("document.querySelector('.bar').style.position = 'static'")
        save(page, os.path.join(output, "resume.png"), around(page, "#cycles"))
        dark = browser.open(failed, width=1120, height=1000, dark=True)
        dark.until(READY)
        dark.evaluate("document.querySelector('.bar').style.position = 'static'")
        dark.evaluate("document.querySelectorAll('.graph .node')[2].dispatchEvent(new MouseEvent('click'))")
        save(dark, os.path.join(output, "references-dark.png"), around(dark, "#references"))
        phone = browser.open(failed, width=390, height=844, mobile=True)
        phone.until(READY)
        save(phone, os.path.join(output, "phone.png"), (0, 0, 390, 1500))
        with perfetto.Viewer(viewer_pages) as viewer:
            shoot_trace(viewer, browser, trace_of_demo(bin_directory, scratch), os.path.join(output, "trace.png"))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    if chromium.find() is None:
        sys.exit("there is no Chromium: install one, or name it in AMEM_CHROMIUM")
    main(*sys.argv[1:])
