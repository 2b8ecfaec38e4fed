"""farandole.ray.run on a Ray cluster of this machine. Needs ray, which test/run.sh installs for it alone."""

import os

import pytest

ray = pytest.importorskip("ray")

import farandole.ray  # noqa: E402

pytestmark = pytest.mark.once


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def test_results_come_by_rank_and_the_ranks_know_each_other():
    def total(scale):
        import numpy as np

        import farandole

        farandole.init()
        ours = farandole.allreduce(np.full(3, farandole.rank() + 1.0), op=farandole.Sum, name="x")
        return farandole.rank(), farandole.local_size(), float(ours[0]) * scale

    assert farandole.ray.run(total, (10,), num_workers=3) == [(rank, 3, 60.0) for rank in range(3)]


def test_the_rank_that_failed_first_is_named_with_its_traceback():
    def fail():
        import time

        if os.environ["FARANDOLE_RANK"] == "1":
            raise KeyError("broken")
        time.sleep(600)

    with pytest.raises(RuntimeError) as raised:
        farandole.ray.run(fail, num_workers=2)
    lines = str(raised.value).splitlines()
    assert lines[0] == "rank 1 failed first, with exit code 1" and lines[-1] == "KeyError: 'broken'"


def test_a_worker_that_dies_is_named():
    def die():
        import time

        if os.environ["FARANDOLE_RANK"] == "1":
            os._exit(7)
        time.sleep(600)

    with pytest.raises(RuntimeError, match="^rank 1 was lost first: "):
        farandole.ray.run(die, num_workers=2)


def test_a_cluster_without_room_is_an_error_in_time():
    with pytest.raises(RuntimeError, match="no room for 9 workers .* Ray has {'CPU': 4.0}"):
        farandole.ray.run(os.getpid, num_workers=9, timeout_s=2)
