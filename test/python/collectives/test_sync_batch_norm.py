"""SyncBatchNorm: N ranks normalize as one process normalizes the concatenated batch."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import farandole.torch as fl
from ranks import on_threads, run_forked, run_threads

CHANNELS = 3
#: Images per rank; the first ``size`` entries are a job's.
EVEN, UNEVEN, ONE_EMPTY, ONE_EACH = (4, 4, 4, 4), (1, 5, 2, 3), (3, 0, 4, 1), (1, 1, 1, 1)
SHAPES = {2: (), 3: (7,), 4: (5, 6), 5: (2, 3, 4)}
OF_TORCH = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def make_batches(counts, dimensions, dtype, offset=0.0, steps=1):
    """Per step and rank an input; each channel has another scale."""
    generator = torch.Generator().manual_seed(11)
    scales = torch.tensor([1.0, 3.0, 0.2]).view(1, -1, *[1] * (dimensions - 2))

    def make(count):
        shape = (count, CHANNELS, *SHAPES[dimensions])
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (values * scales + offset).to(dtype)

    return [[make(count) for count in counts] for _ in range(steps)]


def set_parameters(layer):
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([0.5, -2.0, 1.5]))
            layer.bias.copy_(torch.tensor([0.1, 0.0, -3.0]))
    return layer


def run_layer(layer, inputs):
    """Outputs, input gradients, parameter gradients and buffers after a step per input."""
    seen = []
    for step, values in enumerate(inputs):
        x = values.clone().requires_grad_()
        layer.zero_grad()
        y = layer(x)
        weights = torch.linspace(-1, 1, math.prod(x.shape[1:]), dtype=x.dtype, device=x.device).view(1, *x.shape[1:])
        # Of a loss quadratic in y nothing is left: its gradient is a multiple of y and a constant.
        (y * (step + 1) + y.pow(3) / 3).mul(weights).sum().backward()
        seen.append((y.detach(), x.grad))
    gradients = [p.grad for p in layer.parameters()]
    return seen, gradients, [b.clone() for b in layer.buffers()]


def compare_with_torch(counts, dimensions, dtype, tolerance, offset=0.0, steps=2, **options):
    """Runs a layer of ``options`` on ranks, and torch's own on all batches in float64.

    The difference is at most ``tolerance`` of the largest value, and what torch's own layer of the
    same dtype loses.
    """
    batches = make_batches(counts, dimensions, dtype, offset, steps)
    reference = set_parameters(OF_TORCH[dimensions](CHANNELS, **options, dtype=torch.float64))
    expected, gradients, buffers = run_layer(reference, [torch.cat(b).double() for b in batches])
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    plain = set_parameters(OF_TORCH[dimensions](CHANNELS, **options, dtype=wide))
    rounded, _, _ = run_layer(plain, [torch.cat(b).to(wide) for b in batches])

    def body(rank):
        layer = set_parameters(fl.SyncBatchNorm(CHANNELS, **options, dtype=wide))
        return run_layer(layer, [ranks[rank] for ranks in batches])

    told = run_threads(len(counts), body)
    for step, tensors in enumerate(expected):  # outputs, gradients of inputs
        for number, tensor in enumerate(tensors):
            got = torch.cat([own[0][step][number] for own in told])
            assert got.dtype == dtype and got.shape == tensor.shape
            loss = float((rounded[step][number] - tensor).abs().max())
            atol = tolerance * max(1.0, float(tensor.abs().max())) + loss
            torch.testing.assert_close(got.double(), tensor, rtol=0, atol=atol)
    for number, gradient in enumerate(gradients):
        total = sum(gradients[number].double() for _, gradients, _ in told)
        scale = float(gradient.abs().max()) + batches[0][0].shape[1]
        torch.testing.assert_close(total, gradient, rtol=0, atol=tolerance * scale)
    for _, _, own in told:
        for got, first, buffer in zip(own, told[0][2], buffers, strict=True):
            torch.testing.assert_close(got.double(), buffer.double(), rtol=1e-6, atol=1e-6)
            assert torch.equal(got, first), "all ranks have the same statistics bit for bit"


ROWS = [
    *[(counts[:size], dimensions, torch.float64, 1e-12, {}) for counts in (EVEN, UNEVEN, ONE_EMPTY, ONE_EACH)
      for size in (2, 3, 4) for dimensions in SHAPES],
    *[(counts[:3], dimensions, torch.float32, 1e-6, {}) for counts in (EVEN, UNEVEN, ONE_EMPTY)
      for dimensions in (2, 4)],
    (UNEVEN, 4, torch.float32, 1e-6, {}),
    *[(UNEVEN[:2], 4, dtype, 3 * torch.finfo(dtype).eps, {}) for dtype in (torch.float16, torch.bfloat16)],
    *[(UNEVEN[:3], 4, torch.float64, 1e-12, {"steps": 4, **options})
      for options in ({"affine": False}, {"momentum": None}, {"momentum": 0.7, "eps": 0.5},
                      {"track_running_stats": False}, {"affine": False, "track_running_stats": False})],
]  # fmt: skip


@pytest.mark.parametrize(("counts", "dimensions", "dtype", "tolerance", "options"), ROWS, ids=str)
def test_a_layer_with_any_options_is_batch_norm_of_the_concatenated_batch(
    counts, dimensions, dtype, tolerance, options
):
    compare_with_torch(counts, dimensions, dtype, tolerance, **options)


def test_a_large_mean_costs_no_digits():
    """A sum of squares minus a squared sum would leave nothing of a deviation of 1 in float32."""
    counts = (6, 7)
    (batches,) = make_batches(counts, 4, torch.float32, offset=20000.0)
    whole = torch.cat(batches).double()
    expected = nn.BatchNorm2d(CHANNELS, affine=False, dtype=torch.float64)(whole)

    def body(rank):
        layer = fl.SyncBatchNorm(CHANNELS, affine=False)
        return layer(batches[rank]), layer.running_var

    for (got, running), part in zip(run_threads(2, body), expected.split(counts), strict=True):
        # What the float32 inputs still say about a deviation of 0.2.
        torch.testing.assert_close(got.double(), part, rtol=0, atol=0.02)
        unbiased = whole.transpose(0, 1).flatten(1).var(1)
        torch.testing.assert_close(running.double(), 0.9 + 0.1 * unbiased, rtol=1e-3, atol=0)


def twice(layer, x):
    """A checkpointed layer, and two passes before one backward."""
    return checkpoint(layer, layer(x).square(), use_reentrant=False).pow(3).sum()


def on_another_thread(layer, x):
    """As autograd's own thread of each GPU runs backward, which knows nothing of ranks that are threads."""
    loss = layer(x).pow(3).sum()
    with ThreadPoolExecutor(1) as other:
        other.submit(loss.backward).result()
    return loss.detach().requires_grad_()


