"""The manifests in `deploy/kuberay/`: valid for KubeRay and Kubernetes, fit for the roles of a run, safe by default.

Each overlay is rendered, as `kubectl kustomize` does (compared with it where it is installed; equal to kustomize 5.5),
and each field is checked against the schemas of Kubernetes and KubeRay.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Literal

import kubernetes_validate
import pytest
import yaml
from pydantic import BaseModel, ConfigDict

from deploy.presets import load_config
from protocol.config.run import RunConfig
from tests.support.paths import ROOT
from tests.support.services.kustomize import Document, build

OVERLAYS = ("cpu-demo", "sd35-8gpu", "flux-16gpu")
FOLDERS = tuple(name for overlay in OVERLAYS for name in (overlay, f"{overlay}/cluster"))
KUBERNETES = "1.33"


class Known(BaseModel):
    """Fields that our manifests use, with their names and types; an unknown field would be dropped without a word."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Auth(Known):
    mode: Literal["token", "disabled"]
    secretName: str


class Autoscaler(Known):
    version: Literal["v1", "v2"]
    idleTimeoutSeconds: int
    resources: Document
    securityContext: Document


class GcsFaultTolerance(Known):
    redisAddress: str
    redisPassword: Document


class HeadGroup(Known):
    rayStartParams: dict[str, str]
    template: Document


class WorkerGroup(Known):
    groupName: str
    minReplicas: int
    maxReplicas: int
    replicas: int
    rayStartParams: dict[str, str]
    resources: dict[str, str]
    template: Document


class RayClusterSpec(Known):
    rayVersion: str
    authOptions: Auth
    enableInTreeAutoscaling: bool
    autoscalerOptions: Autoscaler
    gcsFaultToleranceOptions: GcsFaultTolerance
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]


class RayJobSpec(Known):
    entrypoint: str
    submissionMode: Literal["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]
    backoffLimit: int
    shutdownAfterJobFinishes: bool
    ttlSecondsAfterFinished: int
    preRunningDeadlineSeconds: int
    submitterPodTemplate: Document
    rayClusterSpec: RayClusterSpec


class SecretKey(Known):
    name: str
    key: str


class Authorization(Known):
    credentials: SecretKey


class MetricsEndpoint(Known):
    port: str
    path: str = "/metrics"
    authorization: Authorization | None = None
    relabelings: list[Document] = []


class PodMonitorSpec(Known):
    selector: Document
    podMetricsEndpoints: list[MetricsEndpoint]


class Resource(Known):
    apiVersion: str
    kind: str
    metadata: Document
    spec: Document


FOREIGN: Mapping[str, tuple[str, type[Known]]] = {
    "RayCluster": ("ray.io/v1", RayClusterSpec),
    "RayJob": ("ray.io/v1", RayJobSpec),
    "PodMonitor": ("monitoring.coreos.com/v1", PodMonitorSpec),
}
"""Kinds that Kubernetes itself does not know."""


@cache
def rendered(folder: str) -> list[Document]:
    return build(ROOT / "deploy" / "kuberay" / "overlays" / folder)


def cluster_of(folder: str) -> RayClusterSpec:
    """The cluster of an overlay, also where it is part of a job."""
    (found,) = [each for each in rendered(folder) if each["kind"] in ("RayCluster", "RayJob")]
    return RayClusterSpec.model_validate(found["spec"].get("rayClusterSpec", found["spec"]))


def job_of(overlay: str) -> RayJobSpec:
    (found,) = [each for each in rendered(overlay) if each["kind"] == "RayJob"]
    return RayJobSpec.model_validate(found["spec"])


def pods_of(document: Document) -> Iterator[Document]:
    """The templates of all pods that a document makes, those of Ray's groups included."""
    for _, template in walk(document["spec"]):
        if isinstance(template, dict) and "containers" in template.get("spec", {}):
            yield template


def walk(node: Any) -> Iterator[tuple[str, Any]]:
    """Every key and value of a document, inner ones too."""
    items = node.items() if isinstance(node, dict) else (("", each) for each in node) if isinstance(node, list) else ()
    for key, value in items:
        yield str(key), value
        yield from walk(value)


def config_of(overlay: str) -> RunConfig:
    """The run that an overlay's job trains."""
    program, command, preset, *words = shlex.split(job_of(overlay).entrypoint)
    assert (program, command, words[0]) == ("flowcredit", "train", "--run")
    assert words[1].startswith("/runs/")
    return load_config(preset, overrides=words[2:])


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_document_is_valid_and_holds_no_unknown_field(folder: str) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in rendered(folder)]
    assert len(set(names)) == len(names)
    for document in rendered(folder):
        Resource.model_validate(document)
        if document["kind"] in FOREIGN:
            api, spec = FOREIGN[document["kind"]]
            assert document["apiVersion"] == api
            spec.model_validate(document["spec"])
        else:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
        for template in pods_of(document):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which renders kustomizations, is not installed")
