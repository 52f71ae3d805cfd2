"""Names under which Kubernetes and the local fleet know our resources, objects and probes."""

from __future__ import annotations

GROUP = "pagefleet.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

KIND = "InferenceService"
PLURAL = "inferenceservices"
SINGULAR = "inferenceservice"
SHORT_NAME = "pfis"
CATEGORY = "pagefleet"

PROFILE_KIND = "InferenceProfile"
PROFILE_PLURAL = "inferenceprofiles"
PROFILE_SINGULAR = "inferenceprofile"
PROFILE_SHORT_NAME = "pfip"

LIVE_PATH = "/livez"
"""Answers 200 while the process should be kept."""
READY_PATH = "/readyz"
"""Answers 200 while the process should get traffic."""

FIELD_MANAGER = "pagefleet-operator"
"""Owner of the fields that the operator applies."""

LABEL_NAME = "app.kubernetes.io/name"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_SERVICE = f"{GROUP}/service"
"""On everything that belongs to an InferenceService: its name."""
LABEL_REVISION = f"{GROUP}/revision"
"""On pods: hash of all that needs a new pod when it changes."""
LABEL_ROLE = f"{GROUP}/role"
"""On engines of a disaggregated service: prefill or decode."""
LABEL_CANARY = f"{GROUP}/canary"
"""On the engines' Service, from which Kubernetes copies it to the EndpointSlices that routers follow:
`REVISION.PERCENT` of what is tried out, whose pods' names begin with the Service's and the revision."""
ANNOTATION_APPLIED = f"{GROUP}/applied"
"""On children: hash of the object as the operator last wanted it."""

RESERVED_SUFFIXES = ("-engine", "-prefill", "-decode", "-router", "-model", "-openai", "-fleet")
"""Ends that no InferenceService's name may have: children of another one are called so."""
NODES_SUFFIX = "-engine-[0-9]+"
"""Nor this one: pods of engines on several nodes are called so, and their Services."""
DOTTED_SUFFIX = "-x[0-9a-f]{10}"
"""Nor this one: it tells the children of a service whose name has a dot from those of all others."""

SERVING_PORT = 8000
"""Where engines and routers listen in pods, and where a download tells its progress."""
KV_EVENTS_PORT = 8100
"""Where engines in pods publish KV events; the next one answers for what was missed."""
KV_CONTROL_PORT = 8102
"""Where prefill engines in pods answer those that want K/V; the next one takes data."""
PORT_NAME = "http"
"""Of the port of pods where requests go."""
RANK_PORTS_APART = 4
"""Of data ranks that serve on ports of their own, from one rank's KV ports to the next one's: KV_EVENTS_PORT and
KV_CONTROL_PORT of all of them fit between each other."""

RANKS_PORT = 29500
"""Where the leader of an engine on several nodes listens to the others."""

PICKER_PORT = 9002
"""Where routers in pods are asked by gateways."""

COMPILED_FOLDER = ".compiled"
"""In the folder of a model that was downloaded: what engines have compiled for it, as a claim keeps it."""
FLEET_KEY_ENTRY = "key"
"""Of the Secret that holds a service's fleet key."""


def rank_port_name(rank: int) -> str:
    """Return the name of the port of a data rank that serves on a port of its own."""
    return f"{PORT_NAME}-{rank}" if rank else PORT_NAME


def rank_id(engine: str, rank: int) -> str:
    """Return what routers call such a rank of an engine's pod or process."""
    return f"{engine}.{rank}" if rank else engine