def frozen_later(layer, x):
    layer.track_running_stats = False
    return layer(x).pow(3).sum()


def plainly(layer, x):
    return layer(x).pow(3).sum()


@pytest.mark.parametrize("rank_1", ["takes part", "has joined", "is not in the process set"])
@pytest.mark.parametrize("use", [plainly, twice, on_another_thread, frozen_later])
def test_gradients_and_statistics_are_those_of_the_batches_of_all_who_take_part(use, rank_1):
    (batches,) = make_batches(UNEVEN, 4, torch.float64)
    members = [0, 1, 2] if rank_1 == "takes part" else [0, 2]
    reference, whole = nn.BatchNorm2d(CHANNELS, dtype=torch.float64), torch.cat([batches[r] for r in members])
    use(reference, whole.requires_grad_()).backward()
    expected = dict(zip(members, whole.grad.split([UNEVEN[r] for r in members]), strict=True))

    def body(rank):
        others = fl.add_process_set([0, 2]) if rank_1 == "is not in the process set" else None
        if rank in members:
            layer = fl.SyncBatchNorm(CHANNELS, process_set=others, dtype=torch.float64)
            x = batches[rank].clone().requires_grad_()
            use(layer, x).backward()
            torch.testing.assert_close(x.grad, expected[rank])
            for own, buffer in zip(layer.buffers(), reference.buffers(), strict=True):
                torch.testing.assert_close(own, buffer)
        if rank_1 == "has joined":
            fl.join()

    run_threads(3, body)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_one_rank_is_torch_bit_for_bit(momentum):
    batches = [ranks[0] for ranks in make_batches((5,), 4, torch.float32, steps=3)]
    reference = set_parameters(nn.BatchNorm2d(CHANNELS, momentum=momentum))
    expected = run_layer(reference, batches)

    def body(rank):
        return run_layer(set_parameters(fl.SyncBatchNorm(CHANNELS, momentum=momentum)), batches)

    [got] = run_threads(1, body)
    flat = [[*sum(seen, ()), *gradients, *buffers] for seen, gradients, buffers in (got, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*flat, strict=True))


