#!/usr/bin/env bash
# torch 2.13.0.
#
# Expected: a checkpoint of tensors, numbers and texts, among them the version of torch that wrote it, can be loaded.
# Seen: torch.__version__ looks like a str and is one to isinstance, but torch.save keeps its class, which the default
#   torch.load refuses: the file that was to say who wrote it cannot be read. str(torch.__version__) can.
# Output seen: torch.__version__: UnpicklingError; str(torch.__version__): loaded
# Farandole: checkpoints of a Job hold no object of another class.
source "$(dirname "$0")/packages.sh"
install torch==2.13.0 numpy==2.4.6

"$python" - <<'PYTHON'
import io, pickle
import torch

def loads(version):
    file = io.BytesIO()
    torch.save({"weights": torch.ones(2), "torch": version}, file)
    file.seek(0)
    try:
        return "loaded" if torch.load(file)["torch"] == version else "another"
    except pickle.UnpicklingError as error:
        assert "TorchVersion" in str(error), error
        return "UnpicklingError"

assert isinstance(torch.__version__, str)
seen = loads(torch.__version__), loads(str(torch.__version__))
print(f"torch.__version__: {seen[0]}; str(torch.__version__): {seen[1]}")
assert seen == ("UnpicklingError", "loaded"), seen
PYTHON
