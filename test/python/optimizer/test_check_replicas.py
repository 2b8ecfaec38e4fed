"""Comparing the parameters of all ranks."""

import pytest
import torch

import farandole.torch as fl
from ranks import run_threads

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def model_of(dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 1)).to(dtype)


def refusal(model, **options):
    """What check_replicas says, or None."""
    try:
        fl.check_replicas(model, **options)
    except fl.MismatchError as error:
        return error
    return None


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_differing_bit_is_named_on_every_rank(dtype):
    models = [model_of(dtype) for _ in range(3)]

    def body(rank):
        model = models[rank]
        assert refusal(model) is None
        if rank == 1:
            with torch.no_grad():
                model[0].bias.view(torch.uint8)[0] ^= 1
        error = refusal(model)
        kind = str(dtype).removeprefix("torch.")
        assert f'parameter "0.bias {kind} [3]" differs; ranks alike: 0, 2 | 1; 1 of 4 parameters' in str(error)
        assert error.tensor == "0.bias"
        assert fl.allreduce(torch.ones(1), op=fl.Sum).item() == 3  # the ranks go on

    run_threads(3, body)


def test_elements_in_another_order_differ():
    models = [model_of() for _ in range(2)]

    def body(rank):
        with torch.no_grad():
            if rank == 1:
                models[rank][0].weight.copy_(models[0][0].weight.flip(1))
        fl.barrier()
        assert refusal(models[rank]).tensor == "0.weight"

    run_threads(2, body)


def test_only_every_nth_call_compares():
    models = [model_of() for _ in range(2)]

    def body(rank):
        if rank == 1:
            torch.nn.init.zeros_(models[rank][1].bias)
        assert [refusal(models[rank], every=3) is None for _ in range(6)] == [True, True, False] * 2

    run_threads(2, body)


def test_other_parameters_are_a_mismatch_and_so_are_more_of_them():
    def body(rank):
        assert "other names, dtypes or shapes; ranks alike: 0 | 1" in str(refusal(torch.nn.Linear(2 + rank, 1)))
        layers = [torch.nn.Linear(1, 1) for _ in range(1 + rank)]
        assert "check_replicas" in str(refusal(torch.nn.Sequential(*layers)))

    run_threads(2, body)


def test_the_ranks_are_those_of_a_process_set():
    def body(rank):
        last = fl.add_process_set([1, 2])
        if rank != 0:
            model = model_of()
            if rank == 2:
                torch.nn.init.zeros_(model[1].bias)
            assert "ranks alike: 1 | 2" in str(refusal(model, process_set=last))
        fl.barrier()

    run_threads(3, body)


def test_large_tensors_and_odd_sizes_are_compared_to_the_last_byte():
    def body(rank):
        big = torch.nn.Module()
        big.a = torch.nn.Parameter(torch.zeros(3_000_001))
        big.b = torch.nn.Parameter(torch.zeros(7, dtype=torch.float16))
        big.c = torch.nn.Parameter(torch.zeros(0))
        big.d = torch.nn.Parameter(torch.tensor(1.0))
        assert refusal(big) is None
        for tensor in (big.b, big.a):
            with torch.no_grad():
                tensor[-1] = rank
            assert refusal(big).tensor == ("a" if tensor is big.a else "b")

    run_threads(2, body)


def test_every_must_be_positive():
    with pytest.raises(ValueError, match="every must be at least 1, not 0"):
        fl.check_replicas(torch.nn.Linear(1, 1), every=0)
