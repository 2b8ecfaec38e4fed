"""Which torch will do."""

import subprocess
import sys

OLDER = """
import torch
del torch.Tensor.register_post_accumulate_grad_hook
torch.__version__ = "1.13.1"
import farandole.torch
"""


def test_an_older_torch_is_refused_with_both_versions():
    done = subprocess.run([sys.executable, "-c", OLDER], capture_output=True, text=True)
    expected = "ImportError: farandole.torch needs PyTorch 2.1 or newer; this is 1.13.1"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == expected
