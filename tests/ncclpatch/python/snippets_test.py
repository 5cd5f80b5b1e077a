"""Runs every Python snippet of the tree's documents as it stands, and looks at every command that they show.

The snippets of one page run one after the other in one process, on AMem's library and the stand-ins for NCCL and the driver. What a page
takes for granted (a model, an engine, a trainer) is a stand-in that accepts everything; modules it must import itself. What a page says of
`amem` has to be true: names, arguments, and that nothing raises.
"""
import ast
import builtins
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.normpath(os.path.join(HERE, "../../.."))
GOLDEN = os.path.join(TREE, "tests/replay/golden")
# Snippets of what has no stand-in, or opens a port of a fixed number: their names are looked up, and they are not run. Python.ray,
# Python.metrics and ./run frameworks-test run such code.
NOWHERE = "/nowhere"  # a LD_LIBRARY_PATH without a driver and NCCL
LOOKED_UP = re.compile(r"amem\.(frameworks\.ray|hosts|serve_metrics)\b|@ray\.|import ray\b")


def documents():
    listed = subprocess.run(["git", "-C", TREE, "ls-files", "-co", "--exclude-standard", "*.md"], stdout=subprocess.PIPE, text=True, check=False).stdout.split()
    return [name for name in listed if os.path.exists(os.path.join(TREE, name))] or \
        [os.path.relpath(path, TREE) for path in glob.glob(TREE + "/**/*.md", recursive=True) if "/build" not in path]


def fences(document, languages):
    """(line number, text) of each fenced block in one of these languages."""
    with open(os.path.join(TREE, document), encoding="utf-8") as file:
        lines = file.read().split("\n")
    language, begin = None, 0
    for number, line in enumerate(lines):
        if line.startswith("```") and language is None:
            language, begin = line[3:].strip(), number + 1
        elif line.startswith("```"):
            if language in languages:
                yield begin + 1, "\n".join(lines[begin:number])
            language = None


class Anything:
    """What a program has that a page is not about: callable, a context, iterable as nothing, with any attribute."""

    def __init__(self, *_, **__):
        pass

    def __call__(self, *_, **__):
        return Anything()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def __iter__(self):
        return iter(())


class Model(Anything):
    """As much of a torch.nn.Module as AMem asks for."""

    def modules(self):
        return []

    parameters = modules


def torch_stand_in():
    torch = types.ModuleType("torch")
    torch.Tensor = type("Tensor", (), {})
    torch.cuda = types.SimpleNamespace(is_available=lambda: False)
    torch.nn = types.SimpleNamespace(Module=Model)
    torch.__getattr__ = lambda name: Anything() if not name.startswith("__") else object.__getattribute__(torch, name)
    return torch


def staged(trees):
    """The names that these snippets use and neither define nor import, as stand-ins; modules are the page's own to import."""
    defined = {"amem", "torch", "ctypes"} | set(dir(builtins)) | set(sys.stdlib_module_names if hasattr(sys, "stdlib_module_names") else ())
    used = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
    return {name: Anything() for name in used - defined}


def trainer(stand_ins):
    """TRL's, of one rank."""
    made = stand_ins.trl()(0, lambda: None)
    made.model, made.optimizer, made.add_callback = Model(), None, lambda callback: None
    return made


