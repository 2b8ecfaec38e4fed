"""torch's CUDA tensors on a real GPU: one process is enough for collectives, as ranks are threads.

Optimizers need a process per rank: autograd has one thread per GPU and process, and a rank's waits
there for the others'. Those tests run under mpirun; ranks share GPU 0 where there is only one, so
that batches travel through host memory.
"""

import shutil

import pytest

torch = pytest.importorskip("torch")

import farandole.torch as fl  # noqa: E402
from farandole.torch.optimizer._codecs import context_of  # noqa: E402
from models import OPTIMIZERS, Branched, train_alone  # noqa: E402
from ranks import run_mpi, run_threads  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
LONG = 100_000_000  # cycles: some 50 ms

PRELUDE = """
import torch
import farandole.torch as fl
from models import OPTIMIZERS, Branched, batch, loss_of
fl.init()
torch.cuda.set_device(fl.local_rank() % torch.cuda.device_count())
"""


def on_ranks(text, size=2, timeout_s=300):
    """What each rank of a job under mpirun told."""
    import textwrap

    return run_mpi(size, PRELUDE + textwrap.dedent(text), timeout_s)


def grad_scaler():
    """The GradScaler of this torch for CUDA."""
    return (
        torch.amp.GradScaler("cuda")
        if hasattr(torch.amp, "GradScaler")
        else (torch.cuda.amp.GradScaler())
    )


