"""The InferenceService, v1alpha1: what a person writes to have a model served, and what they read back.

The one source of the resource's schema: `crds/` is generated from these types and `pagefleet up` reads files with them.
A field is here only when something acts on it. Fields that a profile may give have no default here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pagefleet_protocol.canary import Canary
from pagefleet_protocol.cidr import Cidr
from pagefleet_protocol.inference_status import InferenceServiceStatus
from pagefleet_protocol.kv_offload import KvOffload
from pagefleet_protocol.model_uri import ModelUriText
from pagefleet_protocol.parallelism import MAX_NODES, MAX_RANKS, Parallelism
from pagefleet_protocol.quantities import Quantity, TokenCount
from pagefleet_protocol.resource_base import Labels, NameRef, Object, ObjectMeta, ObjectName, all_different, matching

_SERVED_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$"
_ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
_COLLECTOR = (
    r"^https?://([A-Za-z0-9]([A-Za-z0-9._-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\])"
    r"(:([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))?"
    r"(/[A-Za-z0-9._~%/-]*)?$"
)
_HOST_NAME = r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\.)*[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
_ENDPOINT = r"^https?://[^\x00-\x20/?#@]+(/[^\x00-\x20?#]*)?$"
_HOST_PATH = r"^/[^\x00:]+$"
_IMAGE = r"^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}$"
_ENTRY = r"^[-._A-Za-z0-9]{1,253}$"
_HEADER_NAME = r"^[A-Za-z0-9-]{1,128}$"
_REVISION = r"^[^\x00-\x20]{1,128}$"
_ARGUMENT = r"^[^\x00]*$"

Arguments = Annotated[
    tuple[Annotated[str, *matching(_ARGUMENT, "must be at most 1024 characters, none of them NUL", 1024)], ...],
    Field(strict=False, max_length=64, json_schema_extra={"x-kubernetes-list-type": "atomic"}),
]
PodTemplate = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]
ServedName = Annotated[
    str,
    *matching(_SERVED_NAME, "must be at most 128 letters, digits and . _ / : -, starting with a letter or digit", 128),
]
Image = Annotated[
    str, *matching(_IMAGE, "must be an image reference such as registry/name:tag or registry/name@sha256:…", 512)
]


class Model(Object):
    """Which model, and under which names clients ask for it."""

    uri: ModelUriText
    """organization/name of the hub (hf://organization/name), s3://bucket/path, gs://bucket/path, pvc://claim/path,
    oci://registry/repository:tag, file:///absolute/path or builtin://tiny"""
    revision: Annotated[str, *matching(_REVISION, "must be at most 128 characters without spaces", 128)] | None = None
    """Branch, tag or commit, of hf:// alone; default: main. All engines load the one commit that it meant at first."""
    name: ServedName | None = None
    """What clients write as `model`; default: metadata.name."""
    aliases: Annotated[
        tuple[ServedName, ...],
        Field(strict=False, max_length=8, json_schema_extra={"x-kubernetes-list-type": "set"}),
        all_different(),
    ] = ()
    """More names for the same model."""
    secret_ref: NameRef | None = None
    """Secret with the credentials of the store: HF_TOKEN; AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; or a Google
    service account's key as `key.json`."""
    endpoint: Annotated[str, *matching(_ENDPOINT, "must be a URL such as https://mirror.example.org", 1024)] | None = (
        None
    )
    """Mirror of the store: another Hugging Face endpoint for hf://, an S3-compatible service for s3://."""


class Cache(Object):
    """Where engines find the model's files."""

    type: Literal["auto", "none", "pvc", "hostPath", "image"] = "auto"
    """none: each pod downloads; pvc: downloaded once into a claim; hostPath: once on each node; image: an OCI image is
    mounted; auto: image for oci://, else none."""
    size: Quantity | None = None
    """Of the claim that is made for type pvc; default 100Gi."""
    claim: ObjectName | None = None
    """An existing claim to download into, for type pvc."""
    storage_class: ObjectName | None = None
    """Of the claim that is made; default: the cluster's."""
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    """Of the claim that is made; ReadWriteOnce keeps all engines on one node."""
    path: Annotated[str, *matching(_HOST_PATH, "must be an absolute path", 1024)] | None = None
    """Folder on the nodes, for type hostPath."""


class SecretKey(Object):
    """One entry of a Secret of the same namespace."""

    name: ObjectName
    """The Secret."""
    key: Annotated[str, *matching(_ENTRY, "must be at most 253 letters, digits and . _ -", 253)]
    """The entry."""


class EnvValue(Object):
    """Where a variable's value comes from."""

    secret_key_ref: SecretKey
    """An entry of a Secret."""


class EnvVar(Object):
    """An environment variable."""

    name: Annotated[str, *matching(_ENV_NAME, "must be letters, digits and '_', not starting with a digit", 128)]
    """Its name."""
    value: Annotated[str, Field(max_length=4096)] | None = None
    """Its value."""
    value_from: EnvValue | None = None
    """Where its value comes from, instead of `value`."""


class Engine(Object):
    """Settings of each engine. A change replaces the engines one by one."""

    image: Image | None = None
    """Image of the engine; default: the one that the operator was installed with."""
    args: Arguments = ()
    """More flags of `pagefleet serve`, one word each."""
    env: Annotated[
        tuple[EnvVar, ...],
        Field(
            strict=False,
            max_length=64,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
        all_different("name"),
    ] = ()
    """Environment variables of the engines."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """Type of weights and activations; default auto: the checkpoint's, where the device computes in it."""
    quantization: Literal["fp8", "int8"] | None = None
    """fp8, int8: weights are quantized while they are loaded; default: as the checkpoint is."""
    max_model_len: TokenCount | None = None
    """Longest prompt plus answer in tokens, as 4096, 32k (32,000) or 32Ki; default: what the model was made for."""
    kv_offload: KvOffload | None = None
    """Keeps the K/V that the pool gives up; default: it is computed again."""


class Resources(Object):
    """What each engine gets."""

    gpus: Annotated[int, Field(ge=0, le=MAX_RANKS)] | None = None
    """GPUs of each node of an engine, one for each rank; 0: computes on the CPU; default: one for each rank where a GPU
    type is named, else 0."""
    gpu_type: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """Class of GPU: the InferenceProfile with this spec.gpuType gives the defaults."""
    cpu: Quantity | None = None
    """CPU cores per engine; default on this machine: an equal share."""
    memory: Quantity | None = None
    """Memory per engine, request and limit; engine.kvOffload.memory comes on top. `pagefleet up` does not limit it."""
    shm: Quantity | None = None
    """Size of /dev/shm, counted in memory; default 1Gi for each rank."""


class RouterResources(Object):
    """What each router gets."""

    cpu: Quantity | None = None
    """CPU cores, request; default 500m."""
    memory: Quantity | None = None
    """Memory, request and limit; default 512Mi."""


class RouterAuth(Object):
    """Who may ask."""

    secret_ref: SecretKey
    """Entry with API keys, one a line. Clients send one as bearer token; changes take effect without a restart."""


class RouterQueue(Object):
    """Where requests wait that no engine has room for."""

    max: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Requests that wait at each router, more are refused with 429; default 1024."""
    timeout: Annotated[int, Field(ge=0, le=86_400)] | None = None
    """Seconds that a request waits for room; default 60."""
    cold_start_timeout: Annotated[int, Field(ge=0, le=86_400)] = 600
    """Seconds that a request waits for the first engine where there is none: after a scale to zero, or at the start."""


class RouterPool(Object):
    """Gateways that know InferencePools (Gateway API Inference Extension) carry requests to engines, and ask routers
    where each goes."""

    failure_mode: Literal["FailClose", "FailOpen"] = "FailClose"
    """What gateways do while no router answers: refuse requests, or send them to any engine."""
    tls: bool = True
    """Gateways ask by TLS, of a certificate that each router makes; false: by plain HTTP/2."""
    gateway_cidrs: Annotated[
        tuple[Cidr, ...],
        Field(strict=False, max_length=16, json_schema_extra={"x-kubernetes-list-type": "atomic"}),
    ] = ()
    """Addresses of gateways that are no pods; engines take requests of these, and of pods that the Gateway API's labels
    call gateways."""


class Router(Object):
    """The front door of the engines."""

    replicas: Annotated[int, Field(ge=1, le=16)] = 1
    """Routers, each with an address of its own when run locally."""
    workers: Annotated[int, Field(ge=1, le=16)] = 1
    """Processes of each router, on one port."""
    policy: Literal["auto", "prefix", "least-load", "session", "round-robin"] = "auto"
    """auto: the engine that will answer first, by its cached prefix, its queue and its speed; prefix: the one that has
    the prompt's beginning cached; least-load: the one with the least work; session: one engine per session;
    round-robin: each in turn."""
    kv_events: bool = True
    """Engines tell routers what is in their caches; false: routers guess it from the requests they sent."""
    session_header: (
        Annotated[str, *matching(_HEADER_NAME, "must be a header's name: letters, digits and '-'", 128)] | None
    ) = None
    """Header by which clients name their session; default x-pagefleet-session."""
    explain: bool = False
    """True: requests with the header x-pagefleet-explain are told the score of each engine."""
    console: bool = True
    """Routers serve a page for browsers at their address: a chat, and how the fleet is. It asks for a key where auth
    does."""
    inference_pool: RouterPool | None = None
    """An InferencePool, whose endpoint picker the routers are; default: none."""
    queue: RouterQueue = RouterQueue()
    """Where requests wait that no engine has room for."""
    auth: RouterAuth | None = None
    """Who may ask; default: everybody who reaches the router."""
    resources: RouterResources = RouterResources()
    """What each router gets."""


class ScalingTarget(Object):
    """What the autoscaler keeps: latencies, or the load of each engine."""

    ttft_ms: Annotated[int, Field(ge=1, le=3_600_000)] | None = None
    """Time to the first token in milliseconds, for 95 of 100 requests."""
    itl_ms: Annotated[int, Field(ge=1, le=60_000)] | None = None
    """Time between two tokens in milliseconds, for 95 of 100 streams."""
    queue: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Requests that wait per engine, in it and at the routers."""
    kv_usage: Annotated[float, Field(ge=0.1, le=1)] | None = None
    """Share of each engine's KV cache in use."""


class ScaleToZero(Object):
    """Engines end when nobody asks; the routers stay, hold the next request and have it answered."""

    after: Annotated[int, Field(ge=10, le=604_800)] = 600
    """Seconds without any request."""


class Autoscaling(Object):
    """How many engines there are, by their load."""

    mode: Literal["Internal", "External", "Advisory"] = "Internal"
    """Internal: pagefleet scales; External: a HorizontalPodAutoscaler or KEDA does, through the scale subresource;
    Advisory: pagefleet only says in status.scaling what it would do, and replicas counts."""
    min: Annotated[int, Field(ge=1, le=256)] = 1
    """Least engines, apart from none by scaleToZero."""
    max: Annotated[int, Field(ge=1, le=256)] | None = None
    """Most engines; needed unless mode is External."""
    target: ScalingTarget | None = None
    """What is kept; default: 4 waiting requests per engine and 0.8 of the KV cache."""
    scale_to_zero: ScaleToZero | None = None
    """Whether engines end when nobody asks; default: never."""


class DisaggregatedRole(Object):
    """Engines of one part. Model, type, quantization and length are those of spec.engine: only equal engines pair."""

    replicas: Annotated[int, Field(ge=0, le=256)] = 1
    """Engines of this part; left out where autoscaling chooses them."""
    autoscaling: Autoscaling | None = None
    """How many engines there are, by their load; targets of prefill: ttftMs, queue; of decode: itlMs, kvUsage."""
    args: Arguments = ()
    """More flags of these engines, after those of spec.engine.args."""
    kv_offload: KvOffload | None = None
    """What these engines keep of the K/V that their pool gives up; default: spec.engine.kvOffload."""
    resources: Resources = Resources()
    """What each of these engines gets; default: spec.resources."""
    parallelism: Parallelism = Parallelism()
    """Over how many ranks each of these engines is spread; default: spec.parallelism."""
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] | None = None
    """Pods of each of these engines; default: spec.nodes, or of those with ranks or GPUs of their own as many as these
    need."""
    pod_template: PodTemplate = Field(default_factory=dict)
    """Strategic merge patch of these engines' pod template, after spec.podTemplate."""


class Disaggregation(Object):
    """Prompts are computed by some engines, answers by others, which get the KV cache from them directly."""

    prefill: DisaggregatedRole = DisaggregatedRole()
    """Engines that compute prompts."""
    decode: DisaggregatedRole = DisaggregatedRole()
    """Engines that go on from there, and answer whole requests where that is quicker."""
    connector: Literal["p2p"] = "p2p"
    """How they meet; p2p: each decode engine asks the prefill engine."""
    data_plane: Literal["auto", "tcp", "nccl", "cuda_ipc"] = "auto"
    """How blocks travel; auto: cuda_ipc on one host with GPUs, nccl between GPUs of engines of one rank, else tcp."""
    send_type: Literal["PutAsync", "Put", "Get"] = "PutAsync"
    """PutAsync: each chunk's blocks are sent while the next is computed; Put: all at the end; Get: they are kept until
    the decode engine fetches them."""
    threshold: Annotated[int, Field(ge=0, le=16_777_216)] | None = None
    """Uncached prompt tokens below which decode engines compute prompts themselves; default 256."""
    fallback: Literal["Recompute", "Fail"] = "Recompute"
    """When KV cache does not arrive and no other prefill engine can compute it; Recompute: the decode engine computes
    the prompt; Fail: the request ends with 503 kv_load_failed."""


class Rollout(Object):
    """How a change reaches the engines."""

    max_surge: Annotated[int, Field(ge=0, le=256)] | None = None
    """Engines more than replicas while a revision replaces another; default 1, and 0 with GPUs unless the profile says
    that there are spare ones."""
    max_unavailable: Annotated[int, Field(ge=0, le=256)] | None = None
    """Engines fewer than replicas meanwhile; default 0, and 1 where maxSurge is 0."""
    drain_seconds: Annotated[int, Field(ge=0, le=3600)] = 30
    """Seconds that running requests get before an engine that has to go ends them; a router of a cluster gives twice as
    many, for those that go on at another engine."""
    progress_seconds: Annotated[int, Field(ge=30, le=86_400)] = 1800
    """A new revision that makes no progress for so long has failed; the old one keeps serving."""
    canary: Canary | None = None
    """A new revision is tried out on some requests first; default: it replaces the old one at once."""


class GatewayRef(Object):
    """A Gateway, of this namespace unless another is named."""

    name: ObjectName
    """Its name."""
    namespace: ObjectName | None = None
    """Its namespace."""
    section_name: ObjectName | None = None
    """One of its listeners; default: all."""


class ExposeTls(Object):
    """Encryption at the Ingress."""

    secret_name: ObjectName
    """Secret with tls.crt and tls.key."""


class Expose(Object):
    """How clients outside the cluster get in."""

    type: Literal["ClusterIP", "Ingress", "Gateway"] = "ClusterIP"
    """ClusterIP: not at all; Ingress: networking.k8s.io; Gateway: an HTTPRoute of gateway.networking.k8s.io."""
    host: Annotated[str, *matching(_HOST_NAME, "must be a host name such as llm.example.org", 253)] | None = None
    """Name that clients use; needed for Ingress and Gateway."""
    class_name: ObjectName | None = None
    """IngressClass; default: the cluster's."""
    gateway_ref: GatewayRef | None = None
    """The Gateway; needed for Gateway."""
    tls: ExposeTls | None = None
    """Encryption, for Ingress; a Gateway has its own."""


class Monitoring(Object):
    """Who reads the metrics, and who gets traces."""

    service_monitor: bool = False
    """True: make a ServiceMonitor for the Prometheus operator."""
    labels: Labels = Field(default_factory=dict)
    """More labels of the ServiceMonitor, by which Prometheus selects it."""
    traces_endpoint: (
        Annotated[str, *matching(_COLLECTOR, "must be a URL such as http://collector.monitoring:4318", 512)] | None
    ) = None
    """OpenTelemetry collector (OTLP over HTTP) that routers and engines tell of requests; a change replaces them."""
    traces_sample: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the requests that are traced; default: all. Requests that come with a trace do as it says."""


class InferenceServiceSpec(Object):
    """What is wanted."""

    model: Model
    """Which model to serve."""
    cache: Cache = Cache()
    """Where engines find the model's files."""
    engine: Engine = Engine()
    """Settings of each engine. A change replaces the engines one by one."""
    replicas: Annotated[int, Field(ge=0, le=256)] = 1
    """Engines that serve the model; left out where autoscaling chooses them."""
    autoscaling: Autoscaling | None = None
    """How many engines there are, by their load."""
    disaggregation: Disaggregation | None = None
    """Prompts and answers by different engines; {} is enough. Replicas and autoscaling are then those of its parts."""
    resources: Resources = Resources()
    """What each engine gets."""
    parallelism: Parallelism = Parallelism()
    """Over how many ranks each engine is spread; default: one for each of resources.gpus."""
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] | None = None
    """Pods of each engine, each on a node of its own, with resources each; default: as many as its ranks need."""
    router: Router = Router()
    """The front door of the engines."""
    rollout: Rollout = Rollout()
    """How a change reaches the engines."""
    expose: Expose = Expose()
    """How clients outside the cluster get in."""
    monitoring: Monitoring = Monitoring()
    """Who reads the metrics."""
    pod_template: PodTemplate = Field(default_factory=dict)
    """Strategic merge patch of the engines' pod template ({metadata, spec}); it has the last word."""
    profile_ref: NameRef | None = None
    """InferenceProfile with defaults; default: the one of resources.gpuType, if there is one."""
    fleet_key: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Number of the secret that engines and routers share; another number makes a new one and replaces them all."""
    paused: bool = False
    """True: the operator leaves everything as it is."""


class InferenceService(Object):
    """A model to be served."""

    api_version: Literal["pagefleet.dev/v1alpha1"]
    """pagefleet.dev/v1alpha1"""
    kind: Literal["InferenceService"]
    """InferenceService"""
    metadata: ObjectMeta
    """Name and labels."""
    spec: InferenceServiceSpec
    """What is wanted."""
    status: InferenceServiceStatus | None = None
    """What is so; written by pagefleet."""

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def model_name(self) -> str:
        """What clients write as `model`."""
        return self.spec.model.name or self.metadata.name
