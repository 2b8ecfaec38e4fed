"""What a rank of test_torch_libraries.py runs: users' scripts of libraries, which make the group where they can.

``library_job.py FOLDER NAME:BACKEND:PORT ...`` saves what each has trained as FOLDER/NAME-BACKEND-RANK.
"""

import importlib
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

import farandole.torch.distributed  # noqa: F401  (registers the backend)
from distributed_job import RANK, SIZE, copied, model

SAMPLES = 48


def samples():
    torch.manual_seed(5)
    return torch.utils.data.TensorDataset(torch.randn(SAMPLES, 16), torch.randint(0, 4, (SAMPLES,)))


def lightning(backend):
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model(nn.BatchNorm1d(32))

        def training_step(self, batch, _):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    folder = tempfile.mkdtemp()
    classifier = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=SIZE, strategy=DDPStrategy(process_group_backend=backend), max_epochs=2,
        callbacks=[ModelCheckpoint(folder)], logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(classifier, torch.utils.data.DataLoader(samples(), batch_size=4, shuffle=True))
    return [*classifier.net.state_dict().values(), trainer.callback_metrics["loss"]]


def accelerate(backend):
    from accelerate import Accelerator

    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = model()
    loader = torch.utils.data.DataLoader(samples(), batch_size=4, shuffle=True)
    trained, optimizer, batches = accelerator.prepare(net, torch.optim.Adam(net.parameters()), loader)
    for inputs, classes in batches:
        with accelerator.accumulate(trained):
            loss = nn.functional.cross_entropy(trained(inputs), classes)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    losses = accelerator.gather_for_metrics(loss.detach())
    return [*net.parameters(), losses]


def transformers(backend):
    from transformers import Trainer, TrainingArguments

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model()

        def forward(self, inputs, labels):
            outputs = self.net(inputs)
            return {"loss": nn.functional.cross_entropy(outputs, labels), "logits": outputs}

    dist.init_process_group(backend)
    classifier = Classifier()
    rows = [{"inputs": inputs, "labels": label} for inputs, label in samples()]
    arguments = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)
    trainer = Trainer(classifier, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    return [*classifier.parameters(), trainer.evaluate()["eval_loss"]]


def ignite(backend):
    import ignite.distributed as idist
    from ignite.engine import Engine
    from ignite.metrics import Average

    dist.init_process_group(backend)
    net = model()
    trained, optimizer = nn.parallel.DistributedDataParallel(net), torch.optim.Adam(net.parameters())

    def step(_, batch):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(trained(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    engine = Engine(step)
    Average().attach(engine, "loss")
    engine.run(idist.auto_dataloader(samples(), batch_size=4 * SIZE, shuffle=True))
    return [*net.parameters(), engine.state.metrics["loss"]]


def deepspeed(backend):
    import deepspeed

    deepspeed.init_distributed(backend)
    results = []
    for stage in (0, 1, 2, 3):
        settings = {
            "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }  # fmt: skip
        net = model()
        engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=settings)
        inputs, classes = samples()[RANK::SIZE]
        for step in range(3):
            batch = slice(4 * step, 4 * step + 4)
            loss = nn.functional.cross_entropy(engine(inputs[batch]), classes[batch])
            engine.backward(loss)
            engine.step()
        with deepspeed.zero.GatheredParameters(list(net.parameters()), enabled=stage == 3):
            results += copied(net.parameters())
        engine.destroy()
    return results


def main():
    folder, *jobs = sys.argv[1:]
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # which takes longest, and which optimizers import

    for job in jobs:
        name, backend, port = job.split(":")
        importlib.import_module(name)
        if os.fork() == 0:  # a process for each, as scripts have, but imports happen once
            os.environ["MASTER_PORT"] = port
            torch.save(copied(globals()[name](backend)), f"{folder}/{name}-{backend}-{RANK}")
            assert dist.get_backend() == backend
            dist.destroy_process_group()
            return
        if os.wait()[1] != 0:
            sys.exit(f"{name} over {backend} failed")


if __name__ == "__main__":
    main()
