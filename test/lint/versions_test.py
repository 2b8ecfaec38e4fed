"""What the documents and the doctor say of the oldest NCCL is what the library accepts."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]


def found(path, pattern):
    return re.search(pattern, (ROOT / path).read_text()).groups()


def test_the_citation_has_the_version_of_the_package():
    assert found("CITATION.cff", r"\nversion: (.*)\n") == found("pyproject.toml", r'\nversion = "(.*)"\n')


def test_the_oldest_nccl_is_the_same_everywhere():
    number = int(*found("ops/gpu/nccl/library.h", r"kOldestNccl = (\d+);"))
    version = f"{number // 10000}.{number // 100 % 100}"
    doctor = "bindings/python/farandole/doctor.py"
    assert found(doctor, r"OLDEST_NCCL = (\d+)") == (str(number),)
    assert found(doctor, r"([\d.]+) is the oldest that is used") == (version,)
    assert found("README.md", r"NCCL >= ([\d.]+)") == (version,)
    assert found("docs/gpu.md", r"NCCL ([\d.]+) or newer\*\*") == (version,)
