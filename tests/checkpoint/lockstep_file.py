# SPDX-License-Identifier: Apache-2.0
# docs/checkpoint-format.md once more, in Python: a second opinion about checksums, and files for the fuzz target.
import json
import struct

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def checksum(data):
    lanes = [mix((i + 1) * GOLDEN & MASK) for i in range(8)]
    padded = data + bytes(-len(data) % 128)
    for block in range(0, len(padded), 128):
        words = struct.unpack_from("<16Q", padded, block)
        for i in range(8):
            x = lanes[i] ^ words[i]
            x ^= x >> 29
            x = (x + (x << 21)) & MASK
            x ^= words[8 + i]
            lanes[i] = ((x ^ (x >> 32)) * GOLDEN) & MASK
    value = mix(len(data))
    for lane in lanes:
        value = mix(((value ^ lane) + GOLDEN) & MASK)
    return "%016x" % value


def read(path):
    """The header as raw bytes, its JSON, and the data."""
    data = open(path, "rb").read()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    return data[:end], json.loads(data[8:end]), data[end:]


def check(path):
    """Says what is wrong with the checksums of a file; nothing where they are right."""
    raw, header, data = read(path)
    facts = json.loads(header["__metadata__"]["lockstep"])
    digits = facts["header"].encode()
    before = b'"lockstep":"{\\"header\\":\\"'
    place = raw.index(before) + len(before)
    if raw[place : place + 16] != digits:
        return "the header's checksum is not at the front"
    if checksum(raw[:place] + b"0" * 16 + raw[place + 16 :]) != facts["header"]:
        return "the header's checksum is wrong"
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if set(tensors) != set(facts["checksums"]):
        return "the checksums are not those of the tensors"
    for name, entry in tensors.items():
        begin, end = entry["data_offsets"]
        if checksum(data[begin:end]) != facts["checksums"][name]:
            return "the checksum of %r is wrong" % name
    return None


def build(tensors, facts=None):
    """A file of tensors [(name, dtype, shape, bytes)], with facts as lockstep writes them, or without."""
    header, place = {}, 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + len(data)]}
        place += len(data)
    dumps = lambda value: json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    if facts is not None:
        facts = {"header": "0" * 16, **facts, "checksums": {name: checksum(data) for name, _, _, data in tensors}}
        header = {"__metadata__": {"format": "pt", "writer": "lockstep 0", "lockstep": dumps(facts)}, **header}
    text = dumps(header).encode()
    text += b" " * (-len(text) % 8)
    raw = struct.pack("<Q", len(text)) + text
    digest = None
    if facts is not None:
        digest = checksum(raw)
        before = b'"lockstep":"{\\"header\\":\\"'
        place = raw.index(before) + len(before)
        raw = raw[:place] + digest.encode() + raw[place + 16 :]
    return raw + b"".join(data for *_, data in tensors), digest
