#!/usr/bin/env bash
# cloudpickle 3.1.3.
#
# Expected: an object of a class of the script, sent to another process of the same script, is of the class that the
#   script has there, as with pickle.
# Seen: cloudpickle sends classes of __main__ by value. The receiver gets a class of the same name that is another
#   object: isinstance is False, a dataclass is not equal, an Enum's member is neither the same nor equal and finds no
#   key of a dict, an exception is not caught by `except`. Within one process it is the same class, so a test there
#   passes.
# Output seen: pickle: True True True; cloudpickle: False False False
source "$(dirname "$0")/packages.sh"
install cloudpickle==3.1.3

cat >"$folder/script.py" <<'PYTHON'
import dataclasses, enum, pickle, sys
import cloudpickle

class Mode(enum.Enum):
    TRAIN = 1

@dataclasses.dataclass
class Config:
    rate: float

if sys.argv[1] == "send":
    for library in (pickle, cloudpickle):
        with open(f"{sys.argv[2]}/{library.__name__}", "wb") as file:
            library.dump((Mode.TRAIN, Config(0.1)), file)
    mode, config = cloudpickle.loads(cloudpickle.dumps((Mode.TRAIN, Config(0.1))))
    assert mode is Mode.TRAIN and config == Config(0.1)
else:
    for library, is_same in ((pickle, True), (cloudpickle, False)):
        with open(f"{sys.argv[2]}/{library.__name__}", "rb") as file:
            mode, config = pickle.load(file)
        seen = mode in {Mode.TRAIN: 1}, isinstance(config, Config), config == Config(0.1)
        print(f"{library.__name__}: {seen}")
        assert seen == (is_same,) * 3
PYTHON
"$python" "$folder/script.py" send "$folder"
"$python" "$folder/script.py" receive "$folder"