@pytest.mark.parametrize("tracks", [True, False])
def test_eval_mode_is_local(tracks):
    """Ranks evaluate different numbers of batches, each as torch does."""
    (batches,) = make_batches(UNEVEN, 4, torch.float32)

    def body(rank):
        layer = set_parameters(fl.SyncBatchNorm(CHANNELS, track_running_stats=tracks))
        plain = set_parameters(nn.BatchNorm2d(CHANNELS, track_running_stats=tracks))
        layer(batches[rank])
        if tracks:
            plain.load_state_dict(layer.state_dict())
        layer.eval(), plain.eval()
        for _ in range(rank):
            assert torch.equal(layer(batches[1]), plain(batches[1]))

    run_threads(3, body)


def test_inputs_that_need_no_gradient_cost_no_second_collective():
    (batches,) = make_batches(UNEVEN, 4, torch.float64)

    def body(rank):
        layer = set_parameters(fl.SyncBatchNorm(CHANNELS, dtype=torch.float64))
        before = fl.counters()
        (layer(batches[rank]) * batches[rank]).sum().backward()
        after = fl.counters()
        return layer.weight.grad, after["batches"] - before["batches"]

    told = run_threads(2, body)
    assert [batches for _, batches in told] == [1, 1]
    reference = set_parameters(nn.BatchNorm2d(CHANNELS, dtype=torch.float64))
    whole = torch.cat(batches[:2])
    (reference(whole) * whole).sum().backward()
    torch.testing.assert_close(told[0][0] + told[1][0], reference.weight.grad)


def test_channels_last_stays_channels_last():
    (batches,) = make_batches(UNEVEN, 4, torch.float32)

    def body(rank):
        x = batches[rank].contiguous(memory_format=torch.channels_last).requires_grad_()
        y = fl.SyncBatchNorm(CHANNELS)(x)
        y.square().sum().backward()
        for tensor in (y, x.grad):
            assert tensor.is_contiguous(memory_format=torch.channels_last)

    run_threads(2, body)


@on_threads(2)
def test_wrong_inputs_are_refused(rank):
    layer = fl.SyncBatchNorm(CHANNELS)
    for shape in ((3,), (2, 4), (2, 4, 5, 5), (1, 3, 1, 1, 1, 1)):
        with pytest.raises(ValueError, match=r"shape \[batch, 3, ...\] with 2 to 5 dimensions"):
            layer(torch.ones(shape))
    for counts in ((1, 0), (0, 0)):
        text = f"more than 1 value per channel .* all ranks together have {sum(counts)}"
        with pytest.raises(ValueError, match=text):
            layer(torch.ones(counts[rank], 3))
    assert layer.num_batches_tracked == 0
    assert layer(torch.ones(1, 3)).tolist() == [[0.0] * 3]


@on_threads(2)
def test_a_second_derivative_is_refused(rank):
    layer = fl.SyncBatchNorm(CHANNELS)
    x = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="SyncBatchNorm has no second derivative"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)


class Net(nn.Module):
    """One layer in two places, a layer in eval mode, one that is no batch norm."""

    def __init__(self):
        super().__init__()
        shared = nn.BatchNorm2d(4)
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), shared, nn.ReLU(), nn.Conv2d(4, 4, 3), shared)
        self.frozen = nn.BatchNorm2d(4, momentum=None, affine=False).eval()
        self.other = nn.InstanceNorm2d(4)

    def forward(self, x):
        return self.other(self.frozen(self.body(x)))


def test_conversion_keeps_parameters_buffers_modes_and_sharing():
    net = Net()
    before = dict([*net.named_parameters(), *net.named_buffers()])
    layer = net.body[1]
    state = copy.deepcopy(net.state_dict())
    assert fl.SyncBatchNorm.convert_sync_batchnorm(net) is net
    assert type(net.body[1]) is type(net.frozen) is fl.SyncBatchNorm
    assert net.body[1] is net.body[4] and type(net.other) is nn.InstanceNorm2d
    after = dict([*net.named_parameters(), *net.named_buffers()])
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert net.body[1].training and not net.frozen.training
    assert (net.frozen.momentum, net.frozen.affine) == (None, False)
    net.load_state_dict(state)
    single = fl.SyncBatchNorm.convert_sync_batchnorm(layer)
    assert type(single) is fl.SyncBatchNorm and single.weight is layer.weight
    assert copy.deepcopy(net).body[1].num_features == 4


