"""What `helm test` runs in a pod: the operator answers, and the API server knows our kinds."""

import json
import ssl
import sys
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
GROUP = "https://kubernetes.default.svc/apis/pagefleet.dev/v1alpha1"
KINDS = {"InferenceService", "InferenceProfile"}


def get(url: str, token: str = "", authority: ssl.SSLContext | None = None) -> bytes:
    """Return the body of a successful answer."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 (the chart writes every URL)
    with urllib.request.urlopen(request, timeout=10, context=authority) as answer:  # noqa: S310
        return bytes(answer.read())


def main(operator: str) -> None:
    """Check the operator at that URL, then the API server."""
    get(f"{operator}/readyz")
    print("operator: ready")
    token = (ACCOUNT / "token").read_text().strip()
    group = json.loads(get(GROUP, token, ssl.create_default_context(cafile=ACCOUNT / "ca.crt")))
    if missing := KINDS - {resource["kind"] for resource in group["resources"]}:
        sys.exit(f"the API server does not know {', '.join(sorted(missing))}: set crds.install, or apply crds/")
    print(f"API server: knows {' and '.join(sorted(KINDS))}")


if __name__ == "__main__":
    main(sys.argv[1])
