"""Compresses a libnccl to the kernels of some architectures: `slim_nccl.py FILE OUT.xz 90 [100 ...]`.

Of 330 MiB nine tenths are debug information, kernels of other architectures, and the relocatable code
that these were linked from. The first is stripped beforehand; of the others the payload is overwritten
with zeros, which compress to nothing. Headers and offsets stay, and the driver, which picks a payload by
its header, never reads those of other architectures. Prints what is left, in bytes.
"""

import lzma
import pathlib
import struct
import subprocess
import sys
from collections.abc import Iterator

FATBIN = struct.Struct("<IHHQ")  # magic, version, size of this header, size of what follows
MAGIC = 0xBA55ED50
ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, size of this header, of the payload; architecture


def sections(file: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Offset and size of each section in the file."""
    found = {}
    listed = subprocess.run(["readelf", "-SW", file], capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        fields = line.partition("]")[2].split()
        if len(fields) > 5 and fields[0] != "Name":
            found[fields[0]] = (int(fields[3], 16), int(fields[4], 16))
    return found


def payloads(data: bytes, offset: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Architecture, offset and size of each kernel's code in a section of fat binaries."""
    at = offset
    while at + FATBIN.size <= offset + size:
        magic, _, header, length = FATBIN.unpack_from(data, at)
        if magic != MAGIC:
            at += 8  # padding between two of them
            continue
        entry, end = at + header, at + header + length
        while entry < end:
            _, _, entry_header, entry_size, architecture = ENTRY.unpack_from(data, entry)
            yield architecture, entry + entry_header, entry_size
            entry += entry_header + entry_size
        at = end


def slim(file: pathlib.Path, keep: set[int]) -> bytes:
    """The library without what the architectures to keep do not need."""
    data = bytearray(file.read_bytes())
    places = sections(file)
    kept = set()
    for name in (".nv_fatbin", "__nv_relfatbin"):
        for architecture, at, size in list(payloads(data, *places[name])):
            if name == ".nv_fatbin" and architecture in keep:
                kept.add(architecture)
            else:
                data[at : at + size] = bytes(size)
    if kept != keep:
        raise SystemExit(f"{file} has no kernels for {sorted(keep - kept)}")
    return bytes(data)


def main(file: str, out: str, *architectures: str) -> None:
    """Writes the compressed library."""
    data = lzma.compress(slim(pathlib.Path(file), set(map(int, architectures))), preset=1)
    pathlib.Path(out).write_bytes(data)
    print(len(data))


if __name__ == "__main__":
    main(*sys.argv[1:])
