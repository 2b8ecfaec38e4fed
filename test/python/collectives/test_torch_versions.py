"""Which torch will do; and whether the torch of this run is the one that it means to be."""

import os
import subprocess
import sys

import pytest
import torch

from ranks import run_mpi

HAS_FUNCTIONS = "hasattr(torch.Tensor, '__dlpack_c_exchange_api__')"
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


@pytest.mark.mpi
@pytest.mark.torch
def test_dlpacks_c_functions_are_hidden_in_every_process_where_the_run_says_so():
    is_hidden = "FARANDOLE_TEST_OLDER_TORCH" in os.environ
    expected = not is_hidden and torch.__version__ >= (2, 10)
    told = run_mpi(2, f"import farandole.torch, torch; tell({HAS_FUNCTIONS})")
    assert [eval(HAS_FUNCTIONS), *told] == [expected] + [str(expected)] * 2
