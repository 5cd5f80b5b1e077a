"""What `amem doctor` looks at, behind one class, so that tests can show it a machine that is broken in a certain way."""

import glob
import os
import resource
import shutil
import subprocess

__all__ = ["Machine"]


class Machine:
    """This machine, this user and this environment. Every method answers, also where it cannot know: with None, "" or []."""

    def __init__(self, environment=None):
        self.environment = dict(os.environ if environment is None else environment)

    def variable(self, name):
        return self.environment.get(name, "")

    def read(self, path):
        """The text of a small file; "" where it cannot be read."""
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read(65536)
        except OSError:
            return ""

    def exists(self, path):
        return os.path.exists(path)

    def find(self, pattern):
        return sorted(glob.glob(pattern))

    def run(self, command, environment=None, limit=20):
        """(exit code, stdout, stderr); the code is None where it could not be run, or did not end in `limit` seconds."""
        try:
            done = subprocess.run(command, env={**self.environment, **(environment or {})}, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=limit, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, "", str(error)
        return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

    def descriptors(self):
        """How many descriptors a process may hold open."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def free_bytes(self, directory):
        """Free bytes of the file system that has `directory`, or will have it; None where that cannot be known."""
        while directory and not os.path.exists(directory):
            parent = os.path.dirname(directory)
            if parent == directory:
                return None
            directory = parent
        try:
            return shutil.disk_usage(directory).free
        except OSError:
            return None

    def why_not_writable(self, directory):
        """"" where files can be made in `directory`, which is made if it does not exist; else the reason."""
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            path = os.path.join(directory, ".doctor-%d" % os.getpid())
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            os.unlink(path)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def user(self):
        return os.getuid()

    def why_no_memfd(self):
        """"" where the memory files exist by which ranks share tokens; else the reason."""
        try:
            os.close(os.memfd_create("amem-doctor"))
        except OSError as error:
            return error.strerror or str(error)
        return ""
