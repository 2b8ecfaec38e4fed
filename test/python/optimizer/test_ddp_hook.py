"""The communication hook of torch's DistributedDataParallel."""

import signal
import textwrap

import pytest

from test_torch_distributed import pytestmark as of_processes
from test_torch_distributed import run_script

pytestmark = of_processes
TRAIN = """
import farandole.torch as fl
fl.init()

def train(backend=None, state=None, is_compiled=False):
    torch.manual_seed(3)
    layers = torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    net = torch.nn.Sequential(*layers)
    group = None if backend is None else dist.new_group(backend=backend)
    cap_mb = 25 if is_compiled else 0.001
    model = torch.nn.parallel.DistributedDataParallel(net, process_group=group, bucket_cap_mb=cap_mb)
    if backend is not None:
        model.register_comm_hook(state, fl.ddp_hook)
    if is_compiled:
        model = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(4):
        torch.manual_seed(100 + R + 10 * step)
        inputs, classes = torch.randn(8, 16), torch.randint(0, 4, (8,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), classes).backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])
"""


def run_training(script, **options):
    return run_script(2, textwrap.dedent(TRAIN) + textwrap.dedent(script), **options)


@pytest.mark.parametrize("backend", ["gloo", "farandole"])
def test_two_ranks_train_bitwise_as_without_it(backend):
    script = f"""
        dist.init_process_group("gloo")
        plain = train()
        for is_compiled in (False, True):
            tell(f"same: {{torch.equal(plain, train({backend!r}, None, is_compiled))}}")
        dist.destroy_process_group()
    """
    for output in run_training(script):
        assert output.count("same: True") == 2, output


def test_gradients_travel_as_the_state_says():
    script = """
        class Halves:
            def compress(tensor):
                return tensor.to(torch.float16), "context"
            def decompress(tensor, context):
                assert context == "context"
                return tensor.to(torch.float32)

        dist.init_process_group("gloo")
        plain = train()
        for state in (fl.Compression.bf16, fl.Compression.fp16, Halves):
            result = train("gloo", state)
            worst = (plain - result).abs().max()
            tell(f"close: {0 < worst < 0.01} {worst}")
        dist.destroy_process_group()
    """
    for output in run_training(script):
        assert output.count("close: True") == 3, output


def test_what_is_wrong_is_an_error_in_backward():
    script = """
        dist.init_process_group("gloo")
        try:
            train("gloo", "bf16")
        except ValueError as error:
            tell(f"refused: {error}")
        dist.destroy_process_group()
    """
    for output in run_training(script):
        assert "refused: compression must have compress(tensor)" in output


def test_a_model_of_a_part_of_the_ranks_is_refused():
    script = """
        dist.init_process_group("gloo")
        groups = [dist.new_group([rank]) for rank in range(N)]
        whole = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        part = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=groups[R])
        for model in (whole, part):
            model.register_comm_hook(None, fl.ddp_hook)
            try:
                model(torch.ones(2, 4)).sum().backward()
                tell("averaged")
            except ValueError as error:
                tell(f"refused: {error}")
        dist.destroy_process_group()
    """
    for output in run_training(script):
        assert "averaged" in output and "refused: ddp_hook: the model's process group has 1 ranks and" in output


def test_a_death_is_an_error_in_backward():
    script = """
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        model.register_comm_hook(fl.Compression.fp16, fl.ddp_hook)
        try:
            for step in range(1000):
                loss = model(torch.ones(2, 4)).sum()
                if R == 1 and step == 3:
                    time.sleep(0.5)  # the other is in its backward pass
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
        except RuntimeError as error:
            tell(f"raised: {error}")
        os._exit(0)
    """
    outputs = run_training(script, codes=[0, -signal.SIGKILL])
    assert "raised: " in outputs[0] and "rank 1 (pid" in outputs[0], outputs[0]
