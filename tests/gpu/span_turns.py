"""Two jobs that run at once and make their spans of work in turns, and what one costs more than the other.

On a machine of shared processors a job takes 0.7 to 1.4 of its median time, for minutes; two spans of a tenth of a second beside each other take the same.
"""
import math
import os
import statistics

FIRST = 5  # spans that are not counted


class Turn:
    """Of one of the jobs: two FIFOs, comma separated, by which it gets the turn and gives it to the other. Without them it is always this one's."""

    def __init__(self, fifos):
        self.mine, self.others = (os.open(fifo, os.O_RDWR) for fifo in fifos.split(",")) if fifos else (None, None)

    def take(self):
        if self.mine is not None:
            os.read(self.mine, 1)

    def give(self, ends=False):
        if self.others is not None:
            os.write(self.others, b"." * (4096 if ends else 1))  # once this job has ended the other waits for it no more


class Fifos:
    """For both jobs, in a folder: `first` and `second` are what Turn takes. The first job has the first turn. This object holds both open, so that no turn is
    lost while a job starts. Once a job has ended, or failed, release() lets the other go on by itself."""

    def __init__(self, folder, name):
        paths = [os.path.join(folder, f"{name}.{number}.turn") for number in (1, 2)]
        for path in paths:
            os.mkfifo(path)
        self.first, self.second = ",".join(paths), ",".join(reversed(paths))
        self.held = [os.open(path, os.O_RDWR) for path in paths]
        os.write(self.held[0], b".")

    def __enter__(self):
        return self

    def release(self):
        for fifo in self.held:
            os.write(fifo, b"." * 4096)

    def __exit__(self, *_):
        for fifo in self.held:
            os.close(fifo)


def compare(first, second):
    """How long a span of the second job takes, of the first's: each is compared with the mean of the two of the first around it. {"spans", "ratio",
    "quartiles"}: the ratio is the median. ValueError: there are too few spans. What the jobs have of their own, such as where memory lies, differs from one
    pair of jobs to the next by more than the quartiles say: several() has the error."""
    ratios = [2 * mine / (before + after) for mine, before, after in zip(second[FIRST:], first[FIRST:], first[FIRST + 1:])]
    if len(ratios) < 2:
        raise ValueError(f"{len(first)} and {len(second)} spans are too few: {FIRST} are not counted")
    low, ratio, high = statistics.quantiles(ratios, n=4)
    return {"spans": len(ratios), "ratio": round(ratio, 5), "quartiles": [round(low, 5), round(high, 5)]}


def turned(found):
    """The same as if the jobs had changed places."""
    return {**found, "ratio": round(1 / found["ratio"], 5), "quartiles": [round(1 / one, 5) for one in reversed(found["quartiles"])]}


def several(pairs):
    """Of several pairs: {"ratio", "error"}, the median of their ratios and its standard error, by how far they lie apart (None: of less than three)."""
    ratios = [one["ratio"] for one in pairs]
    error = round(1.2533 * statistics.stdev(ratios) / math.sqrt(len(ratios)), 5) if len(ratios) > 2 else None
    return {"ratio": round(statistics.median(ratios), 5), "error": error}