def look_up(tree, names):
    """Every a.b.c of a snippet that begins with a module exists."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            exec(compile(ast.Module([node], []), "import", "exec"), names)  # pylint: disable=exec-used
        parts, at = [], node
        while isinstance(at, ast.Attribute):
            parts.append(at.attr)
            at = at.value
        if parts and isinstance(at, ast.Name) and isinstance(names.get(at.id), types.ModuleType):
            found = names[at.id]
            for part in reversed(parts):
                found = getattr(found, part)


def run_page(document):
    """In a process of its own: see __main__. With AMEM_ENABLE=0 the snippets, too, find the driver and NCCL; without a GPU neither."""
    sys.path[:0] = [os.path.join(HERE, "frameworks"), HERE]
    import python_test
    import stand_ins
    driver = {}
    if os.environ["LD_LIBRARY_PATH"] != NOWHERE:  # the driver and NCCL, as torch would have them
        exec(python_test.PREAMBLE + "load_nccl()\nallocate()\nbefore = in_use()\n", driver)  # pylint: disable=exec-used
    try:
        import torch  # noqa: F401
    except ImportError:
        sys.modules["torch"] = torch_stand_in()
    import fake_library
    from amem import _pools
    side = fake_library.Cpu(sys.modules["torch"])
    if driver and os.environ.get("AMEM_ENABLE") != "0":
        _pools._backend, _pools.backend = side, lambda: side  # PyTorch's allocations are CPU memory; the pools' own calls are the library's
    sys.modules.setdefault("transformers", types.SimpleNamespace(TrainerCallback=object))
    projects = {**stand_ins.verl(lambda: None), **stand_ins.slime(), **stand_ins.slime("roll.utils.offload_nccl", "roll.user")}
    sys.modules.update({name: one for name, one in projects.items() if name not in sys.modules})
    workers = projects["verl.workers.engine_workers"]
    snippets = [(text, ast.increment_lineno(ast.parse(text), line - 1)) for line, text in fences(document, ("python",))]
    names = staged([tree for _, tree in snippets])
    known = {"model": Model(), "optimizer": types.SimpleNamespace(param_groups=[], state={}, step=lambda: None), "_offload": None,
             "ActorRolloutRefWorker": workers.ActorRolloutRefWorker, "TrainingWorker": workers.TrainingWorker,
             "GRPOTrainer": lambda *_, **__: trainer(stand_ins)}
    names.update(known)
    for text, tree in snippets:
        if LOOKED_UP.search(text):
            look_up(tree, names)
        else:
            exec(compile(tree, document, "exec"), names)  # pylint: disable=exec-used
    import amem
    if os.environ.get("AMEM_ENABLE") == "0" or not driver:
        assert amem.memory()["tags"] == [] and amem.stats()["session"] is None, amem.memory()
    if driver:
        assert driver["in_use"]() == driver["before"], "the snippets change nothing"


class Snippets(unittest.TestCase):
    def check_pages(self, idle=None, **variables):
        """Runs each page; `idle`: why AMem's calls do nothing there, which the package and the library say once at most."""
        pages = [document for document in documents() if any(fences(document, ("python",)))]
        self.assertIn("README.md", pages)
        for page in pages:
            with self.subTest(page), tempfile.TemporaryDirectory() as folder:
                shutil.copy(os.path.join(GOLDEN, "sim_stuck_in_driver.amem"), folder + "/job.amem")
                environment = {**os.environ, "AMEM_JOURNAL_DIR": folder + "/journal", "LD_PRELOAD": os.environ["AMEM_LIBRARY"], **variables}
                done = subprocess.run([sys.executable, "-B", os.path.abspath(__file__), "--page", page], cwd=folder, capture_output=True, text=True, check=False,
                                      env=environment, timeout=120)
                self.assertEqual(done.returncode, 0, done.stderr[-2000:])
                said = [line for line in done.stderr.splitlines() if idle and idle in line and "do nothing" in line]
                self.assertEqual(len(set(said)), len(said), done.stderr)

    def test_every_python_snippet_runs_as_it_stands(self):
        self.check_pages()

    def test_switched_off_every_python_snippet_runs_and_changes_nothing(self):
        self.check_pages("AMEM_ENABLE=0", AMEM_ENABLE="0", PYTHONWARNINGS="error::RuntimeWarning")

    @unittest.skipIf(os.path.exists("/dev/nvidiactl"), "this machine has a GPU")
    def test_without_a_gpu_every_python_snippet_runs_and_changes_nothing(self):
        self.check_pages("no GPU", LD_LIBRARY_PATH=NOWHERE)

    def test_every_command_of_the_tree_that_is_shown_exists(self):
        usage = subprocess.run([TREE + "/run", "help"], stdout=subprocess.PIPE, text=True, check=True).stdout
        commands = set(re.findall(r"^  ([a-z][a-z0-9-]*)\b", usage, re.M))
        found = 0
        for document in documents():
            with open(os.path.join(TREE, document), encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    for command in re.findall(r"(?<![\w/])\./run ([a-z][\w-]*)", line):
                        found += 1
                        self.assertIn(command, commands, "%s:%d" % (document, number))
        self.assertGreater(found, 5)

    def test_what_a_command_is_shown_to_print_is_what_it_prints(self):
        """Of "$ COMMAND" in a fenced block, for commands that read journals of the tree. A line that ends in "..." was shortened."""
        tool = os.environ["AMEM_REPLAY"]
        shown = 0
        for document in documents():
            for line, text in fences(document, ("", "sh", "console")):
                first, _, rest = text.partition("\n")
                if not re.match(r"\$ (build/bin/amem-replay|amem) \w+ tests/", first):
                    continue
                shown += 1
                done = subprocess.run([tool, *first.split()[2:]], cwd=TREE, stdout=subprocess.PIPE, text=True, check=False,
                                      env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"})
                printed = done.stdout.rstrip("\n").split("\n")
                for number, wanted in enumerate(rest.rstrip("\n").split("\n")):
                    with self.subTest("%s:%d" % (document, line + 1 + number)):
                        got = printed[number] if number < len(printed) else ""
                        self.assertEqual(got[:len(wanted) - 3] + "..." if wanted.endswith("...") else got, wanted)
        self.assertGreater(shown, 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--page"]:
        run_page(sys.argv[2])
    else:
        unittest.main()
