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
    """For both jobs, in a folder: `first` and `second` are what Turn takes. Of the file that both processes have open by then, begin() gives the first turn."""

    def __init__(self, folder, name):
        self.first_turn, other = (os.path.join(folder, f"{name}.{number}.turn") for number in (1, 2))
        for fifo in (self.first_turn, other):
            os.mkfifo(fifo)
        self.first, self.second = f"{self.first_turn},{other}", f"{other},{self.first_turn}"
        self.held = os.open(self.first_turn, os.O_RDWR)
        os.write(self.held, b".")

    def close(self):
        os.close(self.held)


def compare(first, second):
    """How long a span of the second job takes, of the first's: each is compared with the mean of the two of the first around it. {"spans", "ratio", "error",
    "quartiles"}: the ratio is the median, and the error the standard error of that, by the quartiles. ValueError: there are too few spans."""
    ratios = [2 * mine / (before + after) for mine, before, after in zip(second[FIRST:], first[FIRST:], first[FIRST + 1:])]
    if len(ratios) < 2:
        raise ValueError(f"{len(first)} and {len(second)} spans are too few: {FIRST} are not counted")
    low, ratio, high = statistics.quantiles(ratios, n=4)
    error = 1.2533 * (high - low) / 1.349 / math.sqrt(len(ratios))  # of the median of what is distributed normally
    return {"spans": len(ratios), "ratio": round(ratio, 5), "error": round(error, 5), "quartiles": [round(low, 5), round(high, 5)]}