def late(values):
    """The values, in the current stream, after a while."""
    torch.cuda._sleep(LONG)
    return values + 0


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_collectives_give_every_rank_the_result(size, dtype):
    def body(rank):
        values = torch.arange(1000, device="cuda").to(dtype) % 7
        total = fl.allreduce(values * (rank + 1), op=fl.Sum)
        in_place = values * (rank + 1)
        fl.allreduce_(in_place, op=fl.Sum, name="in place")
        rooted = torch.full((5,), rank, device="cuda").to(dtype)
        fl.broadcast_(rooted, size - 1)
        rows = fl.allgather(torch.full((rank + 1, 2), rank, device="cuda").to(dtype))
        expected = values * (size * (size + 1) // 2)
        assert torch.equal(total, expected) and torch.equal(in_place, expected)
        assert rooted.tolist() == [size - 1] * 5 and total.is_cuda
        return rows[:, 0].tolist()

    expected = [float(rank) for rank in range(size) for _ in range(rank + 1)]
    assert run_threads(size, body) == [expected] * size


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_every_rank_gets_its_rows(size, dtype):
    def body(rank):
        values = torch.arange(2 * 1001, device="cuda").reshape(1001, 2).to(dtype) % 7
        whole = fl.allreduce(values * (rank + 1), op=fl.Sum)
        part, other = fl.grouped_reducescatter([values * (rank + 1), values.t()], op=fl.Sum)
        assert torch.equal(fl.allgather(part), whole) and part.is_cuda
        assert torch.equal(fl.allgather(other), values.t() * size)
        splits = torch.tensor([to + rank for to in range(size)], device="cuda")
        there, counts = fl.alltoall(values + rank, splits)
        assert counts.is_cuda and counts.tolist() == [rank + source for source in range(size)]
        back, counts = fl.alltoall(there, counts)
        assert torch.equal(back, (values + rank)[: sum(splits.tolist())])
        assert counts.tolist() == splits.tolist()
        return len(part)

    assert run_threads(size, body) == [1001 // size + (r < 1001 % size) for r in range(size)]


def test_an_allgather_and_an_alltoall_in_the_background_use_the_callers_stream():
    def body(rank):
        seen = []
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                rows = late(torch.full((rank + 1, 100_000), rank + 1.0, device="cuda"))
                handle = fl.allgather_async(rows)
                exchange = fl.alltoall_async(rows, [0, 1])
                seen.append(fl.synchronize(handle).mean(1).tolist())
                seen.append(fl.synchronize(exchange)[0].mean(1).tolist())
            with context_of(rows).using((0, stream.cuda_stream)):
                assert torch.cuda.current_stream().cuda_stream == stream.cuda_stream
        return seen

    assert run_threads(2, body) == [
        [[1.0, 2.0, 2.0], []] * 2,
        [[1.0, 2.0, 2.0], [1.0, 2.0]] * 2,
    ]


def test_late_producers_and_side_streams_are_in_the_sum():
    def body(rank):
        values = torch.full((100_000,), rank + 1.0, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            handle = fl.allreduce_async(late(values), op=fl.Sum, name="side")
        here = fl.allreduce(late(values), op=fl.Sum, name="here")
        return (fl.synchronize(handle) == 3).all().item(), (here == 3).all().item()

    assert run_threads(2, body) == [(True, True)] * 2


def test_synchronize_does_not_wait_for_the_callers_stream():
    def body(rank):
        handle = fl.allreduce_async(torch.full((10,), rank + 1.0, device="cuda"), op=fl.Sum)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(40 * LONG)
            result = fl.synchronize(handle) * 1
            is_busy = not side.query()
        side.synchronize()
        return is_busy, result.tolist()

    assert run_threads(2, body) == [(True, [3.0] * 10)] * 2


def test_dropped_tensors_are_not_overwritten():
    def body(rank):
        results = []
        for step in range(20):
            handle = fl.allreduce_async(late(torch.full((1 << 18,), 1.0, device="cuda")), op=fl.Sum)
            results.append(fl.synchronize(handle)[0] * 1)
            del handle
            torch.full((1 << 18,), -1e9, device="cuda")
        return [result.item() for result in results]

    assert run_threads(2, body) == [[2.0] * 20] * 2


def test_strides_and_16_bit_wires():
    def body(rank):
        strided = (torch.arange(6.0, device="cuda").reshape(2, 3) * (rank + 1)).t()
        plain = fl.allreduce(strided, op=fl.Sum)
        half = fl.allreduce(strided, op=fl.Sum, compression=fl.Compression.fp16)
        return torch.equal(plain, half) and plain.tolist()

    assert run_threads(2, body) == [[[0.0, 9.0], [3.0, 12.0], [6.0, 15.0]]] * 2


def test_a_state_dict_on_both_sides_is_broadcast():
    def body(rank):
        state = {
            "weight": torch.full((3,), float(rank), device="cuda"),
            "counter": torch.tensor(rank, device="cuda"),
            "host": torch.tensor([float(rank)]),
        }
        fl.broadcast_parameters(state, 1)
        return {name: tensor.tolist() for name, tensor in state.items()}

    assert run_threads(2, body) == [{"weight": [1.0] * 3, "counter": 1, "host": [1.0]}] * 2


@pytest.mark.parametrize("capturable", [False, True])
def test_an_optimizers_state_is_broadcast_to_where_it_belongs(capturable):
    def body(rank):
        p = torch.nn.Parameter(torch.ones(4, device="cuda"))
        optimizer = torch.optim.Adam([p], lr=0.1 * (rank + 1), capturable=capturable)
        if rank == 0:
            p.sum().backward()
            optimizer.step()
        fl.broadcast_optimizer_state(optimizer)
        state = optimizer.state[p]
        assert state["exp_avg"].is_cuda and state["step"].is_cuda == capturable
        return state["step"].item(), optimizer.param_groups[0]["lr"]

    assert run_threads(2, body) == [(1.0, 0.1)] * 2


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_is_refused_with_a_sentence():
    def body(_rank):
        tensor = torch.ones(4, device="cuda")
        fl.allreduce_(tensor)
        with pytest.raises(ValueError, match="captured into a CUDA graph"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                fl.allreduce_(tensor)
        return fl.allreduce(tensor).tolist()

    assert run_threads(1, body) == [[1.0] * 4]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU only")
def test_no_context_is_made_on_gpu_0():
    if torch._C._cuda_hasPrimaryContext(0):
        pytest.skip("a test before this one used GPU 0")

    def body(_rank):
        torch.cuda.set_device(1)
        fl.allreduce(torch.ones(4, device="cuda"))
        fl.synchronize(fl.allgather_async(torch.ones(4, device="cuda")))
        return torch._C._cuda_hasPrimaryContext(0)

    assert run_threads(1, body) == [False]


def test_one_rank_with_autocast_and_a_scaler_is_plain_torch():
    def train(wrap):
        torch.manual_seed(0)
        model = Branched(torch.float32).cuda()
        optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.01))
        scaler = grad_scaler()
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.randn(8, 6, device="cuda")).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().clone() for p in model.parameters()]

    plain = train(lambda optimizer: optimizer)
    (ours,) = run_threads(1, lambda _: train(fl.DistributedOptimizer))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


@needs_mpirun
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("complete", ["backward", "step"])
def test_two_ranks_train_as_one_on_all_batches(name, complete):
    told = on_ranks(f"""
        model = Branched().cuda()
        fl.broadcast_parameters(model.state_dict())
        optimizer = fl.DistributedOptimizer(
            OPTIMIZERS[{name!r}](list(model.parameters())), model.named_parameters(),
            complete={complete!r},
        )
        for step in range(6):
            optimizer.zero_grad()
            data = [part.cuda() for part in batch(fl.rank(), step)]
            loss_of(model, data, use_branch=step % 2 == 0 or fl.rank() == 0).backward()
            optimizer.step()
        tell([p.tolist() for p in model.parameters()])
    """)
    _, weights = train_alone(
        Branched(), OPTIMIZERS[name], 2, 6, lambda rank, step: step % 2 == 0 or rank == 0
    )
    assert told[0] == told[1]
    for ours, theirs in zip(eval(told[0]), weights, strict=True):
        torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), theirs)


