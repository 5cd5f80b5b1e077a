"""What the file of a libnccl says: the names that it can look up, and those that it imports. Reads ELF by itself, because the
interesting sections are a thousandth of the file."""

import re
import struct

NAME = re.compile(rb"(?<![A-Za-z0-9])((?:cu[A-Z]|ibv_|mlx5dv_|gdr_)[A-Za-z0-9_]{2,62})(?=\0)")
NAMED_LIKE_IMPORTS = re.compile(r"cu[A-Z]|cuda[A-Z]|ibv_|mlx5dv_|gdr_")
ALLOCATED, EXECUTABLE = 2, 4
PROGRAM_DATA, DYNAMIC_SYMBOLS = 1, 11
DEVICE_CODE = ("fatbin", "nv_module")  # parts of the names of sections with code for GPUs


def _sections(file):
    header = file.read(64)
    if header[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", header, 40)
    size, count, names_at = struct.unpack_from("<HHH", header, 58)
    file.seek(table)
    raw = file.read(size * count)
    sections = [struct.unpack_from("<IIQQQQIIQQ", raw, i * size) for i in range(count)]
    names = _content(file, sections[names_at])
    return [(names[s[0]:names.index(b"\0", s[0])].decode(), s) for s in sections], sections


def _content(file, section):
    file.seek(section[4])
    return file.read(section[5])


def names_in(path):
    """All names of the driver, verbs and GDRCopy that stand in the library's data: what it can ever look up by name."""
    found = set()
    with open(path, "rb") as file:
        for name, section in _sections(file)[0]:
            kind, flags = section[1], section[2]
            device = any(part in name.lower() for part in DEVICE_CODE)
            if kind == PROGRAM_DATA and flags & ALLOCATED and not flags & EXECUTABLE and not device:
                found.update(match.decode() for match in NAME.findall(_content(file, section)))
    return found


def imported(path):
    """What it imports of the driver, of the CUDA runtime or of verbs without looking it up; nothing that AMem would see."""
    found = set()
    with open(path, "rb") as file:
        named, sections = _sections(file)
        for _, section in named:
            if section[1] != DYNAMIC_SYMBOLS:
                continue
            symbols, strings = _content(file, section), _content(file, sections[section[6]])
            for at in range(0, len(symbols), 24):
                name_at, _, _, defined_in = struct.unpack_from("<IBBH", symbols, at)
                name = strings[name_at:strings.index(b"\0", name_at)].decode()
                if defined_in == 0 and NAMED_LIKE_IMPORTS.match(name):
                    found.add(name)
    return found
