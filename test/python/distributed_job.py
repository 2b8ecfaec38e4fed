"""What a rank of test_torch_distributed.py runs: the same work over gloo and over Farandole, in one process.

``distributed_job.py collectives arguments frameworks`` (some of them) prints a line per piece of work: its name and
"same" (bitwise), "close" (to 1e-6 of a tensor's largest element), or how far the results are apart; or what it warns of
that gloo does not.
"""

import functools
import os
import sys
import tempfile
import time
import traceback
import warnings

import torch
import torch.distributed as dist
from torch import nn

import farandole.torch.distributed  # noqa: F401  (registers the backend)

RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


# Collectives: each returns what this rank has received.


def tensor(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(RANK)
    return torch.randint(1, 9, shape, generator=generator).to(dtype)


def reduced(dtype, op):
    value = tensor(3, 5, dtype=dtype)
    dist.all_reduce(value, op)
    return value


def all_reduce():
    integers = [torch.int32, torch.int64, torch.uint8]
    floats = [torch.float32, torch.float64]
    ops = dist.ReduceOp
    plain = [reduced(d, op) for d in integers + floats for op in (ops.SUM, ops.MIN, ops.MAX, ops.PRODUCT)]
    bitwise = [reduced(d, op) for d in integers for op in (ops.BAND, ops.BOR, ops.BXOR)]
    bools = [tensor(3, 5) > 4 for _ in range(7)]
    for value, op in zip(bools, (ops.SUM, ops.PRODUCT, ops.MIN, ops.MAX, ops.BAND, ops.BOR, ops.BXOR), strict=True):
        dist.all_reduce(value, op)
    return plain + bitwise + bools


def all_reduce_strided():
    base = tensor(6, 8)
    dist.all_reduce(base.t())
    return [base]


def reduce():
    value = tensor(7)
    dist.reduce(value, SIZE - 1)
    return [value] if RANK == SIZE - 1 else []


def broadcast():
    values = [tensor(4), tensor(3, dtype=torch.bool), tensor(2).to(torch.complex64), tensor(0)]
    for root, value in enumerate(values):
        dist.broadcast(value, root % SIZE)
    return values


def all_gather():
    parts = [torch.empty(2, 3) for _ in range(SIZE)]
    dist.all_gather(parts, tensor(2, 3))
    whole = torch.empty(SIZE * 4, dtype=torch.int64)
    dist.all_gather_into_tensor(whole, tensor(4, dtype=torch.int64))
    return [*parts, whole]


def gather():
    parts = [torch.empty(5) for _ in range(SIZE)] if RANK == 1 else None
    dist.gather(tensor(5), parts, 1)
    return parts or []


def scatter():
    value = torch.empty(3)
    dist.scatter(value, [tensor(3) + rank for rank in range(SIZE)] if RANK == 1 else None, 1)
    return [value]


def reduce_scatter():
    one, whole = torch.empty(4), torch.empty(3)
    dist.reduce_scatter(one, [tensor(4) * rank for rank in range(SIZE)])
    dist.reduce_scatter_tensor(whole, tensor(3 * SIZE))
    return [one, whole]


def all_to_all_single():
    even = torch.empty(2 * SIZE, 3)
    dist.all_to_all_single(even, tensor(2 * SIZE, 3))
    sent = [RANK + rank for rank in range(SIZE)]
    uneven = torch.empty(sum(sent))
    dist.all_to_all_single(uneven, tensor(sum(sent)), sent, sent)
    return [even, uneven]


def asynchronous():
    values = [tensor(100), tensor(200), tensor(100)]
    works = [dist.all_reduce(value, async_op=True) for value in values]
    futures = [work.get_future() for work in works]
    works[2].wait()
    assert works[2].is_completed()
    return [futures[0].wait()[0], futures[1].then(lambda future: future.value()[0] * 2).wait(), values[2]]


def objects():
    gathered, scattered, whole = [None] * SIZE, [None], [RANK, {"a": RANK}]
    dist.all_gather_object(gathered, {"rank": RANK})
    dist.scatter_object_list(scattered, [f"for {rank}" for rank in range(SIZE)] if RANK == 0 else None, 0)
    dist.broadcast_object_list(whole, 1)
    return [gathered, scattered, whole]


def coalesced():
    values = [tensor(3), tensor(5)]
    with dist._coalescing_manager():
        for value in values:
            dist.all_reduce(value)
    return values


def coalesced_lists():
    lists = [[torch.empty(2, 3), torch.empty(4)] for _ in range(SIZE)]
    dist.all_gather_coalesced(lists, [tensor(2, 3), tensor(4)])
    return [one for of_rank in lists for one in of_rank]


def sparse():
    """Rows that all ranks have, one that a single rank has, dense dimensions, nothing at all."""
    ranks = torch.arange(RANK + 1)
    made = functools.partial(torch.sparse_coo_tensor, check_invariants=True)  # torch warns where nobody says whether
    vector = made(ranks[None], tensor(RANK + 1), (SIZE,))
    matrices = made(torch.stack([ranks, ranks]), tensor(RANK + 1, 2, 3), (SIZE, SIZE, 2, 3))
    nothing = made(torch.empty(1, 0, dtype=torch.int64), tensor(0), (5,))
    for value in (vector, matrices, nothing):
        dist.all_reduce(value)
    return [value.to_dense() for value in (vector, matrices, nothing)]


def messages():
    """Around the ring, by tags out of order, in a batch, and objects."""
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    around, batched, columns = torch.empty(5), torch.empty(2, dtype=torch.bool), torch.zeros(4, 3)
    tagged, items = [torch.empty(3, dtype=torch.complex64) for _ in range(3)], [None, None]
    works = [dist.isend(tensor(5), right), dist.irecv(around, left)]
    works += [dist.isend(tensor(3).to(torch.complex64) * tag, right, tag=tag) for tag in range(3)]
    for tag in (2, 0, 1):
        dist.recv(tagged[tag], left, tag=tag)
    batch = [dist.P2POp(dist.isend, tensor(2) > 4, right), dist.P2POp(dist.irecv, batched, left)]
    for work in works + dist.batch_isend_irecv(batch):
        work.wait()
    if RANK == 0:
        dist.send(tensor(4, 3), 1)
        dist.send_object_list(["some", {"rank": RANK}], 1)
    elif RANK == 1:
        dist.recv(columns, 0)
        dist.recv_object_list(items, 0)
    return [around, *tagged, batched, columns, items]


def groups():
    """Members alone use a group; groups overlap."""
    results = []
    for ranks in ([0], list(range(SIZE)), [SIZE - 1, 0], [rank for rank in range(SIZE) if rank != 1]):
        group = dist.new_group(ranks)
        if RANK in ranks:
            value = tensor(6)
            dist.all_reduce(value, group=group)
            dist.barrier(group)
            results.append(value)
    return results


# What a call does to its arguments, and what may differ between ranks.


def saved(*shape):
    """What autograd needs again: backward fails if its version was raised."""
    return tensor(*shape).requires_grad_().tanh()


def sent(*shape):
    """Likewise, in calls of gloo's whose own copies autograd would record."""
    return saved(*shape).detach() if dist.get_backend() == "gloo" else saved(*shape)


def empty(*shape):
    return [torch.zeros(shape) for _ in range(SIZE)]


def rooted(value):
    return value if RANK == 0 else None


def other(*shapes):
    """A tensor whose shape differs between ranks, with as many elements."""
    return tensor(6).view(shapes[RANK % len(shapes)])


def message(value):
    return (dist.send if RANK == 0 else dist.recv)(value, 1 - RANK) if RANK < 2 else None


#: Name -> a call and its arguments.
CALLS = {
    "all_reduce": lambda: (dist.all_reduce, saved(4)),
    "all_reduce of a parameter": lambda: (dist.all_reduce, tensor(4).requires_grad_()),
    "all_reduce of a transpose": lambda: (dist.all_reduce, tensor(2, 3).t()),
    "all_reduce, asynchronous": lambda: (lambda value: dist.all_reduce(value, async_op=True).wait(), saved(4)),
    "all_reduce_coalesced": lambda: (dist.all_reduce_coalesced, [tensor(4), tensor(2)]),  # which gloo copies
    "broadcast": lambda: (lambda value: dist.broadcast(value, 1), saved(4)),
    "broadcast of a transpose": lambda: (lambda value: dist.broadcast(value, 1), tensor(2, 3).t()),
    "reduce": lambda: (lambda value: dist.reduce(value if RANK == 0 else value.clone(), 0), saved(4)),
    "all_gather": lambda: (dist.all_gather, empty(4), saved(4)),
    "all_gather of transposes": lambda: (dist.all_gather, [one.t() for one in empty(2, 3)], tensor(2, 3).t()),
    "all_gather_into_tensor": lambda: (dist.all_gather_into_tensor, torch.zeros(4 * SIZE), sent(4)),
    "reduce_scatter": lambda: (dist.reduce_scatter, torch.zeros(4), [sent(4) for _ in range(SIZE)]),
    "reduce_scatter_tensor": lambda: (dist.reduce_scatter_tensor, torch.zeros(4), sent(4 * SIZE)),
    "all_to_all_single": lambda: (dist.all_to_all_single, torch.zeros(2 * SIZE), saved(2 * SIZE)),
    "all_to_all": lambda: (dist.all_to_all, empty(4), [sent(4) for _ in range(SIZE)]),
    "gather": lambda: (lambda into, value: dist.gather(value, rooted(into)), empty(4), saved(4)),
    "scatter": lambda: (
        lambda into, values: dist.scatter(into, rooted(values)), torch.zeros(4), [saved(4) for _ in range(SIZE)],
    ),
    "messages": lambda: (message, saved(4)),
    "shapes of all_reduce": lambda: (dist.all_reduce, other((2, 3), (6,))),
    "a scalar and a vector of one element": lambda: (dist.all_reduce, tensor(1).view(() if RANK else (1,))),
    "shapes of all_reduce_coalesced": lambda: (dist.all_reduce_coalesced, [other((2, 3), (6,)), tensor(2)]),
    "shapes of broadcast": lambda: (lambda value: dist.broadcast(value, 1), other((2, 3), (6,))),
    "shapes of all_gather": lambda: (dist.all_gather, [other((2, 3), (6,)) for _ in range(SIZE)], other((2, 3), (6,))),
    "shapes of reduce_scatter": lambda: (
        dist.reduce_scatter, other((2, 3), (6,)), [other((2, 3), (6,)) for _ in range(SIZE)],
    ),
    "shapes of all_to_all_single": lambda: (
        dist.all_to_all_single, torch.zeros(2 * SIZE), tensor(2 * SIZE) if RANK else tensor(2 * SIZE, 1),
    ),
    "shapes of gather": lambda: (
        lambda into, value: dist.gather(value, rooted(into)), [other((2, 3), (6,)) for _ in range(SIZE)],
        other((2, 3), (6,)),
    ),
    "shapes of scatter": lambda: (
        lambda into, values: dist.scatter(into, rooted(values)), other((2, 3), (6,)),
        [other((2, 3), (6,)) for _ in range(SIZE)],
    ),
    "shapes of messages": lambda: (message, other((2, 3), (6,))),
}  # fmt: skip


def effects_of(name):
    """Contents, gradients, strides and the rest of the arguments after a call; gloo writes some of them visibly."""

    def effects():
        call, *arguments = CALLS[name]()
        flat = [one for given in arguments for one in (given if isinstance(given, list) else [given])]
        before = [(one._version, one.requires_grad, one.grad_fn) for one in flat]
        call(*arguments)
        after = [(one._version, one.requires_grad, one.grad_fn) for one in flat]
        for one in flat:
            if one.grad_fn is not None:
                one.square().sum().backward()  # needs what tanh() has saved
        is_seen = before != after and dist.get_backend() != "gloo"
        return [*flat, [(one.shape, one.stride()) for one in flat], f"autograd sees {after}" if is_seen else "not seen"]

    effects.__name__ = f"arguments of {name}"
    return effects


# Frameworks: each returns the parameters of a model after a few steps.


def model(*extra):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), *extra, nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def train(trained, optimizer, steps=3, rank=RANK):
    for step in range(steps):
        torch.manual_seed(100 + rank + 10 * step)
        inputs, classes = torch.randn(8, 16), torch.randint(0, 4, (8,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(trained(inputs), classes).backward()
        optimizer.step()


def ddp():
    net = model(nn.BatchNorm1d(32))
    train(nn.parallel.DistributedDataParallel(net), torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    return list(net.parameters())


def ddp_in_small_buckets():
    net = model()
    wrapped = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    train(wrapped, torch.optim.Adam(net.parameters()))
    return list(net.parameters())


def ddp_with_sparse_gradients():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(12, 1, bias=False))
    wrapped = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        wrapped(torch.tensor([[RANK, step, 7]])).square().sum().backward()
        optimizer.step()
    return list(net.parameters())


def ddp_with_uneven_data():
    net = model()
    wrapped = nn.parallel.DistributedDataParallel(net)
    with wrapped.join():
        train(wrapped, torch.optim.SGD(net.parameters(), 0.1), 2 + RANK)
    return [p.grad for p in net.parameters()]


def fsdp2():
    from torch.distributed.fsdp import fully_shard

    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(net)
    train(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    return [p.full_tensor() for p in net.parameters()]


def zero_redundancy():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = model()
    wrapped = nn.parallel.DistributedDataParallel(net)
    train(wrapped, ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01))
    return list(net.parameters())


def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(16, 12 * SIZE), nn.ReLU(), nn.Linear(12 * SIZE, 4))
    parallelize_module(net, init_device_mesh("cpu", (SIZE,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(net, torch.optim.SGD(net.parameters(), 0.1), rank=0)
    return [p.full_tensor() for p in net.parameters()]


def dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (SIZE,))
    torch.manual_seed(1)
    left, right = torch.randn(8, 6), torch.randn(6, 4)
    columns = distribute_tensor(left, mesh, [Shard(1)])
    product = columns @ distribute_tensor(right, mesh, [Shard(0)])
    return [product.full_tensor(), columns.redistribute(placements=[Shard(0)]).to_local()]


def functional():
    import torch.distributed._functional_collectives as functional_collectives

    given, world = torch.arange(12.0) + RANK, dist.group.WORLD
    results = [
        functional_collectives.all_reduce(given, "sum", world),
        functional_collectives.all_gather_tensor(given, 0, world),
        functional_collectives.reduce_scatter_tensor(given, "sum", 0, world),
        functional_collectives.all_to_all_single(given, None, None, world),
        *functional_collectives.all_reduce_coalesced([given, given * 2], "sum", world),
    ]
    return [functional_collectives.wait_tensor(result) for result in results]


def compiled():
    net = model()
    wrapped = torch.compile(nn.parallel.DistributedDataParallel(net), backend="aot_eager")
    train(wrapped, torch.optim.SGD(net.parameters(), 0.1))
    return list(net.parameters())


def pipeline():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    for schedule in (ScheduleGPipe, Schedule1F1B):
        torch.manual_seed(RANK)
        layer = nn.Linear(16, 16)
        stage = PipelineStage(layer, RANK, SIZE, torch.device("cpu"))
        steps = schedule(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        torch.manual_seed(7)
        given, target = torch.randn(8, 16), torch.randn(8, 16)
        steps.step(*([given] if RANK == 0 else []), **({"target": target} if RANK == SIZE - 1 else {}))
    return [p.grad for p in layer.parameters()]


def checkpoint():
    import torch.distributed.checkpoint as checkpoints
    from torch.distributed.fsdp import fully_shard

    net = model()
    fully_shard(net)
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder, 0)
    state = net.state_dict()
    checkpoints.save(state, checkpoint_id=folder[0])
    for value in state.values():
        value.to_local().zero_()
    checkpoints.load(state, checkpoint_id=folder[0])
    return [p.full_tensor() for p in net.parameters()]


def checkpoint_of_rank_0():
    """As FSDP2 loads one; and a checkpoint that is written in the background."""
    from torch.distributed.checkpoint import async_save, load
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    net, folder = model(), [tempfile.mkdtemp() if RANK == 0 else None]
    given = {name: value + 1 for name, value in net.state_dict().items()} if RANK == 0 else {}
    set_model_state_dict(net, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    dist.broadcast_object_list(folder, 0)
    async_save(net.state_dict(), checkpoint_id=folder[0]).result()
    state = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
    load(state, checkpoint_id=folder[0])
    return [*net.parameters(), *state.values()]


COLLECTIVES = [
    all_reduce, all_reduce_strided, reduce, broadcast, all_gather, gather, scatter, reduce_scatter,
    all_to_all_single, asynchronous, objects, coalesced, coalesced_lists,
    sparse, messages, groups,
]  # fmt: skip
FRAMEWORKS = [
    ddp, ddp_in_small_buckets, ddp_with_sparse_gradients, ddp_with_uneven_data, fsdp2, zero_redundancy, tensor_parallel,
    dtensor, functional, compiled, pipeline, checkpoint, checkpoint_of_rank_0,
]  # fmt: skip
ARGUMENTS = [effects_of(name) for name in CALLS]


def work_of(names):
    kinds = {"collectives": COLLECTIVES, "arguments": ARGUMENTS, "frameworks": FRAMEWORKS}
    return [one for name in names for one in kinds[name]]


def copied(values):
    return [value.detach().clone() if isinstance(value, torch.Tensor) else repr(value) for value in values]


def compare(theirs, ours):
    """Bitwise the same, close, or how far apart: distances are relative to the largest element of a tensor."""
    if theirs is None or ours is None or len(theirs) != len(ours):
        return "failed"
    distances = [distance(a, b) for a, b in zip(theirs, ours, strict=True)]
    if all(one == 0 for one in distances):
        return "same"
    return "close" if all(one <= 1e-6 for one in distances) else f"{distances} apart"


def distance(a, b):
    if not isinstance(a, torch.Tensor) or (a.shape, a.dtype) != (b.shape, b.dtype):
        return 0.0 if a == b else float("inf")
    if as_bytes(a) == as_bytes(b):
        return 0.0
    a, b = a.to(torch.complex128), b.to(torch.complex128)
    return float((a - b).abs().max() / a.abs().max())


def as_bytes(value):
    return value.contiguous().resolve_conj().numpy().tobytes()


def main():
    torch.set_num_threads(1)
    work = work_of(sys.argv[1:])
    found, warned = {one.__name__: [] for one in work}, {one.__name__: [] for one in work}
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), SIZE, RANK == 0)
    for backend in ("gloo", "farandole"):
        dist.init_process_group(backend, store=dist.PrefixStore(backend, store), rank=RANK, world_size=SIZE)
        for one in work:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    found[one.__name__].append(copied(one()))
                except Exception:
                    traceback.print_exc()
                    found[one.__name__].append(None)
            warned[one.__name__].append({str(one.message) for one in caught})
        dist.barrier()
        dist.destroy_process_group()
    store.add("ended", 1)
    while RANK == 0 and store.add("ended", 0) < SIZE:  # it serves the others
        time.sleep(0.01)
    for name, (theirs, ours) in found.items():
        more = warned[name][1] - warned[name][0]
        print(f"{name}: {more or compare(theirs, ours)}\n", end="", flush=True)


if __name__ == "__main__":
    main()
