#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Makes files of tokens of any text: train.bin and validation.bin, numbers of 16 bits, and pieces.txt, the bytes of each token.
#   tokens.py FOLDER TEXT...        files, or folders of files
# Tokens are GPT-2's where tiktoken is installed and has its table, else pairs of the bytes that the text begins with most.
import collections
import pathlib
import sys

vocabulary = 50257
folder = pathlib.Path(sys.argv[1])
files = [path for name in sys.argv[2:] for path in
         (sorted(p for p in pathlib.Path(name).rglob("*") if p.is_file()) if pathlib.Path(name).is_dir() else [pathlib.Path(name)])]
text = b"\n".join(path.read_bytes() for path in files)
try:
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    tokens = encoding.encode_ordinary(text.decode(errors="replace"))
    pieces = [encoding.decode_single_token_bytes(t) for t in range(vocabulary - 1)] + [b""]
except Exception as error:
    print(f"without tiktoken ({type(error).__name__}): pairs of bytes", file=sys.stderr)
    common = [pair for pair, _ in collections.Counter(zip(text[::2], text[1::2])).most_common(vocabulary - 256)]
    pieces = [bytes([b]) for b in range(256)] + [bytes(pair) for pair in common]
    token_of = {piece: token for token, piece in enumerate(pieces)}
    tokens = []
    for i in range(0, len(text) - 1, 2):
        pair = text[i:i + 2]
        tokens += [token_of[pair]] if pair in token_of else [pair[0], pair[1]]
cut = len(tokens) * 9 // 10
folder.mkdir(parents=True, exist_ok=True)
for name, part in (("train", tokens[:cut]), ("validation", tokens[cut:])):
    with open(folder / f"{name}.bin", "wb") as file:
        for begin in range(0, len(part), 1 << 20):
            file.write(b"".join(token.to_bytes(2, "little") for token in part[begin:begin + (1 << 20)]))
(folder / "pieces.txt").write_text("\n".join(piece.hex() for piece in pieces) + "\n")
print(f"{len(tokens)} tokens of {len(text)} bytes, {len(pieces)} different ones")