class NormedAct(nn.BatchNorm2d):
    """A layer of somebody's own, which does more than normalize."""

    def forward(self, x):
        return super().forward(x).relu()


def test_conversion_leaves_a_subclass_as_it_is_and_names_it():
    net = nn.Sequential(nn.BatchNorm1d(2), NormedAct(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2))
    with pytest.warns(UserWarning, match=r"NormedAct .*\"1\""):
        fl.SyncBatchNorm.convert_sync_batchnorm(net)
    ours = fl.SyncBatchNorm
    assert [type(layer) for layer in net] == [ours, NormedAct, ours, ours]


@on_threads(3)
def test_converting_again_keeps_layers_and_their_process_sets(rank):
    pair = fl.add_process_set([0, 1])
    net = nn.Sequential(nn.BatchNorm1d(2))
    fl.SyncBatchNorm.convert_sync_batchnorm(net, pair)
    layer = net[0]
    net.append(nn.BatchNorm1d(2))
    fl.SyncBatchNorm.convert_sync_batchnorm(net)
    assert net[0] is layer and layer.process_set is pair
    assert type(net[1]) is fl.SyncBatchNorm and net[1].process_set is None


def test_a_layer_without_parameters_yet_is_not_converted():
    with pytest.raises(ValueError, match="LazyBatchNorm2d has no parameters before its first forw"):
        fl.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm2d()))


def check_job(device, dtype, tolerance):
    """On a rank of a job of two processes: batches of 5 and 2 against torch on both."""
    counts = (5, 2)
    batches = make_batches(counts, 4, dtype, steps=2)
    layer = set_parameters(fl.SyncBatchNorm(CHANNELS)).to(device)
    seen, gradients, buffers = run_layer(layer, [r[fl.rank()].to(device) for r in batches])
    plain = set_parameters(nn.BatchNorm2d(CHANNELS)).double()
    whole, wholes, expected = run_layer(plain, [torch.cat(r).double() for r in batches])
    for own, both in zip(seen, whole, strict=True):
        for got, tensor in zip(own, both, strict=True):
            part = tensor.split(counts)[fl.rank()]
            atol = tolerance * float(tensor.abs().max())
            assert got.dtype == dtype and got.device.type == device
            torch.testing.assert_close(got.double().cpu(), part, rtol=0, atol=atol)
    totals = [fl.allreduce(gradient, op=fl.Sum).cpu() for gradient in gradients]
    for got, tensor in zip(totals, wholes, strict=True):
        atol = tolerance * (1 + float(tensor.abs().max()))
        torch.testing.assert_close(got.double(), tensor, rtol=0, atol=atol)
    for got, buffer in zip(buffers, expected, strict=True):
        torch.testing.assert_close(got.double().cpu(), buffer.double(), rtol=1e-5, atol=1e-5)


def small_net(dtype=torch.float64):
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(CHANNELS, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 2, 3, bias=False), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(4, 1),
    ).to(dtype)  # fmt: skip


def train(net, optimizer, inputs):
    for x in inputs:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return [value.detach() for value in net.state_dict().values()]


def check_training():
    """On a rank of two: the optimizer's own gradients are in flight while a backward pass exchanges its sums."""
    torch.set_num_threads(1)
    net, plain = fl.SyncBatchNorm.convert_sync_batchnorm(small_net()), small_net()
    sgd, plain_sgd = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (net, plain))
    batches = make_batches((4, 4), 4, torch.float64, steps=20)
    optimizer = fl.DistributedOptimizer(sgd, net.named_parameters())
    got = train(net, optimizer, [ranks[fl.rank()] for ranks in batches])
    for a, b in zip(got, train(plain, plain_sgd, [torch.cat(ranks) for ranks in batches]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_processes_normalize_and_train_as_one_process_on_the_whole_batch():
    script = """
        import torch
        import farandole.torch as fl
        import test_sync_batch_norm as test

        fl.init()
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            test.check_job("cpu", dtype, 1e-5 if dtype == torch.float32 else 5 * torch.finfo(dtype).eps)
        test.check_training()
        tell("done")
    """
    assert run_forked(2, script) == ["done"] * 2
