"""The manifests of docs/kubernetes.md: fields that exist, and variables that two ranks start with."""

import os
import re
import subprocess
import sys

import pytest
import yaml

from ranks import PYTHON_PATH, REPOSITORY, THIS_DIR, free_port

pytestmark = pytest.mark.once

PAGE = (REPOSITORY / "docs" / "kubernetes.md").read_text()
MANIFESTS = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)]
#: By kind, in the package kubeflow-trainer-api; it has no others of the page's.
SCHEMAS = {
    "Job": "IoK8sApiBatchV1Job", "TrainJob": "TrainerV1alpha1TrainJob", "JobSet": "JobsetV1alpha2JobSet",
}  # fmt: skip


def lines_of(value, path=""):
    """What a manifest says, a line for each value."""
    if isinstance(value, dict):
        return {line for key, one in value.items() for line in lines_of(one, f"{path}.{key}")}
    if isinstance(value, list):
        return {line for at, one in enumerate(value) for line in lines_of(one, f"{path}[{at}]")}
    return {f"{path} = {value}"}


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_manifest_has_no_fields_but_those_of_its_schema(kind):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    [manifest] = [one for one in MANIFESTS if one["kind"] == kind]
    read = getattr(models, SCHEMAS[kind]).from_dict(manifest)  # which drops what it does not know
    assert lines_of(manifest) <= lines_of(read.to_dict())


def test_ranks_start_with_the_variables_of_the_indexed_job(tmp_path):
    [job] = [one for one in MANIFESTS if one["kind"] == "Job"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    [volume] = job["spec"]["template"]["spec"]["volumes"]
    given = {one["name"]: one.get("value") for one in container["env"]}
    assert given["FARANDOLE_SIZE"] == str(job["spec"]["completions"]) and given["FARANDOLE_RANK"] is None
    key, mount = tmp_path / "data", container["volumeMounts"][0]["mountPath"]
    key.write_bytes(b"k" * 32)
    key.chmod(volume["secret"]["defaultMode"])
    (tmp_path / "key").symlink_to(key)  # as Kubernetes mounts it
    environment = os.environ | given | {
        "FARANDOLE_SIZE": "2", "FARANDOLE_ADDRESS": f"127.0.0.1:{free_port()}", "PYTHONPATH": PYTHON_PATH,
        "FARANDOLE_KEY_FILE": str(tmp_path) + given["FARANDOLE_KEY_FILE"].removeprefix(mount),
    }  # fmt: skip
    ranks = [
        subprocess.Popen([sys.executable, THIS_DIR / "small_training.py"], env=environment | {"FARANDOLE_RANK": index},
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for index in "01"
    ]  # fmt: skip
    said = [rank.communicate(timeout=90)[0] for rank in ranks]
    assert said[0] == said[1] and re.fullmatch(r"weights \w+ of 2 ranks\n", said[0]), said
