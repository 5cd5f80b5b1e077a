"""Starts two worker processes in the way that is asked for (fork or spawn), as inference engines do. Prints "fine"."""

import ctypes
import multiprocessing
import sys


def work(number):
    return number + ctypes.CDLL(None).getpid() * 0


if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        assert pool.map(work, range(8)) == list(range(8))
    print("fine")
