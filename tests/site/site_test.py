"""The site: each page is short and complete, what it names exists, and every link and anchor of the built pages leads somewhere.

The Python snippets of the pages run in Python.snippets, with those of all documents; tidy.tree looks at their links into the tree.
"""
import ast
import glob
import html.parser
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
import urllib.parse

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import sources  # noqa: E402

MOST_WORDS = 1200


OF_THE_PACKAGE = {"run", "doctor", "demo", "version", "help"}


def commands_of_the_tool():
    return set(re.findall(r"^  ([a-z]+) ", sources.usage("help")[1], re.M)) - OF_THE_PACKAGE


def own_fences():
    """(page, text) of each fenced block that a page has of its own."""
    for page in sources.all_pages():
        yield from ((page, text) for text in re.findall(r"^```\w*\n(.*?)^```", sources.read(page), re.S | re.M))


class Pages(unittest.TestCase):
    def test_each_has_at_most_so_many_words(self):
        for page in sources.all_pages():
            with self.subTest(page):
                text = sources.expand(page)
                self.assertNotIn("{{ ", re.sub(r"```.*?```", "", text, flags=re.S))
                self.assertLessEqual(sources.words(text), MOST_WORDS)

    def test_each_project_and_each_command_has_its_place(self):
        projects = [anchor for _, level, anchor in sources.headings(sources.read("ncclpatch/python/README.md").split("\n")) if level == 2]
        taken = set(sources.DIRECTIVE.findall("\n".join(map(sources.read, sources.all_pages()))))
        self.assertGreater(len(projects), 5)
        self.assertEqual({("section", "ncclpatch/python/README.md#%s body" % project) for project in projects} - taken, set())
        self.assertGreater(len(commands_of_the_tool()), 10)
        self.assertEqual({("usage", command) for command in commands_of_the_tool()} - taken, set())

    def test_a_section_that_is_not_there_is_an_error(self):
        with self.assertRaisesRegex(KeyError, "README.md has no section #no-such"):
            sources.section("README.md#no-such")

    def test_messages_come_whole_from_the_code(self):
        rows = sources.remedies()[1].split("\n")[2:]
        self.assertGreater(len(rows), 20)
        self.assertTrue(all(row.count("|") == 4 and "{" not in row for row in rows), rows)
        self.assertIn("| `free-memory` |", rows[0])
        self.assertGreater(len(sources.doctor()[1].split("\n")), 30)

    def test_every_command_that_a_page_shows_exists_with_its_options(self):
        shown = 0
        for page, text in own_fences():
            for command, rest in re.findall(r"(?<![\w-])amem ([a-z]+)([^\n|&#]*)", text):
                shown += 1
                self.assertIn(command, commands_of_the_tool() | OF_THE_PACKAGE, page)
                for option in re.findall(r"(?<!\S)--[a-z-]+", rest) if command in commands_of_the_tool() else ():
                    self.assertTrue(option in sources.usage(command)[1], "%s: %s %s" % (page, command, option))
        self.assertGreater(shown, 8)


class Monitoring(unittest.TestCase):
    def setUp(self):
        self.known = set(re.findall(r"^\| `(\w+)`", sources.metrics()[1], re.M))

    def used(self, text):
        return set(re.findall(r"\bamem_\w+", text))

    def test_alerts_and_dashboard_use_metrics_that_exist(self):
        for name in ("amem-alerts.yml", "amem-dashboard.json"):
            with open(os.path.join(HERE, "files", name), encoding="utf-8") as file:
                used = self.used(file.read())
            self.assertGreater(len(used), 2)
            self.assertEqual(used - self.known, set(), name)

    def test_the_dashboard_has_panels_that_do_not_overlap(self):
        with open(os.path.join(HERE, "files/amem-dashboard.json"), encoding="utf-8") as file:
            panels = json.load(file)["panels"]
        self.assertEqual(len({(one["gridPos"]["x"], one["gridPos"]["y"]) for one in panels}), len(panels))
        self.assertEqual(len({one["id"] for one in panels}), len(panels))

    def test_yaml_is_yaml(self):
        try:
            import yaml
        except ImportError:
            self.skipTest("PyYAML is not installed; the site's generator brings it")
        with open(os.path.join(HERE, "files/amem-alerts.yml"), encoding="utf-8") as file:
            rules = yaml.safe_load(file)["groups"][0]["rules"]
        self.assertTrue(all(one["alert"] and one["expr"] and one["annotations"]["summary"] for one in rules))
        for page in ("operate/kubernetes.md", "metrics.md"):
            for text in re.findall(r"^```yaml\n(.*?)^```", sources.read(sources.PAGES + "/" + page), re.S | re.M):
                self.assertIsInstance(yaml.safe_load(text), dict)


class Links(html.parser.HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        with open(path, encoding="utf-8") as file:
            self.feed(file.read())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs[key] for key in ("id", "name") if attrs.get(key)}
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        target = attrs.get("src") or (attrs.get("href") if tag == "link" else None)
        if target:
            self.loads.append(target)


class Built(unittest.TestCase):
    def test_every_link_and_anchor_leads_somewhere_and_nothing_is_loaded_from_elsewhere(self):
        try:
            import furo  # noqa: F401
            import myst_parser  # noqa: F401
            import sphinx  # noqa: F401
        except ImportError:
            self.skipTest("the site's generator is not installed: ./run site")
        with tempfile.TemporaryDirectory(prefix="amem-site-") as folder:
            done = subprocess.run([sys.executable, "-B", "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", HERE, "-d", folder + "/trees", HERE + "/pages",
                                   folder + "/site"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stdout[-3000:])
            pages = {path: Links(path) for path in glob.glob(folder + "/site/**/*.html", recursive=True)}
            self.assertGreaterEqual(len(pages), len(sources.all_pages()))
            for path, page in pages.items():
                for target in page.loads:
                    self.assertNotRegex(target, r"^(https?:)?//", path)
                for link in page.links + page.loads:
                    if re.match(r"[a-z]+:", link):
                        continue
                    name, _, anchor = link.partition("#")
                    name = urllib.parse.unquote(name.partition("?")[0])
                    target = os.path.normpath(os.path.join(os.path.dirname(path), name)) if name else path
                    self.assertTrue(os.path.exists(target), "%s: %s" % (path, link))
                    if anchor and target in pages and target.endswith(".html") and anchor not in ("", "#"):
                        self.assertIn(anchor, pages[target].ids, "%s: %s" % (path, link))
            self.assertTrue(os.path.exists(folder + "/site/searchindex.js"))
            with open(folder + "/site/searchindex.js", encoding="utf-8") as file:
                self.assertIn("seccomp", file.read())


class Code(unittest.TestCase):
    def test_every_name_of_the_package_has_its_docstring_in_the_reference(self):
        package = ast.parse(sources.read("ncclpatch/python/amem/__init__.py"))
        names = next(ast.literal_eval(node.value) for node in package.body if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__")
        text = "\n".join(sources.expand(page) for page in sources.all_pages() if "/reference/python" in page)
        described_elsewhere = {"Adopted", "Skipped"}  # by adopt, which returns them
        self.assertEqual(set(names) - described_elsewhere - set(re.findall(r"### `amem\.(\w+)", text)), set())


if __name__ == "__main__":
    unittest.main()
