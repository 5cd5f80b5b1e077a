#!/usr/bin/env python3
"""Makes the screenshots of README from made-up jobs:  screenshots.py BIN_DIRECTORY OUTPUT_DIRECTORY

Each is a PNG under 200 KB. Needs amem-replay and make_report_job in BIN_DIRECTORY, and a Chromium.
"""
import os
import subprocess
import sys
import tempfile

import chromium
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


def main(bin_directory, output):
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


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    if chromium.find() is None:
        sys.exit("there is no Chromium: install one, or name it in AMEM_CHROMIUM")
    main(*sys.argv[1:])