@needs_mpirun
def test_the_rows_of_the_contract_on_two_ranks():
    told = on_ranks("""
        def sgd(*parameters, **arguments):
            named = [(f"p{i}", p) for i, p in enumerate(parameters)]
            return fl.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), named, **arguments)

        def parameter(*values):
            return torch.nn.Parameter(torch.tensor(values, device="cuda"))

        rank = fl.rank()
        p, q, unused = parameter(1.0), parameter(1.0), parameter(1.0)
        optimizer = sgd(p, q, unused)
        for _ in range(3):  # q has a gradient on rank 1 alone
            optimizer.zero_grad()
            (p * (rank + 1.0) + (q * 4.0 if rank else 0.0)).sum().backward()
        tell((p.grad.item(), q.grad.item(), unused.grad))

        with optimizer.no_sync():
            optimizer.zero_grad()
            (p * (rank + 1.0)).sum().backward()
        tell(p.grad.item())
        optimizer.zero_grad()

        table = torch.nn.Embedding(4, 2, sparse=True).cuda()
        sparse = sgd(table.weight)
        for _ in range(3):
            sparse.zero_grad()
            table(torch.tensor([rank, 3], device="cuda")).sum().backward()
        tell((table.weight.grad.is_sparse, table.weight.grad.to_dense()[:, 0].tolist()))

        scaler = torch.cuda.amp.GradScaler(init_scale=8.0)
        w = parameter(1.0)
        scaled = sgd(w)
        with torch.autocast("cuda"):
            loss = (w * (rank + 1.0)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(scaled)
        tell(w.grad.item())
        scaler.step(scaled)
        tell(w.item())

        try:
            raises, fired = parameter(1.0), parameter(1.0)
            failing = sgd(raises, fired)
            y = raises * 1.0
            if rank == 1:
                y.register_hook(lambda grad: 1 / 0)
            (y + fired * 1.0).sum().backward()  # what was made last, the gradient of fired, first
        except (ZeroDivisionError, fl.HorovodInternalError) as error:
            tell(type(error).__name__)
        failing.zero_grad()
        (raises * (rank + 1.0) + fired).sum().backward()
        tell(raises.grad.item())
    """)
    rows = ["(1.5, 2.0, None)", "1.5", "(True, [0.5, 0.5, 0.0, 1.0])", "1.5", "-0.5"]
    for rank, lines in enumerate(text.splitlines() for text in told):
        expected = [*rows, "HorovodInternalError" if rank == 0 else "ZeroDivisionError", "1.5"]
        expected[1] = str(rank + 1.0)
        assert lines == expected


@needs_mpirun
@pytest.mark.skipif(not hasattr(torch, "compile"), reason="this torch has no torch.compile")
def test_a_compiled_model_gets_the_same_weights():
    told = on_ranks("""
        def train(compiled):
            model = Branched(torch.float32).cuda()
            optimizer = fl.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters()
            )
            forward = torch.compile(model, backend="inductor") if compiled else model
            for step in range(4):
                optimizer.zero_grad()
                data = [part.float().cuda() for part in batch(fl.rank(), step)]
                (forward(data[0]) - data[1]).square().mean().backward()
                optimizer.step()
            return [p.detach() for p in model.parameters()]

        for ours, eager in zip(train(True), train(False), strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
        tell("same")
    """)
    assert told == ["same"] * 2


@needs_mpirun
def test_memory_of_gradients_is_given_back():
    told = on_ranks("""
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
        optimizer = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
        sizes = []
        for _ in range(30):
            model(torch.randn(4, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            sizes.append(torch.cuda.memory_allocated())
        torch.cuda.synchronize()
        optimizer.zero_grad(set_to_none=True)
        tell(max(sizes[20:]) <= max(sizes[:10]) and torch.cuda.memory_allocated() < 1.5 * min(sizes))
    """)
    assert told == ["True"] * 2


@needs_mpirun
def test_sync_batch_norm_is_batch_norm_of_the_concatenated_batch():
    told = on_ranks(
        """
        import test_sync_batch_norm as test

        test.check_job("cuda", torch.float32, 1e-5)
        for dtype in (torch.float16, torch.bfloat16):
            test.check_job("cuda", dtype, 5 * torch.finfo(dtype).eps)
        tell("done")
        """
    )
    assert told == ["done"] * 2


def test_metrics_may_be_partly_on_the_gpu():
    def body(rank):
        metrics = {"loss": torch.tensor(1.0 + rank, device="cuda"), "accuracy": torch.tensor(0.5)}
        got = fl.metric_average({**metrics, "count": 3}, weight=1 + rank)
        assert got["loss"].is_cuda and not got["accuracy"].is_cuda and got["count"] == 3
        return got["loss"].item()

    assert run_threads(2, body) == pytest.approx([5 / 3] * 2)
