#!/usr/bin/env python3
"""The page of `amem-replay report` in a real browser.

    report_page_test.py BIN_DIRECTORY [--day]   needs amem-replay and make_report_job there, and a Chromium

--day: without the tests that are marked by_night, which take most of the time; they are counted as skipped. `./run report-test` and
AMEM_NIGHTLY have all.

Exit status 77 (skipped, and said so) where there is no Chromium; AMEM_CHROMIUM names one that is not in PATH.
"""
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

import chromium

BIN = ""
DAY = False
READY = "document.documentElement.dataset.ready === 'yes'"
WIDTHS = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"


def run(program, *arguments):
    subprocess.run([os.path.join(BIN, program), *arguments], check=True, stdout=subprocess.DEVNULL)


def by_night(test):
    @functools.wraps(test)
    def of_the_night(self):
        if DAY:
            self.skipTest("by night")
        test(self)
    return of_the_night


class ReportPage(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.mkdtemp(prefix="amem-report-page-")
        cls.browser = chromium.Chromium.start()
        # The first two are what people look at; the third is as large as a job gets.
        for name, more in {"failed": ["--fail", "--events", "12000", "--ranks", "4", "--allocations", "60"],
                           "healthy": ["--events", "6000", "--ranks", "4", "--allocations", "36", "--no-votes"], "large": ["--fail"],
                           "died": ["--events", "3000", "--ranks", "4", "--allocations", "20", "--die"],
                           # 3 000 pauses and resumes of 64 ranks
                           "long": ["--events", "0", "--ranks", "64", "--allocations", "1", "--cycles", "1500", "--no-votes"]}.items():
            if DAY and name not in ("failed", "healthy"):
                continue
            run("make_report_job", os.path.join(cls.scratch, name), *more)
            run("amem-replay", "report", os.path.join(cls.scratch, name), "-o", cls.path(name))
            shutil.rmtree(os.path.join(cls.scratch, name))

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        shutil.rmtree(cls.scratch)

    @classmethod
    def path(cls, name):
        return os.path.join(cls.scratch, name + ".html")

    def open(self, name="failed", fragment="", **view):
        page = self.browser.open("file://" + self.path(name) + fragment, **view)
        page.until(READY)
        self.addCleanup(self.nothing_went_wrong, page)
        return page

    def edited(self, name, change, as_name):
        """A page with other data: what a job would have to do for that takes long, or another build of AMem."""
        with open(self.path(name), encoding="utf-8") as file:
            head, data, tail = re.split(r'(?<=<script type="application/json" id="data">)(.*?)(?=</script>)', file.read(), maxsplit=1, flags=re.S)
        data = json.loads(data)
        change(data)
        with open(self.path(as_name), "w", encoding="utf-8") as file:
            file.write(head + json.dumps(data).replace("<", "\\u003c") + tail)
        return self.open(as_name)

    def nothing_went_wrong(self, page):
        self.assertEqual(page.errors, [], "the console is clean")
        self.assertEqual([r for r in page.requests if not r.startswith(("file://" + self.scratch, "data:"))], [], "nothing is fetched")

    def texts(self, page, selector):
        return page.evaluate(f"Array.from(document.querySelectorAll({json.dumps(selector)}), (e) => e.textContent)")

    def type(self, page, selector, text):
        page.evaluate(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.focus(); e.value = '';"
                      " e.dispatchEvent(new Event('input', { bubbles: true })); })()")
        page.call("Input.insertText", text=text)
        time.sleep(0.3)  # the search waits for the end of typing

    def choose(self, page, selector, value):
        page.evaluate(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(value)};"
                      " e.dispatchEvent(new Event('change', { bubbles: true })); })()")

    def count(self, page, section):
        """The number that a list says it shows."""
        text = page.evaluate(f"document.querySelector('#{section} .pager .count').textContent")
        number = text.replace("\u202f", " ").split(" of ")[-1]
        return int("".join(c for c in number.split(",")[0] if c.isdigit()))

    # ---- opening ------------------------------------------------------------------------------------------------------------

    def test_verdict_is_on_top(self):
        page = self.open()
        self.assertIn("rank 2", page.evaluate("document.querySelector('h1').textContent"))
        self.assertIn("out of memory", page.evaluate("document.querySelector('h1').textContent"))
        self.assertIn("bad", page.evaluate("document.querySelector('#verdict').className"))
        self.assertIn("out of memory", page.evaluate("document.title"))
        self.assertIn("ree memory on device 2", page.evaluate("document.querySelector('.remedy').textContent"))
        self.assertEqual(page.evaluate("scrollY"), 0, "it opens at the top")

    def test_healthy_job_says_so(self):
        page = self.open("healthy")
        self.assertIn("good", page.evaluate("document.querySelector('#verdict').className"))
        self.assertEqual(self.texts(page, "#cycles .badge.bad"), [])

    def test_a_link_to_a_time_leads_nowhere_where_no_memory_was_ever_held(self):
        def nothing_held(data):
            for session in data["sessions"]:
                session["most"] = [0] * len(session["most"])

        self.edited("healthy", nothing_held, "empty")
        page = self.open("empty", "#time/0/1")
        self.assertIn("No memory was ever held.", self.texts(page, "#memory-charts p"))

    @by_night
    def test_million_events_are_few_bytes_and_elements(self):
        self.assertLess(os.path.getsize(self.path("large")), 5_000_000)
        script = "(() => { const n = performance.getEntriesByType('navigation')[0]; return n.loadEventEnd - n.startTime; })()"
        page = self.open("large")
        elements = page.evaluate("document.querySelectorAll('*').length")
        print(f"a job of 8 ranks and a million events: {os.path.getsize(self.path('large')) / 1e6:.2f} MB and {elements} elements,"
              f" loaded and drawn in {page.evaluate(script):.0f} ms")
        self.assertLess(elements, 10_000, "how long a browser takes to draw them depends on how busy it is")

    # ---- charts -------------------------------------------------------------------------------------------------------------

    def test_charts_are_drawn(self):
        page = self.open()
        self.assertEqual(page.evaluate("document.querySelectorAll('#memory .plot').length"), 4)
        paths = page.evaluate("Array.from(document.querySelectorAll('#memory .plot .area'), (p) => [p.dataset.class, p.getAttribute('d').length,"
                              " p.getBBox().width, p.getBBox().height])")
        for name in ("own", "imported", "host", "pool"):
            of = [p for p in paths if p[0] == name]
            self.assertEqual(len(of), 4, name)
            for _, length, width, height in of:
                self.assertGreater(length, 100)
                self.assertGreater(width, 300, "over the whole time")
                self.assertGreater(height, 0.5)
        self.assertFalse(any("NaN" in d for d in page.evaluate("Array.from(document.querySelectorAll('svg [d]'), (p) => p.getAttribute('d'))")))
        self.assertEqual(page.evaluate("document.querySelectorAll('#memory .failure').length"), 1, "on the rank that failed only")
        self.assertGreaterEqual(page.evaluate("document.querySelectorAll('.gantt .phase').length"), 8)
        self.assertEqual(page.evaluate("document.querySelectorAll('.gantt .cross').length >= 1"), True)
        self.assertEqual(page.evaluate("document.querySelectorAll('.graph .node').length"), 4)
        self.assertGreater(page.evaluate("document.querySelectorAll('.graph .edge').length"), 4)

    def test_what_lies_elsewhere_is_below_the_line(self):
        page = self.open()
        areas = page.evaluate("""(() => { const plot = document.querySelector('#memory .plot'), line = Number(plot.querySelector('.baseline').getAttribute('y1'));
          return Array.from(plot.querySelectorAll('.area'), (area) => { const box = area.getBBox(); return [area.dataset.class, box.y - line, box.y + box.height - line, box.height]; }); })()""")
        seen = {name: (above, below) for name, above, below, height in areas if height}
        self.assertIn("own", seen)
        self.assertIn("imported", seen)
        for name, (above, below) in seen.items():
            if name in ("imported", "host"):
                self.assertGreater(above, -0.2, name)
            else:
                self.assertLess(below, 0.2, name)
        # What the axis and the end say stands beside the bars.
        self.assertEqual(page.evaluate("Array.from(document.querySelectorAll('#memory .plot text'), (t) => t.textContent).filter((t) => t !== '\\u2715')"), [])
        self.assertEqual(page.evaluate("Array.from(document.querySelectorAll('#memory .end'), (t) => t.textContent)"), ["closed"] * 4)
        self.assertIn("0", page.evaluate("Array.from(document.querySelectorAll('#memory .axis-scale text'), (t) => t.textContent)"))

    def test_phases_of_an_undo_are_called_so_in_the_legend(self):
        names = self.open("failed").evaluate("Array.from(document.querySelectorAll('#cycle-detail .legend .key'), (k) => k.textContent)")
        self.assertTrue(any(name.startswith("undo, pause: ") for name in names), names)
        self.assertTrue(any(name.startswith("resume: ") for name in names), names)
        self.assertFalse(any(name.startswith("pause: ") for name in names), names)

    def test_of_many_ranks_those_that_failed_come_first_and_alike_ones_are_folded(self):
        def many(data):
            for number in range(4, 20):
                data["sessions"].append({**data["sessions"][1], "rank": number, "name": f"rank {number}"})
        page = self.edited("failed", many, "many")
        shown = "Array.from(document.querySelectorAll('#memory .plot-box'), (b) => b.parentNode).filter((r) => !r.hidden).map((r) => r.querySelector('strong').textContent)"
        names = page.evaluate(shown)
        self.assertEqual(names[0], "Rank 2", "which failed")
        self.assertLess(len(names), 6)
        page.evaluate("document.querySelector('.folded button').click()")
        self.assertEqual(len(page.evaluate(shown)), 20)
        self.assertIn("Hide", page.evaluate("document.querySelector('.folded button').textContent"))

    def test_a_narrow_page_shows_all_its_sections(self):
        page = self.open(width=500)
        hidden = page.evaluate("""(() => { const nav = document.querySelector('nav').getBoundingClientRect();
          return Array.from(document.querySelectorAll('nav a'), (a) => [a.textContent, a.getBoundingClientRect()]).filter(([, r]) => r.right > nav.right + 1 || r.bottom > nav.bottom + 1).map(([t]) => t); })()""")
        self.assertEqual(hidden, [])

    def test_heights_are_what_is_held(self):
        page = self.open()
        # The peak that the label tells is the highest that the readout tells anywhere; the cursor is taken through by its keys.
        peak, seen = page.evaluate("""(() => {
          const box = document.querySelector('.plot-box'), readout = document.querySelector('#memory-readout'), seen = [];
          box.focus();
          for (let i = 0, last = ''; i < 5000 && readout.textContent !== last; ++i) {
            last = readout.textContent;
            seen.push(readout.querySelectorAll('strong')[1].textContent);
            box.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight', bubbles: true, cancelable: true }));
          }
          return [document.querySelector('.chart-label .nowrap').textContent, seen];
        })()""")
        self.assertIn(peak, seen)
        value = lambda text: float(text.split("\u202f")[0]) if "MiB" in text else 0
        self.assertEqual(value(peak), max(map(value, seen)))
        self.assertIn("0", {text.split("\u202f")[0] for text in seen}, "nothing at the beginning")

    @by_night
    def test_classes_can_be_hidden(self):
        page = self.open()
        page.evaluate("document.querySelector('#memory-legend input').click()")
        self.assertEqual(page.evaluate("document.querySelectorAll('#memory .area[data-class=own]').length"), 0)
        page.evaluate("document.querySelector('#memory-legend input').click()")
        self.assertEqual(page.evaluate("document.querySelectorAll('#memory .area[data-class=own]').length"), 4)

    @by_night
    def test_zoom_with_mouse_and_keyboard(self):
        page = self.open()
        extent = "document.querySelector('.extent').textContent"
        whole = page.evaluate(extent)
        page.evaluate("document.querySelector('.plot-box').scrollIntoView({ block: 'center' })")
        x, y, width, height = page.evaluate("(() => { const r = document.querySelector('.plot-box').getBoundingClientRect();"
                                            " return [r.left, r.top, r.width, r.height]; })()")
        for kind, at in (("mousePressed", 0.3), ("mouseMoved", 0.5), ("mouseReleased", 0.6)):
            page.call("Input.dispatchMouseEvent", type=kind, x=x + width * at, y=y + height / 2, button="left", buttons=1, clickCount=1)
        self.assertNotEqual(page.evaluate(extent), whole)
        page.evaluate("document.querySelector('.plot-box').focus()")
        page.key("Home")
        self.assertEqual(page.evaluate(extent), whole)
        page.key("+", "Equal", text="+")
        self.assertNotEqual(page.evaluate(extent), whole)

    def test_cycle_is_chosen_and_shown(self):
        page = self.open()
        self.assertIn("failed", page.evaluate("document.querySelector('#cycle-detail h3').textContent"), "the failed one at first")
        page.evaluate("document.querySelector('#cycles tbody tr:last-child a').click()")
        name = self.texts(page, "#cycles tbody tr:last-child a")[0]
        page.until(f"document.querySelector('#cycle-detail h3').textContent.startsWith({json.dumps(name)})")
        self.assertIn(name, self.texts(page, "#cycles tr.chosen")[0])
        page.evaluate("document.querySelectorAll('#cycle-detail .tools button')[1].click()")
        self.assertGreater(self.count(page, "events"), 0)
        self.assertFalse(page.evaluate("document.querySelector('#events .small').hidden"), "says which time it shows")

    # ---- lists --------------------------------------------------------------------------------------------------------------

    @by_night
    def test_allocations_sort(self):
        page = self.open()
        column = "Array.from(document.querySelectorAll('#allocations tbody tr'), (r) => r.children[1].textContent)"
        numbers = lambda: [int("".join(c for c in t if c.isdigit()) or 0) for t in page.evaluate(column)]
        page.evaluate("document.querySelectorAll('#allocations thead button')[1].click()")
        self.assertEqual(numbers(), sorted(numbers()))
        self.assertEqual(page.evaluate("document.querySelectorAll('#allocations thead th')[1].getAttribute('aria-sort')"), "ascending")
        page.evaluate("document.querySelectorAll('#allocations thead button')[1].click()")
        self.assertEqual(numbers(), sorted(numbers(), reverse=True))
        self.assertGreater(numbers()[0], numbers()[-1])
        self.assertEqual(page.evaluate("document.querySelectorAll('#allocations thead th')[1].getAttribute('aria-sort')"), "descending")

    def test_allocations_filter_and_search(self):
        page = self.open()
        everything = self.count(page, "allocations")
        selects = "#allocations select"
        page.evaluate(f"(() => {{ const e = document.querySelectorAll('{selects}')[0]; e.value = '2'; e.dispatchEvent(new Event('change')); }})()")
        of_rank = self.count(page, "allocations")
        self.assertTrue(0 < of_rank < everything)
        self.assertEqual(set(self.texts(page, "#allocations tbody th")), {"Rank 2"})
        self.type(page, "#allocations input", "step failed create")
        self.assertEqual(self.count(page, "allocations"), 0, "words that are nowhere together")
        self.assertIn("Nothing matches", page.evaluate("document.querySelector('#allocations tbody').textContent"))
        self.type(page, "#allocations input", "create failed")
        self.assertEqual(self.count(page, "allocations"), 1, "the one that the resume failed on")
        self.type(page, "#allocations input", "10 mib own")
        self.assertTrue(0 < self.count(page, "allocations") < of_rank)
        self.type(page, "#allocations input", "+10b853")
        by_site = self.count(page, "allocations")
        self.assertTrue(0 < by_site < of_rank)

    @by_night
    def test_allocations_are_summed_up_by_call_site(self):
        page = self.open()
        page.evaluate("(() => { const e = document.querySelectorAll('#allocations select')[3]; e.value = 'site'; e.dispatchEvent(new Event('change')); })()")
        rows = page.evaluate("document.querySelectorAll('#allocations tbody tr').length")
        self.assertGreater(page.evaluate("Array.from(document.querySelectorAll('#allocations caption')).filter((c) => /call site/.test(c.textContent)).length"), 0)
        self.assertGreater(rows, 4)

    def test_events_search_and_filter(self):
        page = self.open()
        everything = self.count(page, "events")
        self.type(page, "#events input[type=search]", "step failed")
        failed = self.count(page, "events")
        self.assertTrue(1 <= failed < everything)
        self.assertTrue(all("step failed" in t or "failed" in t for t in self.texts(page, "#events tbody tr")))
        self.type(page, "#events input[type=search]", "")
        self.assertEqual(self.count(page, "events"), everything)
        page.evaluate("document.querySelector('#events input[type=checkbox]').click()")
        only = self.count(page, "events")
        self.assertTrue(0 < only < everything)
        self.assertEqual(page.evaluate("document.querySelectorAll('#events tbody tr:not(.bad-row)').length"), 0)

    @by_night
    def test_pages_turn(self):
        page = self.open()
        first = self.texts(page, "#events tbody tr")[0]
        page.evaluate("document.querySelectorAll('#events .pager button')[1].click()")
        self.assertNotEqual(self.texts(page, "#events tbody tr")[0], first)
        page.evaluate("document.querySelectorAll('#events .pager button')[0].click()")
        self.assertEqual(self.texts(page, "#events tbody tr")[0], first)

    @by_night
    def test_evidence_leads_to_its_event(self):
        page = self.open("large")
        number = page.evaluate("document.querySelector('.evidence .role1 a').textContent")
        page.evaluate("document.querySelector('.evidence .role1 a').click()")
        page.until("document.querySelector('#events tr.found') !== null")
        found = page.evaluate("document.querySelector('#events tr.found').textContent")
        self.assertIn(number, found)
        self.assertIn("step failed", found)
        self.assertTrue(page.evaluate("document.activeElement.classList.contains('found')"), "the focus goes there")

    @by_night
    def test_every_event_is_listed_or_counted(self):
        page = self.open("large")
        total = page.evaluate("JSON.parse(document.getElementById('data').textContent).job.events")
        counted = page.evaluate("JSON.parse(document.getElementById('data').textContent).events.columns.n.reduce((a, b) => a + b, 0)")
        self.assertEqual(total, counted)
        self.assertIn("only counted", page.evaluate("document.querySelector('#left-out').textContent"))

    @by_night
    def test_references_can_be_narrowed_to_one_rank(self):
        page = self.open()
        page.evaluate("document.querySelector('.graph .node').focus()")
        page.key("Enter", text="\r")
        self.assertGreater(page.evaluate("document.querySelectorAll('.graph .edge.dim').length"), 0)
        self.assertEqual(page.evaluate("document.activeElement.getAttribute('aria-pressed')"), "true")

    # ---- links ---------------------------------------------------------------------------------------------------------------

    def test_links_lead_to_an_event_an_allocation_and_back(self):
        page = self.open(fragment="#event/r2/100")
        found = "(document.querySelector('tr.found') || {}).textContent"
        page.until("document.querySelector('#events tr.found') !== null")
        self.assertIn("Rank 2", page.evaluate(found))
        self.assertIn("#100", page.evaluate(found))
        self.assertGreater(page.evaluate("scrollY"), 500, "it is brought into view")
        link = page.evaluate("document.querySelector('#allocations tbody a.deep').getAttribute('href')")
        self.assertRegex(link, r"^#allocation/r\d/\d+$")
        page.evaluate("document.querySelector('#allocations tbody a.deep').click()")
        page.until("document.querySelector('#allocations tr.found') !== null")
        self.assertEqual(page.evaluate("location.hash"), link)
        page.evaluate("history.back()")
        page.until("location.hash === '#event/r2/100' && document.activeElement.closest('#events') !== null")
        hrefs = page.evaluate("Array.from(document.querySelectorAll('#events tbody a.deep'), (a) => a.getAttribute('href'))")
        self.assertEqual(len(hrefs), page.evaluate("document.querySelectorAll('#events tbody tr').length"), "each row has one")
        page.evaluate("location.hash = '#event/r9/1'")
        page.until("!document.getElementById('no-such-place').hidden")
        self.assertIn("r9", page.evaluate("document.getElementById('no-such-place').textContent"))

    @by_night
    def test_link_of_an_event_that_is_only_counted_leads_to_its_count(self):
        page = self.open("large", fragment="#event/r1/60000")
        page.until("document.querySelector('#events tr.found') !== null")
        self.assertIn("not listed", page.evaluate("document.querySelector('#events tr.found').textContent"))

    @by_night
    def test_links_lead_to_a_phase_of_a_rank(self):
        page = self.open()
        links = page.evaluate("Array.from(document.querySelectorAll('.gantt .phase'), (a) => a.getAttribute('href'))")
        self.assertEqual(len(links), len(set(links)), "each phase has its own, those of an undo too")
        wanted = next(link for link in links if "/r2/create" in link)
        page = self.open(fragment=wanted)
        page.until("document.querySelector('.gantt .found-phase') !== null")
        self.assertEqual(page.evaluate("document.querySelectorAll('.gantt .found-phase').length"), 1)
        self.assertIn("Rank 2", page.evaluate("document.querySelector('.gantt .found-phase title').textContent"))
        page.evaluate("document.querySelectorAll('#cycle-detail .tools button')[0].click()")
        page.until("location.hash.startsWith('#time/')")
        self.assertIn("from", page.evaluate("document.querySelector('.extent').textContent"), "a part of the job is shown")

    # ---- pauses --------------------------------------------------------------------------------------------------------------

    @by_night
    def test_who_held_the_device_when_its_memory_ran_out(self):
        page = self.open()
        self.assertIn("device 2 of rank 2 (GPU-3f2a4112)", page.evaluate("document.querySelector('.holders h4').textContent"))
        rows = self.texts(page, ".holders tbody tr")
        self.assertEqual(len(rows), 1, "no other rank of this job uses that device")
        self.assertRegex(rows[0].replace("\u202f", " "), r"^Rank 2[\d.]+ MiB[\d.]+ MiB")

    def test_votes_are_drawn_where_they_are_recorded(self):
        page = self.open()
        self.assertGreater(page.evaluate("document.querySelectorAll('.gantt .vote').length"), 4)
        votes = page.evaluate("Array.from(document.querySelectorAll('#cycle-detail td[data-label=\"Own vote\"]'), (e) => e.textContent)")
        self.assertEqual(votes.count("against"), 1, "of the rank that failed")
        page = self.open("healthy")
        self.assertEqual(page.evaluate("document.querySelectorAll('.gantt .vote').length"), 0)
        self.assertIn("not recorded", self.texts(page, '#cycle-detail td[data-label="Own vote"]'))

    def test_slowest_is_whose_own_part_took_longest_or_who_was_not_there(self):
        slowest = "document.querySelector('#cycles tbody td[data-label=Slowest]').textContent"

        def busy(data):  # rank 1 works for most of the phase, and all ranks are equally long in it
            for part in data["cycles"][-1]["parts"]:
                for phase in part["p"]:
                    phase[2] = phase[3] if part["s"] == 1 and phase[3] else phase[1]
        self.assertEqual(self.edited("healthy", busy, "busy").evaluate(slowest), "Rank 1")

        def absent(data):
            cycle = data["cycles"][-1]
            cycle["parts"] = [p for p in cycle["parts"] if p["s"] != 3]
            cycle["absent"] = [3]
            for part in cycle["parts"]:
                part.update({"b": None, "o": 1, "p": part["p"][:1]})
        self.assertEqual(self.edited("healthy", absent, "absent").evaluate(slowest), "Rank 3 (did not come)")

        def stuck(data):
            part = data["cycles"][-1]["parts"][2]
            part["o"] = 3
            part["p"] = part["p"][:2]
            part["p"][-1][3] = None
        self.assertEqual(self.edited("healthy", stuck, "stuck").evaluate(slowest), "Rank 2 (did not finish)")

    @by_night
    def test_colours_of_phases_differ_for_every_kind_of_colour_vision(self):
        # Machado, Oliveira and Fernandes (2009): what is seen without one kind of cone.
        kinds = {"normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
                 "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
                 "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
                 "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900))}

        def lab(linear):
            x, y, z = (sum(m * c for m, c in zip(row, linear)) for row in
                       ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505)))
            f = [(v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116) for v in (x / 0.9505, y, z / 1.089)]
            return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])

        def seen(colour, kind):
            linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (int(v) / 255 for v in colour)]
            return lab([min(1, max(0, sum(m * c for m, c in zip(row, linear)))) for row in kinds[kind]])
        for dark in (False, True):
            page = self.open(dark=dark)
            colours = page.evaluate("""Array.from({ length: 10 }, (_, i) => { const e = document.createElement('i'); e.className = 'swatch p' + i;
              document.body.append(e); const c = getComputedStyle(e).backgroundColor.match(/\\d+/g); e.remove(); return c; })""")
            for kind in kinds:
                far = lambda a, b: sum((p - q) ** 2 for p, q in zip(seen(colours[a], kind), seen(colours[b], kind))) ** 0.5
                self.assertGreater(far(1, 6), 40, f"save and create, {kind}, dark {dark}")
                for phases in (range(5), range(5, 10)):
                    close = [(a, b, round(far(a, b), 1)) for a in phases for b in phases if a < b and far(a, b) < 9]
                    self.assertEqual(close, [], f"{kind}, dark {dark}")

    # ---- long jobs, many ranks, ends ----------------------------------------------------------------------------------------

    @by_night
    def test_strip_of_3000_pauses_and_resumes_sums_them_up_and_can_be_zoomed(self):
        for view in ({"width": 1440}, {"width": 390, "mobile": True, "dark": True}):
            page = self.open("long", **view)
            counts = "Array.from(document.querySelectorAll('.lane'), (m) => Number(m.dataset.count))"
            whole = page.evaluate(counts)
            self.assertEqual(sum(whole), 3000, "every one is in a mark")
            self.assertGreater(len(whole), 5)
            note = page.evaluate("document.querySelector('.lane-note').textContent").replace("\u202f", " ")
            self.assertIn("3 000 pauses and resumes are in view", note)
            self.assertFalse(page.evaluate("document.querySelector('.lane-note').hidden"))
            page.evaluate("document.querySelector('.lane').dispatchEvent(new MouseEvent('click'))")
            page.until(f"({counts}).reduce((a, b) => a + b, 0) < 1000")
            page.evaluate("location.hash = '#time/300/330'")
            page.until("document.querySelector('.lane-note').hidden")
            single = page.evaluate(counts)
            self.assertTrue(0 < len(single) <= 6 and set(single) == {1}, single)
            self.assertEqual(page.evaluate("document.querySelectorAll('#memory .plot').length"), 64)
            scroll, client = page.evaluate(WIDTHS)
            self.assertLessEqual(scroll, client)
        print(f"a job of 64 ranks and 3 000 pauses and resumes: {os.path.getsize(self.path('long')) / 1e6:.2f} MB")
        self.assertLess(os.path.getsize(self.path("long")), 5_000_000)

    @by_night
    def test_crash_is_drawn_where_it_was_noticed(self):
        page = self.open("died", width=1440)
        at, text, width = page.evaluate("""(() => { const box = document.querySelector('.plot-box[data-session="3"]'), plot = box.querySelector('.plot');
          return [Number(plot.querySelector('.ended').getAttribute('x1')), box.parentNode.querySelector('.end').textContent, plot.viewBox.baseVal.width]; })()""")
        self.assertEqual(text, "crashed, as rank 0 noticed")
        data = page.evaluate("(() => { const d = JSON.parse(document.getElementById('data').textContent); return [d.sessions[3].end, d.sessions[3].died[0], d.job.duration]; })()")
        self.assertGreater(data[1] - data[0], 15e9, "long after its last event")
        self.assertAlmostEqual(at / width, data[1] / data[2], delta=0.01)
        facts = page.evaluate("Array.from(document.querySelectorAll('#ranks tbody tr'), (r) => r.textContent)")[3]
        self.assertIn("its end was noticed by rank 0", facts)
        self.assertIn("rank 0 saw it", facts)
        self.assertIn("gone", facts)
        self.assertIn("silent", facts)

    def test_report_of_living_processes_says_as_of_when(self):
        def live(data):
            data["sessions"][0]["as_of"] = data["job"]["duration"]
        page = self.edited("failed", live, "live")
        eyebrow = page.evaluate("document.querySelector('.eyebrow').textContent")
        self.assertRegex(eyebrow, r"as of 2025-11-21 \d\d:\d\d:\d\d UTC$")
        self.assertNotIn("now", eyebrow)

    @by_night
    def test_wide_tables_say_that_there_is_more(self):
        page = self.open(width=1100)
        hint = "document.querySelector('#ranks .scroll-hint')"
        page.until(f"!{hint}.hidden")
        self.assertIn("scroll sideways", page.evaluate(f"{hint}.textContent"))
        page.evaluate("document.querySelector('#ranks .scroll').scrollLeft = 1e6")
        page.until(f"{hint}.hidden")

    # ---- for everybody ------------------------------------------------------------------------------------------------------

    @by_night
    def test_no_horizontal_overflow_anywhere(self):
        for width, mobile in ((320, True), (390, True), (768, False), (1280, False), (2200, False)):
            for name in ("failed", "large", "died"):
                page = self.open(name, width=width, height=800, mobile=mobile)
                page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
                scroll, client = page.evaluate(WIDTHS)
                self.assertLessEqual(scroll, client, f"{name} at {width}")
                self.assertLessEqual(client, width)

    @by_night
    def test_paper_has_no_horizontal_overflow_and_no_controls(self):
        page = self.open("large", width=720)
        page.view(720, 1000, media="print")
        scroll, client = page.evaluate(WIDTHS)
        self.assertLessEqual(scroll, client)
        wide = page.evaluate("Array.from(document.querySelectorAll('main *')).filter((e) => e.getBoundingClientRect().right >"
                             " document.documentElement.clientWidth + 1 && !e.closest('.hidden-text') && !e.closest('svg')).map((e) => e.className).slice(0, 5)")
        self.assertEqual(wide, [])
        self.assertEqual(page.evaluate("getComputedStyle(document.querySelector('.filters')).display"), "none")
        self.assertEqual(page.evaluate("getComputedStyle(document.body).color"), "rgb(0, 0, 0)")

    @by_night
    def test_dark_and_light_have_contrast(self):
        for dark in (False, True):
            page = self.open(dark=dark)
            poor = page.evaluate("""(() => {
              const channel = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
              const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
              const parse = (t) => (t.match(/[\\d.]+/g) || []).map(Number);
              const behind = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
                if (c.length === 3 || c[3] === 1) return c; } return [255, 255, 255]; };
              const poor = [];
              for (const e of document.querySelectorAll('h1, h2, p, dt, dd, strong, th, td, label, a, button:not(:disabled), .badge, .muted, summary')) {
                if (!e.textContent.trim() || e.closest('.hidden-text, .heat, noscript, .skip') || !e.getClientRects().length) continue;
                const [a, b] = [luminance(parse(getComputedStyle(e).color)), luminance(behind(e))].sort((x, y) => y - x);
                if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(e.tagName + '.' + e.className + ' ' + ((a + 0.05) / (b + 0.05)).toFixed(2));
              }
              return [...new Set(poor)];
            })()""")
            self.assertEqual(poor, [], "dark" if dark else "light")

    def test_everything_has_a_name_and_tables_are_tables(self):
        page = self.open()
        nameless = page.evaluate("""Array.from(document.querySelectorAll('input, select, button, a, [tabindex="0"], [role=img]')).filter((e) =>
          !(e.labels && e.labels.length) && !e.getAttribute('aria-label') && !e.textContent.trim()).map((e) => e.outerHTML.slice(0, 90))""")
        self.assertEqual(nameless, [])
        self.assertEqual(page.evaluate("Array.from(document.querySelectorAll('table')).filter((t) => !t.caption || !t.tHead || !t.querySelector('th[scope=col]')).length"), 0)
        self.assertEqual(page.evaluate("new Set(Array.from(document.querySelectorAll('[id]'), (e) => e.id)).size"),
                         page.evaluate("document.querySelectorAll('[id]').length"), "ids are unique")
        self.assertEqual(page.evaluate("document.documentElement.lang"), "en")
        levels = page.evaluate("Array.from(document.querySelectorAll('h1, h2, h3'), (h) => Number(h.tagName[1]))")
        self.assertEqual(levels[0], 1)
        self.assertTrue(all(b - a <= 1 for a, b in zip(levels, levels[1:])), "no level is left out")

    @by_night
    def test_keyboard_reaches_the_controls_in_order(self):
        page = self.open()
        reached = []
        for _ in range(60):
            page.key("Tab")
            reached.append(page.evaluate("(() => { const e = document.activeElement; return (e.closest('section') || {}).id + ' ' + e.tagName; })()"))
        for wanted in ("verdict BUTTON", "memory BUTTON", "memory INPUT", "memory DIV", "cycles BUTTON"):
            self.assertIn(wanted, reached)
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        self.assertNotEqual(outline, "none", "the focus is seen")

    def test_journal_text_is_never_markup(self):
        with open(self.path("failed"), encoding="utf-8") as file:
            text = file.read()
        text = text.replace("gpu-node-07", "\\u003cimg src=x onerror=console.error(1)>")
        path = os.path.join(self.scratch, "markup.html")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        page = self.open("markup")
        self.assertEqual(page.evaluate("document.querySelectorAll('img').length"), 0)
        self.assertIn("<img", page.evaluate("document.querySelector('#ranks tbody').textContent"))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    BIN = sys.argv.pop(1)
    DAY = "--day" in sys.argv
    os.environ["TZ"] = "UTC"
    sys.argv = [a for a in sys.argv if a != "--day"]
    if chromium.find() is None:
        print("SKIPPED: the report's page was not tested: there is no Chromium (install one, or name it in AMEM_CHROMIUM)")
        sys.exit(77)
    unittest.main(verbosity=2 if "-v" in sys.argv else 1)