@pytest.mark.parametrize("folder", FOLDERS)
def test_kustomize_itself_renders_the_same(folder: str) -> None:
    command = ["kubectl", "kustomize", str(ROOT / "deploy" / "kuberay" / "overlays" / folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    def by_name(documents: Iterable[Document]) -> list[Document]:
        return sorted(documents, key=lambda each: (each["kind"], each["metadata"]["name"]))

    assert by_name(yaml.safe_load_all(done.stdout)) == by_name(rendered(folder))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_job_has_the_cluster_of_its_overlay_and_brings_no_second_one(overlay: str) -> None:
    kinds = [each["kind"] for each in rendered(overlay)]
    assert kinds.count("RayJob") == 1
    assert "RayCluster" not in kinds
    alone = [each["kind"] for each in rendered(f"{overlay}/cluster")]
    assert sorted([*alone, "RayJob"]) == sorted([*kinds, "RayCluster"])
    theirs, ours = (cluster_of(folder).model_dump() for folder in (f"{overlay}/cluster", overlay))
    assert theirs == ours


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_worker_groups_have_room_for_all_actors_of_the_run(overlay: str) -> None:
    config, groups = config_of(overlay), {group.groupName: group for group in cluster_of(overlay).workerGroupSpecs}
    learners = config.cluster.learner.workers
    actors = {
        "rollout": [config.cluster.rollout.reserved] * config.cluster.rollout_actors,
        "learner": [config.cluster.learner.reserved] * learners,
        "reward": [
            reward.reserved(config.cluster.reward) for reward in config.rewards.values() for _ in range(reward.actors)
        ],
    }
    assert set(groups) == set(actors)
    for role, reserved in actors.items():
        group = groups[role]
        one = {name: float(amount) for name, amount in group.resources.items()}
        assert role in one
        for actor in reserved:
            assert actor[role] == one[role], "an actor takes one worker"
            assert all(amount <= one.get(name, 0.0) for name, amount in actor.items())
        assert len(reserved) <= group.maxReplicas
        assert group.minReplicas <= group.replicas <= group.maxReplicas


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_ray_is_told_a_worker_has_is_what_kubernetes_gives_it(folder: str) -> None:
    for group in cluster_of(folder).workerGroupSpecs:
        (container,) = group.template["spec"]["containers"]
        limits = container["resources"]["limits"]
        assert limits["cpu"] == group.resources["CPU"]
        assert limits.get("nvidia.com/gpu") == group.resources.get("GPU")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_retry_finds_the_run_folder_of_the_first_try(overlay: str) -> None:
    job = job_of(overlay)
    assert job.backoffLimit > 0
    head = job.rayClusterSpec.headGroupSpec.template["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in head["containers"][0]["volumeMounts"]}
    claims = {each["name"]: each["persistentVolumeClaim"]["claimName"] for each in head["volumes"]}
    held = {each["metadata"]["name"] for each in rendered(overlay) if each["kind"] == "PersistentVolumeClaim"}
    assert claims[mounts["/runs"]] in held


@pytest.mark.parametrize("folder", FOLDERS)
def test_pods_run_without_privileges_and_within_limits(folder: str) -> None:
    containers = 0
    for document in rendered(folder):
        for template in pods_of(document):
            pod = template["spec"]["securityContext"]
            assert pod["runAsNonRoot"] is True
            assert pod["runAsUser"] > 0
            assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
            for container in template["spec"]["containers"]:
                containers += 1
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
                assert {"cpu", "memory"} <= set(container["resources"]["limits"])
                assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    assert containers >= 6


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_status_api_is_probed_and_asks_for_its_token(folder: str) -> None:
    (status,) = [each for each in rendered(folder) if each["kind"] == "Deployment"]
    (container,) = status["spec"]["template"]["spec"]["containers"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert container["args"][:4] == ["flowcredit", "serve", "--host", "0.0.0.0"]
    token = next(each for each in container["env"] if each["name"] == "FLOWCREDIT_TOKEN")
    assert "secretKeyRef" in token["valueFrom"]


def test_no_secret_is_written_down_and_the_documented_command_makes_every_key() -> None:
    page = (ROOT / "deploy" / "kuberay" / "base" / "kustomization.yaml").read_text()
    made = set(re.findall(r"--from-literal=(\w+)=", page))
    documents = [document for folder in FOLDERS for document in rendered(folder)]
    used = [value for document in documents for key, value in walk(document) if key in ("secretKeyRef", "credentials")]
    assert {each["name"] for each in used} == {"flowcredit"}
    needed = {each["key"] for each in used if not each.get("optional")} | {"auth_token"}  # the key that KubeRay reads
    assert needed == made - {"hf_token"}
    assert all(cluster_of(folder).authOptions == Auth(mode="token", secretName="flowcredit") for folder in FOLDERS)
    assert "Secret" not in {document["kind"] for document in documents}


@pytest.mark.parametrize("folder", FOLDERS)
def test_services_and_monitors_select_pods_that_have_the_port(folder: str) -> None:
    documents = rendered(folder)
    templates = [template for document in documents for template in pods_of(document)]

    def ports(selector: Mapping[str, str]) -> set[str]:
        chosen = [each for each in templates if selector.items() <= each["metadata"].get("labels", {}).items()]
        return {port["name"] for each in chosen for c in each["spec"]["containers"] for port in c.get("ports", ())}

    for document in documents:
        if document["kind"] == "Service":
            assert {port["targetPort"] for port in document["spec"]["ports"]} <= ports(document["spec"]["selector"])
        if document["kind"] == "PodMonitor":
            endpoints = {endpoint["port"] for endpoint in document["spec"]["podMetricsEndpoints"]}
            assert endpoints <= ports(document["spec"]["selector"]["matchLabels"])


def test_one_ray_version_in_manifests_and_image() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    assert {cluster_of(folder).rayVersion for folder in FOLDERS} == {re.findall(r"^ray==(\S+)$", constraints, re.M)[0]}
