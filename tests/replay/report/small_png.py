"""Makes a PNG of a page smaller: at most 256 colours, picked by how often they occur. Standard library only."""
import collections
import struct
import zlib

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def chunks(data):
    at = len(SIGNATURE)
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at:at + 8])
        yield kind, data[at + 8:at + 8 + length]
        at += 12 + length


def pixels(data):
    """(width, height, rows of bytes, bytes a pixel) of an 8-bit RGB or RGBA image that is not interlaced."""
    width = height = step = 0
    packed = b""
    for kind, body in chunks(data):
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", body)
            if depth != 8 or colour not in (2, 6) or interlaced:
                raise ValueError("not the kind of PNG that Chromium makes")
            step = 3 if colour == 2 else 4
        elif kind == b"IDAT":
            packed += body
    raw, stride, rows = zlib.decompress(packed), width * step, []
    above = bytearray(stride)
    for y in range(height):
        start = y * (stride + 1)
        row = bytearray(raw[start + 1:start + 1 + stride])
        unfilter(raw[start], row, above, step)
        rows.append(row)
        above = row
    return width, height, rows, step


def unfilter(kind, row, above, step):
    if kind == 1:
        for i in range(step, len(row)):
            row[i] = (row[i] + row[i - step]) & 255
    elif kind == 2:
        row[:] = bytes((a + b) & 255 for a, b in zip(row, above))
    elif kind == 3:
        for i in range(len(row)):
            row[i] = (row[i] + ((row[i - step] if i >= step else 0) + above[i]) // 2) & 255
    elif kind == 4:
        for i in range(len(row)):
            a, b, c = (row[i - step], above[i], above[i - step]) if i >= step else (0, above[i], 0)
            pa, pb, pc = abs(b - c), abs(a - c), abs(a + b - 2 * c)
            row[i] = (row[i] + (a if pa <= pb and pa <= pc else b if pb <= pc else c)) & 255


def shrink(data):
    width, height, rows, step = pixels(data)
    colours = [[bytes(row[i:i + 3]) for i in range(0, len(row), step)] for row in rows]
    often = collections.Counter(colour for row in colours for colour in row)
    palette, spare = [], []
    for colour, _ in often.most_common():  # what is nearly there already need not be there again
        near = any(sum(abs(a - b) for a, b in zip(colour, other)) < 12 for other in palette)
        (spare if near or len(palette) == 256 else palette).append(colour)
    index = {colour: i for i, colour in enumerate(palette)}
    for colour in spare:
        index[colour] = min(range(len(palette)), key=lambda i: sum((a - b) ** 2 for a, b in zip(colour, palette[i])))
    lines = b"".join(b"\0" + bytes(index[colour] for colour in row) for row in colours)

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    return (SIGNATURE + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)) + chunk(b"PLTE", b"".join(palette)) +
            chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b""))
