"""Nothing is left of what was deleted; what was not deleted serves on, whoever leaves."""

from __future__ import annotations

from e2e.kubernetes.cluster import Cluster, Images, wait_until
from e2e.kubernetes.installation import DEFINITION, DEFINITIONS, OPERATOR, Installation
from e2e.kubernetes.load import Load
from e2e.kubernetes.service import CHILD_KINDS, Service
from e2e.kubernetes.test_troubles import LIGHT

GONE_WITHIN_S = 60


def test_nothing_is_left_of_a_deleted_service(cluster: Cluster, installation: Installation) -> None:
    short = Service(cluster, installation.namespace, "short")
    short.apply(router=LIGHT, rollout={"drainSeconds": 0})
    wait_until(lambda: short.pods("engine") and short.pods("router"), "it has pods")
    assert len(short.what_is_left()) >= 12
    short.delete()
    wait_until(lambda: not short.what_is_left(), "nothing is left", GONE_WITHIN_S)
    assert short.get() is None


def test_services_survive_the_release_and_the_next_one_takes_them_up(
    cluster: Cluster, images: Images, installation: Installation, served: Service
) -> None:
    served.wait_for("Ready", "Serving", 180)
    pods = served.pod_names("engine") | served.pod_names("router")
    with Load(cluster, images.operator, served) as load:
        installation.uninstall()
        wait_until(lambda: not of_the_release(cluster, installation), "nothing of the release is left", GONE_WITHIN_S)
        assert all(cluster.get(*DEFINITION, name) for name in DEFINITIONS)
        assert served.get() is not None
        assert load.go_on().failures == ()

        installation.install()
        served.apply(rollout={"progressSeconds": 1300})
        served.wait_until_settled()
        assert served.pod_names("engine") | served.pod_names("router") == pods
        assert load.go_on().failures == ()


def of_the_release(cluster: Cluster, installation: Installation) -> list[str]:
    """Return what there is of the release in its namespace."""
    kinds = (*CHILD_KINDS, ("coordination.k8s.io/v1", "Lease"), ("v1", "Secret"))
    return [
        f"{kind} {one['metadata']['name']}"
        for version, kind in kinds
        for one in cluster.list(version, kind, installation.namespace)
        if OPERATOR in one["metadata"]["name"] or one["metadata"]["name"].startswith("sh.helm.release")
    ]
